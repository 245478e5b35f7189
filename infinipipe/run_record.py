"""What a run leaves for others to read: its metrics, and which plan and profile it followed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from infinipipe.errors import InputError
from infinipipe.ir import Header

METRICS, RECORD = "metrics.jsonl", "plan.json"

WARN_BEYOND = 0.15
"""Relative error of a prediction."""


_Count = Annotated[int, msgspec.Meta(gt=0)]


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a step of a run came to: a line of `metrics.jsonl`."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    num_targets: int
    seconds: Annotated[float, msgspec.Meta(gt=0)]
    predicted_seconds: Annotated[float, msgspec.Meta(gt=0)]
    tokens_per_second: float
    peak_bytes: tuple[_Count, ...]
    predicted_peak_bytes: tuple[_Count, ...]


class RunRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a run followed, in its folder as `plan.json`."""

    plan_sha256: str
    profile_sha256: str
    model: str
    analytic_device: str
    """Whose data sheet the profile was computed from; empty if it was measured."""


class Run(NamedTuple):
    """A run that is done."""

    record: RunRecord
    steps: tuple[StepRecord, ...]
    sha256: str
    """Of `metrics.jsonl`."""

    @property
    def settled(self) -> tuple[StepRecord, ...]:
        """The steps by which times are judged: all but the first, whose allocations are new, if there are more."""
        return self.steps[1:] or self.steps

    @property
    def time_ratio(self) -> float:
        """Measured over predicted seconds, median over the settled steps."""
        return float(np.median([step.seconds / step.predicted_seconds for step in self.settled]))


class _Device(msgspec.Struct):
    name: str


class _Profile(msgspec.Struct):
    """What is read of a plan's profile."""

    device: _Device
    source: str


def record_run(folder: Path, header: Header, plan_sha256: str) -> None:
    """Write down what a run followed."""
    profile = msgspec.msgpack.decode(header.profile, type=_Profile)
    record = RunRecord(
        plan_sha256=plan_sha256,
        profile_sha256=header.profile_sha256,
        model=header.model.name,
        analytic_device=profile.device.name if profile.source == "analytic" else "",
    )
    (folder / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")


def read_run(folder: Path) -> Run:
    """Read a run's metrics and record.

    Raises:
        InputError: the folder holds no complete run.
    """
    try:
        record = msgspec.json.decode((folder / RECORD).read_bytes(), type=RunRecord)
        data = (folder / METRICS).read_bytes()
        steps = msgspec.json.Decoder(StepRecord).decode_lines(data)
    except OSError as error:
        raise InputError(f"{folder}: no complete run: {error.filename}: {error.strerror}") from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError(f"{folder}: no run of this infinipipe: {error}") from None
    if not steps:
        raise InputError(f"{folder / METRICS}: no steps")
    if (
        len(
            {len(peaks) for step in steps for peaks in (step.peak_bytes, step.predicted_peak_bytes)}
        )
        > 1
    ):
        raise InputError(f"{folder / METRICS}: steps of different numbers of stages")
    return Run(record, tuple(steps), hashlib.sha256(data).hexdigest())


def compare_run(run: Run, folder: Path) -> list[str]:
    """Return lines for a person: what was predicted, what was measured, and what to do about the difference."""
    settled, ratio = run.settled, run.time_ratio
    lines = [
        f"{folder}: {len(run.steps)} steps, predicted -> measured",
        f"  {'time':<11} {_median(settled, True):.4g} -> {_median(settled, False):.4g} s a step{_beside(1 / ratio)}",
    ]
    worst: dict[int, float] = {}
    for stage in range(len(run.steps[0].peak_bytes)):
        step = max(run.steps, key=lambda s: s.peak_bytes[stage])
        predicted, measured = step.predicted_peak_bytes[stage], step.peak_bytes[stage]
        worst[stage] = predicted / measured
        lines.append(
            f"  {f'stage {stage}':<11} peak {predicted / 2**20:,.1f} -> {measured / 2**20:,.1f} MiB"
            f"{_beside(worst[stage])}"
        )
    return lines + [f"warning: {text}" for text in _warnings(run, folder, worst)]


def _median(steps: Sequence[StepRecord], predicted: bool) -> float:
    return float(
        np.median([step.predicted_seconds if predicted else step.seconds for step in steps])
    )


def _beside(ratio: float) -> str:
    """Return by how much a prediction is over or under, from predicted over measured."""
    return f" ({abs(ratio - 1):.1%} {'over' if ratio > 1 else 'under'})"


def _warnings(run: Run, folder: Path, peaks: dict[int, float]) -> list[str]:
    found = []
    if run.record.analytic_device:
        found.append(
            f"the plan's profile is analytic, for {run.record.analytic_device}; measure this machine with "
            "`infinipipe profile` and compile again"
        )
    elif abs(1 / run.time_ratio - 1) > WARN_BEYOND:
        found.append(
            f"the predicted time is off by more than {WARN_BEYOND:.0%}; if nothing else ran on this machine, "
            f"correct the profile with `infinipipe profile --refine {folder}` and compile again"
        )
    stages = [str(stage) for stage, ratio in peaks.items() if abs(ratio - 1) > WARN_BEYOND]
    if stages and not run.record.analytic_device:
        found.append(
            f"the predicted peak of stage {', '.join(stages)} is off by more than {WARN_BEYOND:.0%}; "
            "profile this machine again with `infinipipe profile`"
        )
    return found
