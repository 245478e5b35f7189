"""The planner's side of the product starts without torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plans import write_plan
from tests.processes import run_python

PROBE = """
import sys
{code}
heavy = {{"torch", "transformers"}} & set(sys.modules)
assert not heavy, heavy
"""


def run_without_torch(code: str, cwd: Path) -> None:
    done = run_python("-W", "error", "-c", PROBE.format(code=code), cwd=cwd)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "module",
    [
        "infinipipe",
        "infinipipe.cli",
        "infinipipe.dataset",
        "infinipipe.ir",
        "infinipipe.planner.compile",
        "infinipipe.costs.predict",
        "infinipipe.profiles",
        "infinipipe.run_record",
        "infinipipe.profiles.analytic",
        "infinipipe.reports.profile_page",
        "infinipipe.measure.refine",
        "infinipipe.reports.profile_table",
        "infinipipe.reports.verification",
        "infinipipe.reports.compiled",
    ],
)
def test_module_imports_no_torch(module: str, tmp_path: Path) -> None:
    run_without_torch(f"import {module}", tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "run --help",
        "profile --analytic a100-80g",
        "inspect hand.msgpack",
        "inspect hand.msgpack --step 0",
        "inspect hand.msgpack --table",
        "verify hand.msgpack",
    ],
)
def test_command_starts_no_torch(command: str, tmp_path: Path) -> None:
    write_plan(tmp_path / "hand.msgpack", split=True)
    run_without_torch(
        f"from infinipipe.cli import run_command\nassert run_command({command.split()!r}) == 0",
        tmp_path,
    )


def test_compile_starts_no_torch(tmp_path: Path) -> None:
    (tmp_path / "dataset.jsonl").write_text('{"text": "some words"}\n{"text": "more"}\n')
    code = """
from infinipipe.cli import run_command
assert run_command(["profile", "--analytic", "a100-80g"]) == 0
assert run_command(["compile", "dataset.jsonl"]) == 0
"""
    run_without_torch(code, tmp_path)
