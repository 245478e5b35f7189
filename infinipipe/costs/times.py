"""Seconds from the curves, lines and rates of a profile. Pure numpy."""

from __future__ import annotations

import numpy as np

from infinipipe.aliases import Floats, Ints
from infinipipe.profiles import Curve, LayerTime, Line


def curve_seconds(curve: Curve, tokens: Ints) -> Floats:
    """Evaluate a piecewise-linear curve, extrapolating with its last slope.

    Between 0 and the first measured size it stays at the first value: a smaller chunk is not
    faster.
    """
    x = np.asarray(curve.tokens, dtype=float)
    y = np.asarray(curve.seconds)
    largest = x[-1]
    run = largest - x[-2]
    rise = y[-1] - y[-2]
    # Noise may make the last point lower; more tokens never take less time beyond it.
    last_slope = max(0.0, rise / run)
    beyond = np.maximum(0, tokens - largest)
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
    of_tokens = curve_seconds(time.curve, tokens)
    of_pairs = time.s_per_pair * pairs
    of_slices = time.s_per_slice * slices
    first_call = of_tokens + of_pairs + of_slices
    of_context = time.s_per_context_token * context
    of_continued = time.s_per_continued_token * continued
    has_context = np.greater(context, 0)
    of_second_call = time.s_per_context * has_context
    seconds = first_call + (of_context + of_continued) + of_second_call
    return np.asarray(seconds)


def line_values(line: Line, counts: Ints | Floats) -> Floats:
    """Evaluate a line: its constant, and its rate for each of some counts."""
    rising = line.rate * counts
    return np.asarray(line.constant + rising)


def mean_slope(curve: Curve) -> float:
    """Return the slope of the line from a curve's first point to its last."""
    seconds = curve.seconds
    tokens = curve.tokens
    rise = seconds[-1] - seconds[0]
    run = tokens[-1] - tokens[0]
    return rise / run
