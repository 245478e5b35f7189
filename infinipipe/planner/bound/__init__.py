"""A lower bound on the makespan of one step, valid for every chunking, order of F and B, and recompute choice.

It is the best of these; each is proved where it is computed.

* Work: all tokens at the best rate of any chunk, all attention pairs, the recompute that sequences force by
  themselves, and a trip of the smallest chunk to the stage and back.
* Prices (`_Prices`): small chunks cost overhead, large ones memory, and more recompute leaves more of it. With a price
  for the seconds of two stages and for the bytes of one, every token pays at least its share of the best chunk.
* Ends (`_Ends`): a stage that does not want to wait long for its first chunks, and after its last ones, needs small
  ones then, and these cost more.
* Turns (`_turn_seconds`): sequences so long that no two of them fit on a stage together take turns there.

Splitting B into I and W can go below it: the bound is for F and B.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from infinipipe.aliases import Floats, Ints
from infinipipe.costs.cost import curve_seconds, static_bytes
from infinipipe.ir import Sequence
from infinipipe.planner.problem import Pipeline
from infinipipe.profiles import Curve, LayerTime

# Where the bound is exact, the simulator's sums may come out a few digits lower.
_ROUNDING = 1 - 1e-9
_NOTHING = 1e-30


def makespan_bound(pipeline: Pipeline, sequences: SequenceOf[Sequence], num_replicas: int) -> float:
    """Return seconds that no schedule of these sequences on these stages can undercut."""
    lengths = np.sort(np.array([s.length for s in sequences], dtype=np.float64))[::-1]
    if not len(lengths):
        return 0.0
    chunks = _Chunks(pipeline, lengths)
    bounds = [
        _priced_seconds(chunks, lengths, num_replicas),
        _turn_seconds(chunks, lengths, num_replicas),
    ]
    if num_replicas > 1:
        # Replicas share the work, but no sequence is in two of them.
        bounds.append(_priced_seconds(chunks, lengths[:1], 1))
    return max(bounds) * _ROUNDING


class _Chunks:
    """The least that chunks of each size need, on every stage.

    Sizes are in ranges within which all times are straight. Seconds are rows: a constant for each range, a rate per
    token for each range, then those per pair, per slice, for a context, per token of the context and per token that
    has one. So rows add up as the times of ops do.
    """

    def __init__(self, pipeline: Pipeline, lengths: Floats) -> None:
        times, sizes, stages = pipeline.profile.times, pipeline.profile.bytes, pipeline.stages
        self.lengths = lengths
        self.layers = np.array([stage.num_layers for stage in stages], dtype=np.float64)
        embedding = np.array([float(stage.embedding) for stage in stages])
        head = np.array([float(stage.head) for stage in stages])
        self.full = sizes.layer_full_per_token
        self.kv = float(sizes.layer_kv_per_token)
        self.kv_gradients = float(sizes.layer_kv_grad_per_token)
        self.input = float(sizes.activation_per_token)
        self.saved = max(_NOTHING, self.full - self.input)
        """By recompute of a layer, per token; more of a sequence that is not split."""
        self.kept = (
            sizes.chunk_per_token
            + embedding * sizes.embedding_per_token
            + head * sizes.head_per_token
        )
        """(stages,) bytes per token besides those of layers."""
        self.forward_peak = sizes.layer_forward_peak.rate
        # The output's gradient is received; the head hands it over in place of what it kept.
        self.backward_peak = (
            sizes.layer_backward_peak.rate + self.input - head * sizes.head_per_token
        )
        static = [static_bytes(pipeline.profile, stage) for stage in stages]
        # Sums of many floats may differ in their last digits, so a chunk that fits exactly must fit here too.
        self.room = np.array(pipeline.limits, dtype=np.float64) + 1.0 - static
        self.backward_room = self.room - sizes.layer_backward_peak.constant
        # B holds one layer whole and the inputs of the others.
        self.least_bytes = (
            (self.layers - 1) * self.input + self.full + self.kept + self.backward_peak
        )
        most = int(max(1.0, min(lengths.sum(), (self.backward_room / self.least_bytes).min())))
        layer_times = (times.layer_forward, times.layer_backward, times.layer_recompute)
        end_curves = (
            times.embedding_forward,
            times.embedding_backward,
            times.head_forward,
            times.head_backward,
        )
        curves = (*(layer.curve for layer in layer_times), *end_curves)
        # Sizes that differ twofold are told apart even where the times are straight.
        knots = {tokens for curve in curves for tokens in curve.tokens} | {
            2**k for k in range(most.bit_length())
        }
        edges = np.array(
            [1, *sorted(tokens for tokens in knots if 1 < tokens < most), most], dtype=np.int64
        )
        self.start, self.stop = edges[:-1].astype(np.float64), edges[1:].astype(np.float64)

        def rows(seconds: float, layer: LayerTime, first: Curve, last: Curve) -> Floats:
            found = self.layers[:, None] * _layer_row(edges, layer)
            found += embedding[:, None] * _curve_row(edges, first) + head[:, None] * _curve_row(
                edges, last
            )
            found[:, : len(self.start)] += seconds
            return np.asarray(found)

        ends = times.embedding_forward, times.head_forward
        self.forward = rows(times.chunk_forward_s, times.layer_forward, *ends)
        ends = times.embedding_backward, times.head_backward
        self.backward = rows(times.chunk_backward_s, times.layer_backward, *ends)
        self.work = self.forward + self.backward
        self.recompute = _layer_row(edges, times.layer_recompute)
        """Of one layer."""
        constant, rate = (
            np.full(len(self.start), times.transfer_s.constant),
            np.full_like(self.start, self.input),
        )
        self.transfer = np.concatenate([constant, times.transfer_s.rate * rate, np.zeros(5)])

    def parts(self, rows: Floats) -> tuple[Floats, Floats, Floats]:
        """Return the constants, the rates, and the rest."""
        count = len(self.start)
        return rows[..., :count], rows[..., count:-5], rows[..., -5:]

    def rates(self, rows: Floats) -> Floats:
        """Return seconds per token at the ends of all ranges, between which it is monotone; attention apart."""
        constant, rate, _ = self.parts(rows)
        return np.concatenate([constant / self.start + rate, constant / self.stop + rate], axis=-1)

    def work_seconds(self, rows: Floats, lengths: Floats) -> Floats:
        """Return (rows, lengths) the least seconds of each sequence, however it is cut."""
        pair, piece = np.moveaxis(rows[..., -5:-3, None], -2, 0)
        rate = self.rates(rows).min(axis=-1, keepdims=True)
        return np.asarray(rate * lengths + pair * lengths * (lengths + 1) / 2 + piece)

    def whole_seconds(self, rows: Floats, lengths: Floats) -> Floats:
        """Return (rows, lengths) the least seconds of a chunk that holds such a sequence whole."""
        place = np.maximum(0, np.searchsorted(self.start, lengths, side="right") - 1)
        constant, rate, others = self.parts(rows)
        pair, piece = np.moveaxis(others[..., :2, None], -2, 0)
        own = constant[..., place] + rate[..., place] * lengths
        return np.asarray(own + pair * lengths * (lengths + 1) / 2 + piece)

    def can_split(self, lengths: Floats) -> NDArray[np.bool_]:
        """Return (lengths,) whether every stage can hold such a sequence split.

        The B of its last slice brings the gradients of all its K and V. When that B is at its first layer, it holds
        this layer whole, and all slices before still keep the inputs of all layers.
        """
        last = (self.full + self.kept + self.backward_peak)[:, None]
        before = (self.layers * self.input + self.kept)[:, None]
        # Straight in the tokens of the last slice, so least for the smallest or for the largest one.
        slices = np.minimum(last + before * (lengths - 1), last * (lengths - 1) + before)
        slots = (self.layers * (self.kv + self.kv_gradients))[:, None] * lengths
        return np.asarray((slices + slots <= self.backward_room[:, None]).all(axis=0))

    def whole_tokens(self, lengths: Floats) -> Floats:
        """Return (stages, lengths) how many tokens of layers must be recomputed of a sequence that is not split."""
        held = (self.layers * (self.full + self.kv) + self.kept + self.backward_peak)[
            :, None
        ] * lengths
        return np.asarray(
            np.maximum(0.0, held - self.backward_room[:, None]) / (self.saved + self.kv)
        )

    def forced_seconds(self, lengths: Floats, can_split: NDArray[np.bool_]) -> Floats:
        """Return (stages,) the least seconds of recompute that sequences force, each by itself.

        When the B of a last slice begins, all slices are kept, and one layer's gradients of K and V are there. When it
        is at its first layer, all slices but this one are kept, and the gradients of all layers. The first moment
        asks for more the larger the last slice is, the second mostly for less: then it is least where they meet.
        """
        layers, kv_gradients = self.layers[:, None], self.kv_gradients * lengths
        kept = (self.layers * (self.full + self.kv) + self.kept)[
            :, None
        ] * lengths - self.backward_room[:, None]
        tokens = np.full(kept.shape, np.inf)
        for last in (
            np.ones_like(lengths),
            np.clip(kv_gradients / self.full, 1, np.maximum(1, lengths - 1)),
        ):
            begin = kv_gradients
            first_layer = layers * kv_gradients - (layers - 1) * self.full * last
            peak = self.backward_peak[:, None] * last
            tokens = np.minimum(tokens, kept + peak + np.maximum(begin, first_layer))
        tokens = np.where(can_split, np.maximum(0.0, tokens) / self.saved, np.inf)
        tokens = np.minimum(np.minimum(tokens, self.whole_tokens(lengths)), layers * lengths)
        # Cheapest are the first tokens, whose attention is short, in all layers.
        prefix = tokens / layers
        rate, pair = self.rates(self.recompute).min(), self.recompute[-5]
        return np.asarray((rate * tokens + layers * pair * prefix * prefix / 2).sum(axis=1))


def _curve_row(edges: Ints, curve: Curve) -> Floats:
    # Should a curve fall, the time of a larger chunk is a bound for a smaller one.
    seconds = np.minimum.accumulate(curve_seconds(curve, edges)[::-1])[::-1]
    rate = np.diff(seconds) / np.maximum(1, np.diff(edges))
    return np.concatenate([seconds[:-1] - rate * edges[:-1], rate, np.zeros(5)])


def _layer_row(edges: Ints, layer: LayerTime) -> Floats:
    row = _curve_row(edges, layer.curve)
    row[-5:-2] = layer.s_per_pair, layer.s_per_slice, layer.s_per_context
    row[-2:] = layer.s_per_context_token, layer.s_per_continued_token
    return row


def _priced_seconds(chunks: _Chunks, lengths: Floats, num_replicas: int) -> float:
    """Return the best bound by work, prices and ends."""
    work = chunks.work_seconds(chunks.work, lengths).sum(axis=1)
    forced = chunks.forced_seconds(lengths, chunks.can_split(lengths))
    trips = np.cumsum(chunks.work + 2 * chunks.transfer, axis=0) - chunks.work - 2 * chunks.transfer
    smallest = chunks.whole_seconds(trips, np.ones(1))[:, 0]
    best = float(((work + forced) / num_replicas + smallest).max())
    busy = int(np.argmax(work / num_replicas + smallest))
    ends = _Ends(chunks, busy)
    for held in sorted({0, int(np.argmax(work))} - {busy}) or [busy]:
        if chunks.room[held] > 0:
            prices = _Prices(chunks, lengths, held, busy)
            for point in ((0.0, 0.0), prices.climb(float(forced[busy]))):
                best = max(best, prices.bound(point, ends, float(forced[busy]), num_replicas))
    return best


_NODES = 9
# Sequences longer than this part of the longest pay for contexts. The others would rather gain by it.
_LONG = 0.25
_STEPS = (3.0, 1.5)
# A step must gain so much to be followed by another one.
_LEAST_GAIN = 2e-5

_Point = tuple[float, float]
"""The price of a second on the stage whose bytes have a price, and the price of all its room."""
_Terms = tuple[Floats, Floats, Floats]


class _Prices:
    """Bounds by prices, for the bytes of a stage `held` and the seconds of it and of a stage `busy`.

    What chunks keep on a stage is never more than its room, so the bytes of each chunk times the seconds from its F to
    its B add up to at most room * makespan. Those seconds are at least its trip: F and B on the stage and on all
    below, and the transfers. The peaks of its own F and B count as well while these run. And F, B and recompute on a
    stage take no longer than the makespan. So with prices m, n >= 0 of a second, m + n = 1, and p >= 0 of the room

        makespan * (1 + p) >= sum over chunks of
            m * (F + B + recompute on held) + n * (F + B on busy) + p * bytes * trip / room.

    A chunk of t tokens costs at least the sum over its tokens of a/t + b + c*t, with a, b and c straight in the
    position x: its pairs are the sum of x. And the tokens of its context are at least the sum of (x - (t + 1) / 2) / t,
    over the tokens of long sequences or of all: that is at most l * s / t <= s for the slice of l tokens after
    s others, and at most 0 for a whole sequence. Every token pays at least what it would at the t and with the
    recompute that are best for it. That is the least of straight functions, so concave: between two positions it is at
    least the straight line.
    """

    def __init__(self, chunks: _Chunks, lengths: Floats, held: int, busy: int) -> None:
        self._held, self._busy = held, busy
        self._chunks, self._count, self._total = chunks, len(lengths), float(lengths.sum())
        long = lengths > _LONG * lengths[0]
        classes = [_positions(lengths[chosen]) for chosen in (long, ~long) if chosen.any()]
        position = np.concatenate([nodes for nodes, _ in classes])[:, None]
        self._weights = np.concatenate([weights for _, weights in classes])
        is_long = np.arange(len(position))[:, None] < len(classes[0][0])

        def shares(row: Floats) -> tuple[Floats, Floats]:
            constant, rate, (pair, _, _, context_token, _) = chunks.parts(row)
            context = is_long * context_token
            return constant + context * (position - 0.5), rate + pair * position - context / 2

        layers, room = chunks.layers[held], chunks.room[held]
        (a, b), (more_a, more_b) = shares(chunks.work[held]), shares(chunks.recompute)
        more_pair = chunks.recompute[-5]
        # Of all layers or none: in between is the mean of both.
        self._held_a, self._held_b = (
            np.stack([a, a + layers * more_a]),
            np.stack([b, b + layers * more_b]),
        )
        self._busy_a, self._busy_b = shares(chunks.work[busy])
        self._dearest_recompute = chunks.layers[busy] * (
            chunks.rates(chunks.recompute).min() + lengths[0] * more_pair
        )
        below = len(chunks.layers) - 1 - held
        trip_a, trip_b = shares(chunks.work[held:].sum(axis=0) + 2 * below * chunks.transfer)
        peaks = (
            chunks.forward_peak * chunks.forward[held]
            + chunks.backward_peak[held] * chunks.backward[held]
        )
        peak_a, peak_b = shares(peaks)
        full, dropped = layers * (chunks.full + chunks.kv), layers * chunks.input
        kept = np.array([full, dropped])[:, None, None] + chunks.kept[held]
        self._room_b, self._room_c = (
            (kept * trip_a + peak_a) / room,
            (kept * trip_b + peak_b) / room,
        )

    def bound(self, point: _Point, ends: _Ends, forced: float, num_replicas: int) -> float:
        """Return the bound at some prices, with the ends and with so many seconds of recompute on the busy stage."""
        terms = self._terms(point)
        tokens = self._least(terms)
        total, price = self._sum(point, tokens), 1 - point[0]
        excess = self._excess(terms, tokens)
        # Some replica has its share of price and recompute, and with it at least so many tokens.
        dearest = float(tokens.max()) + self._slice_price(point) + price * self._dearest_recompute
        least_tokens = self._total if num_replicas == 1 else total / num_replicas / dearest
        best = 0.0
        for counted in (False, True) if forced else (False,):
            end = ends.price(excess, price, least_tokens, counted=counted)
            best = max(best, (total + counted * price * forced) / num_replicas + end)
        return best / (1 + point[1])

    def climb(self, forced: float) -> _Point:
        """Return good prices; all are valid."""

        def value(point: _Point) -> float:
            total = self._sum(point, self._least(self._terms(point))) + (1 - point[0]) * forced
            return total / (1 + point[1])

        point = 0.1, 0.012
        best = value(point)
        for step in _STEPS:
            for moves_seconds in (True, False):
                for factor in (step, 1 / step):
                    improved = True
                    while improved:
                        seconds, room = point
                        moved = (
                            min(1.0, seconds * factor) if moves_seconds else seconds,
                            room * factor,
                        )
                        found = value(moved)
                        improved = found > best * (1 + _LEAST_GAIN)
                        point, best = (moved, found) if improved else (point, best)
        return point

    def _terms(self, point: _Point) -> _Terms:
        seconds, room = point
        a = seconds * self._held_a + (1 - seconds) * self._busy_a
        b = seconds * self._held_b + (1 - seconds) * self._busy_b + room * self._room_b
        return a, b, room * self._room_c

    def _least(self, terms: _Terms) -> Floats:
        """Return (positions,) the least price of a token."""
        a, b, c = terms
        size = np.sqrt(np.maximum(a, 0.0) / np.maximum(c, _NOTHING))
        size = np.clip(size, self._chunks.start, self._chunks.stop)
        return np.asarray((a / size + b + c * size).min(axis=(0, 2)))

    def _excess(self, terms: _Terms, tokens: Floats) -> Floats:
        """Return (ranges,) how much more than its tokens' prices a chunk costs at least."""
        a, b, c = terms
        b = b - tokens[:, None]
        size = np.clip(-b / np.maximum(2 * c, _NOTHING), self._chunks.start, self._chunks.stop)
        return np.asarray((a + b * size + c * size * size).min(axis=(0, 1)))

    def _slice_price(self, point: _Point) -> float:
        return float(
            point[0] * self._chunks.work[self._held, -4]
            + (1 - point[0]) * self._chunks.work[self._busy, -4]
        )

    def _sum(self, point: _Point, tokens: Floats) -> float:
        return float(self._weights @ tokens) + self._count * self._slice_price(point)


