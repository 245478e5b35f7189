"""What it costs on a stage to fill and to drain: idle time, and small chunks to shorten it.

Take the F on the stage with which half of the replica's tokens have begun. Idle time before it
counts for the fill, after it for the drain, so none counts twice. First chunks with less than half
of the tokens start before it; B of last chunks with less than half end after it.

Fill. F j, counted in the order of F, starts on the stage after the earlier F have run on stage 0
and itself on the stages between. Until then the stage runs only F and B of earlier chunks. So for
the trip y(j) of F down to it

    y(j) <= idle time before + sum over i < j of (F i + B i on the stage - F i on stage 0).

No term of the sum, without what tokens of a context add, is more than g * y(i). Contexts would need
a large g, as F and B here have more of them than F on the way. But a context is no longer than all
chunks before, whose tokens are at most y / (least seconds per token). So there is an h with

    y(j) <= idle time + g * sum over i < j of y(i) + h * sum over i < j of sum over k < i of y(k),

and y(1) <= idle time: that bounds the sizes of the first chunks, one after the other.

Drain, mirrored. Take the last J chunks in the order of F. After B k of one of them, the stage
still runs later B, and F only of some of these J, as all others come before F k. So for the trip
z(k) of B up to stage `top`

    z(k) <= idle time after + slack + sum over later i among the J of
        (F i + B i on the stage - B i on top),

where the slack is all that B of the others can take longer on the stage than on `top`, which makes
it least. Here contexts count in g, as the chunks that hold them need not be among the J.

As long as the bounds on the first and on the last chunks in the order of F stay below half of the
tokens each, these are different chunks; each costs at least the surcharge of the best size that it
can have. The recompute of the B in these sums is time of the stage, too. Either it is not `counted`
elsewhere and passes for idle time here. Or it is counted, and adds to g. In the drain there is no
g for it, as B of any chunk may run then: only the smallest trip is left.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from infinipipe.aliases import Floats, Ints
from infinipipe.costs import ChunkRates
from infinipipe.costs.rates import TINY, SizeRanges, SizeRates

# Idle times that are tried, in smallest trips: from 1 to about 88 of them, in steps of 15 %.
# Closer ones lose less between two, more of them reach further, and each costs time.
_IDLE_TRIPS = 1.15 ** np.arange(33)
# Chunks at an end whose sizes are bounded. More would raise the bound a little, and take longer to
# compute.
_MOST_CHUNKS = 48
# Of no use beyond: where the next chunk may be so much larger, it may as well be of any size.
_MOST_GROWTH = 1e3


class Charges(NamedTuple):
    """What chunks and idle time of a replica cost at some prices."""

    surcharges: Floats
    """(ranges,) what a chunk of such a size costs at least besides what its tokens pay."""
    per_second: float
    """Of idle time."""
    num_tokens: float
    """That the replica has at least."""


class Ends:
    """The two ends of a stage that is not the first."""

    def __init__(self, rates: ChunkRates, stage: int) -> None:
        sizes = rates.sizes
        work = rates.work[stage]
        transfers = rates.transfer * stage
        down = rates.forward.total(slice(stage)) + transfers
        self._down = Trip(sizes, down)
        self._added_down = work - rates.forward[0]
        self._recompute = rates.recompute * rates.num_layers[stage].item()

        slacks = _slack_seconds(rates, stage)
        top = int(np.argmin(slacks))
        transfers_to_top = rates.transfer * (stage - top)
        up_to_top = rates.backward.total(slice(top, stage)) + transfers_to_top
        self._up = Trip(sizes, up_to_top)
        self._added_up = work - rates.backward[top]
        # The last B goes on from `top` to stage 0.
        up = rates.backward.total(slice(stage)) + transfers
        self._least_up = Trip(sizes, up).least
        beyond_top = self._least_up - self._up.least
        self._slack = float(slacks[top]) - beyond_top

    def least_cost(self, charges: Charges, *, counted: bool) -> float:
        """Return the least that idle time and surcharges cost, with recompute `counted` or not."""
        least_drain = charges.per_second * self._least_up
        if counted:
            return self._fill_counted.least_cost(charges) + least_drain
        drain = self._drain.least_cost(charges)
        return self._fill.least_cost(charges) + max(least_drain, drain)

    # What a step does not ask for is not computed.

    @cached_property
    def _fill(self) -> _End:
        growth = self._down.growth(self._added_down, early_context=True)
        return _End(self._down, growth, slack=0.0)

    @cached_property
    def _fill_counted(self) -> _End:
        added = self._added_down + self._recompute
        growth = self._down.growth(added, early_context=True)
        return _End(self._down, growth, slack=0.0)

    @cached_property
    def _drain(self) -> _End:
        growth = self._up.growth(self._added_up, early_context=False)
        return _End(self._up, growth, slack=self._slack)


def make_ends(rates: ChunkRates, stage: int) -> Ends | None:
    """Return the ends of a stage, or None for the first one, which waits for no other."""
    return Ends(rates, stage) if stage > 0 else None


class _End:
    """The chunks of one end, the outermost first, and their largest sizes for every idle time."""

    def __init__(self, trip: Trip, growth: Floats, *, slack: float) -> None:
        self._least = trip.least
        idle = max(TINY, trip.least) * _IDLE_TRIPS
        # (idle times,) what of them is not slack.
        self._idle = np.maximum(0.0, idle - slack)
        # (idle times - 1, chunks) trips of the larger of two idle times.
        trips = idle[1:, None] * growth
        self._place = trip.place(trips)
        largest = trip.largest_sizes(trips, self._place)
        self._num_tokens = largest.cumsum(axis=1)

    def least_cost(self, charges: Charges) -> float:
        """Return the least that idle time and the surcharges of these chunks cost.

        Those with which the end may have half of the replica's tokens are no longer of it.
        """
        if self._least <= 0:
            return 0.0
        is_bounded = self._num_tokens < charges.num_tokens / 2
        # A chunk may as well be smaller than it can be.
        cheapest = np.minimum.accumulate(charges.surcharges)
        surcharges = np.maximum(0.0, cheapest)[self._place]
        paid = (surcharges * is_bounded).sum(axis=1)
        waited = charges.per_second * self._idle
        # Between two idle times: the smaller one, and trips of the larger one.
        either = waited[:-1] + paid
        # Of more idle time than was tried only this is known.
        longest = waited[-1]
        return float(min(either.min(), longest))


class Trip:
    """The least seconds of a chunk's trip by its size: y or z of the proof."""

    def __init__(self, sizes: SizeRanges, seconds: SizeRates) -> None:
        self._sizes = sizes
        self._seconds = seconds
        # Every token has a pair and every chunk a slice.
        self._constant = seconds.constant + seconds.per_slice
        self._rate = seconds.rate + seconds.per_pair
        starts = self._constant + self._rate * sizes.smallest
        self._starts = starts
        self.least = float(starts[0])

    def growth(self, added: SizeRates, *, early_context: bool) -> Floats:
        """Return (chunks,) the most that the trip of each next chunk can be, in idle times.

        Each chunk adds at most `added` to the trips of those after it. With `early_context`
        contexts are no longer than all chunks before, else they may be of any length.
        """
        g = self._largest_ratio(added, any_context=not early_context)
        h = 0.0
        if early_context:
            # Chunks before have no more tokens than their trips have seconds for.
            per_token = self._seconds.least_per_token()
            h = _ratios(added.per_context_token, per_token).item()
        if max(g, h) > _MOST_GROWTH:
            unbounded = np.full(_MOST_CHUNKS - 1, np.inf)
            return np.append(1.0, unbounded)
        trips: list[float] = []
        # The sums of the proof: of the trips before, and for each of these of those before it.
        before = 0.0
        before_those = 0.0
        for _ in range(_MOST_CHUNKS):
            trip = 1 + g * before + h * before_those
            trips.append(trip)
            before_those += before
            before += trip
        return np.array(trips)

    def place(self, trips: Floats) -> Ints:
        """Return the ranges of the largest sizes of chunks whose trips take so long."""
        return np.searchsorted(self._starts, trips, side="right") - 1

    def largest_sizes(self, trips: Floats, place: Ints) -> Floats:
        """Return the largest sizes of chunks whose trips take so long, in their ranges."""
        beyond_constant = trips - self._constant[place]
        rate = np.maximum(TINY, self._rate[place])
        reached = beyond_constant / rate
        return np.minimum(reached, self._sizes.largest[place])

    def _largest_ratio(self, added: SizeRates, *, any_context: bool) -> float:
        """Return g of the proof: the most that any part of `added` is of the same part of the trip.

        What is straight in the size is compared at the ends of all ranges.
        """
        own = self._seconds
        constant = added.constant + np.maximum(0.0, added.per_context)
        rate = added.rate + np.maximum(0.0, added.per_continued_token)
        tops = [added.per_pair, added.per_slice]
        bottoms = [own.per_pair, own.per_slice]
        for size in (self._sizes.smallest, self._sizes.largest):
            tops.append(constant + rate * size)
            bottoms.append(own.constant + own.rate * size)
        if any_context:
            tops.append(added.per_context_token)
            bottoms.append(own.per_context_token)
        ratios = _ratios(np.concatenate(tops), np.concatenate(bottoms))
        return float(ratios.max())


def _ratios(tops: Floats, bottoms: Floats) -> Floats:
    # Less than nothing would only make the proof's sums smaller, so it counts as nothing.
    return np.asarray(np.maximum(0.0, tops) / np.maximum(TINY, bottoms))


def _slack_seconds(rates: ChunkRates, stage: int) -> Floats:
    """Return (stage,) the most that B of all chunks can take longer than on each stage before."""
    backward = rates.backward
    longer = backward[stage] - backward[:stage]
    lengths = rates.lengths
    # Each token has at most a slice and a context by itself, with the longest sequence before it.
    context = np.maximum(0.0, longer.per_context_token)
    per_token = (
        np.maximum(0.0, longer.most_per_token())
        + np.maximum(0.0, longer.per_slice)
        + np.maximum(0.0, longer.per_context)
        + np.maximum(0.0, longer.per_continued_token)
        + context * lengths[0]
    )
    num_pairs = lengths * (lengths + 1) / 2
    pairs = np.maximum(0.0, longer.per_pair) * num_pairs.sum()
    slacks = per_token * lengths.sum() + pairs
    return np.asarray(slacks[:, 0])
