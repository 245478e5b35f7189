"""`inspect` and `verify`: JSON, tables, files, and plans that are no plans."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from tests.command_line import Call, assert_refused, write_dataset


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("inspect nowhere.msgpack", ["nowhere.msgpack", "infinipipe compile"]),
        ("inspect dataset.jsonl", ["dataset.jsonl", "not a plan"]),
        ("inspect cut.msgpack", ["cut.msgpack", "damaged"]),
        ("inspect plan.msgpack --trace nowhere/o.json", ["nowhere/o.json", "another file"]),
        ("inspect plan.msgpack --step 3", ["no step 3", "--step"]),
        ("inspect plan.msgpack --html o.html --step 3", ["no step 3", "--step"]),
        (
            "inspect plan.msgpack --csv o.csv --replica 1",
            ["no replica 1", "choose 0 to 0 with --replica"],
        ),
        ("inspect plan.msgpack --csv plan.msgpack", ["overwrite an input", "--csv"]),
        ("inspect plan.msgpack --html ./plan.msgpack", ["overwrite an input", "--html"]),
        ("inspect plan.msgpack --trace .", ["directory", "--trace"]),
        ("verify cut.msgpack", ["cut.msgpack", "damaged"]),
        ("verify plan.msgpack --data other.jsonl", ["other.jsonl", "not the dataset", "--data"]),
        ("verify plan.msgpack --data nowhere.jsonl", ["nowhere.jsonl", "--data"]),
    ],
)
def test_plans_are_refused(
    folder: Path, call: Call, plan: Path, arguments: str, words: list[str]
) -> None:
    (folder / "cut.msgpack").write_bytes(plan.read_bytes()[:-9])
    write_dataset(folder / "other.jsonl", {"text": "another"})
    assert_refused(call, folder, arguments, *words)


def test_inspect_prints_json(call: Call, plan: Path) -> None:
    code, out, err = call("inspect", plan)
    document = json.loads(out)
    assert (code, err, document["header"]["num_steps"], len(document["steps"])) == (0, "", 3, 3)
    code, out, _ = call("inspect", plan, "--step", 2)
    assert (code, json.loads(out)["index"]) == (0, 2)
    code, out, _ = call("inspect", plan, "--all")
    header, *steps = map(json.loads, out.splitlines())
    assert (code, header["num_steps"], [s["index"] for s in steps]) == (0, 3, [0, 1, 2])
    code, out, _ = call("inspect", plan, "--schema")
    assert "$defs" in json.loads(out)


def test_inspect_shows_and_writes_views(folder: Path, call: Call, plan: Path) -> None:
    assert "3 steps" in call("inspect", plan, "--table")[1]
    assert "step 1, replica 0" in call("inspect", plan, "--table", "--step", 1)[1]
    code, out, _ = call(
        "inspect", plan, "--html", "o.html", "--trace", "o.json", "--csv", "o.csv", "--step", 1
    )
    assert (code, out) == (0, "")
    assert json.loads((folder / "o.json").read_text())["traceEvents"]
    rows = (folder / "o.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["0F0", "1F0"]
    page = (folder / "o.html").read_text()
    assert "<html" in page[:200]
    assert '"steps":[{"index":1,' in page
    assert '{"index":0,' not in page
    assert call("inspect", plan, "--html", "all.html")[0] == 0
    assert all(f'{{"index":{k},"makespan"' in (folder / "all.html").read_text() for k in range(3))
    assert not list(folder.glob("*.tmp"))


def test_a_failed_view_keeps_the_file_that_was_there(
    folder: Path, call: Call, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "o.csv").write_text("mine")

    def full(path: Path, *_: object, **__: object) -> None:
        with path.open("w") as file:
            file.write("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    code, _, err = call("inspect", plan, "--csv", "o.csv")
    assert (code, err) == (
        1,
        "error: o.csv: No space left on device; choose another file with --csv\n",
    )
    assert (folder / "o.csv").read_text() == "mine"
    assert not list(folder.glob("*.tmp"))


def test_verify_says_what_it_checked(call: Call, plan: Path) -> None:
    code, out, err = call("verify", plan, "--data", "dataset.jsonl")
    assert (code, err) == (0, f"{plan}: the plan is valid\n")
    assert "checked: 3 steps, 12 sequences, " in out
    assert "which are those of dataset.jsonl" in out
