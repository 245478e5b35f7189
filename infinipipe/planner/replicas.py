"""Sequences to replicas: dealt out by work, then moved on from the slowest to the fastest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from infinipipe.aliases import Floats
from infinipipe.ir import Sequence
from infinipipe.planner.passes.recompute import Shortage
from infinipipe.planner.passes.schedule import Schedule
from infinipipe.planner.policies import Policy
from infinipipe.planner.problem import Pipeline, Problem

# How often sequences move from the slowest replica to the fastest. Each time plans two replicas
# again; later ones gain less.
_ROUNDS = 4
# Where the slowest replica takes less than this part more than all do on average, nothing moves:
# it would gain no more, and planning two replicas again takes longer than that is worth.
_CLOSE = 0.01
# Moves and swaps of one round, after which what is left to move is small.
_MOVES = 8

Members = tuple[int, ...]
"""Sequences of one replica, as indices into those of the step."""


@dataclass(frozen=True)
class Hand:
    """What one replica has, and its schedule."""

    members: Members
    schedule: Schedule | None
    """None where there is nothing to do."""

    @property
    def makespan_s(self) -> float:
        """Simulated seconds."""
        return self.schedule.makespan_s if self.schedule else 0.0


def plan_replicas(
    pipeline: Pipeline, policy: Policy, sequences: tuple[Sequence, ...]
) -> list[Hand] | Shortage:
    """Deal a step's sequences out to the replicas and plan each of them.

    While the slowest replica is a straggler, sequences move from it to the fastest one, as their
    seconds in the schedules found say, and these two are planned again. That is kept only if both
    are faster than the slowest one was.
    """
    hands: list[Hand] = []
    for members in deal(pipeline, sequences):
        hand = _plan(pipeline, policy, sequences, members)
        if isinstance(hand, Shortage):
            return hand
        hands.append(hand)

    def plan(members: Members) -> Hand | Shortage:
        return _plan(pipeline, policy, sequences, members)

    for _ in range(_ROUNDS):
        if not even_out(hands, plan):
            break
    return hands


def _plan(
    pipeline: Pipeline, policy: Policy, sequences: tuple[Sequence, ...], members: Members
) -> Hand | Shortage:
    if not members:
        return Hand(members, None)
    result = policy(Problem(pipeline, sequences, members))
    return result if isinstance(result, Shortage) else Hand(members, result)


def deal(pipeline: Pipeline, sequences: tuple[Sequence, ...]) -> list[Members]:
    """Deal sequences out to the replicas by work: the longest first, to the one with least so far.

    Return the indices of each replica's sequences.
    """
    num_replicas = pipeline.num_replicas
    everyone = range(len(sequences))
    if num_replicas == 1:
        return [tuple(everyone)]
    hands: list[list[int]] = [[] for _ in range(num_replicas)]
    totals = [0.0] * num_replicas
    for member in sorted(everyone, key=lambda m: (-sequences[m].length, m)):
        least = min(range(num_replicas), key=lambda replica: (totals[replica], replica))
        hands[least].append(member)
        totals[least] += pipeline.costs.work.between(0, sequences[member].length)
    return [tuple(sorted(hand)) for hand in hands]


def even_out(hands: list[Hand], plan: Callable[[Members], Hand | Shortage]) -> bool:
    """Move sequences from the slowest replica to the fastest, in place; return whether the step
    got faster.

    Args:
        hands: of all replicas.
        plan: plans the sequences of one.
    """
    replicas = range(len(hands))
    slowest = max(replicas, key=lambda replica: (hands[replica].makespan_s, -replica))
    fastest = min(replicas, key=lambda replica: (hands[replica].makespan_s, replica))
    slow = hands[slowest]
    fast = hands[fastest]
    gap_s = slow.makespan_s - fast.makespan_s
    average_s = sum(hand.makespan_s for hand in hands) / len(hands)
    if slow.makespan_s <= (1 + _CLOSE) * average_s:
        return False
    # All of what would make both equal; then half of it, as an estimate it is.
    for part in (0.5, 0.25):
        given = exchange(slow, fast, part * gap_s)
        if given is None:
            continue
        new_slow = plan(given[0])
        if not _is_faster(new_slow, slow):
            continue
        new_fast = plan(given[1])
        if not _is_faster(new_fast, slow):
            continue
        hands[slowest] = new_slow
        hands[fastest] = new_fast
        return True
    return False


def _is_faster(plan: Hand | Shortage, slow: Hand) -> TypeGuard[Hand]:
    """Return whether a replica fits and ends before the slow one does."""
    return isinstance(plan, Hand) and plan.makespan_s < slow.makespan_s


def exchange(slow: Hand, fast: Hand, seconds: float) -> tuple[Members, Members] | None:
    """Return what both have after about so many seconds moved from the slow one to the fast one.

    Sequences move one by one, or are swapped for one that takes less. None if no move brings the
    two closer.
    """
    of_slow = sequence_seconds(slow)
    of_fast = sequence_seconds(fast)
    left_s = seconds
    for _ in range(_MOVES):
        move = _best_move(of_slow, of_fast, left_s)
        if move is None:
            break
        given, taken = move
        given_s = of_slow.pop(given)
        left_s -= given_s
        if taken is not None:
            taken_s = of_fast.pop(taken)
            left_s += taken_s
            of_slow[taken] = taken_s
        of_fast[given] = given_s
    if left_s == seconds:
        return None
    return tuple(sorted(of_slow)), tuple(sorted(of_fast))


def _best_move(
    of_slow: dict[int, float], of_fast: dict[int, float], seconds: float
) -> tuple[int, int | None] | None:
    """Return what to give and what to take for it, so that the difference comes closest to so many
    seconds; None if nothing comes closer than to do nothing."""
    # Cheapest first; among equals by number, so that the choice does not depend on anything else.
    takings: list[tuple[float, int | None]] = [(0.0, None)]
    takings += sorted((taken_s, member) for member, taken_s in of_fast.items())
    taken_s = np.array([each for each, _ in takings])
    best: tuple[int, int | None] | None = None
    best_error_s = seconds
    for member, given_s in sorted(of_slow.items()):
        wanted_s = given_s - seconds
        place = int(np.searchsorted(taken_s, wanted_s))
        for index in (place - 1, place):
            if not 0 <= index < len(takings):
                continue
            moved_s = given_s - float(taken_s[index])
            error_s = abs(seconds - moved_s)
            # By more than rounding.
            if error_s < best_error_s * (1 - 1e-9):
                best = (member, takings[index][1])
                best_error_s = error_s
    return best


def sequence_seconds(hand: Hand) -> dict[int, float]:
    """Return the seconds that each of a replica's sequences takes on its busiest stage.

    A chunk's seconds, recompute included, are shared by its slices as their work is.
    """
    schedule = hand.schedule
    if schedule is None:
        return {}
    stages = range(len(schedule.memories))
    busiest = max(stages, key=lambda stage: (schedule.timeline.busy_s(stage), -stage))
    chunk_s = _chunk_seconds(schedule, busiest)
    work = schedule.problem.pipeline.costs.work
    seconds = dict.fromkeys(hand.members, 0.0)
    for number, chunk in enumerate(schedule.chains.ir_chunks):
        works = [work.between(part.start, part.start + part.length) for part in chunk.slices]
        s_per_work = float(chunk_s[number]) / sum(works)
        for part, each in zip(chunk.slices, works, strict=True):
            seconds[part.sequence] += s_per_work * each
    return seconds


def _chunk_seconds(schedule: Schedule, stage: int) -> Floats:
    """(C,) seconds of F and B of each chunk on a stage, recompute included."""
    costs = schedule.problem.pipeline.costs
    program = schedule.programs[stage]
    ops_s = costs.op_seconds(stage, schedule.chains.costs, program, schedule.recompute_on(stage))
    seconds: Floats = np.zeros(schedule.chains.num_chunks)
    np.add.at(seconds, program.chunks, ops_s)
    return seconds
