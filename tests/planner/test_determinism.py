"""The plan's bytes depend on its inputs alone.

They do not on the folder, the hash seed, the workers or an interruption.
"""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from infinipipe.errors import RunError
from infinipipe.planner.workers import ordered_map
from infinipipe.profiles import read_model, write_profile
from infinipipe.profiles.analytic import analytic_profile
from tests.processes import finish, run_python, start_python, wait_until

pytestmark = pytest.mark.slow

OPTIONS = (
    "--devices",
    "4",
    "--stages",
    "4",
    "--memory",
    "80GiB",
    "--batch-size",
    "16",
    "--seed",
    "5",
)
COMPILE = ("compile", "dataset.jsonl", *OPTIONS)

# A compile that waits for a signal once three of its six steps are in the file.
INTERRUPTIBLE = """
import pathlib, signal
from infinipipe.cli import main
from infinipipe.ir import PlanWriter

append = PlanWriter.append

def append_and_wait(writer, step):
    append(writer, step)
    if step.index == 2:
        pathlib.Path("waiting").touch()
        signal.pause()

PlanWriter.append = append_and_wait
main()
"""


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    lengths = np.random.default_rng(3).pareto(1.1, 16 * 6) * 800 + 10
    folder = tmp_path / "inputs"
    folder.mkdir()
    (folder / "dataset.jsonl").write_text(
        "".join(f'{{"length": {min(int(n), 60000)}}}\n' for n in lengths)
    )
    write_profile(analytic_profile(read_model("llama-7b"), "a800-80g"), folder / "profile.json")
    return folder


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "plan.msgpack").read_bytes()).hexdigest()


def compile_in(folder: Path, inputs: Path, hash_seed: int, *more: object) -> str:
    folder.mkdir(exist_ok=True)
    for name in ("dataset.jsonl", "profile.json"):
        (folder / name).write_bytes((inputs / name).read_bytes())
    environment = {"PYTHONHASHSEED": str(hash_seed)}
    command = ("-m", "infinipipe", *COMPILE, *more)
    done = run_python(*command, cwd=folder, environment=environment)
    assert done.returncode == 0, done.stderr
    return digest(folder)


def test_folders_hash_seeds_and_workers_do_not_change_the_plan(
    tmp_path: Path, inputs: Path
) -> None:
    one = compile_in(tmp_path / "a", inputs, 1, "--workers", 1)
    two = compile_in(tmp_path / "b", inputs, 2, "--workers", 2)
    four = compile_in(tmp_path / "c", inputs, 3, "--workers", 4)
    assert one == two == four
    assert compile_in(tmp_path / "d", inputs, 1, "--seed", 6) != one


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_compile_resumes_to_the_same_bytes(
    tmp_path: Path, inputs: Path, how: signal.Signals
) -> None:
    """CASES J4: nothing under the plan's name until it is complete."""
    whole = compile_in(tmp_path / "whole", inputs, 1)
    plan, partial = inputs / "plan.msgpack", inputs / "plan.msgpack.partial"
    command = ("-c", INTERRUPTIBLE, *COMPILE, "--workers", 1)
    with start_python(*command, cwd=inputs) as process:
        waiting = inputs / "waiting"
        wait_until(lambda: waiting.exists() or process.poll() is not None, "three steps are there")
        assert process.poll() is None, "the compile ended before it could be interrupted"
        process.send_signal(how)
        _, errors = finish(process)
    assert process.returncode == (130 if how == signal.SIGINT else -how)
    assert "Traceback" not in errors
    assert ("--resume goes on" in errors) == (how == signal.SIGINT)
    assert not plan.exists()
    assert partial.exists()
    assert compile_in(inputs, inputs, 2, "--resume") == whole
    assert not partial.exists()


def _cube(number: int) -> int:
    return number**3


def _die_at_seven(number: int) -> int:
    if number == 7:
        os._exit(1)
    return number


def test_ordered_map_keeps_the_order_and_names_a_dead_worker() -> None:
    assert list(ordered_map(_cube, range(30), 2)) == [n**3 for n in range(30)]
    with pytest.raises(RunError, match="planning process died"):
        list(ordered_map(_die_at_seven, range(30), 2))
