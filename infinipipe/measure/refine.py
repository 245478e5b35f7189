"""Corrects a profile by what a run measured.

A run tells how long whole steps took, not which op is to blame. So all times are multiplied by one number:
the one with the least squares of relative errors over the run's steps. The samples stay as they were measured.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from infinipipe.aliases import Floats
from infinipipe.errors import InputError
from infinipipe.measure.fit import scale_layer_time
from infinipipe.measure.samples import measure_accuracy
from infinipipe.profiles.profile import Curve, Line, Profile, Refinement, Times, profile_sha256
from infinipipe.run_record import Run

_LAYERS = (
    "layer_forward",
    "layer_backward",
    "layer_recompute",
    "layer_input_backward",
    "layer_weight_backward",
)
_CURVES = ("embedding_forward", "embedding_backward", "head_forward", "head_backward")
_LINES = ("optimizer_s", "transfer_s", "all_to_all_s")


def refine_profile(profile: Profile, run: Run, folder: Path) -> Profile:
    """Return the profile with its times scaled to a run's, and a record of that.

    Raises:
        InputError: the run followed another profile.
    """
    if run.record.profile_sha256 != profile_sha256(profile):
        raise InputError(
            f"{folder}: was a run of {run.record.model} with another profile than this one of {profile.model.name} on "
            f"{profile.device.name}; name the profile its plan was compiled with by --profile"
        )
    ratios = np.array([step.predicted_seconds / step.seconds for step in run.settled])
    scale = float(ratios.sum() / (ratios @ ratios))
    refinement = Refinement(
        run_sha256=run.sha256,
        num_steps=len(ratios),
        scale=scale,
        error_before=_median_error(ratios),
        error_after=_median_error(scale * ratios),
    )
    samples = tuple(replace(sample, fitted_s=scale * sample.fitted_s) for sample in profile.samples)
    return replace(
        profile,
        times=scale_times(profile.times, scale),
        samples=samples,
        accuracy=measure_accuracy(samples),
        refinements=(*profile.refinements, refinement),
    )


def scale_times(times: Times, scale: float) -> Times:
    """Return times that are all `scale` times as long."""
    chunk = {name: scale * getattr(times, name) for name in ("chunk_forward_s", "chunk_backward_s")}
    layers = {
        name: scale_layer_time(time, scale)
        for name in _LAYERS
        if (time := getattr(times, name)) is not None
    }
    curves = {name: _scale_curve(getattr(times, name), scale) for name in _CURVES}
    lines = {name: _scale_line(getattr(times, name), scale) for name in _LINES}
    return replace(times, **layers, **curves, **lines, **chunk)


def _scale_curve(curve: Curve, scale: float) -> Curve:
    return replace(curve, seconds=tuple(scale * seconds for seconds in curve.seconds))


def _scale_line(line: Line, scale: float) -> Line:
    return Line(constant=scale * line.constant, rate=scale * line.rate)


def _median_error(ratios: Floats | SequenceOf[float]) -> float:
    return float(np.median(np.abs(np.asarray(ratios) - 1)))
