"""Loss and EVERY gradient against the unsplit model, for all ways to cut, recompute and stage."""

from __future__ import annotations

import pytest
import torch

from infinipipe.runtime.attention import CpuKernel
from tests.runtime.cuts import CUTS, HYBRID, LAYERS, MENU, RECOMPUTE, slices
from tests.runtime.replay import (
    MemoryDataset,
    assert_equal,
    hand_header,
    hand_step,
    oracle,
    replay,
    small_model,
)


@pytest.mark.parametrize("num_stages", LAYERS)
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("menu", MENU)
def test_slices_equal_the_unsplit_model(num_stages: int, cuts: int, menu: str) -> None:
    """CASES B3, B4, B5: key and value projections get their gradients across slices too."""
    header = hand_header(small_model(), LAYERS[num_stages])
    dataset = MemoryDataset([7, 13, 698])
    chunks = [chunk for row, n in enumerate((7, 13, 698)) for chunk in slices(row, CUTS[cuts][n])]
    step = hand_step(header, dataset, [chunks], *MENU[menu])
    assert_equal(replay(header, step, dataset), oracle(header, step, dataset))


@pytest.mark.parametrize("num_stages", LAYERS)
@pytest.mark.parametrize("menu", MENU)
def test_hybrid_chunks_equal_the_unsplit_model(num_stages: int, menu: str) -> None:
    header = hand_header(small_model(), LAYERS[num_stages])
    dataset = MemoryDataset([11, 3, 6])
    step = hand_step(header, dataset, [HYBRID], *MENU[menu])
    assert_equal(replay(header, step, dataset), oracle(header, step, dataset))


@pytest.mark.parametrize("menu", MENU)
def test_packed_chunks_equal_the_unsplit_model(menu: str) -> None:
    header = hand_header(small_model(), (3, 1))
    dataset = MemoryDataset([11, 3, 6, 1, 20])
    chunks = [[(0, 0, 11), (1, 0, 3)], [(2, 0, 6), (3, 0, 1), (4, 0, 20)]]
    step = hand_step(header, dataset, [chunks], *MENU[menu])
    assert_equal(replay(header, step, dataset), oracle(header, step, dataset))


def test_attention_that_was_kept_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four layers one is recomputed in whole, two keep attention, and one keeps all."""
    runs = []
    forward = CpuKernel.forward

    def counted(*arguments: object) -> object:
        runs.append(arguments)
        return forward(*arguments)

    monkeypatch.setattr(CpuKernel, "forward", counted)
    header = hand_header(small_model(), (4,))
    dataset = MemoryDataset([9])
    step = hand_step(header, dataset, [[[(0, 0, 9)]]], lambda s, c: 1, lambda s, c: 2)
    replay(header, step, dataset)
    assert len(runs) == 4 + 1


@pytest.mark.parametrize(
    "order", [(3, 40, 5), (40, 3, 29)], ids=["short-long-short", "long-short-long"]
)
@pytest.mark.parametrize("num_stages", [2, 4])
def test_chunks_of_different_lengths_in_one_step(order: tuple[int, ...], num_stages: int) -> None:
    """CASES E1, E3: shapes come from the plan for every chunk; fewer chunks than stages at 4."""
    header = hand_header(small_model(), LAYERS[num_stages])
    dataset = MemoryDataset(order)
    step = hand_step(header, dataset, [[[(row, 0, n)] for row, n in enumerate(order)]])
    assert_equal(replay(header, step, dataset), oracle(header, step, dataset))


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_architectures_and_tied_heads(architecture: str, tied: bool, num_stages: int) -> None:
    """CASES I1: the copies' gradients add up to the one of the tied weight."""
    header = hand_header(small_model(architecture, tied=tied), LAYERS[num_stages])
    dataset = MemoryDataset([11, 3, 6])
    step = hand_step(header, dataset, [HYBRID], RECOMPUTE["mixed"])
    assert_equal(replay(header, step, dataset), oracle(header, step, dataset))


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_grouped_query_attention(heads: tuple[int, int]) -> None:
    model = small_model(num_attention_heads=heads[0], num_key_value_heads=heads[1])
    header = hand_header(model, (2, 2))
    dataset = MemoryDataset([11, 3, 6])
    step = hand_step(header, dataset, [HYBRID], RECOMPUTE["mixed"])
    assert_equal(replay(header, step, dataset), oracle(header, step, dataset))


