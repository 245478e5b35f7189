"""Fits the time of a layer to measurements (design, section 5)."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import highspy
import numpy as np
from numpy.typing import NDArray

from infinipipe.profiles.cost import layer_seconds
from infinipipe.profiles.profile import Curve, LayerTime


@dataclass(frozen=True)
class Point:
    """One measurement: a chunk's slices as (start, length), and the seconds it took."""

    slices: tuple[tuple[int, int], ...]
    seconds: float

    @property
    def tokens(self) -> int:
        """Tokens of all slices."""
        return sum(length for _, length in self.slices)

    @property
    def pairs(self) -> int:
        """Attention pairs of all slices."""
        return sum(length * start + length * (length + 1) // 2 for start, length in self.slices)


class _QuietHighs(highspy.Highs):
    """Does not even greet: the constructor would print to stdout before an option can be set."""

    def enableCallbacks(self) -> None:
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()  # type: ignore[no-untyped-call]


def fit_layer_time(points: SequenceOf[Point], knots: SequenceOf[int]) -> LayerTime:
    """Return the curve and rates with the least sum of absolute relative errors, as a linear program.

    The curve is non-negative and never falls, the rates are non-negative, so that a noisy measurement cannot make
    a longer chunk cheaper. Absolute errors let single outliers go.
    """
    basis = _basis(points, knots)
    relative = basis / np.array([[p.seconds] for p in points])
    num_points, num_terms = relative.shape
    solver = _QuietHighs()  # type: ignore[no-untyped-call]
    terms = [solver.addVariable(lb=0.0) for _ in range(num_terms)]
    errors = [solver.addVariable(lb=0.0, obj=1.0) for _ in range(num_points)]
    scale = np.maximum(relative.max(axis=0), 1e-300)  # terms of one size keep the solver's tolerances meaningful
    for error, row in zip(errors, relative / scale, strict=True):
        fitted = solver.qsum(float(c) * terms[i] for i, c in enumerate(row) if c)
        solver.addConstr(fitted - error <= 1)
        solver.addConstr(fitted + error >= 1)
    for left in range(len(knots) - 1):
        solver.addConstr(terms[left + 1] * float(1 / scale[left + 1]) >= terms[left] * float(1 / scale[left]))
    solver.minimize()
    values = np.array(solver.vals(terms)) / scale
    curve = Curve(tokens=tuple(knots), seconds=tuple(float(v) for v in values[: len(knots)]))
    return LayerTime(curve=curve, s_per_pair=float(values[-2]), s_per_slice=float(values[-1]))


def fitted_seconds(time: LayerTime, points: SequenceOf[Point]) -> NDArray[np.float64]:
    """Return what a fit says of each point."""
    tokens, pairs, slices = (
        np.array(v) for v in zip(*((p.tokens, p.pairs, len(p.slices)) for p in points), strict=True)
    )
    return layer_seconds(time, tokens, pairs, slices)


def _basis(points: SequenceOf[Point], knots: SequenceOf[int]) -> NDArray[np.float64]:
    """Return what each term adds to each point: a hat function per knot, then pairs and slices."""
    tokens = np.array([p.tokens for p in points], dtype=float)
    hats = [np.interp(tokens, knots, np.eye(len(knots))[k]) for k in range(len(knots))]
    return np.column_stack([*hats, [p.pairs for p in points], [len(p.slices) for p in points]])
