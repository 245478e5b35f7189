"""Fits lines and the time of a layer to measurements (design, section 5), by linear programs."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from msgspec.structs import replace

from infinipipe.aliases import Floats
from infinipipe.costs.cost import layer_seconds
from infinipipe.highs import QuietHighs
from infinipipe.profiles.profile import Curve, LayerTime, Line

Slices = tuple[tuple[int, int], ...]
"""A chunk's slices as (start, length); at most one has a context."""


@dataclass(frozen=True)
class Point:
    """A chunk that was measured, and the seconds it took."""

    slices: Slices
    seconds: float

    @property
    def tokens(self) -> int:
        """Tokens of all slices."""
        return sum(length for _, length in self.slices)

    @property
    def pairs(self) -> int:
        """Attention pairs of all slices."""
        return sum(length * start + length * (length + 1) // 2 for start, length in self.slices)

    @property
    def context(self) -> int:
        """Start of the slice that has a context, 0 without one."""
        return max(start for start, _ in self.slices)

    @property
    def continued(self) -> int:
        """Tokens of that slice."""
        return sum(length for start, length in self.slices if start)


def fit_layer_time(points: SequenceOf[Point]) -> LayerTime:
    """Return the curve and rates with the least sum of absolute relative errors.

    The curve bends at the sizes of the points that are one whole sequence. It is non-negative and never falls, the
    rates are non-negative, so that a noisy measurement cannot make a longer chunk cheaper. Nor does it ever rise per
    token: packs of as many tokens as one of those sizes would else pull the curve down there alone, and a planner
    finds such dips. Absolute errors let single outliers go.

    Args:
        points: at least two of them whole sequences of different lengths.
    """
    knots = sorted(
        {point.tokens for point in points if len(point.slices) == 1 and not point.context}
    )
    hats = _hats(np.array([p.tokens for p in points], dtype=float), knots)
    rates = [(p.pairs, len(p.slices), p.context > 0, p.context, p.continued) for p in points]
    values = _least_errors(
        np.column_stack([hats, np.array(rates, dtype=float)]),
        np.array([p.seconds for p in points]),
        np.zeros(len(points)),
        knots,
    )
    # Accumulated, as the solver keeps to its constraints but for a tolerance.
    curve = Curve(
        tokens=tuple(knots), seconds=tuple(np.maximum.accumulate(values[: len(knots)]).tolist())
    )
    pair, piece, context, context_token, continued_token = values[len(knots) :]
    return LayerTime(
        curve=curve,
        s_per_pair=pair,
        s_per_slice=piece,
        s_per_context=context,
        s_per_context_token=context_token,
        s_per_continued_token=continued_token,
    )


def fit_recompute(points: SequenceOf[Point], forward: LayerTime, backward: LayerTime) -> LayerTime:
    """Return what recompute adds to F and B: a share of F, as it runs F again, and a constant.

    Args:
        points: seconds of F and B together, with recompute. Their difference to F and B without would be noisier
            than either; and where memory is warm, F costs less the second time.
        forward: fitted to F alone.
        backward: fitted to B alone.
    """
    once = fitted_seconds(forward, points)
    basis = np.column_stack([once, np.ones(len(points))])
    seconds = np.array([point.seconds for point in points])
    share, constant = _least_errors(basis, seconds, once + fitted_seconds(backward, points))
    scaled = scale_layer_time(forward, share)
    return replace(
        scaled,
        curve=replace(scaled.curve, seconds=tuple(constant + s for s in scaled.curve.seconds)),
    )


def scale_layer_time(time: LayerTime, scale: float) -> LayerTime:
    """Return times that are all `scale` times as long."""
    rates = (
        "s_per_pair",
        "s_per_slice",
        "s_per_context",
        "s_per_context_token",
        "s_per_continued_token",
    )
    seconds = tuple(scale * s for s in time.curve.seconds)
    return replace(
        time,
        curve=replace(time.curve, seconds=seconds),
        **{name: scale * getattr(time, name) for name in rates},
    )


def fitted_seconds(time: LayerTime, points: SequenceOf[Point]) -> Floats:
    """Return what a fit says of each point."""
    loads = np.array([(p.tokens, p.pairs, len(p.slices), p.context, p.continued) for p in points]).T
    return layer_seconds(time, *loads)


def fit_line(sizes: SequenceOf[float], seconds: SequenceOf[float]) -> Line:
    """Return the line with the least sum of absolute relative errors; neither part is negative."""
    basis = np.column_stack([np.ones(len(sizes)), np.array(sizes, dtype=float)])
    constant, rate = _least_errors(basis, np.array(seconds), np.zeros(len(sizes)))
    return Line(constant=constant, rate=rate)


def _hats(x: Floats, knots: SequenceOf[int]) -> Floats:
    """Return what each knot of a piecewise-linear curve adds at each x, as `curve_seconds` evaluates it."""
    hats = np.column_stack([np.interp(x, knots, row) for row in np.eye(len(knots))])
    beyond = np.maximum(0.0, x - knots[-1]) / (knots[-1] - knots[-2])
    hats[:, -2:] += np.column_stack([-beyond, beyond])
    return hats


def _least_errors(
    basis: Floats, measured: Floats, given: Floats, knots: SequenceOf[int] = ()
) -> list[float]:
    """Return non-negative weights of the basis with the least sum of `|(given + basis @ weights) / measured - 1|`.

    Args:
        basis: (measurements, weights).
        measured: (measurements,) seconds.
        given: (measurements,) seconds that are known already.
        knots: the first weights are a curve at these sizes, which never falls, nor rises per token.
    """
    relative, target = basis / measured[:, None], 1 - given / measured
    largest = np.abs(relative).max(axis=0)
    scale = np.where(
        largest > 0, largest, 1.0
    )  # terms of one size keep the solver's tolerances meaningful
    solver = QuietHighs()  # type: ignore[no-untyped-call]
    terms = [solver.addVariable(lb=0.0) for _ in scale]
    for row, wanted in zip(relative / scale, target.tolist(), strict=True):
        error = solver.addVariable(lb=0.0, obj=1.0)
        fitted = solver.qsum(float(c) * terms[i] for i, c in enumerate(row) if c)
        solver.addConstr(fitted - error <= wanted)
        solver.addConstr(fitted + error >= wanted)
    curve = [term * float(1 / unit) for term, unit in zip(terms, scale, strict=False)][: len(knots)]
    for left, right in pairwise(range(len(knots))):
        solver.addConstr(curve[right] >= curve[left])
        solver.addConstr(curve[right] <= curve[left] * (knots[right] / knots[left]))
    solver.minimize()
    return [max(0.0, float(value)) for value in np.array(solver.vals(terms)) / scale]
