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

# What is chosen from afterwards: up to 65,536 tokens, which few devices have the memory for.
_SIZES = (
    *(1, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768),
    *(1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288),
    *(16384, 24576, 32768, 49152, 65536),
)
_STARTS = (64, 256, 1024, 4096, 16384, 65536)
_LATER_LENGTHS = (16, 64, 256, 1024, 4096)
_PACK_LENGTHS = (16, 64, 256, 1024)
_PACK_COUNTS = (2, 4, 16, 64)
_HYBRID_STARTS = (256, 4096)
_HYBRID_COUNTS = (2, 8)

_DRAWS = 1000
"""Of each kind: far more than any effort holds out, for machines on which most are too slow."""


def _whole(length: int) -> Slices:
    return ((0, length),)


def _pack(length: int, count: int) -> Slices:
    return ((0, length),) * count


def _hybrid(start: int, count: int) -> Slices:
    """Return a slice with context, packed with short whole sequences."""
    return ((start, 256), *_pack(64, count))


_COARSE_WHOLE = [_whole(size) for size in _COARSE_SIZES]
_COARSE_LATER = [(later,) for later in _COARSE_LATER_SLICES]
_COARSE_PACKED = [_pack(length, count) for length, count in _COARSE_PACKS]

COARSE: tuple[Slices, ...] = (*_COARSE_WHOLE, *_COARSE_LATER, *_COARSE_PACKED)
"""What is measured first: enough of each kind for a first fit."""

_WHOLE_SEQUENCES = [_whole(size) for size in _SIZES]
_LATER_SLICES = [(later,) for later in product(_STARTS, _LATER_LENGTHS)]
_PACKED = [_pack(length, count) for length, count in product(_PACK_LENGTHS, _PACK_COUNTS)]
_HYBRIDS = [_hybrid(start, count) for start, count in product(_HYBRID_STARTS, _HYBRID_COUNTS)]

CANDIDATES: tuple[Slices, ...] = (*_WHOLE_SEQUENCES, *_LATER_SLICES, *_PACKED, *_HYBRIDS)

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
        start = _draw_size(draw, 32, longest_context)
        later = (start, _draw_size(draw, 8, longest))
        yield _whole(_draw_size(draw, 8, longest))
        yield (later,)
        yield pack
        yield (later, *pack[:8])


def _draw_pack(draw: random.Random, longest: int) -> Slices:
    # Up to 24 short sequences, as in packs of a run.
    count = draw.randint(2, 24)
    most = min(512, longest)
    lengths = [_draw_size(draw, 4, most) for _ in range(count)]
    return tuple((0, length) for length in lengths)


def _draw_size(draw: random.Random, least: int, most: int) -> int:
    """Draw a size, each doubling as likely as any other."""
    most = max(least, most)
    exponent = draw.uniform(math.log(least), math.log(most))
    return round(math.exp(exponent))
