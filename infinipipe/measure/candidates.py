"""The chunks that a survey of a layer may measure."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import product

from infinipipe.measure.fit import Slices

# Sizes grow by factors, as cost per token changes by factors: a fit's errors are relative.
_COARSE_SIZES = (1, 16, 64, 256, 1024, 4096, 16384)
_COARSE_LATER_SLICES = ((1024, 16), (16384, 16), (1024, 256), (8192, 256), (4096, 1024))
"""Start and length: of few and many tokens, with a short and a long context each."""
_COARSE_PACKS = ((16, 4), (16, 32), (64, 16), (256, 4))
"""Length and number of equal sequences."""

_POWERS = [2**k for k in range(4, 17)]
_BETWEEN_POWERS = [3 * 2**k for k in range(5, 15)]
_SIZES = sorted({1, *_POWERS, *_BETWEEN_POWERS})
"""Up to 65,536 tokens in one chunk, which few devices have the memory for."""
_STARTS = (64, 256, 1024, 4096, 16384, 65536)

_DRAWS = 1000
"""Of each kind: far more than any effort holds out, for machines on which most are too slow."""


def _whole(length: int) -> Slices:
    return ((0, length),)


def _pack(length: int, count: int) -> Slices:
    return ((0, length),) * count


def _hybrid(start: int, count: int) -> Slices:
    """Return a slice with context, packed with short whole sequences."""
    return ((start, 256), *_pack(64, count))


COARSE: tuple[Slices, ...] = (
    *(_whole(size) for size in _COARSE_SIZES),
    *((later,) for later in _COARSE_LATER_SLICES),
    *(_pack(length, count) for length, count in _COARSE_PACKS),
)
"""What is measured first: enough of each kind for a first fit."""
CANDIDATES: tuple[Slices, ...] = (
    *(_whole(size) for size in _SIZES),
    *((later,) for later in product(_STARTS, (16, 64, 256, 1024, 4096))),
    *(_pack(length, count) for length, count in product((16, 64, 256, 1024), (2, 4, 16, 64))),
    *(_hybrid(start, count) for start, count in product((256, 4096), (2, 8))),
)
"""What is chosen from afterwards."""

NUM_KINDS = 4
"""Whole sequences, slices with context, packs and hybrids of the last two."""


def draw_chunks(longest: int, longest_context: int) -> Iterator[Slices]:
    """Yield chunks of each kind in turn, within what was measured.

    Args:
        longest: tokens of the longest whole sequence that was measured.
        longest_context: the longest context that was measured.
    """
    # A seed of its own, so that the same chunks are held out on every machine that can run them.
    draw = random.Random(7)
    for _ in range(_DRAWS):
        pack = _draw_pack(draw, longest)
        later = (_draw_size(draw, 32, longest_context), _draw_size(draw, 8, longest))
        yield _whole(_draw_size(draw, 8, longest))
        yield (later,)
        yield pack
        yield (later, *pack[:8])


def _draw_pack(draw: random.Random, longest: int) -> Slices:
    # Up to 24 short sequences, as in packs of a run.
    count = draw.randint(2, 24)
    return tuple((0, _draw_size(draw, 4, min(512, longest))) for _ in range(count))


def _draw_size(draw: random.Random, least: int, most: int) -> int:
    """Draw a size, each doubling as likely as any other."""
    exponent = draw.uniform(math.log(least), math.log(max(least, most)))
    return round(math.exp(exponent))
