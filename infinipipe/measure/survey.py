"""Chooses which chunks to measure of a layer: where the fit is least to be trusted.

A coarse grid of whole sequences, slices with context and packs comes first. Then one candidate
after the other: the one farthest from everything measured, next to what the fit explains worst.
Then chunks drawn at random that the fit never sees. At last all are repeated in turns, so that no
drift of the machine falls on a few of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from infinipipe.aliases import Floats
from infinipipe.measure.candidates import CANDIDATES, COARSE, NUM_KINDS, draw_chunks
from infinipipe.measure.fit import Point, Slices, fit_layer_time, fitted_seconds
from infinipipe.profiles import LayerTime
from infinipipe.profiles.profile import SAMPLE_OPS, SampleOp

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
"""About half a minute. The slowest chunk, repeated five times, may take a quarter of it."""
QUICK = Effort(num_points=24, num_held_out=8, min_repeats=3, seconds=8.0, most_seconds=0.5)
"""About ten seconds, for little more than the coarse grid."""
_HELD_OUT_SHARE = 0.3
"""Of the time: about the share of the chunks that are held out."""
_MAX_REPEATS = 31
"""More would hardly move the median."""

_LEAST_DOUBT = 0.02
"""Added to the fit's error: where a fit is perfect, distance alone decides."""
_FARTHEST = 2.0
"""Doublings beyond which a chunk is no more interesting, or only extremes would be chosen."""


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
    """The repeats of each chunk."""
    held_out: list[Slices] = field(default_factory=list)
    _too_large: list[Slices] = field(default_factory=list)
    _fit: tuple[int, LayerTime] | None = None
    """The last fit, and of how many chunks it is."""
    _room_s: float = math.inf
    """For all repeats of what is chosen."""
    _started: float = 0.0
    _deadline: float = 0.0

    def run(self) -> None:
        """Measure everything.

        Raises:
            OutOfMemory: not even two sequences of different lengths could be measured.
        """
        self._started = self.clock()
        self._deadline = self._started + self.effort.seconds
        for slices in COARSE:
            self._measure(slices)
        if not self._can_fit():
            raise OutOfMemory
        self._measure_doubtful()
        self._measure_held_out()
        self._repeat()

    def median(self, slices: Slices, op: SampleOp) -> float:
        """Return the median seconds of an op."""
        repeats = [seconds[op] for seconds in self.times[slices]]
        return float(np.median(repeats))

    @property
    def whole_sizes(self) -> list[int]:
        """Lengths of the whole sequences that were measured to fit, ascending."""
        return [slices[0][1] for slices in self._whole_sequences()]

    def _measure_doubtful(self) -> None:
        """Measure candidates while there are any and the effort allows."""
        self._room_s = (1 - _HELD_OUT_SHARE) * self.effort.seconds
        while len(self.times) < self.effort.num_points:
            candidate = self._most_doubtful()
            if candidate is None:
                return
            self._measure(candidate)

    def _measure_held_out(self) -> None:
        """Measure chunks that the fit never sees."""
        longest_context = max(Point(slices, 0.0).context for slices in self.times)
        for drawn in draw_chunks(self.whole_sizes[-1], longest_context):
            if len(self.held_out) == self.effort.num_held_out:
                return
            # One of each kind, however slow the machine is.
            has_all_kinds = len(self.held_out) >= NUM_KINDS
            self._room_s = self.effort.seconds if has_all_kinds else math.inf
            if drawn in self.times:
                continue
            # Said before it is measured, so that no fit in between takes it in.
            self.held_out.append(drawn)
            if not self._measure(drawn):
                self.held_out.pop()

    def _repeat(self) -> None:
        """Run all chunks in turns, each at most for its share of the time."""
        order = list(self.times)
        draw = random.Random(8)
        left = max(0.0, self._deadline - self.clock())
        share = left / len(order)
        pending = True
        while pending:
            pending = False
            draw.shuffle(order)
            for slices in order:
                if self._wants_repeat(slices, share):
                    ran = self._measure(slices)
                    pending = pending or ran

    def _wants_repeat(self, slices: Slices, share: float) -> bool:
        repeats = self.times[slices]
        if len(repeats) < self.effort.min_repeats:
            return True
        if len(repeats) == _MAX_REPEATS or self.clock() >= self._deadline:
            return False
        spent = sum(_total(seconds) for seconds in repeats)
        return spent < share

    def _measure(self, slices: Slices) -> bool:
        """Run a chunk once more, unless it is too large or too slow; return whether it ran."""
        if slices not in self.times and self._is_out_of_reach(slices):
            return False
        try:
            seconds = self.timer(slices)
        except OutOfMemory:
            self._too_large.append(slices)
            return False
        self.times.setdefault(slices, []).append(seconds)
        self.progress(self._share_done())
        return True

    def _is_out_of_reach(self, slices: Slices) -> bool:
        return self._is_too_large(slices) or self._takes_too_long(slices)

    def _is_too_large(self, slices: Slices) -> bool:
        """Return whether a chunk with at most as many tokens and as much context did not fit."""
        point = Point(slices, 0.0)
        for failed in self._too_large:
            smaller = Point(failed, 0.0)
            if smaller.tokens <= point.tokens and smaller.context <= point.context:
                return True
        return False

    def _takes_too_long(self, slices: Slices) -> bool:
        """Return whether there is no time for all repeats of one more chunk, by the fit so far."""
        if not self._can_fit():
            return False
        expected = self._expected(slices)
        if expected > self.effort.most_seconds:
            return True
        chosen = sum(_total(repeats[0]) for repeats in self.times.values())
        return self.effort.min_repeats * (chosen + expected) > self._room_s

    def _expected(self, slices: Slices) -> float:
        """Return the seconds of one repeat."""
        points = [Point(slices, 0.0)]
        return float(fitted_seconds(self._fitted(), points)[0])

    def _fitted(self) -> LayerTime:
        """Return the fit of all ops together, made again when there is a new chunk to fit."""
        num_points = len(self.times) - len(self.held_out)
        if self._fit is None or self._fit[0] != num_points:
            self._fit = (num_points, fit_layer_time(self._points()))
        return self._fit[1]

    def _can_fit(self) -> bool:
        """Return whether there are two whole sequences, without which a curve has no slope."""
        return len(self._whole_sequences()) >= 2

    def _whole_sequences(self) -> list[Slices]:
        """Return the measured chunks that are one whole sequence, by length."""
        fitted = [slices for slices in self.times if slices not in self.held_out]
        return sorted(slices for slices in fitted if Point(slices, 0.0).is_whole_sequence)

    def _points(self) -> list[Point]:
        """Return the seconds of all ops together of the chunks to fit."""
        fitted = [slices for slices in self.times if slices not in self.held_out]
        return [Point(slices, self._median_of_all(slices)) for slices in fitted]

    def _median_of_all(self, slices: Slices) -> float:
        return sum(self.median(slices, op) for op in SAMPLE_OPS)

    def _most_doubtful(self) -> Slices | None:
        """Return the candidate that promises to correct the fit most.

        None if all are measured, too large or too slow.
        """
        points = self._points()
        doubts = self._doubts(points)
        places = np.array([_place(point) for point in points])
        best = None
        best_score = 0.0
        for slices in CANDIDATES:
            if slices in self.times or self._is_out_of_reach(slices):
                continue
            score = self._score(slices, places, doubts)
            if score > best_score:
                best = slices
                best_score = score
        return best

    def _score(self, slices: Slices, places: Floats, doubts: list[float]) -> float:
        """Return what measuring a candidate promises, for its time."""
        place = _place(Point(slices, 0.0))
        distances = np.linalg.norm(places - place, axis=1)
        nearest = int(distances.argmin())
        distance = min(float(distances[nearest]), _FARTHEST)
        gain = distance * (_LEAST_DOUBT + doubts[nearest])
        # What takes more than its share of the time must be worth it.
        share = self._room_s / (self.effort.min_repeats * self.effort.num_points)
        return gain / (1 + self._expected(slices) / share)

    def _doubts(self, points: list[Point]) -> list[float]:
        """Return each point's relative error.

        That of the fit, or of the line between its neighbours if larger: the fit's curve bends at
        every whole sequence, so these need the second.
        """
        fitted = fitted_seconds(self._fitted(), points)
        measured = np.array([point.seconds for point in points])
        doubts: list[float] = np.abs(fitted / measured - 1).tolist()
        index_of = {point.slices: index for index, point in enumerate(points)}
        whole = [index_of[slices] for slices in self._whole_sequences()]
        for left, middle, right in zip(whole, whole[1:], whole[2:], strict=False):
            between = _interpolate(points[left], points[middle], points[right])
            doubt = abs(between / points[middle].seconds - 1)
            doubts[middle] = max(doubts[middle], doubt)
        return doubts

    def _share_done(self) -> float:
        """Return the share of the time that has passed.

        What is left is what the deadline leaves, or what the least repeats need if that is more.
        """
        passed = self.clock() - self._started
        if passed == 0:
            return 0.0
        measured = 0.0
        missing = 0.0
        for repeats in self.times.values():
            each = _total(repeats[0])
            measured += len(repeats) * each
            missing_repeats = max(0, self.effort.min_repeats - len(repeats))
            missing += missing_repeats * each
        # Where other programs want the machine too, more time passes than is measured.
        missing_s = missing * passed / measured
        left = max(0.0, self._deadline - self.clock(), missing_s)
        return passed / (passed + left)


def _total(seconds: Seconds) -> float:
    """Return the seconds of all ops of one repeat."""
    return sum(seconds.values())


def _interpolate(left: Point, middle: Point, right: Point) -> float:
    """Return the seconds that the line between its neighbours gives a chunk."""
    tokens = [left.tokens, right.tokens]
    seconds = [left.seconds, right.seconds]
    return float(np.interp(middle.tokens, tokens, seconds))


def _place(point: Point) -> Floats:
    """Return where a chunk stands among others, in doublings."""
    # Context and what continues it may be 0, which has no logarithm.
    axes = (
        point.tokens,
        len(point.slices),
        1 + point.context,
        1 + point.continued,
    )
    return np.log2(axes)