def _positions(lengths: Floats) -> tuple[Floats, Floats]:
    """Return positions in sequences, and weights by which what is straight between them adds up over all tokens."""
    longest = float(lengths[0])
    nodes = np.unique(np.round([1.0, *np.geomspace(max(1.0, longest / 32), longest, _NODES - 1)]))
    weights = np.zeros(len(nodes))
    weights[0] = len(lengths)
    for place, (first, last) in enumerate(pairwise(nodes.tolist())):
        # Tokens after `first` up to `last`, and how far on they are.
        counts = np.clip(lengths, first, last) - first
        total, far = float(counts.sum()), float((counts * (counts + 1) / 2).sum()) / (last - first)
        weights[place] += total - far
        weights[place + 1] += far
    return nodes, weights


_FILLS = 1.15 ** np.arange(33)
_MOST_ENDS = 48
# Of no use beyond.
_MOST_GROWTH = 1e3


class _Ends:
    """What it costs on a stage to fill and to drain: idle time, and small chunks to shorten it.

    Fill. F j, counted in the order of F, starts on the stage after the earlier F have run on stage 0 and itself on the
    stages between. Until then the stage runs only F and B of earlier chunks. So for the trip y(j) of F down to it

        y(j) <= idle time before + sum over i < j of (F i + B i on the stage - F i on stage 0).

    Where no term of the sum is more than g * y(i), y(j) <= idle time * (1 + g)**(j - 1), which bounds the
    sizes of the first chunks. A context costs more in B than in F, but it is no longer than all chunks before together.

    Drain, mirrored. Take the last J chunks in the order of F. After B k of one of them, the stage still runs later B,
    and F only of some of these J, as all others come before F k. So for the trip z(k) of B up to stage `top`

        z(k) <= idle time after + slack + sum over later i among the J of (F i + B i on the stage - B i on top),

    where the slack is all that B of the others can take longer on the stage than on `top`, which makes it least.

    As long as the bounds on the first and on the last chunks in the order of F do not add up to all tokens, these are
    different chunks; each costs at least the excess of the best size that it can have. The recompute of the B in
    these sums is time of the stage, too. Either it is not `counted` elsewhere and passes for idle time here. Or it is
    counted, and adds to g. In the drain there is no g for it, as B of any chunk may run then: only the
    smallest trip is left.
    """

    def __init__(self, chunks: _Chunks, stage: int) -> None:
        self._stage = stage
        if stage == 0:
            return
        work, transfers = chunks.work[stage], stage * chunks.transfer
        self._down = _Trip(chunks, chunks.forward[:stage].sum(axis=0) + transfers)
        recompute = chunks.layers[stage] * chunks.recompute
        self._fills = [
            self._down.growth(work - chunks.forward[0] + counted * recompute, early_context=True)
            for counted in (False, True)
        ]
        slacks = [
            _most_seconds(chunks, chunks.backward[stage] - chunks.backward[top])
            for top in range(stage)
        ]
        top = int(np.argmin(slacks))
        self._up = _Trip(
            chunks, chunks.backward[top:stage].sum(axis=0) + (stage - top) * chunks.transfer
        )
        self._drain = self._up.growth(work - chunks.backward[top], early_context=False)
        self._least_up = _Trip(chunks, chunks.backward[:stage].sum(axis=0) + transfers).least
        # The last B goes on from `top` to stage 0.
        self._slack = slacks[top] - (self._least_up - self._up.least)

    def price(self, excess: Floats, price: float, tokens: float, *, counted: bool) -> float:
        """Return the least of idle time and excess, at a price per second, in a replica of at least so many tokens."""
        if self._stage == 0:
            return 0.0
        fill = self._down.price(self._fills[counted], excess, price, 0.0, tokens / 2)
        least = price * self._least_up
        if counted:
            return fill + least
        return fill + max(
            least, self._up.price(self._drain, excess, price, self._slack, tokens / 2)
        )


