"""Attention over the slices of a chunk: isolated, causal, and aware of a split sequence's context.

The plan's segment table travels to every decoder layer as the keyword argument
`segments`; boundaries come from it and never from positions. A slice attends to its own
tokens causally and to its whole context, as two kernel calls merged by their
log-sum-exp, so no mask is ever built. With the merged output and log-sum-exp the
kernel's own backward gives each part's exact gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infinipipe.runtime.attention.kernels import Attended, AttentionGradients, Kernel
from infinipipe.runtime.attention.kv_store import KVStore, Slot
from infinipipe.runtime.attention.segments import Segment

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
    store: KVStore
    """Where K and V of the chunk's split sequence are."""
    kernel: Kernel
    kept: KeptAttention | None = None
    """What a layer keeps that is recomputed without attention; None for all other layers."""


class _Backward(NamedTuple):
    """What a slice's queries bring to the backward of their attention."""

    kernel: Kernel
    grad: Tensor
    query: Tensor
    attended: Attended
    scale: float

    def against(self, key: Tensor, value: Tensor, *, causal: bool) -> AttentionGradients:
        """Return what some of the keys contribute to the gradients."""
        return self.kernel.backward(
            self.grad, self.query, key, value, self.attended, causal, self.scale
        )


class _ChunkAttention(torch.autograd.Function):
    """Attention of one layer over one chunk.

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
        kept = segments.kept.take() if segments.kept else None
        if kept:
            # Recomputed: K and V of split sequences are in their slots as well.
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
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, out, lse, *key_and_value = ctx.saved_tensors
        segments = ctx.segments
        gradients = AttentionGradients(
            query=torch.empty_like(query),
            key=query.new_empty(ctx.kv_shape),
            value=query.new_empty(ctx.kv_shape),
        )
        for segment in segments.table:
            rows = segment.rows
            attended = Attended(out[:, :, rows], lse[:, :, rows])
            backward = _Backward(
                kernel=segments.kernel,
                grad=grad[:, :, rows],
                query=query[:, :, rows],
                attended=attended,
                scale=ctx.scale,
            )
            into = AttentionGradients(
                query=gradients.query[:, :, rows],
                key=gradients.key[:, :, rows],
                value=gradients.value[:, :, rows],
            )
            if segment.split:
                slot = segments.store.slot(segment, ctx.layer)
                _backward_of_split(backward, segment, slot, into)
            else:
                key, value = key_and_value
                _backward_of_whole(backward, key[:, :, rows], value[:, :, rows], into)
        return *gradients, None, None, None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, layer: int, segments: Segments, scale: float
) -> Attended:
    """Run the kernel on all slices of a chunk, and write K and V of split sequences to slots."""
    batch, heads, num_tokens, head_dim = query.shape
    # Tokens before heads in memory: the layer's next product then reads it without a copy.
    out = query.new_empty(batch, num_tokens, heads, head_dim).transpose(1, 2)
    lse = query.new_empty(batch, heads, num_tokens, dtype=torch.float32)
    for segment in segments.table:
        rows = segment.rows
        own_query = query[:, :, rows]
        own_key = key[:, :, rows]
        own_value = value[:, :, rows]
        attended = segments.kernel.forward(own_query, own_key, own_value, True, scale)
        if segment.split:
            slot = segments.store.write(segment, layer, own_key, own_value)
            attended = _add_context(segments.kernel, attended, segment, slot, own_query, scale)
        out[:, :, rows] = attended.out
        lse[:, :, rows] = attended.lse
    return Attended(out, lse)


def _add_context(
    kernel: Kernel, own: Attended, segment: Segment, slot: Slot, query: Tensor, scale: float
) -> Attended:
    """Extend a slice's attention over its own tokens to those before it."""
    if segment.start == 0:
        return own
    key = slot.key[:, :, segment.context]
    value = slot.value[:, :, segment.context]
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
    key_gradient, value_gradient = slot.gradients(segment)
    span = segment.span
    own_key = slot.key[:, :, span]
    own_value = slot.value[:, :, span]
    own = backward.against(own_key, own_value, causal=True)
    into.query.copy_(own.query)
    if segment.stop == segment.total:
        into.key.copy_(own.key)
        into.value.copy_(own.value)
    else:
        # Later slices have left what they ask of this one's K and V; their backward comes first.
        into.key.copy_(key_gradient[:, :, span] + own.key)
        into.value.copy_(value_gradient[:, :, span] + own.value)
    if segment.start == 0:
        return
    before = segment.context
    context_key = slot.key[:, :, before]
    context_value = slot.value[:, :, before]
    context = backward.against(context_key, context_value, causal=False)
    into.query.add_(context.query)
    # Earlier slices find it when their backward runs.
    key_gradient[:, :, before] += context.key
    value_gradient[:, :, before] += context.value


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
    """Attend as transformers' interface asks.

    Takes (1, heads, tokens, head dim) and returns (1, tokens, heads, head dim).
    """
    assert segments is not None, "a decoder layer was called without the plan's segment table"
    assert attention_mask is None, "boundaries come from the segment table, not from a mask"
    assert sliding_window is None, "sliding-window attention is refused when the model is read"
    assert dropout == 0.0, "attention dropout is refused when the model is read"
    num_tokens = query.shape[2]
    covered = segments.table[-1].last
    assert covered == num_tokens, (
        f"the segment table covers {covered} tokens, the chunk has {num_tokens}"
    )
    out = _ChunkAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, module.layer_idx, segments, scaling
    )
    return out.transpose(1, 2), None
