"""Runs a pure function over many tasks in worker processes, results in the tasks' order."""

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
"""Tasks given out per worker before their results are taken, so that none waits and memory stays bounded."""


def ordered_map(
    function: Callable[[Task], Result], tasks: Iterable[Task], num_workers: int
) -> Iterator[Result]:
    """Yield `function(task)` for every task in order, whatever the number of workers.

    Raises:
        RunError: a worker died. What the function raises comes through as it is.
    """
    if num_workers == 1:
        yield from map(function, tasks)
        return
    waiting: deque[Future[Result]] = deque()
    source = iter(tasks)
    pool = ProcessPoolExecutor(
        num_workers, multiprocessing.get_context("spawn"), initializer=_leave_interrupts
    )
    try:
        waiting.extend(pool.submit(function, task) for task in islice(source, _AHEAD * num_workers))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(pool.submit(function, task) for task in islice(source, 1))
    except BrokenProcessPool:
        raise RunError(
            "a planning process died; if memory ran out, compile again with fewer --workers"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _leave_interrupts() -> None:
    """Let only the process that the user sees answer Ctrl-C; it ends the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
