"""Rates of chunks: the least seconds and bytes that chunks of each size need on every stage."""

from __future__ import annotations

import operator
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np

from infinipipe.aliases import Floats, Ints
from infinipipe.costs.cost import curve_seconds, static_bytes
from infinipipe.ir import Stage
from infinipipe.profiles import Bytes, Curve, LayerTime, Profile, Times

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

    def on_stages(self, counts: Floats) -> SizeRates:
        """Return the seconds on stages that have so many, of layers for example."""
        column = counts[:, None]
        return self._changed(lambda part: column * part)

    def cumulative(self) -> SizeRates:
        """Return for each stage the seconds on it and on all stages before."""
        return self._changed(lambda part: part.cumsum(axis=0))

    def total(self) -> SizeRates:
        """Return the seconds on all stages together."""
        return self.cumulative()[-1]

    def plus_per_chunk(self, seconds: float) -> SizeRates:
        """Return the seconds with so many more for each chunk, whatever its size."""
        return replace(self, constant=self.constant + seconds)

    def least_per_token(self) -> Floats:
        """Return (stages, 1) the least seconds per token at any size, attention apart."""
        return np.asarray(self._per_token().min(axis=-1, keepdims=True))

    def most_per_token(self) -> Floats:
        """Return (stages, 1) the most seconds per token at any size, attention apart."""
        return np.asarray(self._per_token().max(axis=-1, keepdims=True))

    def split_seconds(self, lengths: Floats) -> Floats:
        """Return (stages, lengths) the least seconds of such sequences, however they are cut."""
        own = self.least_per_token() * lengths
        return self._with_pairs_and_slice(own, lengths)

    def whole_seconds(self, lengths: Floats) -> Floats:
        """Return (stages, lengths) the least seconds of chunks that hold such sequences whole."""
        after = np.searchsorted(self.sizes.smallest, lengths, side="right")
        place = np.maximum(0, after - 1)
        own = self.constant[..., place] + self.rate[..., place] * lengths
        return self._with_pairs_and_slice(own, lengths)

    def _per_token(self) -> Floats:
        # At both ends of all ranges: in between, `constant / t + rate` is monotone.
        at_smallest = self.constant / self.sizes.smallest + self.rate
        at_largest = self.constant / self.sizes.largest + self.rate
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
    """Bytes per token of a chunk."""

    full: float
    """Kept by a layer that is not recomputed, its input included, without K and V."""
    input: float
    """Kept by a layer that is recomputed."""
    freed: float
    """Freed by recomputing a layer; K and V besides, unless they are in a slot."""
    kv: float
    """K and V of one layer."""
    kv_gradients: float
    """Gradients of K and V of one layer, for a split sequence."""
    beside_layers: Floats
    """(stages,) kept besides what the layers keep."""
    forward_transient: float
    """Needed while F of a layer runs, above what it keeps."""
    backward_transient: Floats
    """(stages,) needed while B of a layer runs."""
    least: Floats
    """(stages,) held in B with all recompute: one layer whole, and the inputs of the others."""


@dataclass(frozen=True)
class ChunkRates:
    """The least that chunks of a batch need on each stage, by their size."""

    lengths: Floats
    """(sequences,) of the batch, longest first."""
    sizes: SizeRanges
    """From one token to the most that a chunk can have."""
    num_layers: Floats
    """(stages,)"""
    forward: SizeRates
    """On each stage."""
    backward: SizeRates
    """On each stage, without recompute."""
    work: SizeRates
    """F and B on each stage, without recompute."""
    recompute: SizeRates
    """Added to B for each layer that is recomputed."""
    transfer: SizeRates
    """Of one activation, or its gradient, between neighbours."""
    bytes: TokenBytes
    room: Floats
    """(stages,) bytes besides the static ones."""
    backward_room: Floats
    """(stages,) the same without what B of a layer needs however small the chunk is."""

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.num_layers)