class _Trip:
    """The least seconds of a chunk's trip by its size."""

    def __init__(self, chunks: _Chunks, row: Floats) -> None:
        self._chunks = chunks
        self._row = row
        constant, rate, (pair, piece, *_) = chunks.parts(row)
        # Every token has a pair and every chunk a slice.
        self._constant, self._rate = constant + piece, rate + pair
        self._starts = self._constant + self._rate * chunks.start
        self.least = float(self._starts[0])

    def growth(self, more: Floats, *, early_context: bool) -> Floats:
        """Return the most that the trip of each next chunk can be, in idle time, if each adds at most `more`.

        With `early_context` contexts are no longer than all chunks before, else they may be of any length.
        """
        chunks = self._chunks
        constant, rate, (pair, piece, context, context_token, continued) = chunks.parts(more)
        own_constant, own_rate, own = chunks.parts(self._row)
        tops = [
            constant + max(0.0, context) + (rate + max(0.0, continued)) * size
            for size in (chunks.start, chunks.stop)
        ]
        bottoms = [own_constant + own_rate * size for size in (chunks.start, chunks.stop)]
        tops, bottoms = [*tops, np.array([pair, piece])], [*bottoms, own[:2]]
        early = 0.0
        if early_context:
            early = max(0.0, context_token) / max(_NOTHING, chunks.rates(self._row).min())
        else:
            tops, bottoms = [*tops, np.array([context_token])], [*bottoms, own[3:4]]
        top, bottom = np.concatenate(tops), np.concatenate(bottoms)
        growth = float((np.maximum(0.0, top) / np.maximum(bottom, _NOTHING)).max())
        if max(growth, early) > _MOST_GROWTH:
            return np.append(1.0, np.full(_MOST_ENDS - 1, np.inf))
        trips, total, totals = [], 0.0, 0.0
        for _ in range(_MOST_ENDS):
            trips.append(1 + growth * total + early * totals)
            totals += total
            total += trips[-1]
        return np.array(trips)

    def price(
        self, growth: Floats, excess: Floats, price: float, slack: float, tokens: float
    ) -> float:
        """Return the least of idle time and the excess of the chunks whose sizes it bounds, up to so many tokens."""
        if self.least <= 0:
            return 0.0
        idle = self.least * _FILLS
        # Between two idle times: the smaller one, and trips of the larger one.
        trips = idle[1:, None] * growth
        place = np.searchsorted(self._starts, trips, side="right") - 1
        size = (trips - self._constant[place]) / np.maximum(self._rate[place], _NOTHING)
        bounded = np.cumsum(np.minimum(size, self._chunks.stop[place]), axis=1) < tokens
        paid = (np.maximum(0.0, np.minimum.accumulate(excess))[place] * bounded).sum(axis=1)
        waited = price * np.maximum(0.0, idle - slack)
        return float(min((waited[:-1] + paid).min(), waited[-1]))


