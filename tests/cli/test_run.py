"""`run`: what it refuses before any process starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command_line import LENGTHS, Call, assert_refused, write_dataset


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("run nowhere.msgpack", ["nowhere.msgpack", "infinipipe compile"]),
        ("run cut.msgpack", ["cut.msgpack", "damaged"]),
        ("run plan.msgpack --data other.jsonl", ["other.jsonl", "not the dataset", "--data"]),
        ("run plan.msgpack --data nowhere.jsonl", ["nowhere.jsonl", "--data"]),
        ("run plan.msgpack --steps 4", ["3 steps", "--steps"]),
        ("run plan.msgpack --model other", ["other", "model"]),
        ("run plan.msgpack --output dataset.jsonl", ["dataset.jsonl", "--output"]),
    ],
)
def test_run_refuses(
    folder: Path, call: Call, plan: Path, arguments: str, words: list[str]
) -> None:
    (folder / "cut.msgpack").write_bytes(plan.read_bytes()[:-9])
    write_dataset(folder / "other.jsonl", {"text": "another"})
    (folder / "other").mkdir()
    config = json.loads(json.loads((folder / "profile.json").read_text())["model"]["config"])
    (folder / "other" / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    assert_refused(call, folder, arguments, *words)


def test_lengths_can_be_planned_but_not_run(folder: Path, call: Call) -> None:
    write_dataset(folder / "lengths.jsonl", *({"length": 40 * n} for n in LENGTHS))
    assert call("compile", "lengths.jsonl", "--stages", 4, "--devices", 4)[0] == 0
    assert_refused(call, folder, "run plan.msgpack", "plan.msgpack", "lengths")
