"""What a profile learns from a run of it."""

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
from infinipipe.profiles import read_profile, write_profile
from infinipipe.run_record import Run, read_run
from tests.command_line import Call
from tests.plans import make_header, write_plan
from tests.runs import PROFILE, write_run


def test_refine_scales_all_times_by_one_number(tmp_path: Path) -> None:
    """Seconds of any chunk on any stage, of transfers and of the optimizer grow alike."""
    folder = write_run(tmp_path / "run")
    refined = refine_profile(PROFILE, read_run(folder), folder)
    (refinement,) = refined.refinements
    assert refinement.scale == pytest.approx(1.1)
    assert (refinement.num_steps, refinement.error_before) == (3, pytest.approx(1 / 11))
    assert refinement.error_after == pytest.approx(0.0, abs=1e-9)
    assert refinement.run_sha256 == read_run(folder).sha256
    step, header = write_plan(tmp_path / "hand.msgpack")[0], make_header()
    costs_before, costs_after = (
        CostModel(profile, header.layout, header.stages, 64) for profile in (PROFILE, refined)
    )
    chunks = step.replicas[0].chunks
    before = costs_before.price(chunks, step.sequences)
    after = costs_after.price(chunks, step.sequences)
    for name in ("forward_s", "backward_s", "recompute_s", "transfer_s"):
        assert getattr(after, name) == pytest.approx(1.1 * getattr(before, name), rel=1e-9)
    assert np.array_equal(after.activation_bytes, before.activation_bytes)
    assert costs_after.optimizer_s(0) == pytest.approx(1.1 * costs_before.optimizer_s(0))
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
        elif name in ("tokens", "num_ranks"):
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


def test_refined_once_a_run_is_spent(tmp_path: Path) -> None:
    """The run was not of the refined profile, so it cannot be counted twice."""
    folder = write_run(tmp_path / "run")
    run: Run = read_run(folder)
    with pytest.raises(InputError, match="another profile"):
        refine_profile(refine_profile(PROFILE, run, folder), run, folder)


@pytest.mark.slow
def test_a_run_refines_its_profile_and_the_next_plan_predicts_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    """The profile is of a GPU and the run on a CPU, so at first predictions are off by far."""
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
    scale = run_scale(tmp_path)
    before = [step.predicted_seconds for step in run.settled]
    assert predicted[1:] == pytest.approx([scale * seconds for seconds in before], rel=1e-6)
    # However uneven the steps were on a busy machine.
    slower = [step.seconds / step.predicted_seconds for step in run.settled]
    assert min(slower) <= scale <= max(slower)


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