def _most_seconds(chunks: _Chunks, row: Floats) -> float:
    """Return the most that the positive parts of a row can be for all tokens of the batch together."""
    lengths = chunks.lengths
    pair, piece, context, context_token, continued = np.maximum(0.0, row[-5:])
    per_token = (
        max(0.0, chunks.rates(row).max()) + piece + context + continued + context_token * lengths[0]
    )
    return float(per_token * lengths.sum() + pair * (lengths * (lengths + 1) / 2).sum())


def _turn_seconds(chunks: _Chunks, lengths: Floats, num_replicas: int) -> float:
    """Return the longest time in which sequences take turns on a stage.

    A sequence is open on a stage from its first F to its last B there. Two of them take turns if the stage can hold
    neither while the other one's last B runs. Both need more the longer they are: if the two shortest of the
    longest k must take turns, all k must. A sequence that cannot be split is open while it travels down and back.
    """
    layers, room = chunks.layers[:, None], chunks.backward_room[:, None]
    # Bytes (stages, lengths) that a sequence needs at least in its last B, and while it is open.
    can_split = chunks.can_split(lengths)
    whole_last = (chunks.least_bytes[:, None] + chunks.kv) * lengths
    whole_held = (
        np.minimum(layers * chunks.input + chunks.kept[:, None], chunks.least_bytes[:, None])
        * lengths
    )
    slots = layers * lengths
    last = np.where(
        can_split, np.minimum(whole_last, slots * (chunks.kv + chunks.kv_gradients)), whole_last
    )
    held = np.where(can_split, np.minimum(whole_held, slots * chunks.kv), whole_held)
    together = np.minimum(last[:, 1:] + held[:, :-1], last[:, :-1] + held[:, 1:]) <= room
    counts = 1 + np.cumprod(~together, axis=1).sum(axis=1)
    lengths = lengths[: counts.max()]
    recomputed = np.minimum(np.ceil(chunks.whole_tokens(lengths) / lengths * (1 - 1e-12)), layers)
    whole = chunks.whole_seconds(chunks.work, lengths) + recomputed * chunks.whole_seconds(
        chunks.recompute, lengths
    )
    trips = np.cumsum(whole[::-1], axis=0)[::-1]
    # A split sequence is open at least while its slices run on any one of the stages.
    slices = np.maximum.accumulate(chunks.work_seconds(chunks.work, lengths)[::-1], axis=0)[::-1]
    spans = np.where(can_split[: len(lengths)], np.minimum(slices, trips), trips)
    sums = (spans * (np.arange(len(lengths)) < counts[:, None])).sum(axis=1)
    return float(max(sums.max() / num_replicas, spans[:, 0].max()))
