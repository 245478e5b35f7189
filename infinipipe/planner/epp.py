"""The policy `epp`: search over the size of chunks and the order, and keep the best simulated makespan."""

from __future__ import annotations

import math
from collections.abc import Iterable

from infinipipe.planner.checkpointing import Shortage
from infinipipe.planner.chunking import Chunks, cut_chunks
from infinipipe.planner.order import Window, stage_leads
from infinipipe.planner.problem import Problem, average_work
from infinipipe.planner.schedule import Priced, Schedule, fit_schedule, order_memories, price

# Chunks per step that are tried first, by this factor; then around the best by its roots.
_COARSE = 1.6
_FINE = (1.26, 0.8, 1.12, 0.9)
_MOST_CHUNKS = 600


def plan_epp(problem: Problem) -> Schedule | Shortage:
    """Return the best schedule found for a replica's sequences."""
    search = Search(problem)
    search.try_counts(_coarse_counts(problem))
    if isinstance(search.best, Schedule):
        around = search.best_count
        search.try_counts(around * factor for factor in _FINE)
    else:
        search.try_frugal()
    return search.best


class Search:
    """The best schedule so far, and how to try for a better one."""

    def __init__(self, problem: Problem) -> None:
        self.best: Schedule | Shortage = Shortage(0, math.inf)
        self.best_count = 0.0
        self._problem = problem
        pipeline = problem.pipeline
        self._work = average_work(pipeline.profile, pipeline.num_stages)
        works = self._work.whole(problem.lengths)
        self._total, self._longest = float(works.sum()), float(works.max())
        self._max_tokens = most_chunk_tokens(problem)
        self._seen: set[Chunks] = set()

    def try_counts(self, counts: Iterable[float]) -> None:
        """Try chunks of so many equal parts of the whole work."""
        for count in counts:
            for even in (False, True):
                chunks = self._cut(count, even=even)
                if chunks in self._seen:
                    continue
                self._seen.add(chunks)
                self._try(count, price(self._problem, chunks), ("adaptive", "uniform"))

    def try_frugal(self) -> None:
        """Try orders that keep ever less in flight, until one fits or none can."""
        count = 1.0
        while isinstance(self.best, Shortage) and count <= min(int(self._problem.lengths.sum()), 16 * _MOST_CHUNKS):
            priced = price(self._problem, self._cut(count, even=True))
            self._try(count, priced, ("serial", "adaptive"), depth=0)
            count *= 2

    def _cut(self, count: float, *, even: bool) -> Chunks:
        target = self._total / count
        if self._longest > target:
            target = self._longest / max(1, round(self._longest / target))
        return cut_chunks(self._problem, self._work, target, self._max_tokens, even=even)

    def _try(self, count: float, priced: Priced, windows: Iterable[Window], depth: int | None = None) -> None:
        num_stages = self._problem.pipeline.num_stages
        # No order can beat the heaviest stage's work.
        if isinstance(self.best, Schedule) and float(priced.work_s.max()) >= self.best.makespan_s:
            return
        for window in windows:
            leads = stage_leads(priced.chunks, num_stages, window, num_stages if depth is None else depth)
            found = fit_schedule(self._problem, priced, order_memories(self._problem, priced, leads))
            if _better(found, self.best):
                self.best, self.best_count = found, count


def _better(found: Schedule | Shortage, best: Schedule | Shortage) -> bool:
    match found, best:
        case Schedule(), Schedule():
            return found.makespan_s < best.makespan_s
        case Shortage(), Shortage():
            return found.bytes_needed < best.bytes_needed
        case _:
            return isinstance(found, Schedule)


def _coarse_counts(problem: Problem) -> list[float]:
    """Return how many chunks to try, from one up, as long as a chunk has a token."""
    most = min(int(problem.lengths.sum()), _MOST_CHUNKS)
    steps = range(1 + math.ceil(math.log(most, _COARSE)))
    return [min(_COARSE**step, float(most)) for step in steps]


def most_chunk_tokens(problem: Problem) -> int:
    """Return how many tokens a chunk can have: its activations must be indexable with 32 bits."""
    model = problem.pipeline.profile.model
    return int((2**31 - 1) // max(model.hidden_size, model.num_heads * model.head_dim, 1))
