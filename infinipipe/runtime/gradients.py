"""Gradients of a step: summed over the ranks that share a weight, measured, clipped and zeroed."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from infinipipe.runtime.model import EMBEDDING, HEAD, StageModel
from infinipipe.runtime.ranks import Groups, Ranks

MAX_GRAD_NORM = 1.0
"""The usual limit of LLM training: it bounds what one step with a bad batch can do."""
_TINY = 1e-6
"""Added to the norm, as `torch.nn.utils.clip_grad_norm_` does, so that 0 can be divided by."""


class Totals(NamedTuple):
    """Of a step, over all ranks."""

    loss: float
    grad_norm: float


class Gradients:
    """The gradients of one stage's parameters.

    Args:
        model: the stage, made trainable.
        ranks: this process.
        groups: the groups it talks in.
    """

    def __init__(self, model: StageModel, ranks: Ranks, groups: Groups) -> None:
        self._parameters = model.global_parameters()
        self._buffer = model.gradients
        self._num_copies = ranks.layout.num_copies
        self._copies = groups.copies
        self._tied = groups.tied
        self._tied_name: str | None = None
        if groups.tied is not None:
            self._tied_name = EMBEDDING if ranks.stage_index == 0 else HEAD

    def sum_over_ranks(self) -> None:
        """Add up every gradient over the ranks that hold its weight."""
        if self._tied is not None:
            # First over the two copies of a tied weight in each pipeline; then all copies of it,
            # at both ends, have the same sum and take the same update.
            dist.all_reduce(self._tied_gradient(), group=self._tied)
        if self._copies is not None:
            for part in self._parts():
                dist.all_reduce(part, group=self._copies)

    def totals(self, loss: Tensor) -> Totals:
        """Return the loss and the gradients' norm over all ranks, after `sum_over_ranks`.

        Args:
            loss: a scalar, this rank's part of the loss.
        """
        squares = self._sum_of_squares()
        # Every copy holds the same gradients by now, but only its own chunks' loss.
        both = torch.stack([loss.double(), squares / self._num_copies])
        dist.all_reduce(both)
        return Totals(loss=float(both[0]), grad_norm=math.sqrt(float(both[1])))

    def clip(self, grad_norm: float) -> None:
        """Scale all gradients so that a norm beyond `MAX_GRAD_NORM` becomes that."""
        scale = min(1.0, MAX_GRAD_NORM / (grad_norm + _TINY))
        if scale < 1.0:
            self._buffer.mul_(scale)

    def zero(self) -> None:
        """Set all gradients to zero, in place."""
        self._buffer.zero_()

    def _tied_gradient(self) -> Tensor:
        assert self._tied_name is not None
        return self._by_name()[self._tied_name]

    def _parts(self) -> list[Tensor]:
        """Return what copies add up: a tied weight apart, so that both ends add it up alike."""
        if self._tied_name is None:
            return [self._buffer]
        tied = self._tied_gradient()
        first = tied.storage_offset()
        sizes = [first, tied.numel(), self._buffer.numel() - first - tied.numel()]
        return [part for part in self._buffer.split(sizes) if part.numel()]

    def _by_name(self) -> dict[str, Tensor]:
        gradients: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            assert parameter.grad is not None
            gradients[name] = parameter.grad
        return gradients

    def _sum_of_squares(self) -> Tensor:
        """Return this rank's sum in float64; a tied weight counts once, where it embeds."""
        gradients = self._by_name()
        if self._tied_name == HEAD:
            del gradients[HEAD]
        # Float64, as a stage's squares may be billions of very different size.
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients.values()]
        return torch.stack(norms).square().sum()
