"""Small runs made by hand: what their folders hold, and the profile that they followed."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from infinipipe.profiles import Profile, profile_sha256, read_model
from infinipipe.profiles.analytic import analytic_profile
from infinipipe.run_record import METRICS, RECORD, RunRecord
from infinipipe.units import MIB

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
    """Write a run of two stages; `peak` is measured over predicted bytes of the first."""
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
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = RunRecord(
        plan_sha256="0" * 64,
        profile_sha256=profile_sha256(PROFILE),
        model="tiny",
        analytic_device=analytic,
    )
    (folder / RECORD).write_bytes(msgspec.json.encode(record))
    return folder
