"""The menu of recompute as a ladder: a level for each chunk on a stage, from nothing to all.

With every rung a layer more keeps less. On the lower rungs, as many as the stage has layers, one
layer after the other comes to keep only its input and attention's output. On the upper rungs they
come to keep only their input. Where attention is cheap for the bytes of its output, as it is where
sequences are short, there are no upper rungs, and on the lower ones layers drop attention's output
with the rest. So a rung never frees more for a second than one below it: no choice of layers is
cheaper than a level that frees as much, but for parts of a rung.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from infinipipe.aliases import Bools, Floats, Ints
from infinipipe.costs import CostedChunks, Recompute

# A quotient that is a whole number but for rounding is not rounded up to the next one.
_CLOSE = 1 - 1e-12


@dataclass(frozen=True)
class Ladder:
    """What rungs free and cost for each chunk, the same on every stage; arrays are (chunks,).

    Methods take levels of one stage, (chunks,), with its number of layers; or of all stages,
    (stages, chunks), with those of each as a column.
    """

    has_upper: Bools
    """Whether there are upper rungs, so that lower ones keep attention's output."""
    lower_bytes: Floats
    """That a lower rung frees."""
    lower_s: Floats
    """That it costs."""
    upper_bytes: Floats
    """The same of an upper rung, 0 without."""
    upper_s: Floats

    def num_rungs(self, num_layers: int | Ints) -> Ints:
        """Return the highest level of each chunk, at which all layers keep only their input."""
        return np.asarray(num_layers * (1 + self.has_upper))

    def recompute(self, levels: Ints, num_layers: int | Ints) -> Recompute:
        """Return what layers keep at some levels."""
        lower_if_upper = num_layers * self.has_upper
        keep_input = np.maximum(levels - lower_if_upper, 0)
        # Each upper rung takes a layer from those that keep attention's output.
        keep_attention = (levels - 2 * keep_input) * self.has_upper
        return Recompute(keep_input, keep_attention)

    def seconds(self, levels: Ints, num_layers: int | Ints) -> Floats:
        """Return what levels add to B."""
        lower = np.minimum(levels, num_layers)
        return np.asarray(lower * self.lower_s + (levels - lower) * self.upper_s)

    def freed_bytes(self, levels: Ints, num_layers: int | Ints) -> Floats:
        """Return what is not kept at some levels."""
        lower = np.minimum(levels, num_layers)
        return np.asarray(lower * self.lower_bytes + (levels - lower) * self.upper_bytes)

    def levels_that_free(self, num_bytes: Floats, num_layers: int | Ints) -> Ints:
        """Return the lowest levels that free so many bytes, the highest where none does."""
        divisor = np.where(self.lower_bytes > 0, self.lower_bytes, 1.0)
        lower = np.minimum(np.ceil(num_bytes / divisor * _CLOSE), num_layers)
        rest = np.maximum(num_bytes - lower * self.lower_bytes, 0.0)
        divisor = np.where(self.has_upper, self.upper_bytes, np.inf)
        upper = np.minimum(np.ceil(rest / divisor * _CLOSE), num_layers)
        return np.asarray(lower + upper, dtype=np.int64)

    def weighed(self, weights: Floats) -> Ladder:
        """Return the ladder with other prices of each chunk's seconds."""
        return replace(self, lower_s=weights * self.lower_s, upper_s=weights * self.upper_s)


def inputs_only(costs: CostedChunks) -> Ladder:
    """Return the ladder of layers that keep all or only their input."""
    return plain_ladder(costs.freed_per_layer_bytes, costs.recompute_s)


def plain_ladder(freed_bytes: Floats, seconds: Floats) -> Ladder:
    """Return a ladder without upper rungs."""
    nothing = np.zeros(len(seconds))
    return Ladder(
        has_upper=np.zeros(len(seconds), dtype=np.bool_),
        lower_bytes=freed_bytes,
        lower_s=seconds,
        upper_bytes=nothing,
        upper_s=nothing,
    )


def whole_menu(costs: CostedChunks) -> Ladder:
    """Return the ladder of layers that keep all, attention's output, or only their input."""
    upper_bytes = costs.attention_bytes
    upper_s = costs.attention_s
    lower_bytes = costs.freed_per_layer_bytes - upper_bytes
    lower_s = costs.recompute_s - upper_s
    # More bytes for a second below than above, multiplied out.
    frees_more_below = lower_bytes * upper_s > upper_bytes * lower_s
    has_upper = frees_more_below & (lower_bytes > 0)
    return Ladder(
        has_upper=has_upper,
        lower_bytes=np.where(has_upper, lower_bytes, costs.freed_per_layer_bytes),
        lower_s=np.where(has_upper, lower_s, costs.recompute_s),
        upper_bytes=np.where(has_upper, upper_bytes, 0.0),
        upper_s=np.where(has_upper, upper_s, 0.0),
    )
