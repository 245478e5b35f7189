"""Chunks: every token once, equal work, no more tokens than allowed, few bins."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinipipe.costs import Work
from infinipipe.ir import Slice, chunk_chains
from infinipipe.planner.passes.chunking import (
    NO_GRADES,
    Bin,
    Chunks,
    Grades,
    cut_chunks,
    cut_evenly,
    geometric_grades,
    linear_grades,
    pack,
)
from infinipipe.planner.problem import Problem
from tests.planner.toys import draw_lengths, toy_problem

LINEAR = Work(s_per_token=1.0, s_per_pair=0.0, s_per_slice=0.0)
ATTENTION = Work(s_per_token=1e-12, s_per_pair=1.0, s_per_slice=0.0)


def cut(
    problem: Problem,
    parts: float,
    max_tokens: int = 10**6,
    even: bool = False,
    grades: Grades = NO_GRADES,
) -> tuple[Chunks, Work, float]:
    work = problem.pipeline.costs.work
    target = float(work.whole(problem.lengths).sum()) / parts
    return cut_chunks(problem, work, target, max_tokens, even=even, grades=grades), work, target


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=30),
    st.floats(0.5, 60),
    st.integers(1, 400),
    st.booleans(),
    st.sampled_from(
        [NO_GRADES, linear_grades(3), linear_grades(5), geometric_grades(2), geometric_grades(8)]
    ),
)
def test_every_token_once_and_chains_in_order(
    lengths: list[int], parts: float, max_tokens: int, even: bool, grades: Grades
) -> None:
    problem = toy_problem(lengths, [3, 3])
    chunks, _, _ = cut(problem, parts, max_tokens, even, grades)
    seen: dict[int, list[Slice]] = {}
    for chunk in chunks.chunks:
        assert 1 <= chunk.num_tokens <= max_tokens
        assert sum(piece.length != lengths[piece.sequence] for piece in chunk.slices) <= 1
        for piece in chunk.slices:
            seen.setdefault(piece.sequence, []).append(piece)
    assert sorted(seen) == list(range(len(lengths)))
    for sequence, pieces in seen.items():
        assert [0, *(p.stop for p in pieces)] == [*(p.start for p in pieces), lengths[sequence]]
    # Chunks are numbered chain by chain, the longest chain first.
    assert [len(chain) for chain in chunk_chains(chunks.chunks, problem.sequences)] == list(
        chunks.chains
    )
    long = [size for size in chunks.chains if size > 1]
    assert long == sorted(long, reverse=True)
    assert grades.growing or list(chunks.chains) == sorted(chunks.chains, reverse=True)


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


def test_graded_chunks_grow_and_shrink() -> None:
    problem = toy_problem([350, *[5] * 300], [3, 3])
    chunks, work, target = cut(problem, 20, grades=linear_grades(4))
    works = [
        sum(work.between(p.start, p.stop) for p in chunk.slices) / target for chunk in chunks.chunks
    ]
    assert works[:3] == pytest.approx([0.25, 0.5, 0.75], abs=0.05)
    assert works[3:-3] == pytest.approx([1.0] * (len(works) - 6), abs=0.06)
    assert works[-3:] == pytest.approx([0.75, 0.5, 0.25], abs=0.05)
    assert chunks.chains[:4] == (1, 1, 1, max(chunks.chains))


def test_geometric_grades_grow_fast_and_shrink_slowly() -> None:
    grades = geometric_grades(4)
    assert grades.growing[:3] == pytest.approx((0.05, 0.075, 0.1125))
    assert grades.shrinking[-3:] == pytest.approx((0.05 * 1.175**2, 0.05 * 1.175, 0.05))
    assert 1 / 1.5 < grades.growing[-1] < 1
    assert 1 / 1.175 < grades.shrinking[0] < 1
    assert len(grades.growing) < len(grades.shrinking)
    assert geometric_grades(1) == linear_grades(1) == NO_GRADES


def test_too_little_work_for_all_grades_drops_the_largest() -> None:
    assert Grades((0.2, 0.6), (0.7, 0.3)).within(1.2) == Grades((0.2, 0.6), (0.3,))
    assert Grades((0.2, 0.6), (0.7, 0.3)).within(0.6) == Grades((0.2,), (0.3,))
    assert Grades((0.2, 0.6), (0.7, 0.3)).within(-1.0) == NO_GRADES


def first_fit_decreasing(lengths: list[int], capacity: int) -> int:
    bins: list[int] = []
    for length in sorted(lengths, reverse=True):
        place = next((i for i, tokens in enumerate(bins) if tokens + length <= capacity), None)
        if place is None:
            bins.append(length)
        else:
            bins[place] += length
    return len(bins)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(50, 120))
def test_strict_packing_needs_no_more_bins_than_first_fit_decreasing(
    lengths: list[int], capacity: int
) -> None:
    shorts = [Slice(i, 0, length) for i, length in enumerate(sorted(lengths, reverse=True))]
    packed = pack(shorts, [], LINEAR, capacity, capacity).full
    assert len(packed) <= first_fit_decreasing(lengths, capacity)
    assert all(sum(p.length for p in each.slices) == each.tokens <= capacity for each in packed)
    assert sorted(p.sequence for each in packed for p in each.slices) == list(range(len(lengths)))


@pytest.mark.parametrize("seed", range(3))
def test_real_lengths_need_no_more_bins_than_first_fit_decreasing(seed: int) -> None:
    lengths = [min(length, 4096) for length in draw_lengths("wikipedia", 512, seed)]
    shorts = [Slice(i, 0, length) for i, length in enumerate(sorted(lengths, reverse=True))]
    for capacity in (4096, 8192, 16384):
        assert len(pack(shorts, [], LINEAR, capacity, capacity).full) <= first_fit_decreasing(
            lengths, capacity
        )


def test_packing_leaves_the_given_bins_alone() -> None:
    tail = Bin(3.0, 3, [Slice(0, 5, 3)])
    packed = pack([Slice(1, 0, 2)], [tail], LINEAR, 8, 8)
    assert (tail.tokens, packed.tails[0].tokens, packed.full) == (3, 5, [])


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
