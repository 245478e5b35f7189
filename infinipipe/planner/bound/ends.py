"""What it costs on a stage to fill and to drain: idle time, and small chunks to shorten it.

Fill. F j, counted in the order of F, starts on the stage after the earlier F have run on stage 0
and itself on the stages between. Until then the stage runs only F and B of earlier chunks. So for
the trip y(j) of F down to it

    y(j) <= idle time before + sum over i < j of (F i + B i on the stage - F i on stage 0).

Where no term of the sum is more than g * y(i), y(j) <= idle time * (1 + g)**(j - 1), which bounds
the sizes of the first chunks. A context costs more in B than in F, but it is no longer than all
chunks before together.

Drain, mirrored. Take the last J chunks in the order of F. After B k of one of them, the stage
still runs later B, and F only of some of these J, as all others come before F k. So for the trip
z(k) of B up to stage `top`

    z(k) <= idle time after + slack + sum over later i among the J of
        (F i + B i on the stage - B i on top),

where the slack is all that B of the others can take longer on the stage than on `top`, which makes
it least.

As long as the bounds on the first and on the last chunks in the order of F do not add up to all
tokens, these are different chunks; each costs at least the surcharge of the best size that it can
have. The recompute of the B in these sums is time of the stage, too. Either it is not `counted`
elsewhere and passes for idle time here. Or it is counted, and adds to g. In the drain there is no
g for it, as B of any chunk may run then: only the smallest trip is left.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from infinipipe.aliases import Floats
from infinipipe.costs.rates import TINY, ChunkRates, SizeRanges, SizeRates

# Idle times that are tried, in smallest trips: from 1 to about 88 of them, in steps of 15 %.
# Closer ones lose less between two, more of them reach further, and each costs time.
_IDLE_TRIPS = 1.15 ** np.arange(33)
# Chunks at an end whose sizes are bounded. More of them may cost more, and take more time.
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
        added = work - rates.forward[0]
        self._fill = self._down.growth(added, early_context=True)
        num_layers = rates.num_layers[stage].item()
        added_counted = added + rates.recompute * num_layers
        self._fill_counted = self._down.growth(added_counted, early_context=True)

        slacks = _slack_seconds(rates, stage)
        top = int(np.argmin(slacks))
        transfers_to_top = rates.transfer * (stage - top)
        up_to_top = rates.backward.total(slice(top, stage)) + transfers_to_top
        self._up = Trip(sizes, up_to_top)
        added = work - rates.backward[top]
        self._drain = self._up.growth(added, early_context=False)
        # The last B goes on from `top` to stage 0.
        up = rates.backward.total(slice(stage)) + transfers
        self._least_up = Trip(sizes, up).least
        beyond_top = self._least_up - self._up.least
        self._slack = float(slacks[top]) - beyond_top

    def price(self, charges: Charges, *, counted: bool) -> float:
        """Return the least that idle time and surcharges cost, with recompute `counted` or not."""
        growth = self._fill_counted if counted else self._fill
        fill = self._down.price(growth, charges, slack=0.0)
        least_drain = charges.per_second * self._least_up
        if counted:
            return fill + least_drain
        drain = self._up.price(self._drain, charges, slack=self._slack)
        return fill + max(least_drain, drain)


def make_ends(rates: ChunkRates, stage: int) -> Ends | None:
    """Return the ends of a stage, or None for the first one, which waits for no other."""
    return Ends(rates, stage) if stage > 0 else None


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
        context_g = 0.0
        if early_context:
            # Chunks before have no more tokens than their trips have seconds for.
            per_token = self._seconds.least_per_token()
            context_g = _ratios(added.per_context_token, per_token).item()
        if max(g, context_g) > _MOST_GROWTH:
            unbounded = np.full(_MOST_CHUNKS - 1, np.inf)
            return np.append(1.0, unbounded)
        trips: list[float] = []
        before = 0.0
        # For each chunk before, the trips before that one.
        before_those = 0.0
        for _ in range(_MOST_CHUNKS):
            trip = 1 + g * before + context_g * before_those
            trips.append(trip)
            before_those += before
            before += trip
        return np.array(trips)

    def price(self, growth: Floats, charges: Charges, *, slack: float) -> float:
        """Return the least price of idle time and of the surcharges of chunks that it bounds.

        The chunks of this end are those that have less than half of the tokens.
        """
        if self.least <= 0:
            return 0.0
        idle = self.least * _IDLE_TRIPS
        # Between two idle times: the smaller one, and trips of the larger one.
        trips = idle[1:, None] * growth
        place = np.searchsorted(self._starts, trips, side="right") - 1
        beyond_constant = trips - self._constant[place]
        rate = np.maximum(TINY, self._rate[place])
        reached = beyond_constant / rate
        sizes = np.minimum(reached, self._sizes.largest[place])
        is_bounded = sizes.cumsum(axis=1) < charges.num_tokens / 2

        # A chunk may as well be smaller than it can be.
        cheapest = np.minimum.accumulate(charges.surcharges)
        surcharges = np.maximum(0.0, cheapest)[place]
        paid = (surcharges * is_bounded).sum(axis=1)
        counted_idle = np.maximum(0.0, idle - slack)
        waited = charges.per_second * counted_idle
        either = waited[:-1] + paid
        # Of more idle time than was tried only this is known.
        longest = waited[-1]
        return float(min(either.min(), longest))

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
