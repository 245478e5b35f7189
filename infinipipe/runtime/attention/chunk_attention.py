"""Attention over the slices of a chunk: isolated, causal, and aware of a split sequence's context.

The plan's segment table travels to every decoder layer as the keyword argument
`segments`; boundaries come from it and never from positions. A slice attends to its own
tokens causally and to its whole context, as two kernel calls merged by their
log-sum-exp, so no mask is ever built. With the merged output and log-sum-exp the
kernel's own backward gives each part's exact gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

ATTENTION_NAME = "infinipipe"


@dataclass(frozen=True)
class Segment:
    """One slice's place in a chunk."""

    first: int
    """Its first token in the chunk."""
    length: int
    sequence: int
    """Index into the step's sequences."""
    start: int
    """Its context: the sequence's tokens before it."""
    total: int
    """Tokens of the whole sequence."""

    @property
    def last(self) -> int:
        """One past its last token in the chunk."""
        return self.first + self.length

    @property
    def stop(self) -> int:
        """One past its last token in the sequence."""
        return self.start + self.length

    @property
    def split(self) -> bool:
        """Whether it is only a part of its sequence."""
        return self.length != self.total


class Slot:
    """K and V of one split sequence on one layer, shape (1, kv heads, tokens, head dim), and their gradients."""

    def __init__(self, key: Tensor, total: int) -> None:
        shape = (1, key.shape[1], total, key.shape[3])
        self.key = key.new_empty(shape)
        self.value = key.new_empty(shape)
        self._gradients: tuple[Tensor, Tensor] | None = None

    @property
    def gradients(self) -> tuple[Tensor, Tensor]:
        """Accumulators of dK and dV in float32, made at the sequence's first backward."""
        if self._gradients is None:
            zeros = torch.zeros_like(self.key, dtype=torch.float32)
            self._gradients = zeros, torch.zeros_like(zeros)
        return self._gradients


class KVStore:
    """The slots of a stage, by sequence and layer."""

    def __init__(self) -> None:
        self._slots: dict[int, dict[int, Slot]] = {}

    def write(self, segment: Segment, layer: int, key: Tensor, value: Tensor) -> Slot:
        """Put a slice's K and V into the sequence's slot; recompute writes the same again."""
        layers = self._slots.setdefault(segment.sequence, {})
        slot = layers.get(layer)
        if slot is None:
            slot = layers[layer] = Slot(key, segment.total)
        slot.key[:, :, segment.start : segment.stop] = key
        slot.value[:, :, segment.start : segment.stop] = value
        return slot

    def slot(self, segment: Segment, layer: int) -> Slot:
        """Return the slot that an earlier `write` filled."""
        return self._slots[segment.sequence][layer]

    def free(self, sequence: int) -> None:
        """Drop a sequence whose first slice's backward is done."""
        del self._slots[sequence]

    def __len__(self) -> int:
        """Count the sequences that have a slot."""
        return len(self._slots)


@dataclass(frozen=True)
class Segments:
    """A chunk's segment table, with the store that keeps its split sequence's K and V."""

    table: tuple[Segment, ...]
    store: KVStore


class Kernel(Protocol):
    """Attention of (1, heads, tokens, head dim) queries on keys and values with fewer or as many heads."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the output and its log-sum-exp in float32, shape (1, heads, tokens)."""

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v, for an output and log-sum-exp that may cover more keys than these."""


class CpuKernel:
    """PyTorch's flash attention for CPUs."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = op(q, k, v, 0.0, causal, scale=scale)
        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = op(grad, q, k, v, out, lse, 0.0, causal, scale=scale)
        return dq, dk, dv


