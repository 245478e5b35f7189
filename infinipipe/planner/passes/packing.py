"""Packing: short sequences in bins, each of which becomes a chunk."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from infinipipe.costs import Work
from infinipipe.ir import Chunk, Slice
from infinipipe.planner.passes.ramp import NO_RAMP, Ramp

_ROUNDING = 1e-6
"""A bin is not added for less than this part of one.

Work that fills whole bins can come out a little above them, by the rounding of its sum. That is far
less than this part, and a chunk that is worth its overhead has far more.
"""

_WeighedSlice = tuple[Slice, float]
"""A slice and its work."""


@dataclass
class Bin:
    """A chunk that is being filled."""

    work: float = 0.0
    tokens: int = 0
    slices: list[Slice] = field(default_factory=list)

    @property
    def chunk(self) -> Chunk:
        """What is in it."""
        return Chunk(tuple(self.slices))

    def has_room(self, slice_: Slice, max_tokens: int) -> bool:
        """Return whether a slice can be put in without exceeding so many tokens."""
        return self.tokens + slice_.length <= max_tokens

    def add(self, slice_: Slice, work: float) -> None:
        """Put a slice of so much work in."""
        self.work += work
        self.tokens += slice_.length
        self.slices.append(slice_)

    def copy(self) -> Bin:
        """Return a bin of the same slices that can be filled by itself."""
        slices = list(self.slices)
        return Bin(self.work, self.tokens, slices)


@dataclass(frozen=True)
class Packing:
    """Short sequences in bins: after the tails of long ones, and in bins of their own."""

    tails: list[Bin]
    """One for each tail that was given, in their order."""
    ramp_up: list[Bin]
    full: list[Bin]
    ramp_down: list[Bin]


def pack(
    shorts: SequenceOf[Slice],
    tails: SequenceOf[Bin],
    work: Work,
    target: float,
    max_tokens: int,
    ramp: Ramp = NO_RAMP,
) -> Packing:
    """Fill the tails' bins and as few new ones as the work needs.

    Longest first into the bin that lacks most, which balances better than the first that fits. The
    token limit is strict; where it is what counts, first fit decreasing can need fewer bins and is
    taken instead.

    Args:
        shorts: whole sequences, the longest first.
        tails: bins with the last slice of each long sequence; they are not changed.
        work: what `target` is measured in.
        target: work of a full bin.
        max_tokens: of any bin.
        ramp: sizes of the first and last new bins, as far as there is work for them.
    """
    lengths = np.array([slice_.length for slice_ in shorts], dtype=np.int64)
    works: list[float] = work.whole(lengths).tolist()
    weighed = list(zip(shorts, works, strict=True))
    lacks = [target - tail.work for tail in tails]
    lacking = sum(max(0.0, lack) for lack in lacks)
    # Negative if the tails lack more than there is.
    new_work = sum(works) - lacking
    in_full_bins = new_work / target
    fitting = ramp.within(in_full_bins)
    besides_ramp = in_full_bins - fitting.total
    num_full = math.ceil(besides_ramp - _ROUNDING)
    num_full = max(0, num_full)
    capacities = _capacities(new_work, fitting, num_full)
    bins = _pack_balanced(weighed, tails, target, capacities, max_tokens)
    num_tails = len(tails)
    wanted = num_tails + len(capacities)
    if len(bins) > wanted:
        # The token limit is what counts.
        fitted = _pack_first_fit(weighed, tails, max_tokens)
        if len(fitted) <= len(bins):
            return _in_parts_without_ramp(fitted, num_tails)
    return _in_parts(bins, num_tails, fitting, num_full)


def _capacities(new_work: float, ramp: Ramp, num_full: int) -> list[float]:
    """Share the work out to new bins: evenly, rather than leave what lacks to the last full one."""
    full = [1.0] * num_full
    shares = [*ramp.up, *full, *ramp.down]
    if not shares:
        return []
    total = ramp.total + num_full
    work_of_full = new_work / total
    return [work_of_full * share for share in shares]


def _in_parts(bins: SequenceOf[Bin], num_tails: int, ramp: Ramp, num_full: int) -> Packing:
    """Tell bins apart: tails, those that `_capacities` asked for, then any number of others."""
    ordered = iter(bins)
    tails = list(islice(ordered, num_tails))
    ramp_up = list(islice(ordered, len(ramp.up)))
    full = list(islice(ordered, num_full))
    ramp_down = list(islice(ordered, len(ramp.down)))
    # The token limit made the others necessary.
    full += ordered
    full.sort(key=lambda each: -each.work)
    return Packing(tails, _filled(ramp_up), _filled(full), _filled(ramp_down))


def _in_parts_without_ramp(bins: list[Bin], num_tails: int) -> Packing:
    # Where the token limit fills the bins, none is left small for a ramp.
    tails = bins[:num_tails]
    full = bins[num_tails:]
    return Packing(tails, [], full, [])


def _filled(bins: list[Bin]) -> list[Bin]:
    """Return those with something in them: there may be fewer sequences than bins."""
    return [each for each in bins if each.slices]


def _pack_balanced(
    shorts: SequenceOf[_WeighedSlice],
    tails: SequenceOf[Bin],
    target: float,
    capacities: SequenceOf[float],
    max_tokens: int,
) -> list[Bin]:
    """Put each slice into the bin that lacks most, of those that have room for its tokens.

    Returns:
        The tails' bins, one for each of the capacities, and more where the token limit needs them.
    """
    bins = [tail.copy() for tail in tails]
    bins += [Bin() for _ in capacities]
    wanted = [target] * len(tails)
    wanted += capacities
    # Entries are how far a bin is above what is wanted, and its index: the first lacks most.
    heap: list[tuple[float, int]] = []
    for index, each in enumerate(bins):
        above = each.work - wanted[index]
        heap.append((above, index))
    heapq.heapify(heap)
    for slice_, seconds in shorts:
        without_room: list[tuple[float, int]] = []
        while heap:
            _, index = heap[0]
            if bins[index].has_room(slice_, max_tokens):
                break
            entry = heapq.heappop(heap)
            without_room.append(entry)
        if not heap:
            # It is put into a new bin.
            heap.append((-target, len(bins)))
            bins.append(Bin())
            wanted.append(target)
        _, index = heap[0]
        chosen = bins[index]
        chosen.add(slice_, seconds)
        above = chosen.work - wanted[index]
        heapq.heapreplace(heap, (above, index))
        # A shorter slice may still fit in.
        for entry in without_room:
            heapq.heappush(heap, entry)
    return bins


def _pack_first_fit(
    shorts: SequenceOf[_WeighedSlice], tails: SequenceOf[Bin], max_tokens: int
) -> list[Bin]:
    """Put each slice into the first bin that has room for its tokens, tails' bins first."""
    bins = [tail.copy() for tail in tails]
    for slice_, seconds in shorts:
        with_room = (each for each in bins if each.has_room(slice_, max_tokens))
        first = next(with_room, None)
        if first is None:
            first = Bin()
            bins.append(first)
        first.add(slice_, seconds)
    return bins
