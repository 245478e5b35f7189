"""The head and its loss, a block of logits at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _HeadLoss(torch.autograd.Function):
    """Weighted sum of token losses.

    Forward computes all gradients, while a block of logits is at hand. That of the head's weight
    goes straight into `weight.grad`, so that chunks waiting for their backward do not each hold
    one; that of `hidden` is kept until backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        token_weights: Tensor,
        block_tokens: int,
    ) -> Tensor:
        assert weight.grad is not None, "the stage allocates gradients before its first op"
        num_tokens = hidden.shape[0]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        for first in range(0, num_tokens, block_tokens):
            rows = slice(first, min(first + block_tokens, num_tokens))
            logits = (hidden[rows] @ weight.t()).float()
            total += _differentiate(logits, targets[rows], token_weights[rows])
            grad = logits.to(hidden.dtype)
            grad_hidden[rows] = grad @ weight
            weight.grad.addmm_(grad.t(), hidden[rows])
            # Before the next block's are made.
            del logits, grad
        ctx.save_for_backward(grad_hidden)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (grad_hidden,) = ctx.saved_tensors
        return grad_hidden * grad, None, None, None, None


def _differentiate(logits: Tensor, targets: Tensor, token_weights: Tensor) -> Tensor:
    """Return the weighted loss of a block of logits, (tokens, vocabulary), and differentiate them.

    In place, because of all tensors here only this one is large.
    """
    label = targets[:, None].clamp(min=0)
    scale = token_weights[:, None]
    top = logits.amax(-1, keepdim=True)
    target_logit = logits.gather(1, label) - top
    exponentials = logits.sub_(top).exp_()
    normaliser = exponentials.sum(-1, keepdim=True)
    losses = normaliser.log() - target_logit
    # The gradient of the logits: softmax minus one at the target, times the token's weight.
    logits.mul_(scale / normaliser).scatter_add_(1, label, -scale)
    return (losses * scale).sum()


def head_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor, block_tokens: int
) -> Tensor:
    """Return the weighted sum of token losses, a float32 scalar.

    Its backward must run exactly once, with gradient 1.

    Args:
        hidden: (tokens, hidden size), after the final norm.
        weight: (vocabulary, hidden size); its gradient is added to `weight.grad` at once.
        targets: (tokens,) int64; negative only where the weight is 0.
        token_weights: (tokens,) float32; 0 for a token without target.
        block_tokens: logits are made for at most this many tokens at a time.
    """
    loss: Tensor = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, token_weights, block_tokens
    )
    return loss