@pytest.mark.parametrize("loss_norm", ["token", "sequence"])
def test_replicas_and_loss_norms_and_masked_labels(loss_norm: str) -> None:
    """CASES C1 to C5, D1: uneven replicas, a chunk without any target, and masked tokens."""
    header = hand_header(small_model(), (1, 3), num_replicas=2, loss_norm=loss_norm)
    dataset = MemoryDataset([97, 3, 9, 1])
    dataset.examples[2].labels[:] = -100
    dataset.examples[0].labels[10:40] = -100
    chunks = [*slices(0, (50, 47))], [[(1, 0, 3)], [(2, 0, 9)], [(3, 0, 1)]]
    step = hand_step(header, dataset, chunks, RECOMPUTE["mixed"])
    assert step.denominator == (96 - 30 + 2 if loss_norm == "token" else 2)
    assert_equal(replay(header, step, dataset), oracle(header, step, dataset))


def test_targets_do_not_depend_on_slicing() -> None:
    """CASES B1 and A7: no target is lost at a slice's end, none crosses into a neighbour."""
    from infinipipe.runtime.data import StepData

    header = hand_header(small_model(), (4,))
    dataset = MemoryDataset([8, 3, 3])
    dataset.examples[0].input_ids[:] = dataset.examples[0].labels[:] = range(1, 9)
    for lengths in ((8,), (4, 4), (3, 3, 2), (1,) * 8):
        step = hand_step(header, dataset, [[*slices(0, lengths), [(1, 0, 3), (2, 0, 3)]]])
        data = StepData(dataset, step, "token")
        parts = [data.targets(chunk) for chunk in step.replicas[0].chunks]
        long = torch.cat([targets for targets, _ in parts[:-1]])
        assert long.tolist() == [2, 3, 4, 5, 6, 7, 8, -100]
        assert [int((weights > 0).sum()) for _, weights in parts][-1] == 2 + 2
        assert sum(float(weights.sum()) for _, weights in parts) == pytest.approx(1.0)


def test_a_zero_target_step_is_finite() -> None:
    """CASES D1, D2: no target anywhere gives loss 0 and zero gradients, never NaN."""
    header = hand_header(small_model(), (2, 2))
    dataset = MemoryDataset([5, 4])
    for example in dataset.examples:
        example.labels[:] = -100
    step = hand_step(header, dataset, [[[(0, 0, 5)], [(1, 0, 4)]]])
    result = replay(header, step, dataset)
    assert step.denominator == 0
    assert result.loss == 0.0
    assert all(float(gradient.abs().max()) == 0.0 for gradient in result.gradients.values())


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("first", [0, 1])
def test_packed_neighbours_are_isolated_on_every_stage(num_stages: int, first: int) -> None:
    """CASES A1 to A4: changing all of one sequence leaves the other's outputs bit-identical."""
    header = hand_header(small_model(), LAYERS[num_stages])
    second = 1 - first
    lengths = (5, 7)
    chunk = [(first, 0, lengths[first]), (second, 0, lengths[second])]
    spans = {first: slice(0, lengths[first]), second: slice(lengths[first], 12)}

    def outputs(changed: int | None) -> list[torch.Tensor]:
        dataset = MemoryDataset(lengths)
        if changed is not None:
            ids = dataset.examples[changed].input_ids
            ids[:] = (ids + 17) % 64
        result = replay(header, hand_step(header, dataset, [[chunk]]), dataset)
        return [stage[0] for stage in result.outputs]

    before = outputs(None)
    for changed in (0, 1):
        for stage, after in enumerate(outputs(changed)):
            kept, lost = spans[1 - changed], spans[changed]
            assert torch.equal(before[stage][:, kept], after[:, kept])
            assert not torch.equal(before[stage][:, lost], after[:, lost])


def test_two_replays_are_bitwise_equal() -> None:
    """CASES C10."""
    header = hand_header(small_model(), (2, 1, 1))
    dataset = MemoryDataset([11, 3, 6])
    step = hand_step(header, dataset, [HYBRID], RECOMPUTE["mixed"])
    one, two = replay(header, step, dataset), replay(header, step, dataset)
    assert one.loss == two.loss
    assert all(torch.equal(one.gradients[name], two.gradients[name]) for name in one.gradients)
