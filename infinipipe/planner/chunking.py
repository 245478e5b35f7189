"""Chunks of equal work (PAPER.md, Algorithm 1): long sequences are sliced, tails and short ones packed."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import pairwise

from infinipipe.ir import Chunk, Slice
from infinipipe.planner.problem import Problem, Work

# Even slices may have a little more work than asked for, rather than be one more and smaller.
_STRETCH = 1.1
# A tail of less work than this part of a slice joins the slice before it.
_LEAST_TAIL = 0.05


@dataclass(frozen=True)
class Chunks:
    """One replica's chunks, chain by chain: chunk numbers follow the order of F."""

    chunks: tuple[Chunk, ...]
    chains: tuple[int, ...]
    """How many chunks each chain has."""

    @property
    def chain_ends(self) -> list[int]:
        """One past the last chunk of each chunk's chain."""
        ends: list[int] = []
        for size in self.chains:
            ends += [len(ends) + size] * size
        return ends


def cut_chunks(problem: Problem, work: Work, target: float, max_tokens: int, *, even: bool) -> Chunks:
    """Make chunks of about `target` work each and at most `max_tokens` tokens.

    A sequence of more work is sliced: by one mesh for all, which leaves a tail to fill up with short sequences,
    or, if `even`, into slices that are equal within the sequence. Chains come longest first.
    """
    sizes = {member: problem.sequences[member].length for member in problem.members}
    by_length = sorted(sizes, key=lambda member: (-sizes[member], member))
    mesh = _Mesh(work, target, max_tokens)
    limit = mesh.boundary(1)
    long = [member for member in by_length if sizes[member] > limit]
    chains = []
    for member in long:
        bounds = cut_evenly(sizes[member], work, target, max_tokens) if even else mesh.cut(sizes[member])
        chains.append([Slice(member, a, b - a) for a, b in pairwise(bounds)])
    bins = [Bin(work.between(c[-1].start, c[-1].stop), c[-1].length, [c[-1]]) for c in chains]
    shorts = [Slice(member, 0, sizes[member]) for member in by_length[len(long) :]]
    packed = pack(shorts, bins, work, target, max_tokens)
    whole = [[Chunk((piece,)) for piece in chain[:-1]] for chain in chains] + [[] for _ in packed[len(chains) :]]
    lists = [[*chain, Chunk((*final.slices,))] for chain, final in zip(whole, packed, strict=True)]
    totals = [work.between(0, sizes[member]) for member in long] + [final.work for final in packed[len(chains) :]]
    order = sorted(range(len(lists)), key=lambda i: (-len(lists[i]), -totals[i], i))
    return Chunks(tuple(chunk for i in order for chunk in lists[i]), tuple(len(lists[i]) for i in order))


class _Mesh:
    """Boundaries of slices of equal work from token 0 on, as far as they were asked for."""

    def __init__(self, work: Work, target: float, max_tokens: int) -> None:
        self._work = work
        self._target = target
        self._max_tokens = max_tokens
        self._boundaries = [0]

    def boundary(self, number: int) -> int:
        while len(self._boundaries) <= number:
            last = self._boundaries[-1]
            reach = round(min(self._work.reach(last, self._target), last + self._max_tokens))
            self._boundaries.append(max(reach, last + 1))
        return self._boundaries[number]

    def cut(self, length: int) -> list[int]:
        bounds = [0]
        while (bound := self.boundary(len(bounds))) < length:
            bounds.append(bound)
        if len(bounds) > 1 and length - bounds[-2] <= self._max_tokens:
            tail = self._work.between(bounds[-1], length)
            bounds = bounds[:-1] if tail < _LEAST_TAIL * self._target else bounds
        return [*bounds, length]


def cut_evenly(length: int, work: Work, target: float, max_tokens: int) -> list[int]:
    """Return the boundaries of slices of equal work, each at most about `target` and `max_tokens` tokens."""
    bare = Work(work.s_per_token, work.s_per_pair, 0.0)
    total = bare.between(0, length)
    count = min(length, max(1, math.ceil(total / target / _STRETCH), -(-length // max_tokens)))
    bounds = [0]
    for slices in range(count, 1, -1):
        last = bounds[-1]
        reach = round(bare.reach(last, bare.between(last, length) / slices))
        # Every later slice needs a token and can take no more than the most.
        least, most = max(last + 1, length - (slices - 1) * max_tokens), min(last + max_tokens, length - slices + 1)
        bounds.append(min(max(reach, least), most))
    return [*bounds, length]


@dataclass
class Bin:
    """A chunk that is being filled."""

    work: float
    tokens: int
    slices: list[Slice] = field(default_factory=list)

    def add(self, piece: Slice, work: float) -> None:
        """Put a slice in."""
        self.work += work
        self.tokens += piece.length
        self.slices.append(piece)


def pack(shorts: SequenceOf[Slice], tails: SequenceOf[Bin], work: Work, target: float, max_tokens: int) -> list[Bin]:
    """Fill the tails' bins and as few new ones as the work needs; return all, the tails' first.

    Longest first into the bin with the least work, which balances better than the first that fits. The token
    limit is strict; where it is what counts, first fit decreasing can need fewer bins and is taken instead.
    """
    works = [work.between(0, piece.length) for piece in shorts]
    room = sum(max(0.0, target - tail.work) for tail in tails)
    num_new = max(0, -int(-(sum(works) - room) // target)) if target > 0 else len(shorts)
    balanced = _pack_balanced(shorts, works, tails, num_new, max_tokens)
    if len(balanced) > len(tails) + num_new:
        first_fit = _pack_first_fit(shorts, works, tails, max_tokens)
        return min(balanced, first_fit, key=len)
    return [final for final in balanced if final.slices]


def _pack_balanced(
    shorts: SequenceOf[Slice], works: SequenceOf[float], tails: SequenceOf[Bin], num_new: int, max_tokens: int
) -> list[Bin]:
    bins = [Bin(tail.work, tail.tokens, [*tail.slices]) for tail in tails] + [Bin(0.0, 0) for _ in range(num_new)]
    heap = [(each.work, index) for index, each in enumerate(bins)]
    heapq.heapify(heap)
    for piece, seconds in zip(shorts, works, strict=True):
        full = []
        while heap and bins[heap[0][1]].tokens + piece.length > max_tokens:
            full.append(heapq.heappop(heap))
        if heap:
            _, index = heapq.heappop(heap)
        else:
            index = len(bins)
            bins.append(Bin(0.0, 0))
        bins[index].add(piece, seconds)
        for entry in (*full, (bins[index].work, index)):
            heapq.heappush(heap, entry)
    return bins


def _pack_first_fit(
    shorts: SequenceOf[Slice], works: SequenceOf[float], tails: SequenceOf[Bin], max_tokens: int
) -> list[Bin]:
    bins = [Bin(tail.work, tail.tokens, [*tail.slices]) for tail in tails]
    for piece, seconds in zip(shorts, works, strict=True):
        place = next((each for each in bins if each.tokens + piece.length <= max_tokens), None)
        if place is None:
            place = Bin(0.0, 0)
            bins.append(place)
        place.add(piece, seconds)
    return bins
