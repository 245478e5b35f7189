"""Attention over the slices of a chunk: isolated, causal, and aware of a split sequence's context.

The plan's segment table travels to every decoder layer as the keyword argument
`segments`; boundaries come from it and never from positions. A slice attends to its own
tokens causally and to its whole context, as two kernel calls merged by their
log-sum-exp, so no mask is ever built. With the merged output and log-sum-exp the
kernel's own backward gives each part's exact gradients. Ranks that share a chunk exchange
within attention: each attends over the whole chunk with its part of the heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from infinipipe.runtime.attention.exchange import NO_EXCHANGE, Exchange
from infinipipe.runtime.attention.kernels import Attended, AttentionGradients, Kernel
from infinipipe.runtime.attention.kv_store import KVStore, Slot
from infinipipe.runtime.attention.segments import Segment
from infinipipe.runtime.shards import shard_sizes

ATTENTION_NAME = "infinipipe"
"""Under which transformers finds `chunk_attention`; none of its own has this name."""


class KeptAttention:
    """What attention of one layer over one chunk gave in F, until the layer is recomputed in B."""

    def __init__(self) -> None:
        self._attended: Attended | None = None

    def keep(self, out: Tensor, lse: Tensor) -> None:
        """Hold what attention gave, apart from its graph, which would hold all of the layer."""
        self._attended = Attended(out.detach(), lse)

    def take(self) -> Attended | None:
        """Hand over what is held, if anything is."""
        attended = self._attended
        self._attended = None
        return attended


@dataclass(frozen=True)
class Segments:
    """A chunk's segment table, and what it takes to attend by it."""

    table: tuple[Segment, ...]
    """Of the whole chunk, also where ranks share it."""
    store: KVStore
    """Where K and V of the chunk's split sequence are."""
    kernel: Kernel
    exchange: Exchange = NO_EXCHANGE
    """Of the ranks that share the chunk."""
    kept: KeptAttention | None = None
    """What a layer keeps that is recomputed without attention; None for all other layers."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk."""
        return self.table[-1].last

    @property
    def split(self) -> Segment | None:
        """The slice that is only a part of its sequence, if there is one."""
        return next((segment for segment in self.table if segment.split), None)


class _Backward(NamedTuple):
    """What a slice's queries bring to the backward of their attention."""

    kernel: Kernel
    grad: Tensor
    query: Tensor
    attended: Attended
    scale: float

    def against(self, key: Tensor, value: Tensor, *, causal: bool) -> AttentionGradients:
        """Return what some of the keys contribute to the gradients, tokens first as they are."""
        gradients = self.kernel.backward(
            self.grad,
            self.query,
            _heads_first(key),
            _heads_first(value),
            self.attended,
            causal,
            self.scale,
        )
        return AttentionGradients(*map(_tokens_first, gradients))


class _ChunkAttention(torch.autograd.Function):
    """Attention of one layer over one chunk, tokens first: (tokens, heads, head dim).

    Takes and returns all heads of the rank's tokens; in between it has its heads of all tokens.
    Keeps queries, output and log-sum-exp; K and V of whole sequences only, as the others' are in
    their slots.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: int,
        segments: Segments,
        scale: float,
    ) -> Tensor:
        num_heads = query.shape[1]
        ctx.num_heads = num_heads
        ctx.num_kv_heads = key.shape[1]
        query = segments.exchange.to_heads(query, segments.num_tokens)
        key, value = _bring_keys_and_values(key, value, layer, segments)
        kept = segments.kept.take() if segments.kept else None
        if kept:
            out, lse = kept
        else:
            out, lse = _attend(query, key, value, layer, segments, scale)
            if segments.kept:
                segments.kept.keep(out, lse)
        if all(segment.split for segment in segments.table):
            ctx.save_for_backward(query, out, lse)
        else:
            ctx.save_for_backward(query, out, lse, key, value)
        ctx.layer = layer
        ctx.segments = segments
        ctx.scale = scale
        ctx.kv_shape = key.shape
        return segments.exchange.to_tokens(out, num_heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, out, lse, *key_and_value = ctx.saved_tensors
        segments = ctx.segments
        exchange = segments.exchange
        grad = exchange.to_heads(grad, segments.num_tokens)
        gradients = AttentionGradients(
            query=query.new_empty(query.shape),
            key=query.new_empty(ctx.kv_shape),
            value=query.new_empty(ctx.kv_shape),
        )
        for segment in segments.table:
            rows = segment.rows
            backward = _Backward(
                kernel=segments.kernel,
                grad=_heads_first(grad[rows]),
                query=_heads_first(query[rows]),
                attended=Attended(_heads_first(out[rows]), lse[:, :, rows]),
                scale=ctx.scale,
            )
            into = AttentionGradients(
                query=gradients.query[rows],
                key=gradients.key[rows],
                value=gradients.value[rows],
            )
            if segment.split:
                slot = segments.store.slot(segment, ctx.layer)
                _backward_of_split(backward, segment, slot, into)
            else:
                key, value = key_and_value
                _backward_of_whole(backward, key[rows], value[rows], into)
        return (
            exchange.to_tokens(gradients.query, ctx.num_heads),
            exchange.to_tokens(gradients.key, ctx.num_kv_heads),
            exchange.to_tokens(gradients.value, ctx.num_kv_heads),
            None,
            None,
            None,
        )


def _bring_keys_and_values(
    key: Tensor, value: Tensor, layer: int, segments: Segments
) -> tuple[Tensor, Tensor]:
    """Return the rank's heads of K and V over the chunk; those of a split slice are in its slot."""
    exchange = segments.exchange
    num_tokens = segments.num_tokens
    split = segments.split
    if split is None:
        return exchange.to_heads(key, num_tokens), exchange.to_heads(value, num_tokens)
    slot = segments.store.open(split, layer, exchange.own_heads(key.shape[1]), key)
    slot_key = slot.key[split.span]
    slot_value = slot.value[split.span]
    if len(segments.table) == 1:
        # Recompute writes the same again.
        exchange.to_heads(key, num_tokens, slot_key)
        exchange.to_heads(value, num_tokens, slot_value)
        return slot_key, slot_value
    key = exchange.to_heads(key, num_tokens)
    value = exchange.to_heads(value, num_tokens)
    slot_key.copy_(key[split.rows])
    slot_value.copy_(value[split.rows])
    return key, value


