"""The command line as a whole: exit codes, one line for what a user gets wrong, the docs' page."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType

import pytest

from tests.command_line import LENGTHS, Call, assert_refused, snapshot, write_texts
from tests.processes import run_infinipipe

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "compile",
        "compile dataset.jsonl --memory 80XB",
        "compile dataset.jsonl --memory 0",
        "compile dataset.jsonl --memory 80GiB,",
        "compile dataset.jsonl --batch-size 0",
        "compile dataset.jsonl --loss-norm mean",
        "inspect",
        "inspect plan.msgpack --step 0 --all",
        "inspect plan.msgpack --table --html o.html",
        "inspect plan.msgpack --trace o --html o",
        "inspect plan.msgpack --step -1",
        "run plan.msgpack --device tpu",
        "train",
    ],
)
def test_wrong_usage_exits_2(folder: Path, call: Call, arguments: str) -> None:
    before = snapshot(folder)
    code, out, err = call(*arguments.split())
    assert (code, out) == (2, "")
    assert "Usage: infinipipe" in err
    assert snapshot(folder) == before


def test_an_empty_name_is_no_output(folder: Path, call: Call, plan: Path) -> None:
    before = snapshot(folder)
    commands = (
        ["profile", "-o", ""],
        ["compile", "dataset.jsonl", "-o", ""],
        ["inspect", plan, "--csv", ""],
    )
    for command in commands:
        code, out, err = call(*command)
        assert (code, out) == (1, "")
        assert err.startswith("error: .: is a directory; choose another file with --")
    assert snapshot(folder) == before


def test_a_dataset_changed_after_compile_is_refused(folder: Path, call: Call, plan: Path) -> None:
    with (folder / "dataset.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    assert_refused(call, folder, "run plan.msgpack", "dataset.jsonl", "compile it again")
    assert_refused(
        call,
        folder,
        "verify plan.msgpack --data dataset.jsonl",
        "dataset.jsonl",
        "compile it again",
    )


def test_a_closed_pipe_is_no_traceback(plan: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    process = run_infinipipe("inspect", plan, "--all", stdout=write)
    os.close(write)
    assert (process.returncode, process.stderr) == (1, "")


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_the_docs_is_current() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    assert page == load_script(ROOT / "docs" / "make_cli.py").document(), "run `make docs`"


@pytest.mark.slow
def test_the_main_job_needs_no_option(tmp_path: Path) -> None:
    write_texts(tmp_path / "dataset.jsonl")
    for arguments in (["profile"], ["compile", "dataset.jsonl"], ["run", "plan.msgpack"]):
        process = run_infinipipe(*arguments, cwd=tmp_path)
        assert (process.returncode, process.stdout) == (0, ""), process.stderr
    (metrics,) = map(
        json.loads, (tmp_path / "infinipipe-run" / "metrics.jsonl").read_text().splitlines()
    )
    names = (
        "step loss grad_norm lr num_tokens num_targets seconds predicted_seconds tokens_per_second"
    )
    assert set(metrics) == {*names.split(), "peak_bytes", "predicted_peak_bytes"}
    assert metrics["num_tokens"] == sum(LENGTHS)
    assert metrics["num_targets"] == sum(LENGTHS) - len(LENGTHS)
    assert 5.4 < metrics["loss"] < 5.7  # random weights know nothing: ln 256 = 5.55
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "dataset.jsonl",
        "infinipipe-run",
        "plan.msgpack",
        "profile.json",
    ]
