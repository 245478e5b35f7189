"""Rates of chunks: the least seconds and bytes that chunks of each size need on every stage.

Times of a profile and their rates are assumed to be 0 or more: fits and data sheets give no others.
What is left out of a sum then makes it smaller, so it still says the least.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from infinipipe.aliases import Floats, Ints
from infinipipe.costs.chunks import attention_bytes_per_token
from infinipipe.costs.times import curve_seconds
from infinipipe.ir import Stage
from infinipipe.profiles import Curve, LayerTime, Line, Profile, Times

TINY = 1e-30
"""Stands for a divisor of 0 or less: no time or number of bytes that counts is so small."""

# Bytes by which a stage's room is taken for larger than it is: sums of many floats may differ in
# their last digits, and a chunk that fits exactly must fit here too.
_SPARE_BYTES = 1.0


@dataclass(frozen=True)
class SizeRanges:
    """Ranges of chunk sizes within which all times are straight: (ranges,) tokens."""

    smallest: Floats
    largest: Floats


@dataclass(frozen=True)
class SizeRates:
    """Seconds of chunks by their size and by what they hold. They add up as the times of ops do.

    A chunk of t tokens takes `constant + rate * t`, of the range of sizes that t is in, and
    besides `per_pair` and `per_slice` for each pair and slice. If a slice of it has a context,
    it also takes `per_context`, and `per_context_token` for each token of the context, and
    `per_continued_token` for each token of the slice.

    `constant` and `rate` are (stages, ranges), the others (stages, 1) as all ranges have the same;
    without the first axis where they are of one stage, one layer or one transfer.

    `constant` is below 0 where a curve bends up; the difference of two may be so everywhere.
    """

    sizes: SizeRanges
    constant: Floats
    rate: Floats
    per_pair: Floats
    per_slice: Floats
    per_context: Floats
    per_context_token: Floats
    per_continued_token: Floats

    def __add__(self, other: SizeRates) -> SizeRates:
        return self._combined(operator.add, other)

    def __sub__(self, other: SizeRates) -> SizeRates:
        return self._combined(operator.sub, other)

    def __mul__(self, factor: float) -> SizeRates:
        return self._changed(lambda part: part * factor)

    def __getitem__(self, stages: int | slice) -> SizeRates:
        """Return the seconds on one stage, or on some of them."""
        return self._changed(lambda part: part[stages])

    def cumulative(self) -> SizeRates:
        """Return for each stage the seconds on it and on all stages before."""
        return self._changed(lambda part: part.cumsum(axis=0))

    def total(self, stages: slice) -> SizeRates:
        """Return the seconds on some stages together."""
        # Added one after the other as there: `sum` takes another order for a single column.
        return self._changed(lambda part: part[stages].cumsum(axis=0)[-1])

    def without_attention(self) -> SizeRates:
        """Return the seconds without what attention takes."""
        none = np.zeros_like(self.per_pair)
        return SizeRates(self.sizes, self.constant, self.rate, none, none, none, none, none)

    def least_per_token(self, most_tokens: float = np.inf) -> Floats:
        """Return (stages, 1) the least seconds per token at any size up to a most, attention
        apart."""
        per_token = self._per_token(most_tokens)
        return np.asarray(per_token.min(axis=-1, keepdims=True))

    def most_per_token(self) -> Floats:
        """Return (stages, 1) the most seconds per token at any size, attention apart."""
        return np.asarray(self._per_token().max(axis=-1, keepdims=True))

    def split_seconds(self, lengths: Floats, most_tokens: float = np.inf) -> Floats:
        """Return (stages, lengths) the least seconds of such sequences, however they are cut into
        chunks of at most so many tokens."""
        own = self.least_per_token(most_tokens) * lengths
        return self._with_pairs_and_slice(own, lengths)

    def whole_seconds(self, lengths: Floats) -> Floats:
        """Return (stages, lengths) the least seconds of chunks that hold such sequences whole."""
        after = np.searchsorted(self.sizes.smallest, lengths, side="right")
        place = np.maximum(0, after - 1)
        own = self.constant[..., place] + self.rate[..., place] * lengths
        return self._with_pairs_and_slice(own, lengths)

    def _per_token(self, most_tokens: float = np.inf) -> Floats:
        # A chunk has at least one token, which is where the first range begins.
        num_ranges = max(1, np.searchsorted(self.sizes.smallest, most_tokens, side="right"))
        constant = self.constant[..., :num_ranges]
        rate = self.rate[..., :num_ranges]
        largest = np.minimum(self.sizes.largest[:num_ranges], max(1.0, most_tokens))
        # At both ends of all ranges: in between, `constant / t + rate` is monotone.
        at_smallest = constant / self.sizes.smallest[:num_ranges] + rate
        at_largest = constant / largest + rate
        return np.concatenate([at_smallest, at_largest], axis=-1)

    def _with_pairs_and_slice(self, own: Floats, lengths: Floats) -> Floats:
        # A sequence has all its pairs however it is cut, and at least one slice.
        pairs = self.per_pair * lengths * (lengths + 1) / 2
        return np.asarray(own + pairs + self.per_slice)

    def _parts(self) -> tuple[Floats, ...]:
        return (
            self.constant,
            self.rate,
            self.per_pair,
            self.per_slice,
            self.per_context,
            self.per_context_token,
            self.per_continued_token,
        )

    def _changed(self, change: Callable[[Floats], Floats]) -> SizeRates:
        return SizeRates(self.sizes, *map(change, self._parts()))

    def _combined(
        self, operation: Callable[[Floats, Floats], Floats], other: SizeRates
    ) -> SizeRates:
        return SizeRates(self.sizes, *map(operation, self._parts(), other._parts()))


@dataclass(frozen=True)
class TokenBytes:
    """Bytes per token of a chunk. Arrays are columns (stages, 1)."""

    full: float
    """Kept by a layer that is not recomputed, its input included, without K and V."""
    input: float
    """Kept by a layer that is recomputed."""
    attention: float
    """Kept besides by one that is recomputed but for attention."""
    freed: float
    """Freed by recomputing a layer; K and V besides, unless they are in a slot."""
    kv: float
    """K and V of one layer."""
    kv_gradients: float
    """Gradients of K and V of one layer, for a split sequence."""
    beside_layers: Floats
    """Kept besides what the layers keep."""
    forward_transient: float
    """Needed while F of a layer runs, above what it keeps."""
    backward_transient: Floats
    """Needed while B of a layer runs."""
    least: Floats
    """Held in B with all recompute: one layer whole, and the inputs of the others."""

    @property
    def full_with_kv(self) -> float:
        """Kept by a layer that is not recomputed, with K and V."""
        return self.full + self.kv


@dataclass(frozen=True)
class ChunkRates:
    """The least that chunks of a batch need on each stage, by their size.

    What has a number for each stage is a column (stages, 1): it goes with ranges, and with lengths.
    """

    lengths: Floats
    """(sequences,) of the batch, longest first."""
    sizes: SizeRanges
    """From one token to the most that a chunk can have."""
    num_layers: Floats
    """Of each stage."""
    forward: SizeRates
    """On each stage."""
    backward: SizeRates
    """On each stage, without recompute."""
    work: SizeRates
    """F and B on each stage, without recompute."""
    recompute: SizeRates
    """Added to B for each layer that is recomputed."""
    recompute_but_attention: SizeRates
    """The same of a layer that keeps attention's output."""
    transfer: SizeRates
    """Of one activation, or its gradient, between the nearest neighbours."""
    bytes: TokenBytes
    room: Floats
    """Bytes of each stage besides the static ones."""
    backward_room: Floats
    """The same without what B of a layer needs however small the chunk is."""

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.num_layers)


