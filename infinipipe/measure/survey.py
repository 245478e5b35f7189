"""Chooses which chunks to measure of a layer: where the fit is least to be trusted.

A coarse grid of whole sequences, slices with context and packs comes first. Then one candidate after the
other: the one farthest from everything measured, next to what the fit explains worst. Then chunks drawn at
random that the fit never sees. At last all are repeated in turns, so that no drift of the machine falls on
a few of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from infinipipe.aliases import Floats
from infinipipe.measure.fit import Point, Slices, fit_layer_time, fitted_seconds
from infinipipe.profiles.profile import LayerTime, SampleOp

Seconds = dict[SampleOp, float]


class OutOfMemory(Exception):
    """A chunk does not fit into the device's memory."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much to measure."""

    num_points: int
    """To fit."""
    num_held_out: int
    min_repeats: int
    seconds: float
    """Of all repeats together; chunks are chosen so that `min_repeats` of each fit into it."""
    most_seconds: float
    """Of one repeat of one chunk."""


FULL = Effort(num_points=40, num_held_out=20, min_repeats=5, seconds=26.0, most_seconds=1.3)
QUICK = Effort(num_points=24, num_held_out=8, min_repeats=3, seconds=8.0, most_seconds=0.5)
_HELD_OUT_SHARE = 0.3
"""Of the time."""
_NUM_KINDS = 4

_MAX_REPEATS = 31
_SIZES = tuple(sorted({1, *(2**k for k in range(4, 17)), *(3 * 2**k for k in range(5, 15))}))
_STARTS = (64, 256, 1024, 4096, 16384, 65536)
_COARSE_SIZES = (1, 16, 64, 256, 1024, 4096, 16384)
COARSE: tuple[Slices, ...] = (
    *(((0, size),) for size in _COARSE_SIZES),
    *(
        ((start, length),)
        for start, length in ((1024, 16), (16384, 16), (1024, 256), (8192, 256), (4096, 1024))
    ),
    *(((0, length),) * count for length, count in ((16, 4), (16, 32), (64, 16), (256, 4))),
)
_CANDIDATES: tuple[Slices, ...] = (
    *(((0, size),) for size in _SIZES),
    *(((start, length),) for start, length in product(_STARTS, (16, 64, 256, 1024, 4096))),
    *(((0, length),) * count for length, count in product((16, 64, 256, 1024), (2, 4, 16, 64))),
    *(((start, 256), *((0, 64),) * count) for start, count in product((256, 4096), (2, 8))),
)
# Where a fit is perfect, distance alone decides.
_LEAST_DOUBT, _FARTHEST = 0.02, 2.0


