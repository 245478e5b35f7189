"""The data-sheet profiles say what their data sheets imply."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from infinipipe.costs import curve_seconds
from infinipipe.errors import InputError
from infinipipe.ir import Model
from infinipipe.measure.refine import scale_times
from infinipipe.profiles import (
    PRESETS,
    Profile,
    pack_profile,
    profile_sha256,
    read_model,
    read_profile,
    write_profile,
)
from infinipipe.profiles.analytic import DEVICES, analytic_profile

MEASURED = Path(__file__).parents[1] / "planner" / "measured_profile.json"
PEAK_FLOPS = {"a800-80g": 312e12, "a100-80g": 312e12, "h100-80g": 989e12, "h200-141g": 989e12}


def layer_seconds(profile: Profile, tokens: int) -> float:
    return float(curve_seconds(profile.times.layer_forward.curve, np.array([tokens]))[0])


@pytest.mark.parametrize("device", DEVICES)
def test_large_chunks_reach_a_plausible_share_of_the_peak(device: str) -> None:
    model = read_model("llama-7b")
    profile = analytic_profile(model, device)
    share = 2 * 16384 * model.layer_parameters / layer_seconds(profile, 16384) / PEAK_FLOPS[device]
    assert 0.5 < share < 0.78


@pytest.mark.parametrize("device", DEVICES)
def test_small_chunks_are_less_efficient(device: str) -> None:
    profile = analytic_profile(read_model("llama-7b"), device)
    per_token = [layer_seconds(profile, tokens) / tokens for tokens in (128, 512, 2048, 8192)]
    assert per_token == sorted(per_token, reverse=True)
    assert per_token[0] > 2 * per_token[-1]


def test_attention_of_7b_costs_what_flash_attention_does() -> None:
    times = analytic_profile(read_model("llama-7b"), "a800-80g").times
    # 4 * 4096 flops per pair at 0.60 of 312 TFLOP/s; five products backward for two, at 0.52
    assert times.layer_forward.s_per_pair == pytest.approx(16384 / (0.60 * 312e12))
    assert times.layer_backward.s_per_pair == pytest.approx(40960 / (0.52 * 312e12))
    assert times.layer_recompute == times.layer_forward


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("preset", PRESETS)
def test_i_and_w_together_cost_a_little_more_than_b(preset: str, device: str) -> None:
    times = analytic_profile(read_model(preset), device).times
    backward, inputs, weights = (
        times.layer_backward,
        times.layer_input_backward,
        times.layer_weight_backward,
    )
    assert inputs is not None
    assert weights is not None
    sizes = np.array([1, *backward.curve.tokens, 100_000])
    both = curve_seconds(inputs.curve, sizes) + curve_seconds(weights.curve, sizes)
    ratio = both / curve_seconds(backward.curve, sizes)
    # The layers of `tiny` are mostly memory traffic.
    assert np.all((ratio >= 1 - 1e-12) & (ratio < (1.10 if preset == "tiny" else 1.04)))
    assert ratio[-1] > 1.005
    # All attention is in I.
    assert inputs == replace(backward, curve=inputs.curve)
    rates = msgspec.structs.asdict(weights)
    del rates["curve"]
    assert set(rates.values()) == {0.0}


def test_w_is_as_long_as_the_products_it_has() -> None:
    times = analytic_profile(read_model("llama-7b"), "a800-80g").times
    weights = times.layer_weight_backward
    assert weights is not None
    # 2 flops per weight and token at 0.78 of 312 TFLOP/s, give or take a wave of tiles; inputs and
    # outputs are read.
    products = 2 * 16384 * 4096 * (4 * 4096 + 3 * 11008) / (0.78 * 312e12)
    read = 16384 * 2 * (8 * 4096 + 3 * 11008) / (0.85 * 2.0e12)
    assert (
        products + read
        < float(curve_seconds(weights.curve, np.array([16384]))[0])
        < 1.02 * products + read
    )


def test_links_differ_where_the_data_sheets_do() -> None:
    a800, a100 = (
        analytic_profile(read_model("llama-7b"), name) for name in ("a800-80g", "a100-80g")
    )
    a800_links, a100_links = a800.times.links, a100.times.links
    assert a800_links.transfer_s.rate == pytest.approx(1.5 * a100_links.transfer_s.rate)
    # The networks of their servers are alike.
    assert a800.times.links_between == a100.times.links_between
    assert a800.times.layer_forward == a100.times.layer_forward


def test_exchanges_in_a_ring_have_seven_hops() -> None:
    """A buffer of eight parts goes around eight devices, a part a hop."""
    links = analytic_profile(read_model("llama-7b"), "a800-80g").times.links
    assert links.num_ranks == 8
    for line in (links.reduce_scatter_s, links.all_gather_s):
        assert line.constant == pytest.approx(7 * 20e-6)
        # A gigabyte: 7 hops of 125 MB each, at three quarters of 200 GB/s.
        assert 1e9 * line.rate == pytest.approx(7 * 125e6 / 150e9)
    # As many bytes, all at once.
    assert links.all_to_all_s.constant == links.transfer_s.constant == 20e-6
    # And every byte is read and written once more, to bring it into order.
    ordered_s = 2 * 1e9 / 1.7e12
    assert 1e9 * links.all_to_all_s.rate == pytest.approx(7 * 125e6 / 150e9 + ordered_s)


@pytest.mark.parametrize(
    ("device", "gigabits"),
    [("a800-80g", 200), ("a100-80g", 200), ("h100-80g", 400), ("h200-141g", 400)],
)
def test_links_between_nodes_are_those_of_each_devices_adapter(device: str, gigabits: int) -> None:
    times = analytic_profile(read_model("llama-7b"), device).times
    between = times.links_between
    assert between is not None
    assert 1 / between.transfer_s.rate == pytest.approx(0.75 * gigabits * 1e9 / 8)
    names = {*between.__struct_fields__} - {"num_ranks"}
    assert len(names) == 4
    for name in names:
        inside = getattr(times.links, name)
        assert getattr(between, name).constant > inside.constant
        assert getattr(between, name).rate > 4 * inside.rate


def test_bytes_of_7b() -> None:
    sizes = analytic_profile(read_model("llama-7b"), "a800-80g").bytes
    assert (sizes.static_per_parameter, sizes.sharded_per_parameter) == (6, 12)
    assert sizes.activation_per_token == 2 * 4096
    assert sizes.layer_kv_per_token == 2 * 2 * 4096
    assert sizes.layer_kv_grad_per_token == 2 * 4 * 4096
    # An input each for Q, K and V together, the output, the MLP's first two together and its last;
    # seven outputs.
    assert sizes.layer_split_per_token == 2 * (3 * 4096 + 11008) + 2 * (5 * 4096 + 2 * 11008)
    # Two float32 norms, q, the attention's output and its log-sum-exp, four products of the MLP.
    assert sizes.layer_full_per_token == 2 * (8 * 4096 + 4) + 4 * 4096 + 4 * 32 + 8 * 11008


def test_bytes_are_those_that_autograd_saves() -> None:
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    shape = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(**shape, num_hidden_layers=1, vocab_size=100, attn_implementation="sdpa")
    layer = LlamaDecoderLayer(config, 0).to(torch.bfloat16)
    hidden = torch.randn(1, 32, 64, dtype=torch.bfloat16, requires_grad=True)
    rotary = LlamaRotaryEmbedding(config)(hidden, torch.arange(32)[None])
    known = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), *rotary)}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = layer(hidden, position_embeddings=rotary, attention_mask=None)
    assert output.shape == hidden.shape
    sizes = analytic_profile(tiny_like(shape), "a800-80g").bytes
    assert sum(saved.values()) / 32 == sizes.layer_full_per_token + sizes.layer_kv_per_token


def tiny_like(shape: dict[str, int]) -> Model:
    return replace(
        read_model("tiny"),
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        num_heads=shape["num_attention_heads"],
        num_kv_heads=shape["num_key_value_heads"],
        head_dim=16,
    )


def test_memory_is_less_than_the_data_sheet() -> None:
    memory = [
        analytic_profile(read_model("tiny"), device).device.memory_bytes / 2**30
        for device in DEVICES
    ]
    assert memory == [77, 77, 77, 137]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_round_trips_and_never_changes(preset: str) -> None:
    profile = analytic_profile(read_model(preset), "h100-80g")
    assert msgspec.json.decode(msgspec.json.encode(profile), type=Profile) == profile
    assert profile_sha256(profile) == profile_sha256(
        analytic_profile(read_model(preset), "h100-80g")
    )
    assert (profile.source, profile.dtype, profile.device.num_devices) == (
        "analytic",
        "bfloat16",
        8,
    )


def test_a_profile_without_i_and_w_is_as_it_was(tmp_path: Path) -> None:
    """It reads, it is written and digested without the fields, and it prices F and B only."""
    profile = analytic_profile(read_model("tiny"), "a800-80g")
    times = replace(profile.times, layer_input_backward=None, layer_weight_backward=None)
    old = replace(profile, times=times, bytes=replace(profile.bytes, layer_split_per_token=None))
    write_profile(old, tmp_path / "old.json")
    fields = {*msgspec.structs.asdict(profile.times)} - {
        "layer_input_backward",
        "layer_weight_backward",
    }
    assert json.loads((tmp_path / "old.json").read_text())["times"].keys() == fields
    assert b"layer_split_per_token" not in pack_profile(old)
    assert read_profile(tmp_path / "old.json") == old
    assert profile.prices_input_weight
    assert not old.prices_input_weight


@pytest.mark.parametrize("device", [None, *DEVICES])
def test_a_profile_packs_as_it_does_when_it_was_read(tmp_path: Path, device: str | None) -> None:
    """A plan's digest does not tell whether its profile was made here or read."""
    made = read_profile(MEASURED)
    if device is not None:
        made = analytic_profile(read_model("tiny"), device)
    write_profile(made, tmp_path / "again.json")
    assert pack_profile(read_profile(tmp_path / "again.json")) == pack_profile(made)


