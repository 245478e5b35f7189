"""Gradients of a step: summed over the ranks that share a weight, measured, clipped and zeroed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from infinipipe.runtime.collectives import place_in, reduce_scatter
from infinipipe.runtime.flat import FlatBuffers, PartKind
from infinipipe.runtime.ranks import Groups, Ranks

MAX_GRAD_NORM = 1.0
"""The usual limit of LLM training: it bounds what one step with a bad batch can do."""
_TINY = 1e-6
"""Added to the norm, as `torch.nn.utils.clip_grad_norm_` does, so that 0 can be divided by."""
_BLOCK = 2**20
"""Elements whose squares are added up at a time. Torch makes a float64 copy of what it measures in
float64; 8 MiB is no matter beside a stage, and still so much that a GPU is kept busy."""


class Totals(NamedTuple):
    """Of a step, over all ranks."""

    loss: float
    grad_norm: float


class Gradients:
    """The gradients of one stage's parameters: whole on every rank, summed and clipped by shards.

    Args:
        flat: the stage's buffers, padded for as many shards as the stage has copies.
        ranks: this process.
        groups: the groups it talks in.
    """

    def __init__(self, flat: FlatBuffers, ranks: Ranks, groups: Groups) -> None:
        self._flat = flat
        self._copies = groups.copies
        self._tied = groups.tied
        self._shards = flat.shards(*place_in(groups.copies))
        self._embeds = ranks.stage_index == 0

    def sum_over_ranks(self) -> None:
        """Add up this rank's shards of all gradients over the ranks that hold their weights.

        The other shards are lost.
        """
        if self._copies is not None:
            for part in self._flat.parts:
                reduce_scatter(part.gradients, self._copies)
        for shard in self._shards:
            if shard.kind is PartKind.TIED:
                # Both ends own the same range of their copies. A sum of two is the same in either
                # order, so the copies take exactly the same updates.
                dist.all_reduce(shard.gradients, group=self._tied)

    def totals(self, loss: Tensor) -> Totals:
        """Return the loss and the gradients' norm over all ranks, after `sum_over_ranks`.

        Args:
            loss: a scalar, this rank's part of the loss.
        """
        counted = [
            shard.gradients
            for shard in self._shards
            if self._embeds or shard.kind is not PartKind.TIED
        ]
        both = torch.stack([loss.double(), sum_of_squares(counted)])
        dist.all_reduce(both)
        return Totals(loss=float(both[0]), grad_norm=math.sqrt(float(both[1])))

    def clip(self, grad_norm: float) -> None:
        """Scale this rank's shards so that a norm beyond `MAX_GRAD_NORM` becomes that."""
        scale = min(1.0, MAX_GRAD_NORM / (grad_norm + _TINY))
        if scale < 1.0:
            for shard in self._shards:
                shard.gradients.mul_(scale)

    def zero(self) -> None:
        """Set all gradients to zero, in place."""
        self._flat.gradients.zero_()


def sum_of_squares(tensors: Iterable[Tensor]) -> Tensor:
    """Return a float64 scalar of tensors of one dim: those of a stage may be billions of squares.

    In float32 they would be off by a percent.
    """
    norms: list[Tensor] = []
    for tensor in tensors:
        blocks = tensor.split(_BLOCK)
        norms += [torch.linalg.vector_norm(block, dtype=torch.float64) for block in blocks]
    return torch.stack(norms).square().sum()
