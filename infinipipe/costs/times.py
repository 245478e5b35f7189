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
    last_rise = y[-1] - y[-2]
    last_run = x[-1] - x[-2]
    last_slope = max(0.0, last_rise / last_run)
    beyond = np.maximum(0, tokens - x[-1])
    within = np.interp(tokens, x, y)
    return np.asarray(within + last_slope * beyond)


def layer_seconds(
    time: LayerTime,
    tokens: Ints,
    pairs: Ints,
    slices: Ints,
    context: Ints | int = 0,
    continued: Ints | int = 0,
) -> Floats:
    """Return the seconds of one layer for each chunk; its arguments are those of `ChunkSizes`.

    A slice with a context needs a second call of attention, between itself and its context.
    """
    seconds = curve_seconds(time.curve, tokens)
    seconds = seconds + time.s_per_pair * pairs
    seconds = seconds + time.s_per_slice * slices
    of_context = time.s_per_context_token * context
    of_slice = time.s_per_continued_token * continued
    has_context = np.greater(context, 0)
    seconds = seconds + (of_context + of_slice)
    return np.asarray(seconds + time.s_per_context * has_context)


def line_values(line: Line, counts: Ints | Floats) -> Floats:
    """Evaluate a line: its constant, and its rate for each of some counts."""
    rising = line.rate * counts
    return np.asarray(line.constant + rising)


def mean_slope(curve: Curve) -> float:
    """Return the slope of the line from a curve's first point to its last."""
    seconds = curve.seconds[-1] - curve.seconds[0]
    tokens = curve.tokens[-1] - curve.tokens[0]
    return seconds / tokens
