"""The policy `epp`: search over chunks and orders for the best simulated makespan."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from infinipipe.costs.sizes import chunk_overhead_s, most_chunk_tokens
from infinipipe.ir import Search
from infinipipe.planner.bound import makespan_bound
from infinipipe.planner.passes.chunking import cut_chunks, join_chunks
from infinipipe.planner.passes.in_flight import Shape, connect_leads, memory_leads
from infinipipe.planner.passes.order import join_leads, overlap_leads
from infinipipe.planner.passes.ramp import NO_RAMP, Ramp, geometric_ramp, linear_ramp
from infinipipe.planner.passes.recompute import Shortage
from infinipipe.planner.passes.recompute_program import polish
from infinipipe.planner.passes.schedule import (
    NOTHING,
    Priced,
    Schedule,
    fit_schedule,
    fixed_schedule,
    is_better,
    least_seconds,
    order_memories,
    price,
    uniform_counts,
    uniform_schedule,
)
from infinipipe.planner.policies.baselines import (
    plan_1f1b,
    plan_chunkflow,
    plan_gpipe,
    plan_seq1f1b,
    plan_terapipe,
)
from infinipipe.planner.policies.paper import plan_paper
from infinipipe.planner.problem import Problem, average_work

_MOST_CHUNKS = 800
_COARSE, _FINE = 1.5, 1.2
"""Factors by which the search for the number of chunks climbs."""
_FRUGAL = Shape(0.0, 1_000_000)
"""One chain at a time: the least that can be in flight."""
_FEW_SEQUENCES = 24
_FEW_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
_APART = (1, 2, 4, 8)
"""How many of the longest sequences may run by themselves."""
_FAR, _VERY_FAR = 1.2, 1.5
"""Makespan over the bound from which on that is tried, and tried again with more though fewer did not help."""
_RETRIES = 3
_SHRINKS = 3
_EFFORT = 100_000
"""Chunks times stages that are simulated at most, give or take a climb: less than a second."""


RIVALS = (plan_paper, plan_chunkflow, plan_seq1f1b, plan_terapipe, plan_1f1b, plan_gpipe)
"""Those whose schedules compete, the ones that come close first."""


Grading = Literal["geometric", "linear", "no"]
_GRADES: dict[Grading, Callable[[int], Ramp]] = {
    "geometric": geometric_ramp,
    "linear": linear_ramp,
    "no": lambda _: NO_RAMP,
}


@dataclass(frozen=True)
class Space:
    """What may be chosen, the first of each to begin with. A smaller space shows what a choice is worth."""

    attentions: tuple[float, ...] = (0.5, 1.0, 0.0)
    """How much of the attention's time counts when chunks are cut: all for equal work, none for equal tokens."""
    evens: tuple[bool, ...] = (False, True)
    """Whether a long sequence is cut evenly by itself, or by the mesh of all."""
    grades: tuple[Grading, ...] = ("linear", "geometric", "no")
    """Whether the first chunks grow and the last shrink."""
    shapes: tuple[Shape, ...] = (Shape(2.0, 2), Shape(2.0, 1), Shape(1.5, 1), Shape(1.0, 1))
    recompute: Literal["adaptive", "uniform", "full"] = "adaptive"
    """What memory asks for by stage and chunk, or the least count that does for all chunks, or all layers."""
    apart: bool = True
    """Whether the longest sequences may run by themselves where memory is short."""
    polish: bool = True
    """Whether the recompute counts of the best order are chosen for its makespan, by a linear program and SCIP."""
    rivals: bool = True
    """Whether the other policies' schedules compete, so that none of them is ever better."""


@dataclass(frozen=True)
class Candidate:
    """One way to plan a step."""

    count: float
    """Parts into which the whole work is cut."""
    attention: float
    even: bool
    grading: Grading
    shape: Shape

    def __str__(self) -> str:
        cut = "even slices" if self.even else "one mesh"
        return (
            f"epp: {self.count:.4g} parts, {self.attention:.0%} of attention, {cut}, "
            f"{self.grading} grades, "
            f"{self.shape.ahead:g} ahead, bursts of {self.shape.burst}"
        )


def plan_epp(problem: Problem, space: Space = Space()) -> Schedule | Shortage:
    """Return the best schedule found for a replica's sequences."""
    best = _climb(problem, space)
    if space.apart and space.recompute == "adaptive" and _over_bound(problem, best) > _FAR:
        best = _longest_apart(problem, space, best)
    best = _polished(best, space)
    if not space.rivals:
        return best
    for rival in RIVALS:
        rivalling = rival(problem, best)
        best = best if rivalling is best else _polished(rivalling, space)
    return best


def _climb(problem: Problem, space: Space) -> Schedule | Shortage:
    search = Climb(problem, space)
    start = Candidate(
        search.guess_count(), space.attentions[0], space.evens[0], space.grades[0], space.shapes[0]
    )
    search.find_feasible(start)
    if len(problem.members) <= _FEW_SEQUENCES:
        search.enumerate(start)
    search.climb(_COARSE)
    search.vary()
    search.climb(_FINE)
    while search.vary():
        search.climb(_COARSE)
        search.climb(_FINE)
    return search.best


