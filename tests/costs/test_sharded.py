"""What ranks that share sequences cost, by hand and by what cannot be otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinipipe.costs import CostModel, check_predictions, curve_seconds
from infinipipe.costs.sharded import exchanged_bytes, sharded_profile
from infinipipe.dataset import BYTES, open_dataset
from infinipipe.errors import VerifyError
from infinipipe.ir import ONE_NODE, Chunk, Layout, Sequence, Slice, verify_step
from infinipipe.planner import CompileOptions
from infinipipe.planner.compile import draw_batches, make_header, make_pipeline, plan_steps
from infinipipe.planner.passes.partition import make_stages
from infinipipe.profiles import LayerTime, Line, Profile, read_model
from infinipipe.profiles.analytic import analytic_profile
from tests.costs.rounds import HYBRID, HYBRID_SEQUENCES, round_profile

PROFILE = round_profile()
"""Of `tiny`: 4 heads of 32, and 2 of K and V; in bfloat16."""
SEVEN_B = analytic_profile(read_model("llama-7b"), "a800-80g")
CHUNK_SEQUENCES = (Sequence(0, 4000, 3999), Sequence(1, 97, 96))
CHUNKS = (Chunk((Slice(0, 0, 3000),)), Chunk((Slice(0, 3000, 1000), Slice(1, 0, 97))))
"""A sequence in two slices, and a whole one beside the second."""


def costs_on(
    num_ranks: int, profile: Profile = PROFILE, devices_per_node: int = 8, num_replicas: int = 1
) -> CostModel:
    layout = Layout(
        num_stages=2,
        sequence_parallel=num_ranks,
        num_replicas=num_replicas,
        devices_per_node=devices_per_node,
    )
    num_layers = profile.model.num_layers
    stages = make_stages([num_layers // 2, num_layers - num_layers // 2])
    return CostModel(profile, layout, stages, 1024)


def exchange_seconds(profile: Profile, num_ranks: int, tokens: int) -> float:
    """Return what a layer's four exchanges take among ranks of one node."""
    links = profile.times.links
    model = profile.model
    line = links.all_to_all_s
    kv_heads = max(model.num_kv_heads, num_ranks)
    # Of a rank: its tokens of all heads, in bfloat16.
    heads = 2 * model.num_heads + 2 * kv_heads
    num_bytes = 2 * tokens / num_ranks * heads * model.head_dim
    sent_s_per_byte = line.rate * links.num_ranks / (links.num_ranks - 1)
    return 4 * line.constant + (num_ranks - 1) / num_ranks * num_bytes * sent_s_per_byte