class BlockKernel:
    """Plain matrix products over blocks of queries: any device and precision, memory linear in the keys."""

    block = 512

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernel`."""
        k, v = _repeat(k, q), _repeat(v, q)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        for rows in self._blocks(q):
            scores = self._scores(q, k, rows, causal, scale)
            lse[:, :, rows] = scores.logsumexp(-1)
            out[:, :, rows] = (scores - lse[:, :, rows, None]).exp_().to(v.dtype) @ v
        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel`."""
        groups = k.shape[1]
        k, v = _repeat(k, q), _repeat(v, q)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta = (grad.float() * out.float()).sum(-1, keepdim=True)
        for rows in self._blocks(q):
            weights = (self._scores(q, k, rows, causal, scale) - lse[:, :, rows, None]).exp_()
            block = grad[:, :, rows]
            dv += weights.to(v.dtype).transpose(-1, -2) @ block
            inner = (
                ((block @ v.transpose(-1, -2)).float() - delta[:, :, rows])
                .mul_(weights)
                .mul_(scale)
                .to(q.dtype)
            )
            dq[:, :, rows] = inner @ k
            dk += inner.transpose(-1, -2) @ q[:, :, rows]
        return dq, dk.unflatten(1, (groups, -1)).sum(2), dv.unflatten(1, (groups, -1)).sum(2)

    def _blocks(self, q: Tensor) -> list[slice]:
        return [slice(a, min(a + self.block, q.shape[2])) for a in range(0, q.shape[2], self.block)]

    def _scores(self, q: Tensor, k: Tensor, rows: slice, causal: bool, scale: float) -> Tensor:
        scores = (q[:, :, rows] @ k.transpose(-1, -2)).float() * scale
        if causal:
            row = torch.arange(rows.start, rows.stop, device=q.device)
            scores.masked_fill_(
                torch.arange(k.shape[2], device=q.device) > row[:, None], float("-inf")
            )
        return scores


def _repeat(tensor: Tensor, q: Tensor) -> Tensor:
    return tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1)


def kernel_for(device: torch.device) -> Kernel:
    """Choose the attention kernel of a device."""
    return CpuKernel() if device.type == "cpu" else BlockKernel()


def _merge(own: Tensor, own_lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Combine attention over two disjoint sets of keys into attention over both."""
    lse = torch.logaddexp(own_lse, other_lse)
    out = own * (own_lse - lse).exp()[..., None].to(own.dtype)
    out += other * (other_lse - lse).exp()[..., None].to(own.dtype)
    return out, lse


class _ChunkAttention(torch.autograd.Function):
    """Attention of one layer over one chunk. Keeps q, output and log-sum-exp; K and V of whole sequences only."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layer: int, segments: Segments, scale: float
    ) -> Tensor:
        kernel = kernel_for(q.device)
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        for segment in segments.table:
            own = slice(segment.first, segment.last)
            part, part_lse = kernel.forward(q[:, :, own], k[:, :, own], v[:, :, own], True, scale)
            if segment.split:
                slot = segments.store.write(segment, layer, k[:, :, own], v[:, :, own])
                if segment.start:
                    context = slice(0, segment.start)
                    other = kernel.forward(
                        q[:, :, own],
                        slot.key[:, :, context],
                        slot.value[:, :, context],
                        False,
                        scale,
                    )
                    part, part_lse = _merge(part, part_lse, *other)
            out[:, :, own], lse[:, :, own] = part, part_lse
        whole = any(not segment.split for segment in segments.table)
        ctx.save_for_backward(q, out, lse, *((k, v) if whole else ()))
        ctx.layer, ctx.segments, ctx.scale = layer, segments, scale
        ctx.kv_shape = k.shape
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, out, lse, *kv = ctx.saved_tensors
        kernel, scale, segments = kernel_for(q.device), ctx.scale, ctx.segments
        dq, dk, dv = torch.empty_like(q), q.new_empty(ctx.kv_shape), q.new_empty(ctx.kv_shape)
        for segment in segments.table:
            own = slice(segment.first, segment.last)
            shared = grad[:, :, own], q[:, :, own]
            merged = out[:, :, own], lse[:, :, own]
            if not segment.split:
                k, v = kv
                parts = kernel.backward(*shared, k[:, :, own], v[:, :, own], *merged, True, scale)
                dq[:, :, own], dk[:, :, own], dv[:, :, own] = parts
                continue
            slot = segments.store.slot(segment, ctx.layer)
            here, context = slice(segment.start, segment.stop), slice(0, segment.start)
            dkey, dvalue = slot.gradients
            parts = kernel.backward(
                *shared, slot.key[:, :, here], slot.value[:, :, here], *merged, True, scale
            )
            dq[:, :, own] = parts[0]
            # Later slices have left what they ask of this one's K and V; their backward always comes first.
            dk[:, :, own] = dkey[:, :, here] + parts[1]
            dv[:, :, own] = dvalue[:, :, here] + parts[2]
            if segment.start:
                parts = kernel.backward(
                    *shared,
                    slot.key[:, :, context],
                    slot.value[:, :, context],
                    *merged,
                    False,
                    scale,
                )
                dq[:, :, own] += parts[0]
                dkey[:, :, context] += parts[1]
                dvalue[:, :, context] += parts[2]
        return dq, dk, dv, None, None, None


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
    """Attend as transformers' interface asks: (1, heads, tokens, head dim) to (1, tokens, heads, head dim)."""
    assert segments is not None, "a decoder layer was called without the plan's segment table"
    assert attention_mask is None, "boundaries come from the segment table, not from a mask"
    assert sliding_window is None, "sliding-window attention is refused when the model is read"
    assert dropout == 0.0, "attention dropout is refused when the model is read"
    assert segments.table[-1].last == query.shape[2], (
        f"the segment table covers {segments.table[-1].last} tokens, the chunk has {query.shape[2]}"
    )
    out = _ChunkAttention.apply(query, key, value, module.layer_idx, segments, scaling)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2), None
