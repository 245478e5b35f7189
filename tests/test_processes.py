"""A process that hangs ends with its test, and so do the processes that it started."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import processes
from tests.processes import children, run_python, start_python, wait_until

HANGING = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(3600)"]
subprocess.Popen(sleep, start_new_session=True)
print("started", file=sys.stderr, flush=True)
time.sleep(3600)
"""


def test_a_process_that_hangs_is_killed_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    with start_python("-c", HANGING) as process:
        (child,) = wait_until(lambda: children(process.pid), "it starts a child")
        monkeypatch.setattr(processes, "HARD_LIMIT_S", 0.1)
        with pytest.raises(AssertionError, match=r"timed out after 0.1 seconds; its stderr"):
            processes.finish(process)
    monkeypatch.undo()
    assert process.returncode == -9
    wait_until(lambda: not is_running(child), "the child is gone")


def test_a_test_that_fails_leaves_no_process() -> None:
    family: list[int] = []

    def fail() -> None:
        with start_python("-c", HANGING) as process:
            (child,) = wait_until(lambda: children(process.pid), "it starts a child")
            family.extend([process.pid, child])
            raise ValueError("a test fails")

    with pytest.raises(ValueError, match="a test fails"):
        fail()
    for pid in family:
        wait_until(lambda pid=pid: not is_running(pid), "it is gone")


def is_running(pid: int) -> bool:
    """Return whether a process is there and no zombie, which only its parent can bury."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_the_limit_ends_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "HARD_LIMIT_S", 0)
    with pytest.raises(AssertionError, match="waited 0 s in vain until it comes"):
        wait_until(lambda: None, "it comes")


def test_a_process_that_ends_is_told() -> None:
    done = run_python(
        "-c", "import os; print(os.environ['WORD']); exit(3)", environment={"WORD": "x"}
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "x\n", "")


def test_the_limit_is_below_that_of_pytest(pytestconfig: pytest.Config) -> None:
    """Or pytest would end the whole run before the test could say what hangs."""
    assert float(pytestconfig.getini("faulthandler_timeout")) > processes.HARD_LIMIT_S