def _over_bound(problem: Problem, best: Schedule | Shortage) -> float:
    """Return how many times longer than its bound a schedule takes, infinity if there is none."""
    members = [problem.sequences[member] for member in problem.members]
    return (
        best.makespan_s / makespan_bound(problem.pipeline, members, 1)
        if isinstance(best, Schedule)
        else math.inf
    )


def _longest_apart(
    problem: Problem, space: Space, best: Schedule | Shortage
) -> Schedule | Shortage:
    """Let the longest sequences run first, one by one, so that what only they need is not asked of all others."""
    members = sorted(
        problem.members, key=lambda member: (-problem.sequences[member].length, member)
    )
    # While one runs, the first activation of the next is on its way.
    pipeline, largest = problem.pipeline, problem.sequences[members[0]].length
    coming = 2 * largest * pipeline.profile.bytes.activation_per_token
    parts = replace(
        problem,
        pipeline=replace(pipeline, limits=tuple(limit - coming for limit in pipeline.limits)),
    )
    few = replace(
        space, attentions=space.attentions[:1], evens=space.evens[:1], shapes=space.shapes[:1]
    )
    alone: list[Schedule] = []
    for count in _APART:
        if count >= len(members):
            break
        for member in members[len(alone) : count]:
            found = _climb(replace(parts, members=(member,)), few)
            if isinstance(found, Shortage):
                return best
            alone.append(found)
        rest = _climb(replace(parts, members=tuple(sorted(members[count:]))), space)
        if isinstance(rest, Shortage):
            continue
        joined = _join(problem, [*alone, rest])
        if is_better(joined, best) and isinstance(joined, Schedule):
            best = joined.won_by(f"{rest.search.winner}, {count} longest first")
        elif _over_bound(problem, best) < _VERY_FAR:
            break
    return best


def _join(problem: Problem, parts: list[Schedule]) -> Schedule | Shortage:
    """Run schedules one after the other, and overlap them where memory allows."""
    chunks = join_chunks(part.priced.chunks for part in parts)
    priced = price(problem, chunks)
    one_by_one = join_leads([part.leads for part in parts])
    ends = np.cumsum([len(part.priced.chunks.chunks) for part in parts]).tolist()
    overlapped = connect_leads(overlap_leads(one_by_one, ends), np.array(chunks.chain_ends))
    found = [
        fit_schedule(problem, priced, order_memories(problem, priced, ls))
        for ls in (one_by_one, overlapped)
    ]
    return found[1] if is_better(found[1], found[0]) else found[0]


def _polished(found: Schedule | Shortage, space: Space) -> Schedule | Shortage:
    """Choose recompute counts for the makespan, now that the order is chosen."""
    if isinstance(found, Shortage) or space.recompute != "adaptive" or not space.polish:
        return found
    polished, solved = polish(found)
    if solved is None:
        return polished
    search = Search(
        winner=found.search.winner, solver=solved.solver, status=solved.status, gap=solved.gap
    )
    return replace(polished, search=search)


