"""What tests of the command line share: datasets, a call in this process, and what a refusal is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

TEXT = "def f(x):\n    return x + 1\n"
LENGTHS = (20, 900, 31, 45, 60, 2500, 18, 75, 400, 33, 90, 12)

Call = Callable[..., tuple[int, str, str]]
"""Runs a command in this process; returns its exit code, stdout and stderr."""


def write_dataset(path: Path, *lines: object) -> Path:
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return path


def write_texts(path: Path) -> Path:
    """Write a dataset of texts of `LENGTHS`."""
    texts = [(TEXT * (length // len(TEXT) + 1))[:length] for length in LENGTHS]
    return write_dataset(path, *({"text": text} for text in texts))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def assert_refused(call: Call, folder: Path, arguments: str, *words: str) -> None:
    """Check for exit code 1, one line on stderr with all words in it, and no change of any file."""
    before = snapshot(folder)
    code, out, err = call(*arguments.split())
    assert code == 1, err
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err
    assert snapshot(folder) == before
