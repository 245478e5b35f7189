"""Policies without one of their choices each: what is lost shows what the choice is worth."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np

from infinipipe.costs import StageMemory
from infinipipe.planner.passes.in_flight import Warmup
from infinipipe.planner.passes.ladder import inputs_only
from infinipipe.planner.passes.recompute import Shortage
from infinipipe.planner.passes.schedule import (
    NOTHING,
    CostedChains,
    Result,
    Schedule,
    fixed_schedule,
)
from infinipipe.planner.policies import Policy, paper
from infinipipe.planner.policies.epp import (
    SearchSpace,
    longest_first,
    plan_alone,
    polish_result,
    search,
)
from infinipipe.planner.policies.epp.longest_first import try_longest_first
from infinipipe.planner.policies.paper import plan_paper
from infinipipe.planner.problem import Problem

_SPACE = SearchSpace()
_PARTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Parts of a stage's layers that are tried as the recompute count of all its chunks: those of the
other systems' policies."""

Fit = Callable[[Problem, CostedChains, SequenceOf[StageMemory]], Result]
"""Chooses recompute counts for given programs, as `fit_schedule` does."""


def uniform_schedule(
    problem: Problem, chains: CostedChains, memories: SequenceOf[StageMemory]
) -> Result:
    """Recompute the least part of the layers that fits, the same for every chunk."""
    result: Result = NOTHING
    for part in _PARTS:
        result = _recompute_part(problem, chains, memories, part)
        if isinstance(result, Schedule):
            break
    return result


def full_schedule(
    problem: Problem, chains: CostedChains, memories: SequenceOf[StageMemory]
) -> Result:
    """Recompute all layers of every chunk."""
    return _recompute_part(problem, chains, memories, 1.0)


def _recompute_part(
    problem: Problem, chains: CostedChains, memories: SequenceOf[StageMemory], part: float
) -> Result:
    counts = np.ceil(part * chains.num_layers).astype(np.int64)
    everywhere = np.repeat(counts, chains.num_chunks, axis=1)
    keep_inputs = replace(chains, ladder=inputs_only(chains.costs))
    return fixed_schedule(problem, keep_inputs, memories, everywhere)


def recompute_by(fit: Fit, problem: Problem) -> Result:
    """Return the best that the search of `epp` finds where recompute follows another rule.

    Nothing else chooses recompute then: no sequence runs by itself, and counts are not polished.
    """
    with patch.object(search, "fit_schedule", fit):
        return search.search_schedule(problem, _SPACE)


def all_together(problem: Problem) -> Result:
    """Plan as `epp` does by itself, with no sequence that runs by itself."""
    return polish_result(search.search_schedule(problem, _SPACE))


def swept(problem: Problem) -> Result:
    """Plan as `epp` does by itself, with the counts that its sweep over the program finds."""
    best = search.search_schedule(problem, _SPACE)
    return try_longest_first(problem, _SPACE, best)


def without_menu(problem: Problem) -> Result:
    """Plan as `epp` does by itself, where layers keep all or only their input."""
    with (
        patch.object(search, "whole_menu", inputs_only),
        patch.object(longest_first, "whole_menu", inputs_only),
    ):
        return plan_alone(problem, _SPACE)


def ungrouped_paper(problem: Problem) -> Result:
    """Plan as `paper` does, with one pipeline for all chains."""
    with patch.object(paper, "_group", _one_group):
        return plan_paper(problem)


def _one_group(problem: Problem, chains: list[paper.Chain]) -> list[paper._Group] | Shortage:
    group = paper._make_group(problem, chains)
    return group if isinstance(group, Shortage) else [group]


def _within(space: SearchSpace) -> Policy:
    """Plan as `epp` does by itself, within a space."""
    return partial(plan_alone, space=space)


ABLATIONS: dict[str, Policy] = {
    "epp alone": _within(_SPACE),
    "equal tokens, not work": _within(SearchSpace(attentions=(0.0,))),
    "equal work only": _within(SearchSpace(attentions=(1.0,), evens=(False,))),
    "linear grades": _within(SearchSpace(ramps=("linear",))),
    "no graded chunks": _within(SearchSpace(ramps=("no",))),
    "plain 1F1B depth": _within(SearchSpace(warmups=(Warmup(1.0, 1),))),
    "no sequence by itself": all_together,
    "recompute by the sweep alone": swept,
    "attention's output dropped with the rest": without_menu,
    "one recompute count": partial(recompute_by, uniform_schedule),
    "full recompute": partial(recompute_by, full_schedule),
    "paper without grouping": ungrouped_paper,
}
"""`epp` without the other policies' schedules and without one of its own choices, and `paper`
without one of its."""
