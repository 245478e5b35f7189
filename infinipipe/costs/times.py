"""Seconds from the curves, lines and rates of a profile. Pure numpy."""

from __future__ import annotations

import numpy as np

from infinipipe.aliases import Floats, Ints
from infinipipe.profiles.profile import Curve, LayerTime, Line


def curve_seconds(curve: Curve, tokens: Ints) -> Floats:
    """Evaluate a piecewise-linear curve, extrapolating with its last slope.

    Between 0 and the first measured size it stays at the first value: a smaller chunk is not
    faster.
    """
    x = np.asarray(curve.tokens, dtype=float)
    y = np.asarray(curve.seconds)
    last_slope = max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2]))
    beyond = np.maximum(0, tokens - x[-1])
    return np.asarray(np.interp(tokens, x, y) + last_slope * beyond)


def layer_seconds(
    time: LayerTime,
    tokens: Ints,
    pairs: Ints,
    slices: Ints,
    context: Ints | int = 0,
    continued: Ints | int = 0,
) -> Floats:
    """Return the seconds of one layer for each chunk; its arguments are those of `ChunkSizes`."""
    whole = curve_seconds(time.curve, tokens) + time.s_per_pair * pairs + time.s_per_slice * slices
    second_call = time.s_per_context_token * context + time.s_per_continued_token * continued
    return np.asarray(whole + second_call + time.s_per_context * np.greater(context, 0))


def line_values(line: Line, counts: Ints | Floats) -> Floats:
    """Evaluate a line: its constant, and its rate for each of some counts."""
    return np.asarray(line.constant + line.rate * counts)


def mean_slope(curve: Curve) -> float:
    """Return the slope of the line from a curve's first point to its last."""
    seconds = curve.seconds[-1] - curve.seconds[0]
    tokens = curve.tokens[-1] - curve.tokens[0]
    return seconds / tokens
