"""Chunks: every token once, equal work, no more tokens than allowed, few bins."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinipipe.costs import Work
from infinipipe.ir import Chunk, Slice, chunk_chains
from infinipipe.planner.passes.chunking import Chunks, cut_chunks, cut_evenly, join_chunks
from infinipipe.planner.passes.ramp import NO_RAMP, Ramp, geometric_ramp, linear_ramp
from tests.planner.toys import cut, draw_lengths, toy_problem

LINEAR = Work(s_per_token=1.0, s_per_pair=0.0, s_per_slice=0.0)
ATTENTION = Work(s_per_token=1e-12, s_per_pair=1.0, s_per_slice=0.0)


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=30),
    st.floats(0.5, 60),
    st.integers(1, 400),
    st.booleans(),
    st.sampled_from(
        [NO_RAMP, linear_ramp(3), linear_ramp(5), geometric_ramp(2), geometric_ramp(8)]
    ),
)
def test_every_token_once_and_chains_in_order(
    lengths: list[int], parts: float, max_tokens: int, even: bool, ramp: Ramp
) -> None:
    problem = toy_problem(lengths, [3, 3])
    chunks, _, _ = cut(problem, parts, max_tokens, even, ramp)
    seen: dict[int, list[Slice]] = {}
    for chunk in chunks.chunks:
        assert 1 <= chunk.num_tokens <= max_tokens
        assert sum(each.length != lengths[each.sequence] for each in chunk.slices) <= 1
        for each in chunk.slices:
            seen.setdefault(each.sequence, []).append(each)
    assert sorted(seen) == list(range(len(lengths)))
    for sequence, slices in seen.items():
        starts = [each.start for each in slices]
        stops = [each.stop for each in slices]
        assert [0, *stops] == [*starts, lengths[sequence]]
    # Chunks are numbered chain by chain, the longest chain first.
    assert [len(chain) for chain in chunk_chains(chunks.chunks, problem.sequences)] == list(
        chunks.chains
    )
    long = [size for size in chunks.chains if size > 1]
    assert long == sorted(long, reverse=True)
    assert ramp.up or list(chunks.chains) == sorted(chunks.chains, reverse=True)


@pytest.mark.parametrize("even", [False, True])
def test_slices_of_one_long_sequence_have_equal_work(even: bool) -> None:
    chunks, work, target = cut(toy_problem([4000], [3, 3]), 8, even=even)
    works = [work.between(p.start, p.stop) for chunk in chunks.chunks for p in chunk.slices]
    assert len(works) == 8
    assert works == pytest.approx([target] * 8, rel=0.01)
    lengths = [chunk.num_tokens for chunk in chunks.chunks]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 2 * lengths[-1]


def test_attention_alone_cuts_at_square_roots() -> None:
    # Equal areas under x: boundaries at sqrt(i / 4) of the length.
    assert cut_evenly(1000, ATTENTION, ATTENTION.between(0, 1000) / 4, 1000) == [
        0,
        500,
        707,
        866,
        1000,
    ]
    assert cut_evenly(1000, LINEAR, 250, 1000) == [0, 250, 500, 750, 1000]


def test_a_sequence_beyond_the_cap_is_sliced() -> None:
    for even in (False, True):
        chunks, _, _ = cut(toy_problem([20], [3, 3]), 1, max_tokens=8, even=even)
        lengths = [chunk.num_tokens for chunk in chunks.chunks]
        assert sum(lengths) == 20
        assert len(lengths) == 3
        assert max(lengths) <= 8


def test_sevens_do_not_pair_within_eight() -> None:
    chunks, _, _ = cut(toy_problem([7] * 8, [3, 3]), 2, max_tokens=8)
    assert [chunk.num_tokens for chunk in chunks.chunks] == [7] * 8


def test_tails_are_filled_and_never_meet() -> None:
    problem = toy_problem([350, 310, *[10] * 60], [3, 3])
    chunks, work, target = cut(problem, 13)
    finals = [
        chunk
        for chunk in chunks.chunks
        if chunk.split_slice(problem.sequences) and len(chunk.slices) > 1
    ]
    assert len(finals) == 2
    works = [sum(work.between(p.start, p.stop) for p in chunk.slices) for chunk in chunks.chunks]
    assert max(works) < 1.1 * target


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("parts", [8, 40, 150])
def test_real_lengths_pack_evenly(seed: int, parts: int) -> None:
    problem = toy_problem(draw_lengths("wikipedia", 512, seed), [3, 3])
    chunks, work, target = cut(problem, parts)
    works = np.array(
        [sum(work.between(p.start, p.stop) for p in chunk.slices) for chunk in chunks.chunks]
    )
    assert parts - 1 <= len(works) <= parts + 2
    assert works.max() < 1.06 * target
    assert works.max() < 1.25 * works.mean()


def test_the_first_chunks_grow_and_the_last_shrink() -> None:
    problem = toy_problem([350, *[5] * 300], [3, 3])
    chunks, work, target = cut(problem, 20, ramp=linear_ramp(4))
    works = [
        sum(work.between(p.start, p.stop) for p in chunk.slices) / target for chunk in chunks.chunks
    ]
    assert works[:3] == pytest.approx([0.25, 0.5, 0.75], abs=0.05)
    assert works[3:-3] == pytest.approx([1.0] * (len(works) - 6), abs=0.06)
    assert works[-3:] == pytest.approx([0.75, 0.5, 0.25], abs=0.05)
    assert chunks.chains[:4] == (1, 1, 1, max(chunks.chains))


@given(st.integers(0, 10**6), st.integers(1, 10**5), st.floats(0, 1e-3))
def test_reach_inverts_between(start: int, length: int, s_per_pair: float) -> None:
    work = Work(s_per_token=1.0, s_per_pair=s_per_pair, s_per_slice=3.0)
    assert work.reach(start, work.between(start, start + length)) == pytest.approx(
        start + length, abs=1e-3, rel=1e-9
    )


def test_boundaries_rise() -> None:
    for length in range(1, 30):
        for target in (0.3, 1.0, 2.5):
            bounds = cut_evenly(length, LINEAR, target, 100)
            assert all(a < b for a, b in pairwise(bounds))
            assert (bounds[0], bounds[-1]) == (0, length)


def test_chains_follow_one_another() -> None:
    first, second, third = (Chunk((Slice(sequence, 0, 1),)) for sequence in range(3))
    chunks = Chunks.of_chains([[first, second], (third,)])
    assert chunks == Chunks((first, second, third), (2, 1))
    assert chunks.chain_ends.tolist() == [2, 2, 3]
    parts = (Chunks.of_chains([chain]) for chain in ([first, second], [third]))
    assert join_chunks(parts) == chunks


@pytest.mark.parametrize(
    ("length", "max_tokens", "expected"),
    [(204, 1000, [100, 104]), (205, 1000, [100, 100, 5]), (204, 103, [100, 100, 4])],
)
def test_a_tail_of_hardly_any_work_joins_the_slice_before_it_if_tokens_allow(
    length: int, max_tokens: int, expected: list[int]
) -> None:
    chunks = cut_chunks(toy_problem([length], [3, 3]), LINEAR, 100.0, max_tokens)
    assert [chunk.num_tokens for chunk in chunks.chunks] == expected


def test_even_slices_stretch_a_little_rather_than_be_one_more() -> None:
    assert cut_evenly(109, LINEAR, 100.0, 1000) == [0, 109]
    assert cut_evenly(111, LINEAR, 100.0, 1000) == [0, 56, 111]
