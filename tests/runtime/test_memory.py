"""The count of live bytes; what a stage needs by count and by cost model (CASES G5, G6, G10)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch

from infinipipe.ir import Step
from infinipipe.profiles import Profile
from infinipipe.profiles.analytic import analytic_profile
from infinipipe.runtime.memory import CpuMemory
from tests.runtime.replay import CPU, MemoryDataset, hand_header, hand_step
from tests.runtime.stage_memory import MODEL, gpipe, measure_bytes, predicted_and_measured


@pytest.fixture(scope="module")
def profile() -> Profile:
    analytic = analytic_profile(MODEL, "a800-80g")
    return msgspec.structs.replace(analytic, bytes=measure_bytes(MODEL, CPU), dtype="float32")


def test_storages_count_once_and_until_the_last_view_is_gone() -> None:
    kept = torch.zeros(100)
    with CpuMemory([kept]) as memory:
        start = memory.current_bytes
        assert start == 400
        a = torch.ones(1000)
        view = a[10:20]
        b = a + 1
        assert memory.current_bytes == start + 8000
        del a, b
        assert memory.current_bytes == start + 4000
        assert memory.peak_bytes == start + 8000
        memory.reset_peak()
        del view
        assert (memory.current_bytes, memory.peak_bytes) == (start, start + 4000)


def test_saved_activations_count_until_backward() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    with CpuMemory([weight]) as memory:
        start = memory.current_bytes
        out = (torch.randn(4, 8) @ weight).exp().sum()
        assert memory.current_bytes == start + 2 * 4 * 8 * 4 + 4
        out.backward()
        del out
        assert memory.current_bytes == start + 8 * 8 * 4  # the gradient stays


def measured_close(profile: Profile, step: Step) -> float:
    predicted, measured = predicted_and_measured(profile, step)
    assert -0.02 <= predicted / measured - 1 <= 0.05, (
        f"predicted {predicted:.0f}, measured {measured:.0f}"
    )
    return measured


def packed_step(
    num_chunks: int,
    recompute: Callable[[int, int], int] = lambda stage, chunk: 0,
    keep_attention: Callable[[int, int], int] = lambda stage, chunk: 0,
) -> Step:
    dataset = MemoryDataset([500, 300] * num_chunks)
    chunks = [[(2 * c, 0, 500), (2 * c + 1, 0, 300)] for c in range(num_chunks)]
    header = hand_header(MODEL, (4,), batch_size=100)
    return hand_step(header, dataset, [chunks], recompute, keep_attention)


@pytest.mark.parametrize("in_flight", [1, 2, 5, 8])
def test_peak_with_chunks_in_flight(profile: Profile, in_flight: int) -> None:
    measured_close(profile, gpipe(packed_step(8), in_flight))


def test_peak_does_not_grow_with_the_number_of_chunks(profile: Profile) -> None:
    peaks = [measured_close(profile, gpipe(packed_step(count), 2)) for count in (4, 16)]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.02)


def test_recompute_lowers_the_peak_as_predicted(profile: Profile) -> None:
    peaks = [
        measured_close(profile, gpipe(packed_step(4, lambda s, c, r=r: r), 2)) for r in range(5)
    ]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[4] < 0.6 * peaks[0]


def test_keeping_attention_costs_its_output_and_log_sum_exp(profile: Profile) -> None:
    """What a layer keeps grows by just that, with any number of others recomputed in whole."""
    num_tokens, in_flight = 800, 5
    output = MODEL.num_heads * MODEL.head_dim * 4
    peaks = [
        measured_close(
            profile, gpipe(packed_step(6, lambda s, c: 1, lambda s, c, k=kept: k), in_flight)
        )
        for kept in range(4)
    ]
    assert peaks == sorted(peaks, reverse=True)
    # Against the same layers recomputed in whole; but for what B needs of its own chunk.
    in_whole = measured_close(profile, gpipe(packed_step(6, lambda s, c: 3), in_flight))
    of_a_chunk = num_tokens * 2 * (output + MODEL.num_heads * 4)
    assert peaks[2] - in_whole == pytest.approx(in_flight * of_a_chunk, rel=1e-3)


@pytest.mark.parametrize("recompute", [0, 1, 4])
def test_peak_of_a_large_chunk_whose_layers_all_keep_attention(
    profile: Profile, recompute: int
) -> None:
    dataset = MemoryDataset([600, 1600])
    chunks = [[(0, 0, 600)], [(1, 0, 1600)]]
    step = hand_step(
        hand_header(MODEL, (4,), batch_size=100),
        dataset,
        [chunks],
        lambda s, c: c * recompute,
        lambda s, c: c * 4,
    )
    measured_close(profile, gpipe(step, 2))


@pytest.mark.parametrize("recompute", [3, 4])
def test_peak_in_the_forward_of_a_large_chunk_that_keeps_little(
    profile: Profile, recompute: int
) -> None:
    """Where all layers are recomputed, F needs more for a moment than it keeps."""
    dataset = MemoryDataset([600, 1600])
    chunks = [[(0, 0, 600)], [(1, 0, 1600)]]
    step = hand_step(
        hand_header(MODEL, (4,), batch_size=100), dataset, [chunks], lambda s, c: c * recompute
    )
    measured_close(profile, gpipe(step, 2))


@pytest.mark.parametrize(
    ("recompute", "keep_attention"), [(0, 0), (2, 0), (4, 0), (0, 4), (0, 2), (1, 2), (2, 2)]
)
def test_peak_of_split_and_hybrid_chunks(
    profile: Profile, recompute: int, keep_attention: int
) -> None:
    """K and V of the whole sequence from its first F, and their gradients from its first B."""
    dataset = MemoryDataset([3000, 200, 100])
    chunks = [
        [(0, 0, 1000)],
        [(0, 1000, 800)],
        [(0, 1800, 700)],
        [(0, 2500, 500), (1, 0, 200), (2, 0, 100)],
    ]
    step = hand_step(
        hand_header(MODEL, (4,)),
        dataset,
        [chunks],
        lambda s, c: recompute,
        lambda s, c: keep_attention,
    )
    measured_close(profile, step)
