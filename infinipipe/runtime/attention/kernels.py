"""Attention kernels: what computes attention of queries on keys and values, and its gradients.

Shapes are (1, heads, tokens, head dim); keys and values may have fewer heads, each of which
serves as many queries' heads that stand next to each other.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

_NO_DROPOUT = 0.0
"""A model with attention dropout is refused when it is read."""


class Attended(NamedTuple):
    """What attention returns, with what it takes to merge it with attention over other keys."""

    out: Tensor
    """(1, heads, tokens, head dim)."""
    lse: Tensor
    """The log of the sum of the exponentials of all scores, (1, heads, tokens) float32."""


class AttentionGradients(NamedTuple):
    """Of the three inputs of attention, each with its shape."""

    query: Tensor
    key: Tensor
    value: Tensor


class Kernel(Protocol):
    """Attention of a device."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
    ) -> Attended:
        """Attend; `causal` means that token i of the queries sees tokens 0 to i of the keys."""

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attended: Attended,
        causal: bool,
        scale: float,
    ) -> AttentionGradients:
        """Return what these keys contribute to the gradients, for a gradient of the output.

        `attended` may be over more keys than these: with the output and the log-sum-exp of all of
        them, each part's gradients are exact.
        """


class CpuKernel:
    """PyTorch's flash attention for CPUs."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
    ) -> Attended:
        """See `Kernel`."""
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = op(query, key, value, _NO_DROPOUT, causal, scale=scale)
        return Attended(out, lse)

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attended: Attended,
        causal: bool,
        scale: float,
    ) -> AttentionGradients:
        """See `Kernel`."""
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        out, lse = attended
        gradients = op(grad, query, key, value, out, lse, _NO_DROPOUT, causal, scale=scale)
        return AttentionGradients(*gradients)


class BlockKernel:
    """Plain matrix products over blocks of queries: any device and precision.

    Its memory is linear in the keys.
    """

    block_tokens = 512
    """Queries at a time. Scores of (heads, block, keys) are what it holds: more take more memory,
    fewer take more launches of smaller products."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
    ) -> Attended:
        """See `Kernel`."""
        key = _repeat_heads(key, query)
        value = _repeat_heads(value, query)
        out = torch.empty_like(query)
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        for rows in self._blocks(query):
            scores = _scores(query, key, rows, causal, scale)
            lse_rows = scores.logsumexp(-1)
            weights = (scores - lse_rows[..., None]).exp_()
            lse[:, :, rows] = lse_rows
            out[:, :, rows] = weights.to(value.dtype) @ value
        return Attended(out, lse)

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attended: Attended,
        causal: bool,
        scale: float,
    ) -> AttentionGradients:
        """See `Kernel`."""
        kv_heads = key.shape[1]
        key = _repeat_heads(key, query)
        value = _repeat_heads(value, query)
        grad_query = torch.empty_like(query)
        grad_key = torch.zeros_like(key)
        grad_value = torch.zeros_like(value)
        # What the softmax takes off every gradient of a row's weights.
        delta = (grad.float() * attended.out.float()).sum(-1, keepdim=True)
        for rows in self._blocks(query):
            scores = _scores(query, key, rows, causal, scale)
            lse_rows = attended.lse[:, :, rows, None]
            weights = (scores - lse_rows).exp_()
            grad_rows = grad[:, :, rows]
            grad_value += weights.to(value.dtype).transpose(-1, -2) @ grad_rows
            grad_weights = (grad_rows @ value.transpose(-1, -2)).float()
            grad_scores = (grad_weights - delta[:, :, rows]).mul_(weights)
            # Of the products of queries and keys, which were scaled into scores.
            grad_products = grad_scores.mul_(scale).to(query.dtype)
            grad_query[:, :, rows] = grad_products @ key
            grad_key += grad_products.transpose(-1, -2) @ query[:, :, rows]
        return AttentionGradients(
            grad_query, _sum_heads(grad_key, kv_heads), _sum_heads(grad_value, kv_heads)
        )

    def _blocks(self, query: Tensor) -> list[slice]:
        num_tokens = query.shape[2]
        starts = range(0, num_tokens, self.block_tokens)
        return [slice(start, min(start + self.block_tokens, num_tokens)) for start in starts]


def _scores(query: Tensor, key: Tensor, rows: slice, causal: bool, scale: float) -> Tensor:
    """Return the scores of some queries on all keys in float32."""
    scores = (query[:, :, rows] @ key.transpose(-1, -2)).float() * scale
    if causal:
        row = torch.arange(rows.start, rows.stop, device=query.device)
        column = torch.arange(key.shape[2], device=query.device)
        scores.masked_fill_(column > row[:, None], float("-inf"))
    return scores


def _repeat_heads(tensor: Tensor, query: Tensor) -> Tensor:
    """Give keys or values as many heads as the queries have."""
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)


def _sum_heads(tensor: Tensor, kv_heads: int) -> Tensor:
    """Add up what `_repeat_heads` repeated."""
    by_kv_head: Tensor = tensor.unflatten(1, (kv_heads, -1))
    return by_kv_head.sum(2)


def kernel_for(device: torch.device) -> Kernel:
    """Choose the attention kernel of a device."""
    return CpuKernel() if device.type == "cpu" else BlockKernel()
