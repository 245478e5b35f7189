"""`profile`: four ways to one, and what each takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from infinipipe.cli import run_command
from tests.command_line import Call, assert_refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("profile nomodel -o .", [".", "directory", "--output"]),
        (
            "profile profile.json --analytic a100-80g -o profile.json",
            ["overwrite an input", "--output"],
        ),
        ("profile nomodel", ["nomodel", "tiny"]),
        ("profile --analytic abacus", ["abacus", "a800-80g"]),
        (
            "profile --analytic a100-80g -o nowhere/profile.json",
            ["nowhere/profile.json", "--output"],
        ),
    ],
)
def test_profile_refuses(folder: Path, call: Call, arguments: str, words: list[str]) -> None:
    assert_refused(call, folder, arguments, *words)


@pytest.mark.parametrize(
    "arguments",
    [
        "--html o.html",
        "-p p.json",
        "--show p.json --analytic a100-80g",
        "--show p.json --refine run",
        "--show p.json -o q.json",
        "llama-7b --show p.json",
        "--refine run --analytic x",
        "--refine run --device cpu",
        "--analytic a100-80g --quick",
        "--analytic a100-80g --html o.html",
    ],
)
def test_options_that_would_be_ignored_are_refused(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["profile", *arguments.split()]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r"Error: (choose one of .*|\S+ (goes with|is not used with) --.*)", message)