def make_rates(
    profile: Profile, stages: SequenceOf[Stage], limits: SequenceOf[int], lengths: Floats
) -> ChunkRates:
    """Return the rates of chunks of a batch.

    Args:
        profile: of the model on the device.
        stages: of the pipeline.
        limits: bytes of each stage.
        lengths: (sequences,) tokens of each sequence of the batch, longest first.
    """
    times = profile.times
    parts = _stage_parts(stages)
    token_bytes = _token_bytes(profile.bytes, parts)
    static = [static_bytes(profile, stage) for stage in stages]
    room = np.array(limits, dtype=np.float64) + _SPARE_BYTES - static
    backward_room = room - profile.bytes.layer_backward_peak.constant

    fitting = (backward_room / token_bytes.least).min()
    edges = _size_edges(times, int(max(1.0, min(lengths.sum(), fitting))))
    sizes = SizeRanges(edges[:-1].astype(np.float64), edges[1:].astype(np.float64))

    forward = _stage_rates(
        parts,
        layer=_layer_rates(times.layer_forward, edges, sizes),
        embedding=_curve_rates(times.embedding_forward, edges, sizes),
        head=_curve_rates(times.head_forward, edges, sizes),
    ).plus_per_chunk(times.chunk_forward_s)
    backward = _stage_rates(
        parts,
        layer=_layer_rates(times.layer_backward, edges, sizes),
        embedding=_curve_rates(times.embedding_backward, edges, sizes),
        head=_curve_rates(times.head_backward, edges, sizes),
    ).plus_per_chunk(times.chunk_backward_s)
    return ChunkRates(
        lengths=lengths,
        sizes=sizes,
        num_layers=parts.layers,
        forward=forward,
        backward=backward,
        work=forward + backward,
        recompute=_layer_rates(times.layer_recompute, edges, sizes),
        transfer=_transfer_rates(times, token_bytes, sizes),
        bytes=token_bytes,
        room=room,
        backward_room=backward_room,
    )


@dataclass(frozen=True)
class _StageParts:
    """How many of each part of the model every stage has. Arrays are (stages,)."""

    layers: Floats
    embedding: Floats
    head: Floats


def _stage_parts(stages: SequenceOf[Stage]) -> _StageParts:
    return _StageParts(
        layers=np.array([stage.num_layers for stage in stages], dtype=np.float64),
        embedding=np.array([stage.embedding for stage in stages], dtype=np.float64),
        head=np.array([stage.head for stage in stages], dtype=np.float64),
    )


def _token_bytes(sizes: Bytes, parts: _StageParts) -> TokenBytes:
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
    # Sizes that differ twofold are told apart even where the times are straight.
    edges = {2**power for power in range(largest.bit_length())}
    for curve in curves:
        edges.update(curve.tokens)
    inner = sorted(tokens for tokens in edges if 1 < tokens < largest)
    return np.array([1, *inner, largest], dtype=np.int64)


def _stage_rates(
    parts: _StageParts, layer: SizeRates, embedding: SizeRates, head: SizeRates
) -> SizeRates:
    ends = embedding.on_stages(parts.embedding) + head.on_stages(parts.head)
    return layer.on_stages(parts.layers) + ends


def _curve_rates(curve: Curve, edges: Ints, sizes: SizeRanges) -> SizeRates:
    # Should a curve fall, the time of a larger chunk is a bound for a smaller one.
    seconds = np.minimum.accumulate(curve_seconds(curve, edges)[::-1])[::-1]
    rate = np.diff(seconds) / np.maximum(1, np.diff(edges))
    constant = seconds[:-1] - rate * edges[:-1]
    nothing = np.zeros(1)
    return SizeRates(sizes, constant, rate, nothing, nothing, nothing, nothing, nothing)


def _layer_rates(layer: LayerTime, edges: Ints, sizes: SizeRanges) -> SizeRates:
    return replace(
        _curve_rates(layer.curve, edges, sizes),
        per_pair=np.array([layer.s_per_pair]),
        per_slice=np.array([layer.s_per_slice]),
        per_context=np.array([layer.s_per_context]),
        per_context_token=np.array([layer.s_per_context_token]),
        per_continued_token=np.array([layer.s_per_continued_token]),
    )


def _transfer_rates(times: Times, token_bytes: TokenBytes, sizes: SizeRanges) -> SizeRates:
    constant = np.full_like(sizes.smallest, times.transfer_s.constant)
    rate = np.full_like(sizes.smallest, times.transfer_s.rate * token_bytes.input)
    nothing = np.zeros(1)
    return SizeRates(sizes, constant, rate, nothing, nothing, nothing, nothing, nothing)
