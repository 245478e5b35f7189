"""Chunks of equal work (PAPER.md, Algorithm 1): long sequences are sliced, tails and short ones packed."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import pairwise

from infinipipe.costs import Work
from infinipipe.ir import Chunk, Slice
from infinipipe.planner.problem import Problem

# Even slices may have a little more work than asked for, rather than be one more and smaller.
_STRETCH = 1.1
# A tail of less work than this part of a slice joins the slice before it.
_LEAST_TAIL = 0.05
_LEAST_GRADE, _GROWTH, _SHRINKAGE = 0.05, 2.0, 0.7
"""Smallest share of a graded chunk, and the growth a chunk at each end, times the stages."""


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


@dataclass(frozen=True)
class Grades:
    """Sizes of the first and last chunks as shares of the others' work: the pipeline fills and drains sooner."""

    growing: tuple[float, ...] = ()
    shrinking: tuple[float, ...] = ()

    def within(self, most: float) -> Grades:
        """Return fewer of them, of together no more than so many full chunks: the largest go first."""
        growing, shrinking = list(self.growing), list(self.shrinking)
        while (growing or shrinking) and sum(growing) + sum(shrinking) > most:
            if not shrinking or (growing and growing[-1] > shrinking[0]):
                growing.pop()
            else:
                shrinking.pop(0)
        return Grades(tuple(growing), tuple(shrinking))


NO_GRADES = Grades()


def linear_grades(num_stages: int) -> Grades:
    """Return as many steps at each end as there are stages before the last."""
    shares = tuple(step / num_stages for step in range(1, num_stages))
    return Grades(shares, shares[::-1])


def geometric_grades(num_stages: int) -> Grades:
    """Return sizes for which the last stage hardly waits, neither for the first chunks nor after the last ones.

    F of a chunk comes down P - 1 stages while the last one runs B of those before it. As B takes about twice as long
    as F, sizes may grow by 2/P from one to the next. At the end B goes up while there is F of those after it to
    run, which allows a quarter of that; a little more costs less than the many chunks.
    """
    if num_stages == 1:
        return NO_GRADES
    growing, shrinking = ([_LEAST_GRADE], [_LEAST_GRADE])
    for shares, growth in ((growing, _GROWTH), (shrinking, _SHRINKAGE)):
        while shares[-1] * (1 + growth / num_stages) < 1:
            shares.append(shares[-1] * (1 + growth / num_stages))
    return Grades(tuple(growing), tuple(shrinking[::-1]))


def join_chunks(parts: Iterable[Chunks]) -> Chunks:
    """Return all chains of some parts, those of the first part first."""
    listed = list(parts)
    return Chunks(
        tuple(chunk for part in listed for chunk in part.chunks),
        tuple(size for part in listed for size in part.chains),
    )


def cut_chunks(
    problem: Problem,
    work: Work,
    target: float,
    max_tokens: int,
    *,
    even: bool = False,
    grades: Grades = NO_GRADES,
) -> Chunks:
    """Make chunks of about `target` work each and at most `max_tokens` tokens.

    A sequence of more work is sliced: by one mesh for all, which leaves a tail to fill up with short sequences,
    or, if `even`, into slices that are equal within the sequence. Chains come longest first. If there are enough
    short sequences, the first chunks grow to the full size and the last ones shrink, by `grades`.
    """
    sizes = {member: problem.sequences[member].length for member in problem.members}
    by_length = sorted(sizes, key=lambda member: (-sizes[member], member))
    mesh = _Mesh(work, target, max_tokens)
    limit = mesh.boundary(1)
    long = [member for member in by_length if sizes[member] > limit]
    chains = []
    for member in long:
        bounds = (
            cut_evenly(sizes[member], work, target, max_tokens) if even else mesh.cut(sizes[member])
        )
        chains.append([Slice(member, a, b - a) for a, b in pairwise(bounds)])
    tails = [Bin(work.between(c[-1].start, c[-1].stop), c[-1].length, [c[-1]]) for c in chains]
    shorts = [Slice(member, 0, sizes[member]) for member in by_length[len(long) :]]
    packing = pack(shorts, tails, work, target, max_tokens, grades)
    lists = [
        [*(Chunk((piece,)) for piece in chain[:-1]), final.chunk]
        for chain, final in zip(chains, packing.tails, strict=True)
    ]
    totals = [work.between(0, sizes[member]) for member in long]
    order = sorted(range(len(lists)), key=lambda i: (-len(lists[i]), -totals[i], i))
    ordered = [
        *([each.chunk] for each in packing.growing),
        *(lists[i] for i in order),
        *([each.chunk] for each in packing.full),
        *([each.chunk] for each in packing.shrinking),
    ]
    return Chunks(tuple(chunk for chain in ordered for chunk in chain), tuple(map(len, ordered)))


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
        least, most = (
            max(last + 1, length - (slices - 1) * max_tokens),
            min(last + max_tokens, length - slices + 1),
        )
        bounds.append(min(max(reach, least), most))
    return [*bounds, length]