class Climb:
    """The best schedule so far, and how to find a better one."""

    def __init__(self, problem: Problem, space: Space) -> None:
        self.best: Schedule | Shortage = NOTHING
        self._best_candidate: Candidate | None = None
        self._problem = problem
        self._space = space
        pipeline = problem.pipeline
        self._work = average_work(pipeline.profile, pipeline.num_stages)
        self._total = float(self._work.whole(problem.lengths).sum())
        self._most = float(min(int(problem.lengths.sum()), _MOST_CHUNKS))
        self._max_tokens = most_chunk_tokens(pipeline)
        self._priced: dict[Candidate, Priced] = {}
        self._makespans: dict[Candidate, float] = {}
        self._effort = 0

    def guess_count(self) -> float:
        """Return where filling and draining costs as much as the overhead of chunks."""
        pipeline = self._problem.pipeline
        overhead = chunk_overhead_s(pipeline)
        return self._clip(math.sqrt((pipeline.num_stages - 1) * self._total / (2 * overhead)))

    def find_feasible(self, start: Candidate) -> None:
        """Look for a candidate that fits: with more or fewer chunks, the least in flight, chunks of equal tokens.

        Fewer chunks can help: large ones need much for a moment, but a sequence that is not split needs no slot.
        """
        counts = self._counts_around(start.count)
        for count in counts:
            if math.isfinite(self.makespan(replace(start, count=count))):
                return
        self._shrink()
        if isinstance(self.best, Schedule):
            return
        for attention in (start.attention, min(self._space.attentions)):
            for count in counts:
                self.makespan(replace(start, count=count, shape=_FRUGAL, attention=attention))
        self._shrink()

    def _shrink(self) -> None:
        """Follow what needs the least memory, for a while, until something fits or nothing needs less."""
        for _ in range(_SHRINKS):
            before = self._best_candidate
            if before is None:
                return
            around: list[dict[str, Any]] = [
                {"count": self._clip(before.count * f)} for f in (1.2, 1 / 1.2, 1.05)
            ]
            around += [{"attention": attention} for attention in self._space.attentions]
            around += [{"even": even} for even in self._space.evens]
            for changes in around:
                if isinstance(self.best, Schedule):
                    return
                self.makespan(replace(before, **changes))
            if before == self._best_candidate:
                return

    def _counts_around(self, start: float) -> list[float]:
        doublings = range(1 + math.ceil(math.log2(self._most)))
        counts = [self._clip(start * 2.0**sign) for power in doublings for sign in (power, -power)]
        return list(dict.fromkeys(counts))

    def enumerate(self, start: Candidate) -> None:
        """Try many numbers of chunks: with few sequences there is no slope to climb."""
        for count in _FEW_COUNTS:
            for attention in self._space.attentions:
                self.makespan(replace(start, count=self._clip(count), attention=attention))

    def climb(self, step: float) -> None:
        """Follow the number of chunks from the best to a local optimum."""
        for factor in (step, 1 / step):
            while (candidate := self._best_candidate) is not None and self._effort < _EFFORT:
                following = replace(candidate, count=self._clip(candidate.count * factor))
                if self.makespan(following) >= self.makespan(candidate):
                    break

    def vary(self) -> bool:
        """Try other orders and other cuts around the best; return whether any is better."""
        before = self._best_candidate
        for changes in self._variations():
            # Graded chunks are many small ones, so with other grades another number may be best.
            for factor in (1.0, _COARSE, 1 / _COARSE) if "grading" in changes else (1.0,):
                if (best := self._best_candidate) is not None and self._effort < _EFFORT:
                    self.makespan(replace(best, **changes, count=self._clip(best.count * factor)))
        return self._best_candidate != before

    def _variations(self) -> list[dict[str, Any]]:
        space = self._space
        # Without neighbours to keep busy, what is in flight only costs memory.
        shapes = (
            (_FRUGAL, *space.shapes) if self._problem.pipeline.num_stages == 1 else space.shapes
        )
        choices = {
            "shape": shapes,
            "even": space.evens,
            "attention": space.attentions,
            "grading": space.grades,
        }
        return [{name: value} for name, values in choices.items() for value in values]

    def makespan(self, candidate: Candidate) -> float:
        """Evaluate a candidate, once."""
        if candidate not in self._makespans:
            self._makespans[candidate] = self._evaluate(candidate)
        return self._makespans[candidate]

    def _evaluate(self, candidate: Candidate) -> float:
        problem, priced = self._problem, self._price(candidate)
        least = least_seconds(priced)
        if isinstance(self.best, Schedule) and least >= self.best.makespan_s:
            return least
        self._effort += len(priced.chunks.chunks) * problem.pipeline.num_stages
        found = self._order(priced, candidate.shape)
        if is_better(found, self.best):
            self.best = found.won_by(str(candidate)) if isinstance(found, Schedule) else found
            self._best_candidate = candidate
        return found.makespan_s if isinstance(found, Schedule) else math.inf

    def _order(self, priced: Priced, shape: Shape) -> Schedule | Shortage:
        """Order chunks and choose their recompute; where that does not fit, leave as much more free and try again."""
        problem, margins = self._problem, np.zeros(self._problem.pipeline.num_stages)
        found: Schedule | Shortage = NOTHING
        for _ in range(1 + _RETRIES):
            leads = memory_leads(problem.pipeline, priced, shape, margins)
            memories = order_memories(problem, priced, leads)
            match self._space.recompute:
                case "adaptive":
                    found = fit_schedule(problem, priced, memories)
                case "uniform":
                    found = uniform_schedule(problem, priced, memories)
                case "full":
                    found = fixed_schedule(
                        problem, priced, memories, uniform_counts(problem, priced, 1.0)
                    )
            if isinstance(found, Schedule):
                break
            margins[found.stage] += found.missing
        return found

    def _price(self, candidate: Candidate) -> Priced:
        key = replace(candidate, shape=_FRUGAL)
        if key not in self._priced:
            work = replace(self._work, s_per_pair=candidate.attention * self._work.s_per_pair)
            works = work.whole(self._problem.lengths)
            target, longest = float(works.sum()) / candidate.count, float(works.max())
            if longest > target:
                target = longest / max(1, round(longest / target))
            # Where tokens are what counts, none may have more.
            max_tokens = (
                self._max_tokens
                if candidate.attention
                else min(self._max_tokens, math.ceil(work.reach(0, target)))
            )
            ramp = _GRADES[candidate.grading](self._problem.pipeline.num_stages)
            chunks = cut_chunks(
                self._problem, work, target, max_tokens, even=candidate.even, ramp=ramp
            )
            self._priced[key] = price(self._problem, chunks)
        return self._priced[key]

    def _clip(self, count: float) -> float:
        return min(max(count, 1.0), self._most)
