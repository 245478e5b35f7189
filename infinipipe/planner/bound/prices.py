"""Bounds by prices, for the bytes of a stage `held` and the seconds of it and of a stage `busy`.

What chunks keep on a stage is never more than its room, so the bytes of each chunk times the
seconds from its F to its B add up to at most room * makespan. Those seconds are at least its trip:
F and B on the stage and on all below, and the transfers. The transient bytes of its own F and B
count as well while these run. And F, B and recompute on a stage take no longer than the makespan.
So with prices m, n >= 0 of a second, m + n = 1, and p >= 0 of the room

    makespan * (1 + p) >= sum over chunks of
        m * (F + B + recompute on held) + n * (F + B on busy) + p * bytes * trip / room.

A chunk of t tokens costs at least the sum over its tokens of a/t + b + c*t, with a, b and c
straight in the position x: its pairs are the sum of x. And the tokens of its context are at least
the sum of (x - (t + 1) / 2) / t, over the tokens of long sequences or of all: that is at most
l * s / t <= s for the slice of l tokens after s others, and at most 0 for a whole sequence. Every
token pays at least what it would at the t and with the recompute that are best for it. That is the
least of straight functions, so concave: between two positions it is at least the straight line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from infinipipe.aliases import Bools, Floats
from infinipipe.costs.rates import TINY, ChunkRates, SizeRates
from infinipipe.planner.bound.ends import Charges, Ends

# Sequences longer than this part of the longest pay for contexts. The others, with their tokens
# at low positions, would rather gain by it.
_LONG = 0.25

# Positions of a class of sequences: the first, and the others from a 32nd of the longest on. More
# of them follow the concave price closer, and each costs time.
_NUM_POSITIONS = 9
_FIRST_PART = 1 / 32

# Prices are climbed by these factors: first far, then close. Finer ones take longer.
_STEPS = (3.0, 1.5)
# A step must gain so much to be followed by another one: less is not worth its time.
_LEAST_GAIN = 2e-5


class Point(NamedTuple):
    """The prices of the proof. All of them give a bound; good ones give a high one."""

    m: float
    """Of a second on `held`, at most 1."""
    p: float
    """Of all the room on `held`."""

    @property
    def n(self) -> float:
        """Of a second on `busy`."""
        return 1 - self.m


FREE = Point(m=0.0, p=0.0)
"""Memory costs nothing, and only the seconds of `busy` do."""

# Where the climb begins: any prices but 0, which no factor changes. Most good ones are not far.
_START = Point(m=0.1, p=0.012)


class _Share(NamedTuple):
    """What a token pays of the seconds of a chunk of t tokens: a/t + b; (positions, ranges)."""

    a: Floats
    b: Floats


class _Terms(NamedTuple):
    """What a token pays at some prices: a/t + b + c*t in a chunk of t tokens.

    Arrays are (2, positions, ranges): with no recompute, and with that of all layers. In between
    is the mean of both.
    """

    a: Floats
    b: Floats
    c: Floats


class Prices:
    """The proof's sum over chunks, for two stages and any prices."""

    def __init__(
        self, rates: ChunkRates, lengths: Floats, held: int, busy: int, *, forced: float
    ) -> None:
        """Take lengths, longest first, and the seconds of recompute that they force on `busy`."""
        self._sizes = rates.sizes
        self._num_sequences = len(lengths)
        self._num_tokens = float(lengths.sum())
        self._forced = forced
        positions = _positions(lengths)
        self._weights = positions.weights

        held_work = rates.work[held]
        work = _token_share(held_work, positions)
        recompute = _token_share(rates.recompute, positions)
        num_layers = rates.num_layers[held]
        recomputed_a = work.a + num_layers * recompute.a
        recomputed_b = work.b + num_layers * recompute.b
        self._held_a = np.stack([work.a, recomputed_a])
        self._held_b = np.stack([work.b, recomputed_b])
        self._held_per_slice = held_work.per_slice.item()

        busy_work = rates.work[busy]
        self._busy = _token_share(busy_work, positions)
        self._busy_per_slice = busy_work.per_slice.item()
        self._dearest_recompute_s = _dearest_recompute_seconds(rates, busy, lengths[0])

        # bytes * trip = kept * t * (trip.a + trip.b * t), and a token's share is a t-th of it.
        kept = _kept_bytes(rates, held)
        room = rates.room[held]
        trip = _token_share(_trip_rates(rates, held), positions)
        transient = _token_share(_transient_rates(rates, held), positions)
        self._room_b = (kept * trip.a + transient.a) / room
        self._room_c = (kept * trip.b + transient.b) / room

    def bound(self, point: Point, ends: Ends | None, num_replicas: int) -> float:
        """Return the bound at some prices, with the ends of `busy` and its forced recompute."""
        terms = self._terms(point)
        token_prices = self._token_prices(terms)
        total = self._total(point, token_prices)
        charges = Charges(
            surcharges=self._surcharges(terms, token_prices),
            per_second=point.n,
            num_tokens=self._fewest_tokens(point, token_prices, num_replicas),
        )
        best = 0.0
        choices = (False, True) if self._forced else (False,)
        for counted in choices:
            forced = point.n * self._forced if counted else 0.0
            share = (total + forced) / num_replicas
            end = ends.price(charges, counted=counted) if ends else 0.0
            best = max(best, share + end)
        return best / (1 + point.p)

    def climb(self) -> Point:
        """Return good prices."""
        point = _START
        value = self._value(point)
        for step in _STEPS:
            for move in (_move_both, _move_room):
                for factor in (step, 1 / step):
                    point, value = self._follow(point, value, move, factor)
        return point

    def _follow(
        self, point: Point, value: float, move: Callable[[Point, float], Point], factor: float
    ) -> tuple[Point, float]:
        """Return the last point, and its value, that a move from the one before has improved."""
        while True:
            moved = move(point, factor)
            moved_value = self._value(moved)
            improved = moved_value > value * (1 + _LEAST_GAIN)
            # Rates below 0, which only a made-up profile has, can make all values negative: none of
            # them is a bound, and by the factor they would improve for ever.
            if not improved or moved_value <= 0:
                return point, value
            point = moved
            value = moved_value

    def _value(self, point: Point) -> float:
        # The bound without the ends, which take longest.
        terms = self._terms(point)
        token_prices = self._token_prices(terms)
        total = self._total(point, token_prices)
        forced = point.n * self._forced
        return (total + forced) / (1 + point.p)

    def _terms(self, point: Point) -> _Terms:
        m, p = point
        n = point.n
        a = m * self._held_a + n * self._busy.a
        b = m * self._held_b + n * self._busy.b + p * self._room_b
        c = p * self._room_c
        return _Terms(a, b, c)

    def _token_prices(self, terms: _Terms) -> Floats:
        """Return (positions,) the least that a token pays."""
        a, b, c = terms
        # a/t + c*t is least where both are equal.
        square = np.maximum(a, 0.0) / np.maximum(c, TINY)
        t = np.clip(np.sqrt(square), self._sizes.smallest, self._sizes.largest)
        price = a / t + b + c * t
        return np.asarray(price.min(axis=(0, 2)))

    def _surcharges(self, terms: _Terms, token_prices: Floats) -> Floats:
        """Return (ranges,) how much more than its tokens pay a chunk costs at least."""
        a, b, c = terms
        # a + beyond*t + c*t*t, which is least where its slope is 0.
        beyond = b - token_prices[:, None]
        level = -beyond / np.maximum(2 * c, TINY)
        t = np.clip(level, self._sizes.smallest, self._sizes.largest)
        surcharge = a + beyond * t + c * t * t
        return np.asarray(surcharge.min(axis=(0, 1)))

    def _total(self, point: Point, token_prices: Floats) -> float:
        """Return what all tokens pay, and one slice of each sequence."""
        tokens = float(self._weights @ token_prices)
        slices = self._num_sequences * self._slice_price(point)
        return tokens + slices

    def _slice_price(self, point: Point) -> float:
        held = point.m * self._held_per_slice
        busy = point.n * self._busy_per_slice
        return held + busy

    def _fewest_tokens(self, point: Point, token_prices: Floats, num_replicas: int) -> float:
        """Return a number of tokens that some replica has at least.

        It has its share of price and recompute, and no token costs more than the dearest one that
        is recomputed and a slice by itself.
        """
        if num_replicas == 1:
            return self._num_tokens
        share = self._total(point, token_prices) / num_replicas
        recompute = point.n * self._dearest_recompute_s
        dearest = float(token_prices.max()) + self._slice_price(point) + recompute
        return share / dearest


