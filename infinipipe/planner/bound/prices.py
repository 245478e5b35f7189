"""Bounds by prices, for the bytes of a stage `held` and the seconds of it and of a stage `busy`.

What chunks keep on a stage is never more than its room, so the bytes of each chunk times the
seconds from its F to its B add up to at most room * makespan. Those seconds are at least its stay:
F and B on the stage and on all below, and the transfers. The transient bytes of its own F and B
count as well while these run: a limit is checked against each op's peak, so each op may be taken to
hold its peak all the time it runs. In a split sequence's first B the slot is charged with all
gradients, which is more than those that are missing. And F, B and recompute on a stage take no
longer than the makespan. So with prices m, n >= 0 of a second, m + n = 1, and p >= 0 of the room

    makespan * (1 + p) >= sum over chunks of
        m * (F + B + recompute on held) + n * (F + B on busy) + p * bytes * stay / room.

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

from infinipipe.aliases import Floats
from infinipipe.costs import ChunkRates
from infinipipe.costs.rates import TINY, SizeRates
from infinipipe.planner.bound.ends import Charges, Ends
from infinipipe.planner.bound.positions import Positions, make_positions

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


_Move = Callable[[Point, float], Point]
"""Prices that are larger or smaller by a factor."""


class _Share(NamedTuple):
    """What a token pays of the seconds of a chunk of t tokens: a/t + b."""

    a: Floats
    b: Floats


class _Shares(NamedTuple):
    """What a token pays at a price of 1, in arrays of (positions, ranges).

    Those of `held` are (3, positions, ranges): without recompute, with that of all layers but for
    attention, and with that of all. Where layers differ, they cost a mean of these.
    """

    held: _Share
    """Of the seconds of F, B and recompute on `held`."""
    busy: _Share
    """Of the seconds of F and B on `busy`."""
    room: _Share
    """Of all the room, by bytes on `held` * seconds: a + b*t, as the bytes grow with t, too."""


class _Terms(NamedTuple):
    """What a token pays at some prices: a/t + b + c*t in a chunk of t tokens."""

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
        positions = make_positions(lengths)
        self._weights = positions.weights
        held_work = rates.work[held]
        busy_work = rates.work[busy]
        self._held_per_slice = held_work.per_slice.item()
        self._busy_per_slice = busy_work.per_slice.item()
        self._dearest_recompute_s = _dearest_recompute_seconds(rates, busy, lengths[0])
        self._shares = _Shares(
            held=_held_share(rates, held, positions),
            busy=_token_share(busy_work, positions),
            room=_room_share(rates, held, positions),
        )

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
            end = ends.least_cost(charges, counted=counted) if ends else 0.0
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
        self,
        point: Point,
        value: float,
        move: _Move,
        factor: float,
    ) -> tuple[Point, float]:
        """Return the last point, and its value, that a move from the one before has improved."""
        while True:
            moved = move(point, factor)
            moved_value = self._value(moved)
            # Below 0, where rates of less than 0 can lead, more than the value is no gain yet.
            enough = max(value, value * (1 + _LEAST_GAIN))
            if not moved_value > enough:
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
        held, busy, room = self._shares
        return _Terms(
            a=m * held.a + n * busy.a,
            b=m * held.b + n * busy.b + p * room.a,
            c=p * room.b,
        )

    def _token_prices(self, terms: _Terms) -> Floats:
        """Return (positions,) the least that a token pays."""
        a, b, c = terms
        # a/t + c*t is least where both are equal.
        t_squared = np.maximum(a, 0.0) / np.maximum(c, TINY)
        best = np.sqrt(t_squared)
        t = best.clip(self._sizes.smallest, self._sizes.largest)
        price = a / t + b + c * t
        return np.asarray(price.min(axis=(0, 2)))

    def _surcharges(self, terms: _Terms, token_prices: Floats) -> Floats:
        """Return (ranges,) how much more than its tokens pay a chunk costs at least."""
        a, b, c = terms
        # a + beyond*t + c*t*t is least where its slope is 0.
        beyond = b - token_prices[:, None]
        best = -beyond / np.maximum(2 * c, TINY)
        t = best.clip(self._sizes.smallest, self._sizes.largest)
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
        dearest_price = float(token_prices.max())
        dearest = dearest_price + self._slice_price(point) + recompute
        return share / dearest


def _move_both(point: Point, factor: float) -> Point:
    return Point(
        m=min(1.0, point.m * factor),
        p=point.p * factor,
    )


def _move_room(point: Point, factor: float) -> Point:
    return Point(
        m=point.m,
        p=point.p * factor,
    )


def _token_share(seconds: SizeRates, positions: Positions) -> _Share:
    """Return what a token at each position pays; (positions, ranges)."""
    # Its part of the context is (x - (t + 1) / 2) / t = (x - 1/2) / t - 1/2.
    context = positions.is_long * seconds.per_context_token
    pairs = seconds.per_pair * positions.x
    return _Share(
        a=seconds.constant + context * (positions.x - 0.5),
        b=seconds.rate + pairs - context / 2,
    )


def _held_share(rates: ChunkRates, held: int, positions: Positions) -> _Share:
    work = _token_share(rates.work[held], positions)
    num_layers = rates.num_layers[held]
    all_a = [work.a]
    all_b = [work.b]
    for recompute in (rates.recompute_but_attention, rates.recompute):
        share = _token_share(recompute, positions)
        all_a.append(work.a + num_layers * share.a)
        all_b.append(work.b + num_layers * share.b)
    return _Share(a=np.stack(all_a), b=np.stack(all_b))


def _room_share(rates: ChunkRates, held: int, positions: Positions) -> _Share:
    # bytes * stay = kept * t * (stay.a + stay.b * t), and a token's share is a t-th of it.
    kept = _kept_bytes(rates, held)
    stay = _token_share(_stay_rates(rates, held), positions)
    transient = _token_share(_transient_rates(rates, held), positions)
    room = rates.room[held]
    return _Share(
        a=(kept * stay.a + transient.a) / room,
        b=(kept * stay.b + transient.b) / room,
    )


def _kept_bytes(rates: ChunkRates, held: int) -> Floats:
    """Return (3, 1, 1) the bytes per token kept from F to B, by recompute as in `_Shares`."""
    sizes = rates.bytes
    num_layers = rates.num_layers[held]
    full = num_layers * sizes.full_with_kv
    but_attention = num_layers * (sizes.input + sizes.attention)
    recomputed = num_layers * sizes.input
    layers = np.stack([full, but_attention, recomputed])[:, None]
    return np.asarray(layers + sizes.beside_layers[held])


def _stay_rates(rates: ChunkRates, held: int) -> SizeRates:
    """Return the seconds from F to B of a chunk, both included."""
    num_below = rates.num_stages - 1 - held
    transfers = rates.transfer * (2 * num_below)
    work = rates.work.total(slice(held, None))
    return work + transfers


def _transient_rates(rates: ChunkRates, held: int) -> SizeRates:
    """Return the transient bytes per token of F and B, times the seconds that these run."""
    backward_bytes = rates.bytes.backward_transient[held]
    forward = rates.forward[held] * rates.bytes.forward_transient
    backward = rates.backward[held] * float(backward_bytes.item())
    return forward + backward


def _dearest_recompute_seconds(rates: ChunkRates, busy: int, longest: float) -> float:
    """Return what recomputing all layers of a token takes at the end of the longest sequence."""
    recompute = rates.recompute
    layer = recompute.least_per_token() + longest * recompute.per_pair
    layers = rates.num_layers[busy] * layer
    return float(layers.item())