def test_a_measured_profile_has_no_links_between_nodes(tmp_path: Path) -> None:
    """It has no field for them, reads without it and writes without it."""
    document = json.loads(MEASURED.read_text())
    assert "links_between" not in document["times"]
    measured = read_profile(MEASURED)
    assert measured.times.links_between is None
    write_profile(measured, tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == document


def test_a_profile_of_another_format_is_refused(tmp_path: Path) -> None:
    document = json.loads(MEASURED.read_text()) | {"format_version": 1}
    (tmp_path / "old.json").write_text(json.dumps(document))
    with pytest.raises(
        InputError, match=r"old.json: profile format 1, this infinipipe reads 2; profile again$"
    ):
        read_profile(tmp_path / "old.json")


@pytest.mark.parametrize("lacking", ["layer_input_backward", "layer_weight_backward"])
def test_i_and_w_are_priced_both_or_not_at_all(lacking: str, tmp_path: Path) -> None:
    document = msgspec.to_builtins(analytic_profile(read_model("tiny"), "a800-80g"))
    del document["times"][lacking]
    (tmp_path / "half.json").write_text(json.dumps(document))
    with pytest.raises(
        InputError, match=r"half.json: not a profile: layer_input_.* are both needed, or neither"
    ):
        read_profile(tmp_path / "half.json")


def test_refining_scales_i_and_w_too() -> None:
    times = analytic_profile(read_model("tiny"), "a800-80g").times
    scaled = scale_times(times, 2.0)
    assert times.layer_weight_backward is not None
    assert scaled.layer_weight_backward is not None
    assert (
        scaled.layer_weight_backward.curve.seconds[-1]
        == 2 * times.layer_weight_backward.curve.seconds[-1]
    )
    measured = replace(times, layer_input_backward=None, layer_weight_backward=None)
    assert scale_times(measured, 2.0).layer_input_backward is None


def test_refining_scales_links_where_there_are_any() -> None:
    times = analytic_profile(read_model("tiny"), "a800-80g").times
    scaled = scale_times(times, 2.0)
    assert times.links_between is not None
    assert scaled.links_between is not None
    assert scaled.links_between.all_gather_s.rate == 2 * times.links_between.all_gather_s.rate
    assert scaled.links.num_ranks == times.links.num_ranks
    assert scale_times(replace(times, links_between=None), 2.0).links_between is None


def test_unknown_device_is_named() -> None:
    with pytest.raises(
        InputError, match=r"--analytic v100: no such device; known are a800-80g, a100-80g"
    ):
        analytic_profile(read_model("tiny"), "v100")
