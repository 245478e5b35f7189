"""The head and its loss, a piece of logits at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _HeadLoss(torch.autograd.Function):
    """Weighted sum of token losses. Forward computes all gradients, while a piece of logits is at hand.

    The gradient of the head's weight goes straight into `weight.grad`, so that chunks waiting for their
    backward do not each hold one; that of `hidden` is kept until backward.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor, piece: int
    ) -> Tensor:
        assert weight.grad is not None, "the stage allocates gradients before its first op"
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        for first in range(0, hidden.shape[0], piece):
            rows = slice(first, min(first + piece, hidden.shape[0]))
            logits = (hidden[rows] @ weight.t()).float()
            label, scale = targets[rows, None].clamp(min=0), token_weights[rows, None]
            # Softmax in place: of all tensors here only this one is large.
            top = logits.amax(-1, keepdim=True)
            picked = logits.gather(1, label) - top
            normaliser = logits.sub_(top).exp_().sum(-1, keepdim=True)
            total += ((normaliser.log() - picked) * scale).sum()
            # The gradient of the logits: softmax minus one at the target, times the token's weight.
            logits.mul_(scale / normaliser).scatter_add_(1, label, -scale)
            grad = logits.to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            weight.grad.addmm_(grad.t(), hidden[rows])
            del logits, grad  # before the next piece's are made
        ctx.save_for_backward(grad_hidden)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (grad_hidden,) = ctx.saved_tensors
        return grad_hidden * grad, None, None, None, None


def head_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor, piece: int
) -> Tensor:
    """Return the weighted sum of token losses, a float32 scalar; its backward must run exactly once, with gradient 1.

    Args:
        hidden: (tokens, hidden size), after the final norm.
        weight: (vocabulary, hidden size); its gradient is added to `weight.grad` at once.
        targets: (tokens,) int64; negative only where the weight is 0.
        token_weights: (tokens,) float32; 0 for a token without target.
        piece: logits are made for at most this many tokens at a time.
    """
    loss: Tensor = _HeadLoss.apply(hidden, weight, targets, token_weights, piece)  # type: ignore[no-untyped-call]
    return loss
