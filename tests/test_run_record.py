"""Predicted against measured at the end of a run, and what a profile learns from it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from infinipipe.costs import CostModel
from infinipipe.errors import InputError
from infinipipe.ir import open_plan
from infinipipe.measure.refine import refine_profile, scale_times
from infinipipe.profiles import Profile, profile_sha256, read_model, read_profile, write_profile
from infinipipe.profiles.analytic import analytic_profile
from infinipipe.run_record import RECORD, Run, RunRecord, compare_run, read_run, record_run
from tests.cli.test_cli import Call, call
from tests.plans import make_header, write_plan

__all__ = ["call"]

MIB = 2**20
STEPS = [(9.0, 2.0), (2.2, 2.0), (3.3, 3.0), (1.1, 1.0)]
"""Measured and predicted seconds; the first is slow because everything in it is new."""


def as_measured(profile: Profile) -> Profile:
    """Return it as it is when it was written and read."""
    data = msgspec.json.encode(msgspec.structs.replace(profile, source="measured"))
    return msgspec.json.decode(data, type=Profile)


PROFILE = as_measured(analytic_profile(read_model("tiny"), "a100-80g"))


def write_run(
    folder: Path, steps: list[tuple[float, float]] = STEPS, peak: float = 1.0, analytic: str = ""
) -> Path:
    folder.mkdir()
    lines = [
        {
            "step": index,
            "loss": 5.5,
            "grad_norm": 1.0,
            "lr": 3e-4,
            "num_tokens": 100,
            "num_targets": 99,
            "tokens_per_second": 100 / seconds,
            "seconds": seconds,
            "predicted_seconds": predicted,
            "peak_bytes": [int(10 * peak * MIB), (12 + index) * MIB],
            "predicted_peak_bytes": [10 * MIB, (12 + index) * MIB],
        }
        for index, (seconds, predicted) in enumerate(steps)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = RunRecord(
        plan_sha256="0" * 64,
        profile_sha256=profile_sha256(PROFILE),
        model="tiny",
        analytic_device=analytic,
    )
    (folder / RECORD).write_bytes(msgspec.json.encode(record))
    return folder


def test_the_comparison_leaves_out_the_first_step(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    run = read_run(folder)
    assert run.time_ratio == pytest.approx(1.1)
    assert compare_run(run, folder) == [
        f"{folder}: 4 steps, predicted -> measured",
        "  time        2 -> 2.2 s a step (9.1% under)",
        "  stage 0     peak 10.0 -> 10.0 MiB (0.0% under)",
        "  stage 1     peak 15.0 -> 15.0 MiB (0.0% under)",
    ]


def test_a_run_of_one_step_is_compared_by_it(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", [(2.2, 2.0)]))
    assert run.time_ratio == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("steps", "peak", "analytic", "warnings"),
    [
        ([(1.0, 1.0), (1.1, 1.0)], 1.0, "", []),
        ([(1.0, 1.0), (1.3, 1.0)], 1.0, "", ["--refine"]),
        ([(1.0, 1.0), (0.8, 1.0)], 1.0, "", ["--refine"]),
        ([(1.0, 1.0), (1.1, 1.0)], 1.3, "", ["peak of stage 0"]),
        ([(1.0, 1.0), (9.9, 1.0)], 1.3, "h100-80g", ["analytic, for h100-80g"]),
    ],
)
def test_warnings_beyond_15_percent(
    tmp_path: Path,
    steps: list[tuple[float, float]],
    peak: float,
    analytic: str,
    warnings: list[str],
) -> None:
    folder = write_run(tmp_path / "run", steps, peak, analytic)
    found = [line for line in compare_run(read_run(folder), folder) if line.startswith("warning: ")]
    assert len(found) == len(warnings)
    for line, word in zip(found, warnings, strict=True):
        assert word in line
        assert "infinipipe profile" in line


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


def test_refine_scales_all_times_by_one_number(tmp_path: Path) -> None:
    """Seconds of any chunk on any stage, of transfers and of the optimizer are then 1.1 times as long."""
    folder = write_run(tmp_path / "run")
    refined = refine_profile(PROFILE, read_run(folder), folder)
    (refinement,) = refined.refinements
    assert refinement.scale == pytest.approx(1.1)
    assert (refinement.num_steps, refinement.error_before) == (3, pytest.approx(1 / 11))
    assert refinement.error_after == pytest.approx(0.0, abs=1e-9)
    assert refinement.run_sha256 == read_run(folder).sha256
    step, header = write_plan(tmp_path / "hand.msgpack")[0], make_header()
    models = [CostModel(p, header.layout, header.stages, 64) for p in (PROFILE, refined)]
    before, after = (model.price(step.replicas[0].chunks, step.sequences) for model in models)
    for name in ("forward_s", "backward_s", "recompute_s", "transfer_s"):
        assert getattr(after, name) == pytest.approx(1.1 * getattr(before, name), rel=1e-9)
    assert np.array_equal(after.activation_bytes, before.activation_bytes)
    optimizer_s = [model.optimizer_s(0) for model in models]
    assert optimizer_s[1] == pytest.approx(1.1 * optimizer_s[0])
    assert refined.bytes == PROFILE.bytes


def test_scaling_leaves_no_time_out() -> None:
    """Every number in the times but sizes and the count of ranks."""
    before, after = (
        msgspec.to_builtins(t) for t in (PROFILE.times, scale_times(PROFILE.times, 2.0))
    )

    def check(a: object, b: object, name: str) -> None:
        if isinstance(a, dict) and isinstance(b, dict):
            for key in a:
                check(a[key], b[key], key)
        elif name in ("tokens", "all_to_all_ranks"):
            assert a == b
        else:
            assert np.array_equal(2 * np.array(a, dtype=float), np.array(b, dtype=float)), name

    check(before, after, "times")


def test_noisy_steps_give_the_least_squares(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [(1.0, 1.0), (1.0, 1.0), (2.0, 1.0)])
    refined = refine_profile(PROFILE, read_run(folder), folder)
    # minimises (x - 1)^2 + (x / 2 - 1)^2
    assert refined.refinements[0].scale == pytest.approx(1.2)


def test_a_run_of_another_profile_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    other = msgspec.structs.replace(PROFILE, created="2026-02-02T00:00:00Z")
    with pytest.raises(InputError, match=r"another profile than this one of tiny .* by --profile"):
        refine_profile(other, read_run(folder), folder)


def test_refining_writes_the_profile_that_it_refines(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_run(tmp_path / "run")
    write_profile(PROFILE, tmp_path / "other.json")
    (tmp_path / "profile.json").write_text("mine")
    assert call("profile", "--refine", folder, "-p", "other.json")[0] == 0
    assert (tmp_path / "profile.json").read_text() == "mine"
    assert len(read_profile(tmp_path / "other.json").refinements) == 1


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


def test_refined_once_a_run_is_spent(tmp_path: Path) -> None:
    """The run was not of the refined profile, so it cannot be counted twice."""
    folder = write_run(tmp_path / "run")
    run: Run = read_run(folder)
    with pytest.raises(InputError, match="another profile"):
        refine_profile(refine_profile(PROFILE, run, folder), run, folder)


def test_a_run_refines_its_profile_and_the_next_plan_predicts_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    """The profile is of a GPU and the run on a CPU, so without correction predictions are off by far."""
    monkeypatch.chdir(tmp_path)
    write_profile(msgspec.structs.replace(PROFILE, dtype="float32"), tmp_path / "profile.json")
    rows = [
        {"input_ids": [(7 * n + k) % 256 for k in range(n)]}
        for n in (600, 40, 300, 90, 700, 20, 550, 80, 200)
    ]
    (tmp_path / "dataset.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    compile_ = "compile", "dataset.jsonl", "--stages", "1", "--batch-size", "3", "--workers", "1"
    assert call(*compile_)[0] == 0
    code, out, err = call("run", "plan.msgpack", "--device", "cpu")
    assert (code, out) == (0, ""), err
    assert "infinipipe-run: 3 steps, predicted -> measured\n" in err
    assert "warning: the predicted time is off by more than 15%" in err
    assert "`infinipipe profile --refine infinipipe-run`" in err
    assert "the predicted peak" in err  # a GPU's bytes are other ones
    run = read_run(tmp_path / "infinipipe-run")
    assert run.time_ratio > 10
    assert call("profile", "--refine", "infinipipe-run")[0] == 0
    assert call(*compile_)[0] == 0
    with open_plan(tmp_path / "plan.msgpack") as plan:
        predicted = [step.step_s for step in plan]
    measured, before = (
        [getattr(s, name) for s in run.settled] for name in ("seconds", "predicted_seconds")
    )
    assert predicted[1:] == pytest.approx([run_scale(tmp_path) * s for s in before], rel=1e-6)
    assert 1 / 3 < sum(predicted[1:]) / sum(measured) < 3


def run_scale(folder: Path) -> float:
    (refinement,) = read_profile(folder / "profile.json").refinements
    return refinement.scale


def test_refine_by_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    write_profile(PROFILE, tmp_path / "profile.json")
    assert call("profile", "--refine", "run", "-o", "new.json")[0] == 0
    code, out, err = call("profile", "--show", "new.json")
    assert (code, err) == (0, "")
    assert "refined: times x 1.100 after 3 steps of a run, error 9.1% -> 0.0%" in out
    code, _, err = call("profile", "--refine", "nowhere")
    assert code == 1
    assert err.startswith("error: nowhere: no complete run")
    assert (tmp_path / "profile.json").read_bytes() != (tmp_path / "new.json").read_bytes()
