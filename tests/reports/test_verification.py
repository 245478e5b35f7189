"""`verify` beyond the rules of the plan alone: the dataset's rows, and the predictions."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from infinipipe.cli import run_command
from infinipipe.dataset import open_dataset
from infinipipe.ir import Header, PlanWriter, StagePrediction, Step, open_plan
from infinipipe.ir.rules.slicing import check_coverage
from infinipipe.planner import CompileOptions, compile_plan
from infinipipe.profiles import read_model
from infinipipe.profiles.analytic import analytic_profile
from tests.plans import make_header, write_plan

LENGTHS = (900, 20, 31, 45, 2500, 60, 18, 75)

Verify = Callable[..., tuple[int, list[str], str]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled")
    (folder / "data.jsonl").write_text("".join(json.dumps({"length": n}) + "\n" for n in LENGTHS))
    profile = analytic_profile(read_model("tiny"), "a800-80g")
    dataset = open_dataset(folder / "data.jsonl", "bytes", 256)
    options = CompileOptions(
        num_devices=4,
        num_stages=2,
        num_replicas=2,
        batch_size=4,
        memory_limit_bytes=(2**30,),
    )
    compile_plan(dataset, profile, options, folder / "plan.msgpack")
    return folder


@pytest.fixture
def plan(compiled: Path, tmp_path: Path) -> Path:
    """Return a plan beside its dataset, to be spoilt."""
    shutil.copytree(compiled, tmp_path, dirs_exist_ok=True)
    return tmp_path / "plan.msgpack"


@pytest.fixture
def verify(capfd: pytest.CaptureFixture[str]) -> Verify:
    def run(plan: Path, *more: object) -> tuple[int, list[str], str]:
        code = run_command(["verify", str(plan), *map(str, more)])
        out, err = capfd.readouterr()
        return code, out.splitlines(), err

    return run


def rewrite(
    plan: Path, edit_header: Callable[[Header], Header], edit_step: Callable[[Step], Step]
) -> None:
    with open_plan(plan) as reader:
        header, steps = reader.header, list(reader)
    with PlanWriter(plan, edit_header(header)) as writer:
        for step in steps:
            writer.append(edit_step(step))


def same(whole: Any) -> Any:
    return whole


def test_the_report_says_what_was_checked_and_how_much(plan: Path, verify: Verify) -> None:
    code, lines, err = verify(plan, "--data", plan.with_name("data.jsonl"))
    assert (code, err) == (0, f"{plan}: the plan is valid\n")
    with open_plan(plan) as reader:
        totals, steps = reader.totals, list(reader)
    num_slices = sum(len(c.slices) for s in steps for r in s.replicas for c in r.chunks)
    assert lines[0] == (
        f"checked: 2 steps, 8 sequences, 3,649 tokens, {totals.num_chunks} chunks, "
        f"{num_slices} slices, {totals.num_ops} ops, {2 * totals.num_chunks} transfers"
    )
    coverage = check_coverage.__doc__
    assert f"  {coverage}" in lines
    assert any(
        re.match(r"  Predicted times .* profile gives, of .* \((measured|analytic)\)\.$", line)
        for line in lines
    )
    assert lines[-2].startswith(
        "  Rows have the dataset's lengths and targets, which are those of "
    )
    assert lines[-1].endswith(" of 2 steps would end without receives posted ahead")
    assert len(lines) > 30
    assert "  Not checked: the dataset; name it with --data." in verify(plan)[1]


def with_first_sequence(step: Step, row: int, num_targets: int) -> Step:
    first, *rest = step.sequences
    edited = replace(first, row=row, num_targets=num_targets)
    denominator = step.denominator - first.num_targets + num_targets
    return replace(step, sequences=(edited, *rest), denominator=denominator)


def test_targets_are_those_of_the_dataset(plan: Path, verify: Verify) -> None:
    def edit(step: Step) -> Step:
        first = step.sequences[0]
        return with_first_sequence(step, first.row, first.num_targets - step.index)

    rewrite(plan, same, edit)
    assert verify(plan)[0] == 0
    code, _, err = verify(plan, "--data", plan.with_name("data.jsonl"))
    with open_plan(plan) as reader:
        first = reader.step(1).sequences[0]
    assert code == 1
    assert err == (
        f"error: {plan}: step 1: sequence 0, row {first.row}, has num_targets {first.num_targets}; "
        f"the dataset's has {first.num_targets + 1}; compile it again with `infinipipe compile`\n"
    )


def test_lengths_are_those_of_the_dataset(plan: Path, verify: Verify) -> None:
    def swap_rows(step: Step) -> Step:
        first, second, *rest = step.sequences
        return replace(
            step, sequences=(replace(first, row=second.row), replace(second, row=first.row), *rest)
        )

    rewrite(plan, same, swap_rows)
    code, _, err = verify(plan, "--data", plan.with_name("data.jsonl"))
    assert code == 1
    assert "step 0: sequence 0, row " in err
    assert "has length " in err


@pytest.mark.parametrize(("name", "value"), [("num_tokens", 3650), ("tokenizer", "ids")])
def test_the_header_says_what_is_true_of_the_dataset(
    plan: Path, verify: Verify, name: str, value: object
) -> None:
    rewrite(
        plan, lambda header: replace(header, dataset=replace(header.dataset, **{name: value})), same
    )
    code, _, err = verify(plan, "--data", plan.with_name("data.jsonl"))
    assert code == 1
    assert f"{plan}: says dataset.{name} {value!r}, but " in err
    assert err.count("\n") == 1


def with_prediction(step: Step, **changes: object) -> Step:
    at = next(number for number, replica in enumerate(step.replicas) if replica.chunks)
    first, *rest = step.replicas[at].predicted
    replica = replace(step.replicas[at], predicted=(replace(first, **changes), *rest))
    return replace(step, replicas=(*step.replicas[:at], replica, *step.replicas[at + 1 :]))


def first_prediction(step: Step) -> StagePrediction:
    return next(replica for replica in step.replicas if replica.chunks).predicted[0]


LIES: dict[str, tuple[Callable[[Step], Step], str]] = {
    "peak": (
        lambda s: with_prediction(s, peak_bytes=0),
        "stage 0: a predicted peak of 0 bytes; the plan's profile",
    ),
    "busy": (
        lambda s: with_prediction(s, busy_s=first_prediction(s).busy_s * (1 - 1e-6)),
        "stage 0: a predicted busy_s of",
    ),
    "recompute": (
        lambda s: with_prediction(s, recompute_s=first_prediction(s).busy_s / 2),
        "a predicted recompute_s of",
    ),
    "bubble": (
        lambda s: with_prediction(s, bubble_s=first_prediction(s).bubble_s / 2),
        "stage 0: a predicted bubble_s of",
    ),
    "makespan": (
        lambda s: replace(s, makespan_s=s.makespan_s * (1 + 1e-6), step_s=s.step_s * 2),
        "makespan_s of",
    ),
    "step": (lambda s: replace(s, step_s=s.step_s * 2), "step 0: a predicted step_s of"),
}


@pytest.mark.parametrize("name", LIES)
def test_predictions_that_the_profile_does_not_give_are_refused(
    plan: Path, verify: Verify, name: str
) -> None:
    edit, expected = LIES[name]
    rewrite(plan, same, edit)
    code, _, err = verify(plan)
    assert code == 1
    assert err.startswith(f"error: {plan}: step 0")
    assert expected in err
    assert err.count("\n") == 1
    assert name != "peak" or re.search(r"gives \d+: .*>>0[FB]\d+<<", err)


def test_steps_with_i_and_w_have_no_prices_to_check(tmp_path: Path, verify: Verify) -> None:
    write_plan(tmp_path / "plan", make_header(), split=True)
    code, lines, _ = verify(tmp_path / "plan")
    assert code == 0
    assert any(
        "Not checked: predicted times and peaks of 2 steps with I and W" in line for line in lines
    )


def with_profile(header: Header, data: dict[str, Any]) -> Header:
    packed = msgspec.msgpack.encode(data)
    return replace(
        header, profile=msgspec.Raw(packed), profile_sha256=hashlib.sha256(packed).hexdigest()
    )


def edited(data: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    *parents, last = path.split(".")
    target = data
    for name in parents:
        target = target[name]
    target[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("device", 3),
        ("times.layer_forward.curve", {"tokens": [1], "seconds": [1.0]}),
        ("times.layer_forward.curve", {"tokens": [1, 2, 3], "seconds": [1.0, 2.0]}),
        ("times.layer_forward.curve", {"tokens": [1, 2], "seconds": [1.0, float("inf")]}),
        ("times.layer_forward.curve", {"tokens": [1, 2], "seconds": [1e308, 1.5e308]}),
        ("times.layer_forward.s_per_pair", 1e308),
        ("times.layer_forward.s_per_pair", float("nan")),
        ("times.links.transfer_s.rate", 1e308),
        ("bytes.static_per_parameter", 2**63),
        ("bytes.layer_full_per_token", 1e308),
    ],
)
def test_impossible_profiles_fail_in_one_line(
    plan: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    path: str,
    value: object,
) -> None:
    monkeypatch.chdir(plan.parent)

    def edit(header: Header) -> Header:
        return with_profile(header, edited(msgspec.msgpack.decode(header.profile), path, value))

    rewrite(plan, edit, same)
    for command in (["verify"], ["inspect", "--html", "o.html"], ["inspect", "--trace", "o.json"]):
        code = run_command([*command, str(plan)])
        out, err = capfd.readouterr()
        # A view of possible but absurd numbers may be drawn; only `verify` knows that they are not
        # the plan's.
        assert out == ""
        assert code == 1 or command[0] != "verify"
        assert code == 0 or err.startswith(f"error: {plan}: ")
        assert err[:-1].isprintable()
