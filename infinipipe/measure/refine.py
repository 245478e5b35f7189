"""Corrects a profile by what a run measured.

A run tells how long whole steps took, not which op is to blame. So all times are multiplied by
one number: the one with the least squares of relative errors over the run's steps. The samples
stay as they were measured.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from msgspec.structs import replace

from infinipipe.aliases import Floats
from infinipipe.errors import InputError
from infinipipe.measure.fit import scale_curve, scale_layer_time
from infinipipe.measure.samples import measure_accuracy
from infinipipe.profiles import Curve, LayerTime, Line, Links, Profile, Times, profile_sha256
from infinipipe.profiles.profile import Refinement
from infinipipe.run_record import Run


def refine_profile(profile: Profile, run: Run, folder: Path) -> Profile:
    """Return the profile with its times scaled to a run's, and a record of that.

    Raises:
        InputError: the run followed another profile.
    """
    if run.record.profile_sha256 != profile_sha256(profile):
        raise InputError(
            f"{folder}: was a run of {run.record.model} with another profile than this one of "
            f"{profile.model.name} on {profile.device.name}; name the profile its plan was "
            "compiled with by --profile"
        )
    ratios = np.array([step.predicted_seconds / step.seconds for step in run.settled])
    # Where the derivative of sum((scale * ratios - 1)^2) is 0.
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
    names = times.__struct_fields__
    return replace(times, **{name: _scaled(getattr(times, name), scale) for name in names})


_Time = LayerTime | Curve | Line | Links | float | None


def _scaled(time: _Time, scale: float) -> _Time:
    match time:
        case None:
            # It was not measured.
            return None
        case LayerTime():
            return scale_layer_time(time, scale)
        case Curve():
            return scale_curve(time, scale)
        case Line():
            return _scaled_line(time, scale)
        case Links():
            return Links(
                transfer_s=_scaled_line(time.transfer_s, scale),
                all_to_all_s=_scaled_line(time.all_to_all_s, scale),
                reduce_scatter_s=_scaled_line(time.reduce_scatter_s, scale),
                all_gather_s=_scaled_line(time.all_gather_s, scale),
                num_ranks=time.num_ranks,
            )
        case _:
            return scale * time


def _scaled_line(line: Line, scale: float) -> Line:
    return Line(constant=scale * line.constant, rate=scale * line.rate)


def _median_error(ratios: Floats) -> float:
    return float(np.median(np.abs(ratios - 1)))
