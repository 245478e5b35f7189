"""The longest sequences first, one by one, so that what only they need is not asked of all."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np

from infinipipe.aliases import Ints
from infinipipe.planner.bound import makespan_bound
from infinipipe.planner.passes.chunking import join_chunks
from infinipipe.planner.passes.in_flight import connect_stages
from infinipipe.planner.passes.ladder import whole_menu
from infinipipe.planner.passes.order import join_orders, overlap_orders
from infinipipe.planner.passes.schedule import (
    CostedChains,
    Result,
    Schedule,
    fit_schedule,
    is_better,
    order_memories,
    price_chains,
)
from infinipipe.planner.policies.epp.candidates import SearchSpace
from infinipipe.planner.policies.epp.search import search_schedule
from infinipipe.planner.problem import Problem

# How many of the longest sequences may run by themselves: for each number the rest is searched
# anew.
_COUNTS = (1, 2, 4, 8)
# Makespan over the bound from which on that is tried: a lower one finds more, and has more batches
# pay for these searches.
_FAR = 1.2
# The same, from which on it is tried with more sequences though fewer did not help.
_VERY_FAR = 1.5


def try_longest_first(problem: Problem, space: SearchSpace, incumbent: Result) -> Result:
    """Return the best of the incumbent and, where it is far from the bound, of schedules that run
    the longest sequences first."""
    if _over_bound(problem, incumbent) <= _FAR:
        return incumbent
    members = problem.longest_first()
    with_room = _leave_room(problem, problem.sequences[members[0]].length)
    best = incumbent
    alone: list[Schedule] = []
    for count in _COUNTS:
        if count >= len(members):
            break
        for member in members[len(alone) : count]:
            result = _search_one(with_room, space, member)
            if not isinstance(result, Schedule):
                return best
            alone.append(result)
        others = tuple(sorted(members[count:]))
        rest = search_schedule(replace(with_room, members=others), space)
        if not isinstance(rest, Schedule):
            continue
        joined = _join(problem, [*alone, rest])
        if isinstance(joined, Schedule) and is_better(joined, best):
            best = joined.won_by(f"{rest.search.winner}, {count} longest first")
        elif _over_bound(problem, best) < _VERY_FAR:
            break
    return best


def _over_bound(problem: Problem, result: Result) -> float:
    """Return how many times longer than its bound a schedule takes, infinity if there is none."""
    if not isinstance(result, Schedule):
        return math.inf
    members = [problem.sequences[member] for member in problem.members]
    return result.makespan_s / makespan_bound(problem.pipeline, members, 1)


def _leave_room(problem: Problem, largest_tokens: int) -> Problem:
    """Return the problem with less memory: while one part ends, the next one's first activation and
    its own last gradient may be under way.

    Each is of a chunk. How large the chunks are is not known yet, and none of a single sequence is
    larger than the longest sequence.
    """
    pipeline = problem.pipeline
    coming = 2 * pipeline.costs.boundary_bytes(largest_tokens)
    limits = tuple(limit - coming for limit in pipeline.limits)
    return replace(problem, pipeline=replace(pipeline, limits=limits))


def _search_one(problem: Problem, space: SearchSpace, member: int) -> Result:
    """Plan one sequence, with fewer choices: this is one of up to eight such searches.

    Ramps and packing have nothing to work on with one sequence.
    """
    few = replace(
        space,
        attentions=space.attentions[:1],
        evens=space.evens[:1],
        warmups=space.warmups[:1],
    )
    return search_schedule(replace(problem, members=(member,)), few)


def _join(problem: Problem, parts: SequenceOf[Schedule]) -> Result:
    """Run schedules one after the other, and overlap them where memory allows."""
    chunks = join_chunks(part.chains.chunks for part in parts)
    chains = price_chains(problem, chunks, whole_menu)
    one_by_one = join_orders([part.forwards_before for part in parts])
    ends = np.cumsum([part.chains.num_chunks for part in parts]).tolist()
    least = np.array(chunks.chain_ends)
    overlapped = overlap_orders(one_by_one, ends)
    overlapped = connect_stages(overlapped, least)
    apart = _fit_order(problem, chains, one_by_one)
    together = _fit_order(problem, chains, overlapped)
    return together if is_better(together, apart) else apart


def _fit_order(problem: Problem, chains: CostedChains, order: Ints) -> Result:
    memories = order_memories(problem, chains, order)
    return fit_schedule(problem, chains, memories)
