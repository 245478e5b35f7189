"""Worker processes: they run a pure function over many tasks, results in the tasks' order."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import TypeVar

from infinipipe.errors import RunError

Task = TypeVar("Task")
Result = TypeVar("Result")

_AHEAD = 4
"""Tasks per worker that are given out before the first result is taken.

Results are taken in order, so behind a slow task the other workers go on with what is given out.
More of it would keep them busy for longer, but every finished result waits in memory.
"""


class Workers:
    """Processes that run pure functions; use it in a `with` statement.

    Args:
        num_workers: with one, all runs in this process.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        if self._num_workers > 1:
            # Spawned, not forked: a fork copies locks that another thread holds, and nobody
            # unlocks them.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                self._num_workers, context, initializer=_ignore_interrupts
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def map(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Yield `function(task)` for every task in order, whatever the number of workers.

        Raises:
            RunError: a worker died. What the function raises comes through as it is.
        """
        pool = self._pool
        if pool is None:
            yield from map(function, tasks)
            return
        waiting: deque[Future[Result]] = deque()
        source = iter(tasks)
        try:
            for task in islice(source, _AHEAD * self._num_workers):
                waiting.append(pool.submit(function, task))
            while waiting:
                yield waiting.popleft().result()
                for task in islice(source, 1):
                    waiting.append(pool.submit(function, task))
        except BrokenProcessPool:
            raise RunError(
                "a planning process died; if memory ran out, compile again with fewer --workers"
            ) from None


def ordered_map(
    function: Callable[[Task], Result], tasks: Iterable[Task], num_workers: int
) -> Iterator[Result]:
    """Yield `function(task)` for every task in order, in processes for this call alone.

    Raises:
        RunError: as `Workers.map`.
    """
    with Workers(num_workers) as workers:
        yield from workers.map(function, tasks)


def _ignore_interrupts() -> None:
    """Let only the process that the user sees answer Ctrl-C; it ends the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