@dataclass
class Survey:
    """Measurements of one layer.

    Args:
        timer: runs a chunk once and returns its seconds; raises `OutOfMemory`.
        clock: tells the time in seconds.
        progress: called with the share of the work that is done.
    """

    timer: Callable[[Slices], Seconds]
    effort: Effort
    clock: Callable[[], float]
    progress: Callable[[float], None]
    times: dict[Slices, list[Seconds]] = field(default_factory=dict)
    held_out: list[Slices] = field(default_factory=list)
    _too_large: list[Slices] = field(default_factory=list)
    _fit: tuple[int, LayerTime] | None = None
    _room_s: float = math.inf
    """For all repeats of what is chosen."""

    def run(self) -> None:
        """Measure everything.

        Raises:
            OutOfMemory: not even two sequences of different lengths could be measured.
        """
        self._started = self.clock()
        self._deadline = self._started + self.effort.seconds
        for slices in COARSE:
            self._measure(slices)
        if len(self._whole()) < 2:
            raise OutOfMemory
        self._room_s = (1 - _HELD_OUT_SHARE) * self.effort.seconds
        while len(self.times) < self.effort.num_points and (candidate := self._most_doubtful()):
            self._measure(candidate)
        for drawn in self._draw_held_out():
            if len(self.held_out) == self.effort.num_held_out:
                break
            # One of each kind, however slow the machine is.
            self._room_s = math.inf if len(self.held_out) < _NUM_KINDS else self.effort.seconds
            if drawn not in self.times:
                self.held_out.append(drawn)
                if not self._measure(drawn):
                    self.held_out.pop()
        self._repeat()

    def median(self, slices: Slices, op: SampleOp) -> float:
        """Return the median seconds of an op."""
        return float(np.median([seconds[op] for seconds in self.times[slices]]))

    @property
    def whole_sizes(self) -> list[int]:
        """Lengths of the whole sequences that were measured to fit, ascending."""
        return sorted(self._whole())

    def _measure(self, slices: Slices) -> bool:
        """Run a chunk once more, unless it is too large or takes too long; return whether it ran."""
        if slices not in self.times and (
            self._is_too_large(slices) or self._takes_too_long(slices)
        ):
            return False
        try:
            seconds = self.timer(slices)
        except OutOfMemory:
            self._too_large.append(slices)
            return False
        self.times.setdefault(slices, []).append(seconds)
        self.progress(self._share_done())
        return True

    def _is_too_large(self, slices: Slices) -> bool:
        """Return whether a chunk with at most as many tokens and as much context did not fit."""
        point = Point(slices, 0.0)
        smaller = (Point(failed, 0.0) for failed in self._too_large)
        return any(p.tokens <= point.tokens and p.context <= point.context for p in smaller)

    def _takes_too_long(self, slices: Slices) -> bool:
        """Return whether there is no time for all repeats of one more chunk, as the fit so far expects."""
        if len(self._whole()) < 2:
            return False
        chosen, expected = (
            sum(sum(repeats[0].values()) for repeats in self.times.values()),
            self._expected(slices),
        )
        return (
            expected > self.effort.most_seconds
            or self.effort.min_repeats * (chosen + expected) > self._room_s
        )

    def _expected(self, slices: Slices) -> float:
        """Return the seconds of one repeat."""
        return float(fitted_seconds(self._fitted(), [Point(slices, 0.0)])[0])

    def _fitted(self) -> LayerTime:
        """Return the fit of all ops together, made again when there is a new chunk to fit."""
        num_points = len(self.times) - len(self.held_out)
        if self._fit is None or self._fit[0] != num_points:
            self._fit = num_points, fit_layer_time(self._points())
        return self._fit[1]

    def _whole(self) -> dict[int, Slices]:
        """Return the measured chunks that are one whole sequence, by length."""
        return {
            s[0][1]: s
            for s in sorted(self.times)
            if len(s) == 1 and not s[0][0] and s not in self.held_out
        }

    def _points(self) -> list[Point]:
        """Return the seconds of all ops together of the chunks to fit."""
        ops: tuple[SampleOp, ...] = ("forward", "backward", "recomputed")
        chunks = (slices for slices in self.times if slices not in self.held_out)
        return [Point(slices, sum(self.median(slices, op) for op in ops)) for slices in chunks]

    def _most_doubtful(self) -> Slices | None:
        """Return the candidate that promises to correct the fit most, None if all are measured or too slow."""
        points, fit = self._points(), self._fitted()
        doubts = self._doubts(points, fitted_seconds(fit, points))
        known = np.array([_place(point) for point in points])
        share = self._room_s / (self.effort.min_repeats * self.effort.num_points)
        best, best_score = None, 0.0
        for slices in _CANDIDATES:
            if slices in self.times or self._is_too_large(slices) or self._takes_too_long(slices):
                continue
            distances = np.linalg.norm(known - _place(Point(slices, 0.0)), axis=1)
            nearest = int(distances.argmin())
            gain = min(float(distances[nearest]), _FARTHEST) * (_LEAST_DOUBT + doubts[nearest])
            # What takes more than its share of the time must be worth it.
            score = gain / (1 + self._expected(slices) / share)
            if score > best_score:
                best, best_score = slices, score
        return best

    def _doubts(self, points: list[Point], fitted: Floats) -> list[float]:
        """Return each point's relative error: that of the fit, or of the line between its neighbours if larger.

        The fit's curve bends at every whole sequence, so these need the second.
        """
        doubts = [
            abs(float(f) / point.seconds - 1) for point, f in zip(points, fitted, strict=True)
        ]
        place = {point.slices: index for index, point in enumerate(points)}
        whole = [place[slices] for _, slices in sorted(self._whole().items())]
        for left, middle, right in zip(whole, whole[1:], whole[2:], strict=False):
            x = [points[i].tokens for i in (left, middle, right)]
            y = [points[i].seconds for i in (left, middle, right)]
            between = float(np.interp(x[1], x[::2], y[::2]))
            doubts[middle] = max(doubts[middle], abs(between / y[1] - 1))
        return doubts

    def _draw_held_out(self) -> Iterator[Slices]:
        """Yield chunks within what was measured: whole sequences, slices with context, packs and hybrids in turn."""
        draw = random.Random(7)
        lengths, starts = sorted(self._whole()), [Point(s, 0.0).context for s in self.times]

        def size(least: int, most: int) -> int:
            return round(math.exp(draw.uniform(math.log(least), math.log(max(least, most)))))

        for _ in range(1000):
            pack = tuple((0, size(4, min(512, lengths[-1]))) for _ in range(draw.randint(2, 24)))
            piece = (size(32, max(starts)), size(8, lengths[-1]))
            yield from (((0, size(8, lengths[-1])),), (piece,), pack, (piece, *pack[:8]))

    def _repeat(self) -> None:
        """Run all chunks in turns, each at most for its share of the time."""
        order, draw = list(self.times), random.Random(8)
        share = max(0.0, self._deadline - self.clock()) / len(order)
        busy = True
        while busy:
            busy = False
            draw.shuffle(order)
            for slices in order:
                repeats = len(self.times[slices])
                spent = sum(sum(seconds.values()) for seconds in self.times[slices])
                more = spent < share and repeats < _MAX_REPEATS and self.clock() < self._deadline
                if repeats < self.effort.min_repeats or more:
                    busy |= self._measure(slices)

    def _share_done(self) -> float:
        """Return the share of the time: what has passed, and what the deadline leaves or the least repeats need."""
        passed = self.clock() - self._started
        seconds = [(len(repeats), sum(repeats[0].values())) for repeats in self.times.values()]
        measured = sum(count * each for count, each in seconds)
        missing = sum(max(0, self.effort.min_repeats - count) * each for count, each in seconds)
        # Where other programs want the machine too, more time passes than is measured.
        left = max(self._deadline - self.clock(), missing * passed / measured)
        return passed / (passed + max(left, 0.0)) if passed else 0.0


def _place(point: Point) -> Floats:
    """Return where a chunk stands among others, in doublings."""
    return np.log2([point.tokens, len(point.slices), 1 + point.context, 1 + point.continued])