def _move_both(point: Point, factor: float) -> Point:
    return Point(min(1.0, point.m * factor), point.p * factor)


def _move_room(point: Point, factor: float) -> Point:
    return Point(point.m, point.p * factor)


def _kept_bytes(rates: ChunkRates, held: int) -> Floats:
    """Return (2, 1, 1) the bytes per token kept from F to B: with no recompute and with all."""
    sizes = rates.bytes
    num_layers = rates.num_layers[held]
    full = num_layers * (sizes.full + sizes.kv)
    recomputed = num_layers * sizes.input
    layers = np.stack([full, recomputed])[:, None]
    return np.asarray(layers + sizes.beside_layers[held])


def _trip_rates(rates: ChunkRates, held: int) -> SizeRates:
    """Return the seconds from F to B of a chunk, both included."""
    num_below = rates.num_stages - 1 - held
    transfers = rates.transfer * (2 * num_below)
    work = rates.work.total(slice(held, None))
    return work + transfers


def _transient_rates(rates: ChunkRates, held: int) -> SizeRates:
    """Return the transient bytes per token of F and B, times the seconds that these run."""
    forward = rates.bytes.forward_transient
    backward = float(rates.bytes.backward_transient[held].item())
    return rates.forward[held] * forward + rates.backward[held] * backward


