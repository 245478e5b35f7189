"""Ways to cut sequences, to recompute and to share layers out, which several tests combine."""

from __future__ import annotations

import itertools

RECOMPUTE = {
    "none": lambda stage, chunk: 0,
    "all": lambda stage, chunk: 99,
    "mixed": lambda stage, chunk: (stage + chunk) % 3,
}
MENU = {name: (recompute, RECOMPUTE["none"]) for name, recompute in RECOMPUTE.items()} | {
    "attention kept": (RECOMPUTE["none"], RECOMPUTE["all"]),
    "all kinds": (RECOMPUTE["mixed"], lambda stage, chunk: (2 * stage + chunk + 1) % 3),
}
"""How many layers of a chunk keep only their input, and how many more keep attention's output."""
LAYERS = {1: (4,), 2: (1, 3), 3: (2, 1, 1), 4: (1, 1, 1, 1)}
"""Layers of each stage, by the number of stages."""

CUTS = {
    2: {7: (1, 6), 13: (8, 5), 698: (500, 198)},
    3: {7: (3, 3, 1), 13: (1, 5, 7), 698: (300, 1, 397)},
    4: {7: (1, 2, 3, 1), 13: (4, 4, 4, 1), 698: (100, 250, 47, 301)},
    5: {7: (1, 1, 1, 1, 3), 13: (2, 3, 1, 3, 4), 698: (211, 103, 97, 1, 286)},
}
"""Sequences of 7, 13 and 698 tokens in uneven slices, one of them of length 1."""

HYBRID = [[(0, 0, 5)], [(0, 5, 4)], [(1, 0, 3), (0, 9, 2), (2, 0, 6)]]
"""A sequence of 11 tokens in three slices; its last one shares a chunk with whole sequences of 3
and 6."""


def slices(sequence: int, lengths: tuple[int, ...]) -> list[list[tuple[int, int, int]]]:
    """Return chunks of one slice each, as (sequence, start, length)."""
    starts = itertools.accumulate(lengths, initial=0)
    return [[(sequence, start, length)] for start, length in zip(starts, lengths, strict=False)]
