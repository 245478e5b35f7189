"""Positions in sequences at which tokens are priced; in between prices count as straight."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from infinipipe.aliases import Bools, Floats

# Sequences longer than this part of the longest pay for contexts. The others have their tokens at
# low positions. Their context term is mostly below 0, and the proof may leave them out.
_LONG = 0.25

# Positions of a class of sequences: the first, and the others from a 32nd of the longest on. More
# of them follow the concave price closer, and each costs time.
_NUM_POSITIONS = 9
_FIRST_PART = 1 / 32


class Positions(NamedTuple):
    """Positions of two classes of sequences, the long ones first."""

    x: Floats
    """(positions, 1)"""
    weights: Floats
    """(positions,) what is straight in between adds up by them to the sum over all tokens."""
    is_long: Bools
    """(positions, 1) whether it is of the long sequences, which pay for contexts."""


def make_positions(lengths: Floats) -> Positions:
    """Return positions for a batch of such lengths, the longest first."""
    long = lengths > _LONG * lengths[0]
    x = _class_positions(lengths[long])
    weights = _weights(x, lengths[long])
    num_long = len(x)
    if not long.all():
        short_x = _class_positions(lengths[~long])
        short_weights = _weights(short_x, lengths[~long])
        x = np.concatenate([x, short_x])
        weights = np.concatenate([weights, short_weights])
    is_long = np.arange(len(x)) < num_long
    return Positions(
        x=x[:, None],
        weights=weights,
        is_long=is_long[:, None],
    )


def _class_positions(lengths: Floats) -> Floats:
    longest = float(lengths[0])
    start = max(1.0, longest * _FIRST_PART)
    rest = np.geomspace(start, longest, _NUM_POSITIONS - 1)
    rounded = np.round([1.0, *rest])
    return np.unique(rounded)


def _weights(x: Floats, lengths: Floats) -> Floats:
    first = x[:-1, None]
    last = x[1:, None]
    # (positions - 1, lengths) the tokens of each sequence after `first` up to `last`.
    counts = np.clip(lengths, first, last) - first
    total = counts.sum(axis=1)
    # Each token counts for `last` by how far on it is, and for `first` by the rest.
    distances = counts * (counts + 1) / 2
    far = distances.sum(axis=1) / np.diff(x)
    weights = np.zeros(len(x))
    weights[0] = len(lengths)
    weights[1:] += far
    weights[:-1] += total - far
    return weights
