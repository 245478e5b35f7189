"""What a run leaves for others to read: its metrics, and which plan and profile it followed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from infinipipe.errors import InputError
from infinipipe.ir import Header, profile_origin

METRICS = "metrics.jsonl"
"""Name of the file with a line for each step."""

RECORD = "plan.json"
"""Name of the file that says what the run followed."""

_Seconds = Annotated[float, msgspec.Meta(gt=0)]
_NumBytes = Annotated[int, msgspec.Meta(gt=0)]


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a step of a run came to: a line of `metrics.jsonl`."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    num_targets: int
    seconds: _Seconds
    predicted_seconds: _Seconds
    tokens_per_second: float
    peak_bytes: tuple[_NumBytes, ...]
    """Per stage, the most of all replicas."""
    predicted_peak_bytes: tuple[_NumBytes, ...]


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
        """The steps by which times are judged: without the first, if there are more.

        In the first everything is new, such as its allocations.
        """
        return self.steps[1:] or self.steps

    @property
    def time_ratio(self) -> float:
        """Measured over predicted seconds, median over the settled steps."""
        return float(np.median([step.seconds / step.predicted_seconds for step in self.settled]))


def record_run(folder: Path, header: Header, plan_sha256: str) -> None:
    """Write down what a run followed."""
    origin = profile_origin(header)
    record = RunRecord(
        plan_sha256=plan_sha256,
        profile_sha256=header.profile_sha256,
        model=header.model.name,
        analytic_device=origin.device.name if origin.is_analytic else "",
    )
    indented = msgspec.json.format(msgspec.json.encode(record))
    (folder / RECORD).write_bytes(indented + b"\n")


def read_run(folder: Path) -> Run:
    """Read a run's metrics and record.

    Raises:
        InputError: the folder holds no complete run.
    """
    metrics = folder / METRICS
    try:
        record = msgspec.json.decode((folder / RECORD).read_bytes(), type=RunRecord)
        data = metrics.read_bytes()
        steps = msgspec.json.Decoder(StepRecord).decode_lines(data)
    except OSError as error:
        raise InputError(f"{folder}: no complete run: {error.filename}: {error.strerror}") from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError(f"{folder}: no run of this infinipipe: {error}") from None
    if not steps:
        raise InputError(f"{metrics}: no steps")
    if not _have_same_stages(steps):
        raise InputError(f"{metrics}: steps of different numbers of stages")
    return Run(record, tuple(steps), hashlib.sha256(data).hexdigest())


def _have_same_stages(steps: list[StepRecord]) -> bool:
    num_stages = len(steps[0].peak_bytes)
    return all(
        len(step.peak_bytes) == len(step.predicted_peak_bytes) == num_stages for step in steps
    )
