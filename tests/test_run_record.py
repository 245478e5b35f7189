"""What a run leaves: its metrics, and which plan and profile it followed."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from infinipipe.errors import InputError
from infinipipe.profiles.analytic import analytic_profile
from infinipipe.run_record import RECORD, RunRecord, read_run, record_run
from tests.plans import make_header
from tests.runs import write_run


def test_a_run_of_one_step_is_compared_by_it(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", [(2.2, 2.0)]))
    assert run.time_ratio == pytest.approx(1.1)


def test_a_record_says_what_was_followed(tmp_path: Path) -> None:
    header = make_header()
    profile = msgspec.msgpack.encode(analytic_profile(header.model, "a800-80g"))
    record_run(tmp_path, msgspec.structs.replace(header, profile=msgspec.Raw(profile)), "ab")
    record = msgspec.json.decode((tmp_path / RECORD).read_bytes(), type=RunRecord)
    assert (record.plan_sha256, record.profile_sha256) == ("ab", header.profile_sha256)
    assert (record.model, record.analytic_device) == (header.model.name, "a800-80g")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("plan.json", None, "no complete run: .*plan.json: No such file"),
        ("metrics.jsonl", None, "no complete run: .*metrics.jsonl: No such file"),
        ("plan.json", "{}", "no run of this infinipipe"),
        ("metrics.jsonl", '{"step": 0', "no run of this infinipipe"),
        ("metrics.jsonl", "", "no steps"),
    ],
)
def test_what_is_no_run_is_refused(
    tmp_path: Path, name: str, content: str | None, words: str
) -> None:
    folder = write_run(tmp_path / "run")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(InputError, match=words):
        read_run(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"seconds": 0.0},
        {"predicted_seconds": -1.0},
        {"peak_bytes": [0, 1]},
        {"peak_bytes": [1]},
        {"seconds": None},
    ],
)
def test_damaged_metrics_are_one_clear_error(tmp_path: Path, changes: dict[str, object]) -> None:
    folder = write_run(tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | changes)
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(InputError, match=r"no run of this infinipipe|different numbers of stages"):
        read_run(folder)