def own_seconds(time: LayerTime, num_ranks: int, kv_share: float) -> list[float]:
    """Return what a layer of `CHUNKS` takes a rank, exchanges apart: 3,000 and 1,097 tokens."""
    own_tokens = [3000 / num_ranks, -(-1097 // num_ranks)]
    pairs = [3000 * 3001 / 2, 3000 * 1000 + 1000 * 1001 / 2 + 97 * 98 / 2]
    seconds = curve_seconds(time.curve, np.array(own_tokens))
    seconds += time.s_per_pair * np.array(pairs) / num_ranks
    seconds += time.s_per_slice * np.array([1, 2])
    of_context = 3000 * kv_share * time.s_per_context_token
    of_continued = 1000 / num_ranks * time.s_per_continued_token
    seconds[1] += time.s_per_context + of_context + of_continued
    return seconds.tolist()


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_times_of_a_layer_by_hand(num_ranks: int) -> None:
    """Of llama 7B, whose 32 heads of K and V are enough for all ranks."""
    costs = costs_on(num_ranks, SEVEN_B, devices_per_node=16)
    alone = costs_on(1, SEVEN_B).price(CHUNKS, CHUNK_SEQUENCES)
    costed = costs.price(CHUNKS, CHUNK_SEQUENCES)
    times = SEVEN_B.times
    rounded = [3000, -(-1097 // num_ranks) * num_ranks]
    exchange_s = np.array([exchange_seconds(SEVEN_B, num_ranks, tokens) for tokens in rounded])
    assert (exchange_s > 4 * times.links.all_to_all_s.constant).all()

    def expected(time: LayerTime) -> list[float]:
        seconds = own_seconds(time, num_ranks, 1 / num_ranks) + exchange_s
        return seconds.tolist()

    assert costed.recompute_s.tolist() == pytest.approx(expected(times.layer_recompute))
    # Who keeps attention's output is spared its kernel, but not the exchanges.
    without_attention_s = curve_seconds(times.layer_recompute.curve, np.array(rounded) // num_ranks)
    spared_s = costed.recompute_s - costed.attention_s
    assert spared_s.tolist() == pytest.approx((without_attention_s + exchange_s).tolist())
    own_tokens = np.array(rounded) // num_ranks
    first = times.chunk_forward_s + curve_seconds(times.embedding_forward, own_tokens)
    first += 16 * np.array(expected(times.layer_forward))
    assert costed.forward_s[0].tolist() == pytest.approx(first.tolist())
    last = times.chunk_backward_s + curve_seconds(times.head_backward, own_tokens)
    last += 16 * np.array(expected(times.layer_backward))
    assert costed.backward_s[1].tolist() == pytest.approx(last.tolist())
    parts = costs.price_input_weight(costed)
    assert parts is not None
    assert times.layer_input_backward is not None
    assert times.layer_weight_backward is not None
    inputs = times.chunk_backward_s + curve_seconds(times.head_backward, own_tokens)
    inputs += 16 * np.array(expected(times.layer_input_backward))
    assert parts.input_s[1].tolist() == pytest.approx(inputs.tolist())
    # No weight is exchanged.
    weights = times.chunk_backward_s + 16 * curve_seconds(
        times.layer_weight_backward.curve, own_tokens
    )
    assert parts.weight_s[1].tolist() == pytest.approx(weights.tolist())
    line = times.links.transfer_s
    hidden = 2 * 4096 * own_tokens
    assert costed.transfer_s.tolist() == [
        pytest.approx((line.constant + line.rate * hidden).tolist())
    ]
    assert (costed.boundary_bytes * num_ranks).tolist() == [2 * 4096 * n for n in rounded]
    assert alone.boundary_bytes.tolist() == [2 * 4096 * 3000, 2 * 4096 * 1097]


def test_bytes_by_hand() -> None:
    """Two ranks, which have 6 tokens of the 11 of `HYBRID`'s second chunk, and 4 of the first."""
    costs = costs_on(2)
    costed = costs.price(HYBRID, HYBRID_SEQUENCES)
    # Attention's output is there twice: 4 heads of 32 in bfloat16, before and after the exchange.
    layer = 100 + 2 * 4 * 32
    # K and V of the second chunk only: the first is in its slot.
    layers = [4 * 4 * layer, 4 * (4 * layer + 4 * 20)]
    assert costed.activation_bytes[0].tolist() == [layers[0] + 4 * 3, layers[1] + 4 * 3]
    assert costed.freed_per_layer_bytes.tolist() == [4 * (layer - 10), 4 * (layer + 20 - 10)]
    assert costed.boundary_bytes.tolist() == [40, 40]
    assert costs.boundary_bytes(8) == 40
    # Of all tokens a rank's heads of the output, and a log-sum-exp in float32 of each.
    assert costed.attention_bytes.tolist() == [4 * (2 * 4 * 32 + 4 * 4)] * 2
    # A rank's logits are those of its own tokens.
    head = 11 + 8 * 4 + 1000 * 4
    assert costed.forward_transient_bytes.tolist() == [[7 + 5 * 4] * 2, [head] * 2]
    one_token = CostModel(PROFILE, costs.layout, costs.stages, 1).price(HYBRID, HYBRID_SEQUENCES)
    assert one_token.forward_transient_bytes[1].tolist() == [11 + 8 * 4 + 1000] * 2
    tokens = np.array([12.0])
    layers_of_stage = costs.stages[0].num_layers
    assert costs.slot_bytes(0, tokens).tolist() == [12 * layers_of_stage * 10]
    assert costs.slot_gradient_bytes(0, tokens).tolist() == [12 * layers_of_stage * 20]
    # Of the context's 8 tokens half of the heads; of the gradient that arrives, another copy.
    in_attention = 4 * (4 + 2 * 4 * 32) + 8 * 4 / 2
    assert costed.backward_transient_bytes[0].tolist() == [9 + 6 * 4, in_attention]


@pytest.mark.parametrize(("num_ranks", "kv_heads"), [(1, 2), (2, 1), (4, 1)])
def test_ranks_that_share_a_head_each_hold_it(num_ranks: int, kv_heads: int) -> None:
    """`tiny` has two heads of K and V: with four ranks each is there twice."""
    assert PROFILE.model.num_kv_heads == 2
    costs = costs_on(num_ranks)
    num_layers = costs.stages[0].num_layers
    tokens = np.array([1000.0])
    assert costs.slot_bytes(0, tokens).tolist() == [1000 * num_layers * 20 * kv_heads / 2]
    assert costs.slot_gradient_bytes(0, tokens).tolist() == [1000 * num_layers * 20 * kv_heads]
    kv_repeats = 2 if num_ranks == 4 else 1
    heads = 2 * 4 + 2 * 2 * kv_repeats
    assert exchanged_bytes(PROFILE.model, "bfloat16", num_ranks) == 2 * 32 * heads
    assert exchanged_bytes(PROFILE.model, "float32", num_ranks) == 4 * 32 * heads
    layer = costs.rank_profile.times.layer_forward
    context_s = PROFILE.times.layer_forward.s_per_context_token
    assert layer.s_per_context_token == pytest.approx(context_s * kv_heads / 2)


def test_one_rank_is_the_profile_itself() -> None:
    for layout in (Layout(num_stages=2), Layout(num_stages=3, num_replicas=4, devices_per_node=1)):
        assert sharded_profile(SEVEN_B, layout) is SEVEN_B


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8])
def test_all_wait_for_the_rank_with_most_tokens(tokens: int) -> None:
    """A chunk of fewer tokens than ranks costs what one with a token a rank does."""

    def priced(length: int) -> list[list[float]]:
        one = (Sequence(0, length, length),)
        costed = costs_on(4).price((Chunk((Slice(0, 0, length),)),), one)
        pairs = length * (length + 1) / 2
        of_pairs = PROFILE.times.layer_forward.s_per_pair * pairs / 4
        layers = np.array([stage.num_layers for stage in costs_on(4).stages])
        forward_s = costed.forward_s[:, 0] - layers * of_pairs
        return [forward_s.tolist(), costed.activation_bytes[:, 0].tolist()]

    even = -(-tokens // 4) * 4
    assert priced(tokens) == [pytest.approx(each, rel=1e-12) for each in priced(even)]


def test_kernels_index_what_a_rank_has() -> None:
    plain = costs_on(1, SEVEN_B).max_chunk_tokens
    assert plain == (2**31 - 1) // 11_008
    assert costs_on(8, SEVEN_B).max_chunk_tokens == 8 * (2**31 - 1) // 11_008


def test_an_exchange_between_nodes_is_slower() -> None:
    inside, across, spread = (
        costs_on(4, SEVEN_B, devices_per_node=count).price(CHUNKS, CHUNK_SEQUENCES)
        for count in (4, 2, 1)
    )
    assert (inside.forward_s < across.forward_s).all()
    assert (across.forward_s < spread.forward_s).all()
    gained = across.recompute_s - inside.recompute_s
    # A layer more or less on each of 16 layers.
    assert (across.forward_s - inside.forward_s)[0] == pytest.approx(16 * gained)
    assert (across.backward_s - inside.backward_s)[1] == pytest.approx(16 * gained)
    # Two stages of four ranks on nodes of four: the edge is between them.
    assert (inside.transfer_s == across.transfer_s).all()
    together = costs_on(4, SEVEN_B, devices_per_node=8).price(CHUNKS, CHUNK_SEQUENCES)
    assert (together.transfer_s < inside.transfer_s).all()
    assert (together.forward_s == inside.forward_s).all()


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=4),
    powers=st.tuples(st.integers(0, 2), st.integers(1, 3)),
    latency=st.sampled_from([0.0, 20e-6]),
)
def test_more_ranks_hold_less_and_have_no_less_work_together(
    lengths: list[int], powers: tuple[int, int], latency: float
) -> None:
    few, many = 2 ** powers[0], 2 ** sum(powers)
    free = Line(constant=latency, rate=0.0)
    links = msgspec.structs.replace(SEVEN_B.times.links, all_to_all_s=free)
    times = msgspec.structs.replace(SEVEN_B.times, links=links)
    profile = msgspec.structs.replace(SEVEN_B, times=times)
    sequences = tuple(Sequence(n, length, length) for n, length in enumerate(lengths))
    chunk = Chunk(tuple(Slice(n, 0, length) for n, length in enumerate(lengths)))
    costed = [costs_on(n, profile, ONE_NODE).price((chunk,), sequences) for n in (few, many)]
    work_s = [n * each.work_s for n, each in zip((few, many), costed, strict=True)]
    assert (work_s[0] <= work_s[1] * (1 + 1e-12)).all()
    # Chunks are rounded up to a token a rank; the attention's output is there once more.
    most = 1 + many / sum(lengths) + 0.2 * (few == 1)
    held = [each.activation_bytes for each in costed]
    assert (held[1] <= most * few / many * held[0]).all()
    assert (costed[1].transfer_s <= costed[0].transfer_s).all()


@pytest.mark.parametrize(("num_ranks", "num_replicas"), [(1, 1), (2, 1), (1, 3), (4, 2)])
def test_optimizer_state_is_shared_by_all_that_hold_a_stage(
    num_ranks: int, num_replicas: int
) -> None:
    alone = costs_on(1)
    costs = costs_on(num_ranks, num_replicas=num_replicas)
    num_copies = num_ranks * num_replicas
    for stage in (0, 1):
        num_parameters = alone.static_bytes(stage) / 16
        expected = (7 + 9 / num_copies) * num_parameters
        assert 0 <= costs.static_bytes(stage) - expected < 1
        line = PROFILE.times.optimizer_s
        rising_s = line.rate * num_parameters / num_copies
        assert costs.optimizer_s(stage) == pytest.approx(line.constant + rising_s)
        assert (costs.gradient_sync_s(stage) > 0) == (num_copies > 1)


def test_copies_of_a_tied_weight_add_up_their_gradients_in_pairs() -> None:
    model = msgspec.structs.replace(SEVEN_B.model, tied=True)
    tied = msgspec.structs.replace(SEVEN_B, model=model)
    links = SEVEN_B.times.links
    ring = links.reduce_scatter_s
    for num_ranks, num_replicas in ((1, 1), (2, 2)):
        plain, costs = (costs_on(num_ranks, p, 8, num_replicas) for p in (SEVEN_B, tied))
        copies = num_ranks * num_replicas
        more = [costs.gradient_sync_s(stage) - plain.gradient_sync_s(stage) for stage in (0, 1)]
        # Two ranks of their share of float32: one message and half of the bytes, there and back.
        num_bytes = 4 * model.embedding_parameters / copies
        pair_s = 2 * (ring.constant / 7 + ring.rate * 8 / 7 / 2 * num_bytes)
        # It is exchanged among the copies as a part of its own.
        part_s = 2 * (copies - 1) / 7 * ring.constant
        assert more == pytest.approx([pair_s + part_s] * 2)
    whole = Layout(num_stages=1)
    alone = CostModel(tied, whole, make_stages([model.num_layers]), 1024)
    assert alone.gradient_sync_s(0) == 0.0


def test_plans_of_ranks_that_share_sequences_hold_their_predictions(tmp_path: Path) -> None:
    lengths = (900, 30, 140, 1500, 9, 2, 650, 1)
    (tmp_path / "lengths.jsonl").write_text(
        "".join(json.dumps({"length": length}) + "\n" for length in lengths)
    )
    profile = analytic_profile(read_model("tiny"), "a800-80g")
    dataset = open_dataset(tmp_path / "lengths.jsonl", BYTES, profile.model.vocabulary_size)
    options = CompileOptions(num_stages=2, batch_size=8, memory_limit_bytes=(40 * 2**20,))
    layout = Layout(num_stages=2, sequence_parallel=4, devices_per_node=4)
    request = options.resolve(profile, len(lengths), layout)
    pipeline = make_pipeline(dataset, profile, request)
    header = make_header(dataset, pipeline, request)
    assert header.layout == layout
    (step,) = plan_steps(pipeline, request, draw_batches(dataset, request))
    verify_step(header, step)
    check_predictions(header, step)
    assert 0 < step.bound_s <= step.makespan_s
    for changes in ({"sequence_parallel": 2}, {"devices_per_node": 8}):
        with pytest.raises(VerifyError, match="the plan's profile gives"):
            check_predictions(msgspec.structs.replace(header, **changes), step)
