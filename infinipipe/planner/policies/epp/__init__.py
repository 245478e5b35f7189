"""The policy `epp`: search over chunks and orders for the best simulated makespan."""

from __future__ import annotations

from dataclasses import replace

from infinipipe.ir import Search
from infinipipe.planner.passes.ladder import whole_menu
from infinipipe.planner.passes.polish import polish
from infinipipe.planner.passes.schedule import Result, Schedule, fixed_schedule
from infinipipe.planner.policies.baselines import (
    plan_1f1b,
    plan_chunkflow,
    plan_gpipe,
    plan_seq1f1b,
    plan_terapipe,
)
from infinipipe.planner.policies.epp.candidates import SearchSpace
from infinipipe.planner.policies.epp.longest_first import try_longest_first
from infinipipe.planner.policies.epp.search import search_schedule
from infinipipe.planner.policies.paper import plan_paper
from infinipipe.planner.problem import Problem

__all__ = ["SearchSpace", "plan_alone", "plan_epp", "polish_result"]

_RIVALS = (plan_paper, plan_chunkflow, plan_seq1f1b, plan_terapipe, plan_1f1b, plan_gpipe)
"""Those whose schedules compete, the ones that come close first: what cannot beat the incumbent is
not simulated."""


def plan_epp(problem: Problem) -> Result:
    """Return the best schedule found for a replica's sequences.

    All other policies compete, so none of them is ever better.
    """
    best = plan_alone(problem, SearchSpace())
    for rival in _RIVALS:
        result = rival(problem, best)
        if result is not best:
            best = polish_result(_on_menu(result))
    return best


def _on_menu(result: Result) -> Result:
    """Return a rival's schedule with levels of the whole menu that free as much, unless those do
    not fit or take longer."""
    if not isinstance(result, Schedule):
        return result
    chains = result.chains
    menu = whole_menu(chains.costs)
    freed_bytes = chains.ladder.freed_bytes(result.levels, chains.num_layers)
    levels = menu.levels_that_free(freed_bytes, chains.num_layers)
    on_menu = replace(chains, ladder=menu)
    found = fixed_schedule(result.problem, on_menu, result.memories, levels)
    if isinstance(found, Schedule) and found.makespan_s <= result.makespan_s:
        return replace(found, search=result.search)
    return result


def plan_alone(problem: Problem, space: SearchSpace) -> Result:
    """Return the best schedule that the search itself finds."""
    best = search_schedule(problem, space)
    best = try_longest_first(problem, space, best)
    return polish_result(best)


def polish_result(result: Result) -> Result:
    """Choose recompute levels for the makespan, now that the order is chosen."""
    if not isinstance(result, Schedule):
        return result
    polished, solved = polish(result)
    if solved is None:
        return polished
    record = Search(
        winner=result.search.winner,
        solver=solved.solver,
        status=solved.status,
        gap=solved.gap,
    )
    return replace(polished, search=record)