def _attend(
    query: Tensor, key: Tensor, value: Tensor, layer: int, segments: Segments, scale: float
) -> Attended:
    """Attend over a chunk whose K and V, and all before it of its split sequence, are here.

    Takes (tokens of the chunk, own heads, head dim); so is the output, with its log-sum-exp as
    kernels have it.
    """
    num_tokens, heads, _ = query.shape
    # Tokens before heads in memory: the layer's next product then reads it without a copy.
    out = query.new_empty(query.shape)
    lse = query.new_empty(1, heads, num_tokens, dtype=torch.float32)
    for segment in segments.table:
        rows = segment.rows
        own_query = _heads_first(query[rows])
        own_key = _heads_first(key[rows])
        own_value = _heads_first(value[rows])
        attended = segments.kernel.forward(own_query, own_key, own_value, True, scale)
        if segment.start > 0:
            slot = segments.store.slot(segment, layer)
            attended = _add_context(segments.kernel, attended, segment, slot, own_query, scale)
        out[rows] = _tokens_first(attended.out)
        lse[:, :, rows] = attended.lse
    return Attended(out, lse)


def _heads_first(tensor: Tensor) -> Tensor:
    """Return (1, heads, tokens, head dim), as kernels take it, of (tokens, heads, head dim)."""
    return tensor.transpose(0, 1)[None]


def _tokens_first(tensor: Tensor) -> Tensor:
    """Return (tokens, heads, head dim) of (1, heads, tokens, head dim)."""
    return tensor[0].transpose(0, 1)


def _add_context(
    kernel: Kernel, own: Attended, segment: Segment, slot: Slot, query: Tensor, scale: float
) -> Attended:
    """Extend a slice's attention over its own tokens to those before it."""
    key = _heads_first(slot.key[segment.context])
    value = _heads_first(slot.value[segment.context])
    # Every token of the context comes before every query, so nothing is masked.
    context = kernel.forward(query, key, value, False, scale)
    return _merge(own, context)


def _merge(own: Attended, other: Attended) -> Attended:
    """Combine attention over two disjoint sets of keys into attention over both."""
    lse = torch.logaddexp(own.lse, other.lse)
    out = own.out * _share(own, lse)
    out += other.out * _share(other, lse)
    return Attended(out, lse)


def _share(part: Attended, lse: Tensor) -> Tensor:
    """Return how much of all exponentials is a part's, (1, heads, tokens, 1)."""
    share = (part.lse - lse).exp()
    return share[..., None].to(part.out.dtype)


def _backward_of_whole(
    backward: _Backward, key: Tensor, value: Tensor, into: AttentionGradients
) -> None:
    own = backward.against(key, value, causal=True)
    into.query.copy_(own.query)
    into.key.copy_(own.key)
    into.value.copy_(own.value)


def _backward_of_split(
    backward: _Backward, segment: Segment, slot: Slot, into: AttentionGradients
) -> None:
    """Write a slice's gradients, and leave in the slot what it asks of the tokens before it."""
    span = segment.span
    own = backward.against(slot.key[span], slot.value[span], causal=True)
    into.query.copy_(own.query)
    if slot.gradients is None:
        # The sequence's last slice: no other asks anything of its K and V.
        into.key.copy_(own.key)
        into.value.copy_(own.value)
    else:
        # Later slices have left what they ask of this one's K and V; their backward comes first.
        key_gradient, value_gradient = slot.gradients
        into.key.copy_(key_gradient[span] + own.key)
        into.value.copy_(value_gradient[span] + own.value)
    if segment.start > 0:
        before = segment.context
        context = backward.against(slot.key[before], slot.value[before], causal=False)
        into.query.add_(context.query)
        # Earlier slices find it when their backward runs.
        slot.add_gradients(context.key, context.value)


def chunk_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    segments: Segments | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' interface asks, with the rank's tokens of the chunk.

    Takes (1, heads, tokens, head dim) and returns (1, tokens, heads, head dim).
    """
    assert segments is not None, "a decoder layer was called without the plan's segment table"
    assert attention_mask is None, "boundaries come from the segment table, not from a mask"
    assert sliding_window is None, "sliding-window attention is refused when the model is read"
    assert dropout == 0.0, "attention dropout is refused when the model is read"
    exchange = segments.exchange
    num_tokens = query.shape[2]
    covered = shard_sizes(segments.num_tokens, exchange.num_ranks)[exchange.index]
    # A rank without tokens has one that nothing depends on, see `Executor`.
    assert num_tokens == max(1, covered), (
        f"the segment table gives this rank {covered} tokens, the layer has {num_tokens}"
    )
    shard = [_tokens_first(tensor[:, :, :covered]) for tensor in (query, key, value)]
    out = _ChunkAttention.apply(  # type: ignore[no-untyped-call]
        *shard, module.layer_idx, segments, scaling
    )
    if covered == 0:
        out = pad(out, (0, 0, 0, 0, 0, 1))
    return out[None], None
