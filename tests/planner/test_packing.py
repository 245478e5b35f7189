"""Packing: no more bins than first fit decreasing needs, and never more tokens than allowed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinipipe.costs import Work
from infinipipe.ir import Slice
from infinipipe.planner.passes.packing import Bin, pack
from tests.planner.toys import draw_lengths

LINEAR = Work(s_per_token=1.0, s_per_pair=0.0, s_per_slice=0.0)


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
        packed = pack(shorts, [], LINEAR, capacity, capacity).full
        assert len(packed) <= first_fit_decreasing(lengths, capacity)


def test_packing_leaves_the_given_bins_alone() -> None:
    tail = Bin(3.0, 3, [Slice(0, 5, 3)])
    packed = pack([Slice(1, 0, 2)], [tail], LINEAR, 8, 8)
    assert (tail.tokens, packed.tails[0].tokens, packed.full) == (3, 5, [])
