"""FlexSP: one stage, and groups of devices of different sizes, each of which shares sequences."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from infinipipe.ir import Sequence
from infinipipe.planner.passes.recompute import Shortage
from infinipipe.planner.passes.schedule import Schedule
from infinipipe.planner.policies.baselines import plan_deepspeed
from infinipipe.planner.problem import Pipeline, Problem

# Into how many phases a step is cut at most: FlexSP's micro-batches, of sequences of like lengths.
# Later ones are of ever fewer sequences, and each ends with a wait of all devices.
_PHASES = (1, 2, 3, 4, 6)
# Groupings of a phase that are planned, of all that were estimated.
_PLANNED = 2
# Sizes of group in one grouping. More make many more groupings: 64 devices have 1828 in all.
_MOST_SIZES = 3

Members = tuple[int, ...]
Grouping = tuple[int, ...]
"""Sizes of groups, the largest first."""


@dataclass(frozen=True)
class MixedGroups:
    """All devices as one stage, in groups of one size at a time.

    Args:
        by_size: the pipeline where all groups have so many ranks.
    """

    by_size: dict[int, Pipeline]

    @property
    def largest(self) -> Pipeline:
        """The pipeline of the largest groups."""
        return self.by_size[max(self.by_size)]

    @cached_property
    def most_tokens(self) -> dict[int, int]:
        """Tokens of the longest sequence that fits, by the size of the group."""
        return {size: _most_tokens(pipeline) for size, pipeline in self.by_size.items()}

    @cached_property
    def groupings(self) -> tuple[Grouping, ...]:
        """All ways to use the devices."""
        sizes = sorted(self.by_size, reverse=True)
        everything = partitions(self.largest.costs.layout.num_ranks, sizes)
        return tuple(each for each in everything if len(set(each)) <= _MOST_SIZES)


@dataclass(frozen=True)
class MixedPlan:
    """What a step comes to."""

    makespan_s: float
    peak_bytes: int


def plan_flexsp(groups: MixedGroups, sequences: tuple[Sequence, ...]) -> MixedPlan | Shortage:
    """FlexSP (Wang et al. 2024, arXiv 2412.01523): in each phase of a step, sequences of like
    lengths go to groups of devices that suit them: many devices for a long one, one for a short.

    Groupings are all estimated with sequences dealt out longest first, where FlexSP solves a
    program of integers, and the best ones planned: each group packs micro-batches and recomputes
    as `deepspeed` does. Left out: what regrouping costs, ZeRO-3, which FlexSP shards parameters
    with, and that every micro-batch would then wait for all groups. All of that would be slower.
    """
    longest_first = sorted(
        range(len(sequences)), key=lambda member: (-sequences[member].length, member)
    )
    plans = []
    for num_phases in _PHASES:
        phases = _cut(groups, sequences, longest_first, num_phases)
        plans.append(_plan_phases(groups, sequences, phases))
    return min(plans, key=_badness)


def _cut(
    groups: MixedGroups, sequences: SequenceOf[Sequence], members: SequenceOf[int], num_phases: int
) -> list[Members]:
    """Cut the members into runs of equal work."""
    lengths = np.array([sequences[member].length for member in members])
    work = groups.by_size[min(groups.by_size)].costs.work
    works = work.whole(lengths)
    # The phase in which the middle of each one's work is.
    middles = (np.cumsum(works) - works / 2) / works.sum()
    phases = (middles * num_phases).astype(np.int64)
    runs: dict[int, list[int]] = {}
    for member, phase in zip(members, phases.tolist(), strict=True):
        runs.setdefault(phase, []).append(member)
    return [tuple(run) for run in runs.values()]


def _plan_phases(
    groups: MixedGroups, sequences: tuple[Sequence, ...], phases: SequenceOf[Members]
) -> MixedPlan | Shortage:
    makespan_s = 0.0
    peak_bytes = 0
    for members in phases:
        plan = _plan_phase(groups, sequences, members)
        if isinstance(plan, Shortage):
            return plan
        makespan_s += plan.makespan_s
        peak_bytes = max(peak_bytes, plan.peak_bytes)
    return MixedPlan(makespan_s, peak_bytes)


def _plan_phase(
    groups: MixedGroups, sequences: tuple[Sequence, ...], members: Members
) -> MixedPlan | Shortage:
    """Plan the groupings that seem best, and return the best of them."""
    estimates = []
    seconds = _seconds(groups, sequences, members)
    for grouping in groups.groupings:
        dealt = _deal(groups, sequences, members, seconds, grouping)
        if dealt is not None:
            estimates.append(dealt)
    if not estimates:
        return _longest_shortage(groups, sequences, members)
    estimates.sort(key=lambda dealt: dealt.seconds)
    plans = [_plan_groups(groups, sequences, dealt) for dealt in estimates[:_PLANNED]]
    return min(plans, key=_badness)


def _badness(plan: MixedPlan | Shortage) -> tuple[bool, float]:
    """Order plans: the fastest first, then shortages, the smallest first."""
    if isinstance(plan, Shortage):
        return (True, plan.missing)
    return (False, plan.makespan_s)


@dataclass(frozen=True)
class _Dealt:
    """Sequences in groups, as estimated."""

    seconds: float
    hands: tuple[tuple[int, Members], ...]
    """The size of each group, and its sequences."""


def _seconds(
    groups: MixedGroups, sequences: SequenceOf[Sequence], members: Members
) -> dict[int, list[float]]:
    """Return the work of each member, by the size of the group that it is in."""
    lengths = np.array([sequences[member].length for member in members])
    return {
        size: pipeline.costs.work.whole(lengths).tolist()
        for size, pipeline in groups.by_size.items()
    }


def _deal(
    groups: MixedGroups,
    sequences: SequenceOf[Sequence],
    members: Members,
    seconds: dict[int, list[float]],
    grouping: Grouping,
) -> _Dealt | None:
    """Deal members, longest first, each to the group that is done with it first; None if one fits
    into no group."""
    # Of each size, the groups with what they have to do, the idlest first.
    heaps: dict[int, list[tuple[float, int]]] = {}
    for index, size in enumerate(grouping):
        heaps.setdefault(size, []).append((0.0, index))
    hands: list[list[int]] = [[] for _ in grouping]
    latest_s = 0.0
    for place, member in enumerate(members):
        length = sequences[member].length
        ends = [
            (heap[0][0] + seconds[size][place], size)
            for size, heap in heaps.items()
            if length <= groups.most_tokens[size]
        ]
        if not ends:
            return None
        end_s, size = min(ends)
        _, index = heaps[size][0]
        heapq.heapreplace(heaps[size], (end_s, index))
        hands[index].append(member)
        latest_s = max(latest_s, end_s)
    dealt = [(size, tuple(hand)) for size, hand in zip(grouping, hands, strict=True) if hand]
    return _Dealt(latest_s, tuple(dealt))


def _plan_groups(
    groups: MixedGroups, sequences: tuple[Sequence, ...], dealt: _Dealt
) -> MixedPlan | Shortage:
    makespan_s = 0.0
    peak_bytes = 0
    for size, members in dealt.hands:
        result = plan_deepspeed(Problem(groups.by_size[size], sequences, members))
        if isinstance(result, Shortage):
            return result
        makespan_s = max(makespan_s, result.makespan_s)
        (memory,) = result.memories
        during = memory.during(result.recompute_on(0))
        peak_bytes = max(peak_bytes, round(during.max()))
    return MixedPlan(makespan_s, peak_bytes)


def _longest_shortage(
    groups: MixedGroups, sequences: tuple[Sequence, ...], members: Members
) -> Shortage:
    """Return what the longest member lacks in the largest group."""
    longest = max(members, key=lambda member: sequences[member].length)
    result = plan_deepspeed(Problem(groups.largest, sequences, (longest,)))
    assert isinstance(result, Shortage), "the longest sequence fits into no group"
    return result


def _most_tokens(pipeline: Pipeline) -> int:
    """Return the tokens of the longest sequence that fits by itself."""
    fits = 0
    too_many = pipeline.context_tokens + 1
    while too_many - fits > 1:
        tokens = (fits + too_many) // 2
        alone = (Sequence(0, tokens, 0),)
        if isinstance(plan_deepspeed(Problem(pipeline, alone, (0,))), Schedule):
            fits = tokens
        else:
            too_many = tokens
    return fits


def partitions(total: int, sizes: SequenceOf[int]) -> Iterator[Grouping]:
    """Yield all ways to write a total as a sum of sizes, the largest first; each size any number
    of times."""
    if total == 0:
        yield ()
        return
    for place, size in enumerate(sizes):
        if size <= total:
            for rest in partitions(total - size, sizes[place:]):
                yield (size, *rest)
