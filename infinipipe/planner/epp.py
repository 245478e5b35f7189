"""The policy `epp`: search over chunks and orders for the best simulated makespan."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from infinipipe.planner.checkpointing import Shortage
from infinipipe.planner.chunking import cut_chunks
from infinipipe.planner.leads import Shape, memory_leads
from infinipipe.planner.problem import Problem, average_work
from infinipipe.planner.schedule import Priced, Schedule, fit_schedule, is_better, order_memories, price
from infinipipe.planner.sizes import chunk_overhead_s, most_chunk_tokens

_MOST_CHUNKS = 800
_STEPS = (1.5, 1.2)
"""Factors by which the search for the number of chunks climbs, coarse before fine."""
_SHAPES = (Shape(1.5, 1), Shape(1.0, 1), Shape(2.0, 1), Shape(2.0, 2))
_FRUGAL = Shape(0.0, 1_000_000)
"""One chain at a time: the least that can be in flight."""


@dataclass(frozen=True)
class Candidate:
    """One way to plan a step."""

    count: float
    """Parts into which the whole work is cut."""
    even: bool
    num_graded: int
    shape: Shape


def plan_epp(problem: Problem) -> Schedule | Shortage:
    """Return the best schedule found for a replica's sequences."""
    search = Search(problem)
    start = Candidate(search.guess_count(), False, problem.pipeline.num_stages - 1, _SHAPES[0])
    first = search.find_feasible(start)
    if isinstance(search.best, Schedule):
        search.climb(first)
        search.vary()
    return search.best


class Search:
    """The best schedule so far, and how to find a better one."""

    def __init__(self, problem: Problem) -> None:
        self.best: Schedule | Shortage = Shortage(0, math.inf)
        self._best_candidate: Candidate | None = None
        self._problem = problem
        pipeline = problem.pipeline
        self._work = average_work(pipeline.profile, pipeline.num_stages)
        works = self._work.whole(problem.lengths)
        self._total, self._longest = float(works.sum()), float(works.max())
        self._most = float(min(int(problem.lengths.sum()), _MOST_CHUNKS))
        self._max_tokens = most_chunk_tokens(pipeline)
        self._priced: dict[tuple[float, bool, int], Priced] = {}
        self._makespans: dict[Candidate, float] = {}

    def guess_count(self) -> float:
        """Return where filling and draining costs as much as the overhead of chunks."""
        pipeline = self._problem.pipeline
        overhead = chunk_overhead_s(pipeline)
        return self._clip(math.sqrt((pipeline.num_stages - 1) * self._total / (2 * overhead)))

    def find_feasible(self, start: Candidate) -> Candidate:
        """Return a first candidate that fits, if any: with more chunks, or fewer, or the least in flight.

        Both can help: large chunks need much for a moment, but a sequence that is not split needs no slot.
        """
        for shape in (start.shape, _FRUGAL):
            for count in self._counts_around(start.count):
                candidate = replace(start, count=count, shape=shape)
                if math.isfinite(self.makespan(candidate)):
                    return candidate
        return start

    def _counts_around(self, start: float) -> list[float]:
        doublings = range(1 + math.ceil(math.log2(self._most)))
        counts = [self._clip(start * 2.0**sign) for power in doublings for sign in (power, -power)]
        return list(dict.fromkeys(counts))

    def climb(self, candidate: Candidate) -> None:
        """Follow the number of chunks to a local optimum."""
        for step in _STEPS:
            for factor in (step, 1 / step):
                while True:
                    following = replace(candidate, count=self._clip(candidate.count * factor))
                    if self.makespan(following) >= self.makespan(candidate):
                        break
                    candidate = following

    def vary(self) -> None:
        """Try other orders and other cuts around the best."""
        assert self._best_candidate is not None
        self._try_all(replace(self._best_candidate, shape=shape) for shape in _SHAPES[1:])
        self._try_all([replace(self._best_candidate, even=True), replace(self._best_candidate, num_graded=0)])

    def makespan(self, candidate: Candidate) -> float:
        """Evaluate a candidate, once."""
        if candidate not in self._makespans:
            self._makespans[candidate] = self._evaluate(candidate)
        return self._makespans[candidate]

    def _try_all(self, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            self.makespan(candidate)

    def _evaluate(self, candidate: Candidate) -> float:
        problem, priced = self._problem, self._price(candidate)
        # No order can beat the heaviest stage's work.
        least = float(priced.work_s.max())
        if isinstance(self.best, Schedule) and least >= self.best.makespan_s:
            return least
        leads = memory_leads(problem.pipeline, priced, candidate.shape)
        found = fit_schedule(problem, priced, order_memories(problem, priced, leads))
        if is_better(found, self.best):
            self.best, self._best_candidate = found, candidate
        return found.makespan_s if isinstance(found, Schedule) else math.inf

    def _price(self, candidate: Candidate) -> Priced:
        key = (candidate.count, candidate.even, candidate.num_graded)
        if key not in self._priced:
            target = self._total / candidate.count
            if self._longest > target:
                target = self._longest / max(1, round(self._longest / target))
            chunks = cut_chunks(
                self._problem,
                self._work,
                target,
                self._max_tokens,
                even=candidate.even,
                num_graded=candidate.num_graded,
            )
            self._priced[key] = price(self._problem, chunks)
        return self._priced[key]

    def _clip(self, count: float) -> float:
        return min(max(count, 1.0), self._most)
