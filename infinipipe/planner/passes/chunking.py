"""Chunks of equal work: long sequences are sliced, their tails and short ones are packed.

It goes back to Algorithm 1 of InfiniPipe (arXiv 2509.21275).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from infinipipe.aliases import Ints
from infinipipe.costs import Work
from infinipipe.ir import Chunk, Slice
from infinipipe.planner.passes.packing import Bin, pack
from infinipipe.planner.passes.ramp import NO_RAMP, Ramp
from infinipipe.planner.problem import Problem

_STRETCH = 1.1
"""Even slices may have so many times the work asked for, rather than be one more and smaller.

It trades balance between chunks for the overhead of one more chunk.
"""

_LEAST_TAIL = 0.05
"""A tail of less work than this part of a slice joins the slice before it.

That saves a chunk in the chain, which has hardly any work but its overhead, and makes the slice
before at most by this part larger.
"""


@dataclass(frozen=True)
class Chunks:
    """One replica's chunks, chain by chain: chunk numbers follow the order of F."""

    chunks: tuple[Chunk, ...]
    chains: tuple[int, ...]
    """How many chunks each chain has."""

    @classmethod
    def of_chains(cls, chains: SequenceOf[SequenceOf[Chunk]]) -> Chunks:
        """Number the chunks of some chains, those of the first chain first."""
        chunks: list[Chunk] = []
        sizes: list[int] = []
        for chain in chains:
            chunks += chain
            sizes.append(len(chain))
        return cls(tuple(chunks), tuple(sizes))

    @cached_property
    def chain_ends(self) -> Ints:
        """(chunks,) one past the last chunk of each chunk's chain."""
        sizes = np.array(self.chains, dtype=np.int64)
        ends = np.cumsum(sizes)
        return np.repeat(ends, sizes)


def join_chunks(parts: Iterable[Chunks]) -> Chunks:
    """Return all chains of some parts, those of the first part first."""
    chunks: list[Chunk] = []
    chains: list[int] = []
    for part in parts:
        chunks += part.chunks
        chains += part.chains
    return Chunks(tuple(chunks), tuple(chains))


def cut_chunks(
    problem: Problem,
    work: Work,
    target: float,
    max_tokens: int,
    *,
    even: bool = False,
    ramp: Ramp = NO_RAMP,
) -> Chunks:
    """Make chunks of about `target` work each and at most `max_tokens` tokens.

    A sequence of more work is sliced: by one mesh for all, which leaves a tail to fill up with
    short sequences, or, if `even`, into slices that are equal within the sequence. Chains come
    longest first. If there are enough short sequences, the first chunks grow to the full size and
    the last ones shrink, by `ramp`.
    """
    mesh = _Mesh(work, target, max_tokens)
    longest_whole = mesh.end(1)
    sliced: list[list[Slice]] = []
    shorts: list[Slice] = []
    for whole in problem.wholes:
        if whole.length <= longest_whole:
            shorts.append(whole)
            continue
        if even:
            cuts = cut_evenly(whole.length, work, target, max_tokens)
        else:
            cuts = mesh.cut(whole.length)
        slices = _slices(whole.sequence, cuts)
        sliced.append(slices)

    # Each tail has a bin of its own: two in one chunk would chain two long sequences.
    tails = [_tail_bin(slices[-1], work) for slices in sliced]
    packing = pack(shorts, tails, work, target, max_tokens, ramp)
    split_chains: list[list[Chunk]] = []
    for slices, tail in zip(sliced, packing.tails, strict=True):
        heads = slices[:-1]
        split_chains.append(_chain(heads, tail))
    # Chains of equally many chunks stay in their order, the longest sequence first.
    split_chains.sort(key=len, reverse=True)
    return Chunks.of_chains(
        [
            *_short_chains(packing.ramp_up),
            *split_chains,
            *_short_chains(packing.full),
            *_short_chains(packing.ramp_down),
        ]
    )


def _slices(sequence: int, cuts: SequenceOf[int]) -> list[Slice]:
    slices: list[Slice] = []
    for start, stop in pairwise(cuts):
        length = stop - start
        slices.append(Slice(sequence, start, length))
    return slices


def _tail_bin(tail: Slice, work: Work) -> Bin:
    tail_work = work.between(tail.start, tail.stop)
    return Bin(tail_work, tail.length, [tail])


def _chain(heads: SequenceOf[Slice], tail: Bin) -> list[Chunk]:
    """Return the chunks of a split sequence; only the last has short sequences as well."""
    chunks = [Chunk((head,)) for head in heads]
    chunks.append(tail.chunk)
    return chunks


def _short_chains(bins: SequenceOf[Bin]) -> list[list[Chunk]]:
    """Return a chain of one chunk for each bin of whole sequences."""
    return [[each.chunk] for each in bins]


class _Mesh:
    """Where slices of equal work end, from token 0 on, as far as it was asked for."""

    def __init__(self, work: Work, target: float, max_tokens: int) -> None:
        self._work = work
        self._target = target
        self._max_tokens = max_tokens
        self._ends = [0]
        """By the number of the slice; no slice has the number 0."""

    def end(self, number: int) -> int:
        """Return where the slice of that number, from 1, ends."""
        while len(self._ends) <= number:
            following = self._following(self._ends[-1])
            self._ends.append(following)
        return self._ends[number]

    def _following(self, last: int) -> int:
        by_work = self._work.reach(last, self._target)
        by_tokens = last + self._max_tokens
        reach = round(min(by_work, by_tokens))
        # A slice has at least one token, whatever its work.
        return max(reach, last + 1)

    def cut(self, length: int) -> list[int]:
        """Return where a sequence is cut into slices, from 0 to its length."""
        cuts = [0]
        end = self.end(1)
        while end < length:
            cuts.append(end)
            end = self.end(len(cuts))
        is_split = len(cuts) > 1
        if is_split and self._joins(cuts, length):
            cuts.pop()
        return [*cuts, length]

    def _joins(self, cuts: SequenceOf[int], length: int) -> bool:
        """Return whether the tail is so small that it joins the slice before it."""
        joined_tokens = length - cuts[-2]
        if joined_tokens > self._max_tokens:
            return False
        tail_work = self._work.between(cuts[-1], length)
        least_work = _LEAST_TAIL * self._target
        return tail_work < least_work


def cut_evenly(length: int, work: Work, target: float, max_tokens: int) -> list[int]:
    """Return where to cut slices of equal work, from 0 to the length.

    Each slice has at most about `target` work and at most `max_tokens` tokens.
    """
    # What each slice costs besides its tokens is equal wherever they are cut.
    bare = replace(work, s_per_slice=0.0)
    total = bare.between(0, length)
    full_slices = total / target
    count_by_work = math.ceil(full_slices / _STRETCH)
    count_by_tokens = -(-length // max_tokens)
    wanted = max(1, count_by_work, count_by_tokens)
    # A slice has at least one token.
    count = min(length, wanted)
    cuts = [0]
    for num_left in range(count, 1, -1):
        last = cuts[-1]
        share = bare.between(last, length) / num_left
        reach = round(bare.reach(last, share))
        # Every later slice needs a token and can take no more than the most.
        num_later = num_left - 1
        most_later = num_later * max_tokens
        least = max(last + 1, length - most_later)
        most = min(last + max_tokens, length - num_later)
        cut = min(max(reach, least), most)
        cuts.append(cut)
    return [*cuts, length]
