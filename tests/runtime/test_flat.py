"""Flat buffers: every weight and gradient has its place, in the part that it belongs to."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from infinipipe.ir import Stage
from infinipipe.runtime.flat import ALIGNMENT, FlatBuffers, PartKind
from infinipipe.runtime.model import EMBEDDING, HEAD, StageModel
from tests.runtime.replay import CPU, small_model

FIRST = Stage(first_layer=0, num_layers=1, embedding=True, head=False)
LAST = Stage(first_layer=1, num_layers=1, embedding=False, head=True)
WHOLE = Stage(first_layer=0, num_layers=2, embedding=True, head=True)
ODD = {
    "num_layers": 2,
    "hidden_size": 7,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "intermediate_size": 5,
    "vocab_size": 13,
}
"""A model none of whose parts 3 or 4 ranks can share evenly."""


def make_stage(stage: Stage, *, tied: bool, num_shards: int = 1) -> StageModel:
    model = StageModel(small_model(tied=tied, **ODD), stage, CPU, num_shards=num_shards)
    model.init_random(0)
    return model


def kinds(model: StageModel) -> dict[str, PartKind]:
    """Return the part that each parameter is in, by where its memory lies."""
    found = {}
    for name, parameter in model.global_parameters().items():
        for part in model.flat.parts:
            first = part.parameters.storage_offset()
            if first <= parameter.storage_offset() < first + part.parameters.numel():
                found[name] = part.kind
    return found


@pytest.mark.parametrize(("stage", "tied_name"), [(FIRST, EMBEDDING), (LAST, HEAD), (WHOLE, None)])
@pytest.mark.parametrize("tied", [False, True])
def test_matrices_decay_and_a_weight_at_both_ends_is_a_part_of_its_own(
    stage: Stage, tied_name: str | None, tied: bool
) -> None:
    model = make_stage(stage, tied=tied)
    parameters = model.global_parameters()
    expected = {
        name: PartKind.DECAYED if parameter.ndim == 2 else PartKind.PLAIN
        for name, parameter in parameters.items()
    }
    if tied and tied_name is not None:
        expected[tied_name] = PartKind.TIED
    assert kinds(model) == expected
    assert [part.kind for part in model.flat.parts] == [
        k for k in PartKind if k in expected.values()
    ]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4])
def test_weights_and_gradients_are_views_that_do_not_overlap(num_shards: int) -> None:
    plain = make_stage(FIRST, tied=True)
    model = make_stage(FIRST, tied=True, num_shards=num_shards)
    flat = model.flat
    covered = torch.zeros_like(flat.parameters)
    for name, parameter in model.global_parameters().items():
        assert parameter.grad is not None
        for view, buffer in ((parameter, flat.parameters), (parameter.grad, flat.gradients)):
            assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
            assert view.is_contiguous()
        assert parameter.grad.storage_offset() == parameter.storage_offset()
        covered.as_strided((parameter.numel(),), (1,), parameter.storage_offset()).add_(1.0)
        # The padding changes no weight.
        assert torch.equal(parameter, plain.global_parameters()[name])
    assert covered.max() == 1.0
    # All that is left is padding, which is zero and stays so without gradients.
    assert not flat.parameters[covered == 0.0].any()
    assert padding(flat, int(covered.sum())) < num_shards * ALIGNMENT * len(flat.parts)


def padding(flat: FlatBuffers, num_parameters: int) -> int:
    return flat.parameters.numel() - num_parameters


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4])
def test_shards_of_a_part_are_equal_ranges_in_order(num_shards: int) -> None:
    flat = make_stage(LAST, tied=True, num_shards=num_shards).flat
    together = [flat.shards(index, num_shards) for index in range(num_shards)]
    for place, part in enumerate(flat.parts):
        own = [shards[place] for shards in together]
        assert torch.equal(torch.cat([shard.parameters for shard in own]), part.parameters)
        assert {shard.parameters.numel() % ALIGNMENT for shard in own} == {0}
        assert {shard.parameters.data_ptr() % (4 * ALIGNMENT) for shard in own} == {0}
        assert {shard.kind for shard in own} == {part.kind}


def test_one_buffer_is_saved_as_the_weights_in_it(tmp_path) -> None:
    """Safetensors refuses weights that share memory, but not those that lie side by side."""
    parameters = make_stage(WHOLE, tied=True, num_shards=3).global_parameters()
    save_file({name: p.detach() for name, p in parameters.items()}, tmp_path / "weights")
    loaded = load_file(tmp_path / "weights")
    assert loaded.keys() == parameters.keys()
    assert all(torch.equal(loaded[name], parameter) for name, parameter in parameters.items())
