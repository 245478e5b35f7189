"""Fits lines and the time of a layer to measurements, by linear programs."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec.structs import replace

from infinipipe.aliases import Floats
from infinipipe.costs import layer_seconds
from infinipipe.highs import QuietHighs
from infinipipe.profiles import Curve, LayerTime, Line

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
        total = 0
        for start, length in self.slices:
            to_context = length * start
            within = length * (length + 1) // 2
            total += to_context + within
        return total

    @property
    def context(self) -> int:
        """Start of the slice that has a context, 0 without one."""
        return max(start for start, _ in self.slices)

    @property
    def continued(self) -> int:
        """Tokens of that slice."""
        return sum(length for start, length in self.slices if start)

    @property
    def is_whole_sequence(self) -> bool:
        """Whether it is one sequence and nothing else."""
        return len(self.slices) == 1 and not self.context


def fit_layer_time(points: SequenceOf[Point]) -> LayerTime:
    """Return the curve and rates with the least sum of absolute relative errors.

    The curve bends at the sizes of the points that are one whole sequence. It is non-negative and
    never falls, the rates are non-negative, so that a noisy measurement cannot make a longer
    chunk cheaper. Nor does it ever rise per token: packs of as many tokens as one of those sizes
    would else pull the curve down there alone, and a planner finds such dips. Absolute errors let
    single outliers go.

    Args:
        points: at least two of them whole sequences of different lengths.
    """
    knots = sorted({point.tokens for point in points if point.is_whole_sequence})
    tokens = np.array([point.tokens for point in points], dtype=float)
    rates = np.array([_rate_counts(point) for point in points], dtype=float)
    weights = _least_errors(
        np.column_stack([_hats(tokens, knots), rates]),
        np.array([point.seconds for point in points]),
        np.zeros(len(points)),
        knots,
    )
    # Accumulated, as the solver keeps to its constraints but for a tolerance.
    seconds = np.maximum.accumulate(weights[: len(knots)])
    per_pair, per_slice, per_context, per_context_token, per_continued = weights[len(knots) :]
    return LayerTime(
        curve=Curve(tokens=tuple(knots), seconds=tuple(seconds.tolist())),
        s_per_pair=per_pair,
        s_per_slice=per_slice,
        s_per_context=per_context,
        s_per_context_token=per_context_token,
        s_per_continued_token=per_continued,
    )


def _rate_counts(point: Point) -> tuple[float, ...]:
    """Return what each rate of a `LayerTime` is multiplied by, in the order of its fields."""
    has_context = point.context > 0
    return point.pairs, len(point.slices), has_context, point.context, point.continued


def fit_recompute(points: SequenceOf[Point], forward: LayerTime, backward: LayerTime) -> LayerTime:
    """Return what recompute adds to F and B: a share of F, as it runs F again, and a constant.

    Args:
        points: seconds of F and B together, with recompute. Their difference to F and B without
            would be noisier than either; and where memory is warm, F costs less the second time.
        forward: fitted to F alone.
        backward: fitted to B alone.
    """
    forward_s = fitted_seconds(forward, points)
    known_s = forward_s + fitted_seconds(backward, points)
    basis = np.column_stack([forward_s, np.ones(len(points))])
    measured_s = np.array([point.seconds for point in points])
    share, constant = _least_errors(basis, measured_s, known_s)
    scaled = scale_layer_time(forward, share)
    seconds = tuple(constant + each for each in scaled.curve.seconds)
    return replace(scaled, curve=replace(scaled.curve, seconds=seconds))


def scale_layer_time(time: LayerTime, scale: float) -> LayerTime:
    """Return times that are all `scale` times as long."""
    return LayerTime(
        curve=scale_curve(time.curve, scale),
        s_per_pair=scale * time.s_per_pair,
        s_per_slice=scale * time.s_per_slice,
        s_per_context=scale * time.s_per_context,
        s_per_context_token=scale * time.s_per_context_token,
        s_per_continued_token=scale * time.s_per_continued_token,
    )


def scale_curve(curve: Curve, scale: float) -> Curve:
    """Return a curve that is `scale` times as high everywhere."""
    return replace(curve, seconds=tuple(scale * seconds for seconds in curve.seconds))


def fitted_seconds(time: LayerTime, points: SequenceOf[Point]) -> Floats:
    """Return what a fit says of each point, shape (points,)."""
    tokens = np.array([point.tokens for point in points])
    pairs = np.array([point.pairs for point in points])
    num_slices = np.array([len(point.slices) for point in points])
    contexts = np.array([point.context for point in points])
    continued = np.array([point.continued for point in points])
    return layer_seconds(time, tokens, pairs, num_slices, contexts, continued)


def fit_line(sizes: SequenceOf[float], seconds: SequenceOf[float]) -> Line:
    """Return the line with the least sum of absolute relative errors; no part is negative."""
    ones = np.ones(len(sizes))
    basis = np.column_stack([ones, np.array(sizes, dtype=float)])
    nothing_known = np.zeros(len(sizes))
    constant, rate = _least_errors(basis, np.array(seconds), nothing_known)
    return Line(constant=constant, rate=rate)


def _hats(x: Floats, knots: SequenceOf[int]) -> Floats:
    """Return the hat function of each knot at each x, shape (x, knots).

    A piecewise-linear curve, as `curve_seconds` evaluates it, is their sum weighted by its values
    at the knots.
    """
    one_knot_up = np.eye(len(knots))
    hats = np.column_stack([np.interp(x, knots, values) for values in one_knot_up])
    # Beyond the last knot the last slope goes on: one value up, the other down.
    before_last, last = knots[-2:]
    beyond = np.maximum(0.0, x - last) / (last - before_last)
    hats[:, -2] -= beyond
    hats[:, -1] += beyond
    return hats


def _least_errors(
    basis: Floats, measured: Floats, given: Floats, knots: SequenceOf[int] = ()
) -> list[float]:
    """Return the weights with the least sum of `|(given + basis @ weights) / measured - 1|`.

    They are not negative.

    Args:
        basis: (measurements, weights).
        measured: (measurements,) seconds.
        given: (measurements,) seconds that are known already.
        knots: the first weights are a curve at these sizes, which never falls, nor rises per
            token.
    """
    relative = basis / measured[:, None]
    target = 1 - given / measured
    # Terms of one size keep the solver's tolerances meaningful.
    largest = np.abs(relative).max(axis=0)
    units = np.where(largest > 0, largest, 1.0)
    solver = QuietHighs()  # type: ignore[no-untyped-call]
    terms = [solver.addVariable(lb=0.0) for _ in units]
    for row, wanted in zip(relative / units, target.tolist(), strict=True):
        _add_error(solver, terms, row, wanted)
    scales = (1 / units).tolist()
    curve = [term * scale for term, scale in zip(terms, scales, strict=True)]
    _keep_in_shape(solver, curve, knots)
    solver.minimize()
    weights = np.array(solver.vals(terms)) / units
    return [max(0.0, weight) for weight in weights.tolist()]


def _add_error(solver: QuietHighs, terms: list[Any], row: Floats, wanted: float) -> None:
    """Add `|row @ terms - wanted|` to what is minimized: what is at least either sign of it."""
    error = solver.addVariable(lb=0.0, obj=1.0)
    used = np.flatnonzero(row).tolist()
    fitted = solver.qsum(float(row[index]) * terms[index] for index in used)
    solver.addConstr(fitted - error <= wanted)
    solver.addConstr(fitted + error >= wanted)


def _keep_in_shape(solver: QuietHighs, curve: list[Any], knots: SequenceOf[int]) -> None:
    """Let a curve, the first of these terms, never fall, nor rise per token."""
    for index, (left, right) in enumerate(pairwise(knots)):
        solver.addConstr(curve[index + 1] >= curve[index])
        solver.addConstr(curve[index + 1] <= curve[index] * (right / left))