@dataclass
class Bin:
    """A chunk that is being filled."""

    work: float
    tokens: int
    slices: list[Slice] = field(default_factory=list)

    @property
    def chunk(self) -> Chunk:
        """What is in it."""
        return Chunk((*self.slices,))

    def add(self, piece: Slice, work: float) -> None:
        """Put a slice in."""
        self.work += work
        self.tokens += piece.length
        self.slices.append(piece)


@dataclass(frozen=True)
class Packing:
    """Short sequences in chunks: after the tails of long ones, and in chunks of their own."""

    tails: list[Bin]
    growing: list[Bin]
    full: list[Bin]
    shrinking: list[Bin]


def pack(
    shorts: SequenceOf[Slice],
    tails: SequenceOf[Bin],
    work: Work,
    target: float,
    max_tokens: int,
    grades: Grades = NO_GRADES,
) -> Packing:
    """Fill the tails' bins and as few new ones as the work needs.

    Longest first into the bin that lacks most, which balances better than the first that fits. The token
    limit is strict; where it is what counts, first fit decreasing can need fewer bins and is taken instead.
    """
    works = [work.between(0, piece.length) for piece in shorts]
    rest = sum(works) - sum(max(0.0, target - tail.work) for tail in tails)
    grades = grades.within(rest / target)
    graded = sum(grades.growing) + sum(grades.shrinking)
    num_full = max(0, math.ceil(rest / target - graded - _ROUNDING))
    scale = rest / (graded + num_full) if graded + num_full else target
    capacities = [
        scale * share for share in (*grades.growing, *[1.0] * num_full, *grades.shrinking)
    ]
    bins = _pack_balanced(shorts, works, tails, target, capacities, max_tokens)
    fresh, num_tails = bins[len(tails) :], len(tails)
    if len(fresh) > len(capacities):
        fitted = _pack_first_fit(shorts, works, tails, max_tokens)
        if len(fitted) <= len(bins):
            return Packing(fitted[:num_tails], [], fitted[num_tails:], [])
    ends = len(grades.growing), len(grades.growing) + num_full
    growing, full, shrinking = (
        fresh[: ends[0]],
        fresh[ends[0] : ends[1]],
        fresh[ends[1] : len(capacities)],
    )
    # Bins that the token limit made necessary stand at the end.
    full += fresh[len(capacities) :]
    full.sort(key=lambda each: -each.work)
    return Packing(
        bins[:num_tails],
        *([each for each in part if each.slices] for part in (growing, full, shrinking)),
    )


# A chunk is not added for less than this part of one.
_ROUNDING = 1e-6


def _pack_balanced(
    shorts: SequenceOf[Slice],
    works: SequenceOf[float],
    tails: SequenceOf[Bin],
    target: float,
    capacities: SequenceOf[float],
    max_tokens: int,
) -> list[Bin]:
    bins = [Bin(tail.work, tail.tokens, [*tail.slices]) for tail in tails] + [
        Bin(0.0, 0) for _ in capacities
    ]
    wanted = [*[target] * len(tails), *capacities]
    heap = [(each.work - wanted[index], index) for index, each in enumerate(bins)]
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
            wanted.append(target)
        bins[index].add(piece, seconds)
        for entry in (*full, (bins[index].work - wanted[index], index)):
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