def _dearest_recompute_seconds(rates: ChunkRates, busy: int, longest: float) -> float:
    """Return what recomputing all layers of a token takes at the end of the longest sequence."""
    layer = rates.recompute.least_per_token() + longest * rates.recompute.per_pair
    layers = rates.num_layers[busy] * layer
    return float(layers.item())


class _Positions(NamedTuple):
    """Positions in sequences between which prices are taken for straight."""

    x: Floats
    """(positions, 1)"""
    weights: Floats
    """(positions,) what is straight in between adds up by them to the sum over all tokens."""
    is_long: Bools
    """(positions, 1) whether it is of the long sequences, which pay for contexts."""


def _positions(lengths: Floats) -> _Positions:
    long = lengths > _LONG * lengths[0]
    x, weights = _class_positions(lengths[long])
    num_long = len(x)
    if not long.all():
        short_x, short_weights = _class_positions(lengths[~long])
        x = np.concatenate([x, short_x])
        weights = np.concatenate([weights, short_weights])
    is_long = np.arange(len(x)) < num_long
    return _Positions(x[:, None], weights, is_long[:, None])


def _class_positions(lengths: Floats) -> tuple[Floats, Floats]:
    """Return positions in sequences, and their weights."""
    longest = float(lengths[0])
    start = max(1.0, longest * _FIRST_PART)
    rest = np.geomspace(start, longest, _NUM_POSITIONS - 1)
    x = np.unique(np.round([1.0, *rest]))
    first = x[:-1, None]
    last = x[1:, None]
    # (positions - 1, lengths) the tokens of each sequence after `first` up to `last`. Each counts
    # for `last` by how far on it is, and for `first` by the rest.
    counts = np.clip(lengths, first, last) - first
    total = counts.sum(axis=1)
    distances = counts * (counts + 1) / 2
    far = distances.sum(axis=1) / (x[1:] - x[:-1])
    weights = np.zeros(len(x))
    weights[0] = len(lengths)
    weights[1:] += far
    weights[:-1] += total - far
    return x, weights


def _token_share(seconds: SizeRates, positions: _Positions) -> _Share:
    """Return what a token pays of the seconds of a chunk of t tokens, as a/t + b."""
    # Its part of the context is (x - (t + 1) / 2) / t = (x - 1/2) / t - 1/2.
    context = positions.is_long * seconds.per_context_token
    return _Share(
        a=seconds.constant + context * (positions.x - 0.5),
        b=seconds.rate + seconds.per_pair * positions.x - context / 2,
    )
