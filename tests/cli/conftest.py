"""Where commands run: a folder with a dataset, a profile and perhaps a plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinipipe.cli import run_command
from tests.command_line import Call, write_texts

TWO_STAGES = ("--stages", 2, "--devices", 2)
"""A layout of one pipeline, though the profile's machine has more devices."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working folder with a dataset and a profile."""
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "dataset.jsonl")
    assert run_command(["profile", "--analytic", "a100-80g"]) == 0
    return tmp_path


@pytest.fixture
def plan(folder: Path, call: Call) -> Path:
    """Return a plan of the folder's dataset."""
    code, out, _ = call("compile", "dataset.jsonl", *TWO_STAGES, "--batch-size", 4)
    assert (code, out) == (0, "")
    return folder / "plan.msgpack"
