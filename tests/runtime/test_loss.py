"""The head's loss block by block against the dense one (CASES G1, G2)."""

from __future__ import annotations

import pytest
import torch

from infinipipe.dataset import IGNORED
from infinipipe.runtime.loss import head_loss
from infinipipe.runtime.memory import CpuMemory


@pytest.mark.parametrize("block_tokens", [1, 3, 7, 100])
def test_blocks_equal_the_dense_loss(block_tokens: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(11, 6, requires_grad=True)
    weight = torch.randn(20, 6, requires_grad=True)
    targets = torch.randint(0, 20, (11,))
    weights = torch.rand(11)
    weights[1] = 0.5
    targets[[2, 7]] = IGNORED
    weights[[2, 7]] = 0.0
    losses = torch.nn.functional.cross_entropy(
        hidden @ weight.t(), targets, reduction="none", ignore_index=IGNORED
    )
    expected = (losses * weights).sum()
    gradients = torch.autograd.grad(expected, (hidden, weight))
    weight.grad = torch.ones_like(weight)
    loss = head_loss(hidden, weight, targets, weights, block_tokens)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(hidden.grad, gradients[0], atol=1e-6)
    assert torch.allclose(weight.grad - 1, gradients[1], atol=1e-5)
    assert hidden.grad[2].abs().max() == 0


def test_large_logits_stay_finite() -> None:
    hidden = torch.full((4, 2), 1e4, requires_grad=True)
    weight = torch.tensor([[1e2, 0.0], [-1e2, 0.0], [0.0, 1.0]], requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    loss = head_loss(hidden, weight, torch.tensor([0, 1, 2, 0]), torch.full((4,), 0.25), 2)
    loss.backward()
    assert loss.item() == pytest.approx(0.25 * (2e6 + 1e6 - 1e4), rel=1e-6)
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(weight.grad).all()


def test_only_one_block_of_logits_is_alive() -> None:
    tokens, vocabulary, block_tokens = 256, 5000, 16
    hidden = torch.randn(tokens, 4, requires_grad=True)
    weight = torch.randn(vocabulary, 4, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    targets, weights = torch.zeros(tokens, dtype=torch.int64), torch.full((tokens,), 1 / tokens)
    with CpuMemory((hidden, weight, weight.grad, targets, weights)) as memory:
        before = memory.current_bytes
        head_loss(hidden, weight, targets, weights, block_tokens).backward()
        assert memory.peak_bytes - before < 1.2 * block_tokens * vocabulary * 4
