"""Processes that tests start: all with one generous limit, and none outlives the test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch.multiprocessing import ProcessContext

Found = TypeVar("Found")

HARD_LIMIT_S = 600
"""After which what a test waits for is taken to hang.

How long something takes says more about the machine and its other work than about the code, so
this is many times what anything here takes. Below pytest's `faulthandler_timeout`, so that the
test that waits says what hangs, and ends it.
"""
_POLL_S = 0.02
"""Between two looks at what a test waits for."""


def run_infinipipe(
    *arguments: object, cwd: Path | None = None, stdout: int | IO[str] = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own to its end."""
    return run_python("-m", "infinipipe", *arguments, cwd=cwd, stdout=stdout)


def run_python(
    *arguments: object,
    cwd: Path | None = None,
    environment: dict[str, str] | None = None,
    stdout: int | IO[str] = subprocess.PIPE,
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments to its end; `environment` adds to this process's own."""
    with start_python(*arguments, cwd=cwd, environment=environment, stdout=stdout) as process:
        out, errors = finish(process)
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


@contextlib.contextmanager
def start_python(
    *arguments: object,
    cwd: Path | None = None,
    environment: dict[str, str] | None = None,
    stdout: int | IO[str] = subprocess.PIPE,
) -> Iterator[subprocess.Popen[str]]:
    """Start Python in a session of its own, so that a signal to its group reaches no other.

    If it still runs at the block's end, it is killed with all its children.
    """
    command = [sys.executable, *map(str, arguments)]
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=os.environ | (environment or {}),
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                kill_family(process.pid)


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Wait for a process's end; return what it wrote to stdout and stderr.

    Raises:
        AssertionError: it hangs.
    """
    try:
        return process.communicate(timeout=HARD_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        kill_family(process.pid)
        _, errors = process.communicate()
        raise AssertionError(f"{error}; its stderr ends with {errors[-2000:]!r}") from None


def finish_all(context: ProcessContext) -> None:
    """Wait for the end of processes that torch started, and raise what one of them raised.

    Raises:
        AssertionError: one hangs.
    """
    try:
        wait_until(lambda: context.join(timeout=_POLL_S), "all processes have ended")
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def wait_until(look: Callable[[], Found | None], what: str) -> Found:
    """Look again and again until something is there, and return it.

    Raises:
        AssertionError: it did not come; says `what` was waited for.
    """
    deadline = time.monotonic() + HARD_LIMIT_S
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(_POLL_S)
    raise AssertionError(f"waited {HARD_LIMIT_S} s in vain until {what}")


def kill_family(parent: int) -> None:
    """Kill a process and all its descendants, whatever groups and sessions these have made."""
    family = [parent]
    for pid in family:
        # Stopped, it starts no more children while they are looked for.
        _send(pid, signal.SIGSTOP)
        family += children(pid)
    for pid in family:
        _send(pid, signal.SIGKILL)


def children(parent: int) -> list[int]:
    """Return the process ids of a process's children, the oldest first."""
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    own = [pid for pid in pids if _parent_of(pid) == parent]
    return sorted(own)


def _parent_of(pid: int) -> int | None:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name before, in parentheses, may hold anything.
    _, _, fields = status.rpartition(")")
    _state, parent, *_ = fields.split()
    return int(parent)


def _send(pid: int, how: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, how)
