"""A profile as one of the ranks sees it that share every sequence.

Of a chunk of t tokens each of S ranks has t / S, and sees them through every layer but for
attention: there it has 1 / S of the heads and all tokens. Between the two views the ranks exchange
Q, K and V, and the output back; in B their gradients. So every time and size is that of one rank
still, per token of the whole chunk: it is a profile like any other, of a smaller model with dearer
layers.
"""

from __future__ import annotations

from msgspec.structs import replace

from infinipipe.costs.links import all_to_all_line, sequence_group
from infinipipe.ir import DType, Layout, Model
from infinipipe.profiles import ELEMENT_BYTES, Bytes, Curve, LayerTime, Line, Profile, Times

_EXCHANGES = 4
"""Of a layer's F: Q, K, V and the output; and of its B: their gradients."""


def query_bytes(model: Model, dtype: DType) -> int:
    """Return the bytes of Q, and of attention's output, of a token."""
    return ELEMENT_BYTES[dtype] * model.num_heads * model.head_dim


def exchanged_bytes(model: Model, dtype: DType, num_ranks: int) -> int:
    """Return the bytes that all ranks hold of a token when a layer's attention exchanges it.

    These are Q and the output, and K and V, which are repeated where there are fewer heads of them
    than ranks.
    """
    kv_heads = max(model.num_kv_heads, num_ranks)
    kv = ELEMENT_BYTES[dtype] * kv_heads * model.head_dim
    return 2 * query_bytes(model, dtype) + 2 * kv


def sharded_profile(profile: Profile, layout: Layout) -> Profile:
    """Return what a rank sees of a profile, per token of the whole chunk."""
    if layout.sequence_parallel == 1:
        return profile
    ranks = _Ranks(profile, layout)
    return replace(profile, model=ranks.model(), times=ranks.times(), bytes=ranks.bytes())


class _Ranks:
    """The ranks that share every sequence.

    Args:
        profile: of a rank that has every token for itself.
        layout: how many ranks share them, and where they stand.
    """

    def __init__(self, profile: Profile, layout: Layout) -> None:
        model = profile.model
        self._profile = profile
        self._num = layout.sequence_parallel
        # Of K and V each rank has at least one head, which it may share with others.
        num_kv_heads = max(model.num_kv_heads, self._num)
        self._kv_share = num_kv_heads / model.num_kv_heads / self._num
        num_bytes = exchanged_bytes(model, profile.dtype, self._num)
        self._exchange = self._exchange_line(layout, num_bytes / self._num)

    def _exchange_line(self, layout: Layout, bytes_per_token: float) -> Line:
        """Return the seconds of a layer's exchanges in one direction, per token of the chunk."""
        line = all_to_all_line(self._profile.times, sequence_group(layout))
        return Line(constant=_EXCHANGES * line.constant, rate=bytes_per_token * line.rate)

    def model(self) -> Model:
        """Return the model with the heads of a rank, as which its attention sees it."""
        model = self._profile.model
        kv_heads = max(1, model.num_kv_heads // self._num)
        return replace(model, num_heads=model.num_heads // self._num, num_kv_heads=kv_heads)

    def times(self) -> Times:
        """Return the seconds of a rank."""
        times = self._profile.times
        input_backward = times.layer_input_backward
        weight_backward = times.layer_weight_backward
        return replace(
            times,
            layer_forward=self._exchanging(times.layer_forward),
            layer_backward=self._exchanging(times.layer_backward),
            # It runs F again, exchanges included.
            layer_recompute=self._exchanging(times.layer_recompute),
            embedding_forward=self._curve(times.embedding_forward),
            embedding_backward=self._curve(times.embedding_backward),
            head_forward=self._curve(times.head_forward),
            head_backward=self._curve(times.head_backward),
            layer_input_backward=input_backward and self._exchanging(input_backward),
            layer_weight_backward=weight_backward and self._layer(weight_backward),
        )

    def _curve(self, curve: Curve) -> Curve:
        """Return the seconds of a rank's tokens, by those of the chunk."""
        tokens = tuple(self._num * tokens for tokens in curve.tokens)
        return replace(curve, tokens=tokens)

    def _layer(self, time: LayerTime) -> LayerTime:
        """Return the seconds of a layer without its exchanges."""
        # Attention is called as often as without the other ranks, for fewer heads.
        return replace(
            time,
            curve=self._curve(time.curve),
            s_per_pair=time.s_per_pair / self._num,
            s_per_context_token=time.s_per_context_token * self._kv_share,
            s_per_continued_token=time.s_per_continued_token / self._num,
        )

    def _exchanging(self, time: LayerTime) -> LayerTime:
        """Return the seconds of a layer with its exchanges in one direction."""
        layer = self._layer(time)
        curve = layer.curve
        seconds = [
            of_layer + self._exchange.constant + self._exchange.rate * tokens
            for of_layer, tokens in zip(curve.seconds, curve.tokens, strict=True)
        ]
        return replace(layer, curve=replace(curve, seconds=tuple(seconds)))

    def bytes(self) -> Bytes:
        """Return the bytes of a rank."""
        sizes = self._profile.bytes
        left = sizes.layer_split_per_token
        # A tensor of its own on either side of an exchange: of the output, which attention keeps
        # and so does the product after it, and of the output's gradient while attention runs.
        exchanged = query_bytes(self._profile.model, self._profile.dtype)
        return replace(
            sizes,
            activation_per_token=sizes.activation_per_token / self._num,
            layer_full_per_token=(sizes.layer_full_per_token + exchanged) / self._num,
            layer_kv_per_token=sizes.layer_kv_per_token * self._kv_share,
            layer_kv_grad_per_token=sizes.layer_kv_grad_per_token * self._kv_share,
            chunk_per_token=sizes.chunk_per_token / self._num,
            embedding_per_token=sizes.embedding_per_token / self._num,
            head_per_token=sizes.head_per_token / self._num,
            layer_forward_peak=self._line(sizes.layer_forward_peak),
            recompute_forward_peak=self._line(sizes.recompute_forward_peak),
            layer_backward_peak=self._line(sizes.layer_backward_peak),
            slice_backward_per_token=(sizes.slice_backward_per_token + exchanged) / self._num,
            context_per_token=sizes.context_per_token * self._kv_share,
            embedding_backward_peak=self._line(sizes.embedding_backward_peak),
            head_forward_peak=self._line(sizes.head_forward_peak),
            head_backward_peak=self._line(sizes.head_backward_peak),
            # Of a block that each rank computes of its own tokens.
            logits_per_token=sizes.logits_per_token / self._num,
            layer_split_per_token=left and left / self._num,
        )

    def _line(self, line: Line) -> Line:
        """Return what a rank's tokens take, by those of the chunk; weights are whole."""
        return replace(line, rate=line.rate / self._num)
