"""The policy `epp`: search over chunks and orders for the best simulated makespan."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from infinipipe.planner.checkpointing import Shortage
from infinipipe.planner.chunking import cut_chunks
from infinipipe.planner.leads import Shape, memory_leads
from infinipipe.planner.problem import Problem, average_work
from infinipipe.planner.schedule import Priced, Schedule, fit_schedule, is_better, order_memories, price
from infinipipe.planner.sizes import chunk_overhead_s, most_chunk_tokens

_MOST_CHUNKS = 800
_COARSE, _FINE = 1.5, 1.2
"""Factors by which the search for the number of chunks climbs."""
_SHAPES = (Shape(2.0, 2), Shape(2.0, 1), Shape(1.5, 1), Shape(1.0, 1))
_FRUGAL = Shape(0.0, 1_000_000)
"""One chain at a time: the least that can be in flight."""
_VARIATIONS: tuple[dict[str, Any], ...] = (
    *({"shape": shape} for shape in _SHAPES),
    {"even": True},
    {"attention": 1.0},
    {"attention": 0.0},
    {"num_graded": 0},
)
_FEW_SEQUENCES = 24
_FEW_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
_EFFORT = 50_000
"""Chunks times stages that are simulated at most, give or take a climb: less than a second."""


@dataclass(frozen=True)
class Candidate:
    """One way to plan a step."""

    count: float
    """Parts into which the whole work is cut."""
    attention: float
    """How much of the attention's time counts when chunks are cut: all for equal work, none for equal tokens."""
    even: bool
    num_graded: int
    shape: Shape


def plan_epp(problem: Problem) -> Schedule | Shortage:
    """Return the best schedule found for a replica's sequences."""
    search = Search(problem)
    start = Candidate(search.guess_count(), 0.5, False, problem.pipeline.num_stages - 1, _SHAPES[0])
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


class Search:
    """The best schedule so far, and how to find a better one."""

    def __init__(self, problem: Problem) -> None:
        self.best: Schedule | Shortage = Shortage(0, math.inf)
        self._best_candidate: Candidate | None = None
        self._problem = problem
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
        """Look for a candidate that fits: with more chunks, or fewer, or the least in flight.

        Both can help: large chunks need much for a moment, but a sequence that is not split needs no slot.
        """
        for shape in (start.shape, _FRUGAL):
            for count in self._counts_around(start.count):
                candidate = replace(start, count=count, shape=shape)
                if math.isfinite(self.makespan(candidate)):
                    return

    def _counts_around(self, start: float) -> list[float]:
        doublings = range(1 + math.ceil(math.log2(self._most)))
        counts = [self._clip(start * 2.0**sign) for power in doublings for sign in (power, -power)]
        return list(dict.fromkeys(counts))

    def enumerate(self, start: Candidate) -> None:
        """Try many numbers of chunks: with few sequences there is no slope to climb."""
        for count in _FEW_COUNTS:
            for attention in (0.0, 0.5, 1.0):
                self.makespan(replace(start, count=self._clip(count), attention=attention, num_graded=0))

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
        # Without neighbours to keep busy, what is in flight only costs memory.
        frugal: list[dict[str, Any]] = [{"shape": _FRUGAL}] if self._problem.pipeline.num_stages == 1 else []
        for changes in [*frugal, *_VARIATIONS]:
            if self._best_candidate is not None and self._effort < _EFFORT:
                self.makespan(replace(self._best_candidate, **changes))
        return self._best_candidate != before

    def makespan(self, candidate: Candidate) -> float:
        """Evaluate a candidate, once."""
        if candidate not in self._makespans:
            self._makespans[candidate] = self._evaluate(candidate)
        return self._makespans[candidate]

    def _evaluate(self, candidate: Candidate) -> float:
        problem, priced = self._problem, self._price(candidate)
        # No order can beat the heaviest stage's work.
        least = float(priced.work_s.max())
        if isinstance(self.best, Schedule) and least >= self.best.makespan_s:
            return least
        self._effort += len(priced.chunks.chunks) * problem.pipeline.num_stages
        leads = memory_leads(problem.pipeline, priced, candidate.shape)
        found = fit_schedule(problem, priced, order_memories(problem, priced, leads))
        if is_better(found, self.best):
            self.best, self._best_candidate = found, candidate
        return found.makespan_s if isinstance(found, Schedule) else math.inf

    def _price(self, candidate: Candidate) -> Priced:
        key = replace(candidate, shape=_FRUGAL)
        if key not in self._priced:
            work = replace(self._work, s_per_pair=candidate.attention * self._work.s_per_pair)
            works = work.whole(self._problem.lengths)
            target, longest = float(works.sum()) / candidate.count, float(works.max())
            if longest > target:
                target = longest / max(1, round(longest / target))
            chunks = cut_chunks(
                self._problem, work, target, self._max_tokens, even=candidate.even, num_graded=candidate.num_graded
            )
            self._priced[key] = price(self._problem, chunks)
        return self._priced[key]

    def _clip(self, count: float) -> float:
        return min(max(count, 1.0), self._most)
