"""From a survey's raw seconds to the times of a layer, its samples and how accurate they are."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from infinipipe.aliases import Floats
from infinipipe.measure.fit import Point, fit_layer_time, fit_recompute, fitted_seconds
from infinipipe.measure.survey import Survey
from infinipipe.profiles import LayerTime, Sample
from infinipipe.profiles.profile import SAMPLE_OPS, Accuracy, SampleOp


def fit_survey(survey: Survey) -> tuple[LayerTime, LayerTime, LayerTime]:
    """Return the times of forward, backward and of what recompute adds to both."""
    forward = fit_layer_time(_points(survey, "forward"))
    backward = fit_layer_time(_points(survey, "backward"))
    recompute = fit_recompute(_points(survey, "recomputed"), forward, backward)
    return forward, backward, recompute


def make_samples(
    survey: Survey, times: tuple[LayerTime, LayerTime, LayerTime]
) -> tuple[Sample, ...]:
    """Return every measurement next to what the fit says."""
    points = [Point(slices, 0.0) for slices in survey.times]
    forward, backward, recompute = (fitted_seconds(time, points) for time in times)
    fitted: dict[SampleOp, Floats] = {
        "forward": forward,
        "backward": backward,
        "recomputed": forward + backward + recompute,
    }
    samples = []
    for op in SAMPLE_OPS:
        for point, fitted_s in zip(points, fitted[op].tolist(), strict=True):
            samples.append(_sample(survey, op, point, fitted_s))
    return tuple(samples)


def measure_accuracy(samples: Iterable[Sample]) -> tuple[Accuracy, ...]:
    """Return the errors of each op, on the samples of the fit and on those held out."""
    errors: dict[tuple[SampleOp, bool], list[float]] = {}
    for sample in samples:
        error = abs(sample.fitted_s / sample.seconds - 1)
        errors.setdefault((sample.op, sample.held_out), []).append(error)
    return tuple(_accuracy(*kind, np.array(values)) for kind, values in errors.items())


def _accuracy(op: SampleOp, held_out: bool, errors: Floats) -> Accuracy:
    median, p90, worst = np.quantile(errors, (0.5, 0.9, 1.0)).tolist()
    return Accuracy(
        op=op,
        held_out=held_out,
        num_samples=len(errors),
        median_error=median,
        p90_error=p90,
        worst_error=worst,
    )


def _points(survey: Survey, op: SampleOp) -> list[Point]:
    fitted = [slices for slices in survey.times if slices not in survey.held_out]
    return [Point(slices, survey.median(slices, op)) for slices in fitted]


def _sample(survey: Survey, op: SampleOp, point: Point, fitted_s: float) -> Sample:
    repeats = [seconds[op] for seconds in survey.times[point.slices]]
    low, median, high = np.quantile(repeats, (0.25, 0.5, 0.75)).tolist()
    return Sample(
        op=op,
        slices=point.slices,
        seconds=median,
        spread_s=high - low,
        num_repeats=len(repeats),
        fitted_s=fitted_s,
        held_out=point.slices in survey.held_out,
    )