def make_rates(
    profile: Profile,
    stages: SequenceOf[Stage],
    edge: Line,
    room_bytes: SequenceOf[int],
    lengths: Floats,
) -> ChunkRates:
    """Return the rates of chunks of a batch.

    Args:
        profile: of the model on the device, as a rank sees it.
        stages: of the pipeline.
        edge: seconds per byte, which no transfer between two stages is faster than.
        room_bytes: of each stage, what its static bytes leave of its limit.
        lengths: (sequences,) tokens of each sequence of the batch, longest first.
    """
    times = profile.times
    parts = _stage_parts(stages)
    token_bytes = _token_bytes(profile, parts)
    room = _column(room_bytes) + _SPARE_BYTES
    backward_room = room - profile.bytes.layer_backward_peak.constant

    fitting = (backward_room / token_bytes.least).min()
    largest = min(lengths.sum(), fitting)
    edges = _size_edges(times, int(max(1.0, largest)))
    sizes = SizeRanges(edges[:-1].astype(np.float64), edges[1:].astype(np.float64))

    forward = _stage_rates(
        parts,
        sizes,
        chunk_s=times.chunk_forward_s,
        layer=_layer_rates(times.layer_forward, edges, sizes),
        embedding=_straight(times.embedding_forward, edges),
        head=_straight(times.head_forward, edges),
    )
    backward = _stage_rates(
        parts,
        sizes,
        chunk_s=times.chunk_backward_s,
        layer=_layer_rates(times.layer_backward, edges, sizes),
        embedding=_straight(times.embedding_backward, edges),
        head=_straight(times.head_backward, edges),
    )
    recompute = _layer_rates(times.layer_recompute, edges, sizes)
    return ChunkRates(
        lengths=lengths,
        sizes=sizes,
        num_layers=parts.layers,
        forward=forward,
        backward=backward,
        work=forward + backward,
        recompute=recompute,
        recompute_but_attention=recompute.without_attention(),
        transfer=_transfer_rates(edge, token_bytes, sizes),
        bytes=token_bytes,
        room=room,
        backward_room=backward_room,
    )


