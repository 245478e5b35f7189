"""What users of other systems met: peaks that grew with the chunks, and bytes not counted."""

from __future__ import annotations

import pytest
import torch

from infinipipe.ir import Chunk, OpKind, Slice, Stage
from infinipipe.profiles.analytic import analytic_profile
from infinipipe.runtime.attention import CpuKernel, KVStore
from infinipipe.runtime.data import chunk_positions, chunk_segments
from infinipipe.runtime.memory import CpuMemory
from infinipipe.runtime.model import StageModel
from infinipipe.runtime.optimizer import Optimizer
from tests.runtime.replay import (
    CPU,
    MemoryDataset,
    assert_equal,
    hand_header,
    hand_step,
    oracle,
    replay,
    small_model,
)
from tests.runtime.stage_memory import MODEL, gpipe, predicted_and_measured

pytestmark = pytest.mark.slow

PROFILE = analytic_profile(MODEL, "a800-80g")


def measured_peak(num_chunks: int, recompute: int, in_flight: int = 2) -> float:
    """Return the bytes of one stage of 4 layers over chunks of 100 tokens."""
    dataset = MemoryDataset([100] * num_chunks)
    chunks = [[(c, 0, 100)] for c in range(num_chunks)]
    step = hand_step(
        hand_header(MODEL, (4,), batch_size=100), dataset, [chunks], lambda stage, chunk: recompute
    )
    return predicted_and_measured(PROFILE, gpipe(step, in_flight))[1]


def test_4_16_and_64_chunks_peak_alike() -> None:
    peaks = [measured_peak(num_chunks, 2) for num_chunks in (4, 16, 64)]
    assert peaks[1:] == pytest.approx([peaks[0]] * 2, rel=0.02)


def test_each_chunk_in_flight_adds_what_it_keeps() -> None:
    counts = (1, 2, 5, 8)
    peaks = [measured_peak(9, 0, in_flight) for in_flight in counts]
    growth = [(peaks[i + 1] - peaks[i]) / (counts[i + 1] - counts[i]) for i in range(3)]
    assert growth[0] > 100 * 4 * PROFILE.bytes.activation_per_token
    assert growth == pytest.approx([growth[0]] * 3, rel=0.02)


def test_recomputed_layers_come_back_one_at_a_time() -> None:
    """With all of a chunk's 4 layers recomputed, its B holds the activations of one, not of all."""
    none, every = measured_peak(1, 0, 1), measured_peak(1, 4, 1)
    kept = 100 * 4 * PROFILE.bytes.layer_full_per_token
    assert none - every > 0.6 * kept


def test_the_update_needs_no_more_than_what_is_always_held() -> None:
    model = StageModel(MODEL, whole(4), CPU)
    model.init_random(0)
    optimizer = Optimizer(model.flat, None, lr=1e-3)
    model.flat.gradients.normal_()
    static = [model.flat.parameters, model.flat.gradients, *optimizer.state_tensors()]
    with CpuMemory(static) as memory:
        held = memory.current_bytes
        optimizer.step()
        assert (memory.current_bytes, memory.peak_bytes) == (held, held)


def whole(num_layers: int) -> Stage:
    return Stage(first_layer=0, num_layers=num_layers, embedding=True, head=True)


@pytest.mark.parametrize("recompute", [0, 4])
def test_logits_are_gone_before_any_layer_is_recomputed(recompute: int) -> None:
    """One block of logits outweighs all that the layers of this model ever need."""
    tokens, words = 50, 50_000
    model = StageModel(small_model(vocab_size=words), whole(4), CPU)
    model.init_random(0)
    header = hand_header(small_model(), (4,))
    step = hand_step(header, MemoryDataset([tokens]), [[[(0, 0, tokens)]]])
    chunk = Chunk((Slice(0, 0, tokens),))
    ids, targets, weights = (
        torch.zeros((1, tokens), dtype=torch.int64),
        torch.ones(tokens).long(),
        torch.ones(tokens),
    )
    static = [model.flat.parameters, model.flat.gradients]
    with CpuMemory([*static, ids, targets, weights]) as memory:
        hidden = model.run_layers(
            model.embed(ids).detach(),
            chunk_positions(chunk),
            chunk_segments(chunk, step, KVStore(), CpuKernel()),
            recompute,
        )
        start = memory.current_bytes
        loss = model.loss(hidden, targets, weights, tokens)
        assert memory.peak_bytes - start >= tokens * words * 4
        del hidden
        memory.reset_peak()
        loss.backward()
        assert memory.peak_bytes - start < 0.1 * tokens * words * 4


@pytest.mark.parametrize(("layers", "recompute"), [((24,), 7), ((10, 7, 7), 5), ((10, 7, 7), 7)])
def test_recompute_need_not_divide_24_layers(layers: tuple[int, ...], recompute: int) -> None:
    header = hand_header(small_model(num_layers=24), layers)
    dataset = MemoryDataset([9, 14])
    step = hand_step(
        header,
        dataset,
        [[[(1, 0, 8)], [(1, 8, 6), (0, 0, 9)]]],
        lambda stage, chunk: recompute - chunk,
    )
    assert {count for row in step.replicas[0].recompute for count in row} == {
        recompute,
        recompute - 1,
    }
    assert {op.kind for op in step.replicas[0].programs[0]} == {OpKind.FORWARD, OpKind.BACKWARD}
    assert_equal(replay(header, step, dataset), oracle(header, step, dataset))