@dataclass(frozen=True)
class _StageParts:
    """How many of each part of the model every stage has. Arrays are columns (stages, 1)."""

    layers: Floats
    embedding: Floats
    head: Floats


def _stage_parts(stages: SequenceOf[Stage]) -> _StageParts:
    layers = [stage.num_layers for stage in stages]
    embedding = [stage.embedding for stage in stages]
    head = [stage.head for stage in stages]
    return _StageParts(
        layers=_column(layers),
        embedding=_column(embedding),
        head=_column(head),
    )


def _column(of_stages: SequenceOf[int]) -> Floats:
    return np.array(of_stages, dtype=np.float64)[:, None]


def _token_bytes(profile: Profile, parts: _StageParts) -> TokenBytes:
    sizes = profile.bytes
    full = sizes.layer_full_per_token
    layer_input = float(sizes.activation_per_token)
    beside_layers = (
        sizes.chunk_per_token
        + parts.embedding * sizes.embedding_per_token
        + parts.head * sizes.head_per_token
    )
    # The output's gradient is received; the head hands it over in place of what it kept.
    backward_transient = (
        sizes.layer_backward_peak.rate + layer_input - parts.head * sizes.head_per_token
    )
    inputs = (parts.layers - 1) * layer_input
    return TokenBytes(
        full=full,
        input=layer_input,
        attention=float(attention_bytes_per_token(profile)),
        freed=max(TINY, full - layer_input),
        kv=float(sizes.layer_kv_per_token),
        kv_gradients=float(sizes.layer_kv_grad_per_token),
        beside_layers=beside_layers,
        forward_transient=sizes.layer_forward_peak.rate,
        backward_transient=backward_transient,
        least=inputs + full + beside_layers + backward_transient,
    )


def _size_edges(times: Times, largest: int) -> Ints:
    """Return where ranges of sizes begin and end, from 1 to the largest size."""
    curves = (
        times.layer_forward.curve,
        times.layer_backward.curve,
        times.layer_recompute.curve,
        times.embedding_forward,
        times.embedding_backward,
        times.head_forward,
        times.head_backward,
    )
    # Sizes that differ twofold are told apart even where the times are straight: finer ranges give
    # ends and surcharges more to tell.
    edges = {2**power for power in range(largest.bit_length())}
    for curve in curves:
        edges.update(curve.tokens)
    inner = sorted(tokens for tokens in edges if 1 < tokens < largest)
    return np.array([1, *inner, largest], dtype=np.int64)


class _Straight(NamedTuple):
    """Seconds of a chunk of t tokens, `constant + rate * t`. Arrays are (ranges,)."""

    constant: Floats
    rate: Floats


def _straight(curve: Curve, edges: Ints) -> _Straight:
    # Should a curve fall, the time of a larger chunk is a bound for a smaller one.
    at_edges = curve_seconds(curve, edges)
    seconds = np.minimum.accumulate(at_edges[::-1])[::-1]
    # One size makes a range, too, in which nothing rises.
    rate = np.diff(seconds) / np.maximum(1, np.diff(edges))
    constant = seconds[:-1] - rate * edges[:-1]
    return _Straight(constant, rate)


def _stage_rates(
    parts: _StageParts,
    sizes: SizeRanges,
    chunk_s: float,
    layer: SizeRates,
    embedding: _Straight,
    head: _Straight,
) -> SizeRates:
    ends_constant = parts.embedding * embedding.constant + parts.head * head.constant
    ends_rate = parts.embedding * embedding.rate + parts.head * head.rate
    num_layers = parts.layers
    return SizeRates(
        sizes,
        constant=num_layers * layer.constant + ends_constant + chunk_s,
        rate=num_layers * layer.rate + ends_rate,
        per_pair=num_layers * layer.per_pair,
        per_slice=num_layers * layer.per_slice,
        per_context=num_layers * layer.per_context,
        per_context_token=num_layers * layer.per_context_token,
        per_continued_token=num_layers * layer.per_continued_token,
    )


def _layer_rates(layer: LayerTime, edges: Ints, sizes: SizeRanges) -> SizeRates:
    line = _straight(layer.curve, edges)
    return SizeRates(
        sizes,
        constant=line.constant,
        rate=line.rate,
        per_pair=np.array([layer.s_per_pair]),
        per_slice=np.array([layer.s_per_slice]),
        per_context=np.array([layer.s_per_context]),
        per_context_token=np.array([layer.s_per_context_token]),
        per_continued_token=np.array([layer.s_per_continued_token]),
    )


def _transfer_rates(edge: Line, token_bytes: TokenBytes, sizes: SizeRanges) -> SizeRates:
    seconds_per_token = edge.rate * token_bytes.input
    nothing = np.zeros(1)
    return SizeRates(
        sizes,
        constant=np.full_like(sizes.smallest, edge.constant),
        rate=np.full_like(sizes.smallest, seconds_per_token),
        per_pair=nothing,
        per_slice=nothing,
        per_context=nothing,
        per_context_token=nothing,
        per_continued_token=nothing,
    )
