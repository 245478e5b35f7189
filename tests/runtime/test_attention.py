"""Chunk attention by itself: kernels, slices, isolation, no tensor as large as a pack squared."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from infinipipe.runtime.attention import (
    Attended,
    BlockKernel,
    CpuKernel,
    Kernel,
    KVStore,
    Segment,
    Segments,
    chunk_attention,
)
from infinipipe.runtime.memory import CpuMemory

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
SCALE = HEAD_DIM**-0.5


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one sequence; (1, heads, tokens, head dim)."""
    groups = HEADS // KV_HEADS
    return torch.nn.functional.scaled_dot_product_attention(
        q,
        k.repeat_interleave(groups, 1),
        v.repeat_interleave(groups, 1),
        is_causal=True,
        scale=SCALE,
    )


def qkv(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    shapes = ((HEADS, tokens), (KV_HEADS, tokens), (KV_HEADS, tokens))
    return tuple(torch.randn(1, heads, n, HEAD_DIM, requires_grad=True) for heads, n in shapes)


def attend(tensors: tuple[Tensor, Tensor, Tensor], segments: Segments) -> Tensor:
    out, _ = chunk_attention(
        SimpleNamespace(layer_idx=0), *tensors, None, scaling=SCALE, segments=segments
    )
    return out.transpose(1, 2)


@pytest.mark.parametrize("kernel", [CpuKernel(), BlockKernel()], ids=["cpu", "blocks"])
@pytest.mark.parametrize("causal", [True, False])
def test_kernels_agree_with_the_reference(
    kernel: Kernel, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockKernel, "block_tokens", 5)
    q, k, v = qkv(13)
    groups = HEADS // KV_HEADS
    scores = (q @ k.repeat_interleave(groups, 1).transpose(-1, -2)) * SCALE
    if causal:
        scores = scores.masked_fill(torch.ones(13, 13).tril().logical_not(), float("-inf"))
    expected = scores.softmax(-1) @ v.repeat_interleave(groups, 1)
    grad = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (q, k, v), grad)
    with torch.no_grad():
        out, lse = kernel.forward(q, k, v, causal, SCALE)
        found = kernel.backward(grad, q, k, v, Attended(out, lse), causal, SCALE)
    assert torch.allclose(out, expected, atol=1e-6)
    assert torch.allclose(lse, scores.logsumexp(-1), atol=1e-5)
    for one, other in zip(found, gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("kernel", [CpuKernel(), BlockKernel()], ids=["cpu", "blocks"])
@pytest.mark.parametrize("lengths", [(12,), (4, 4, 4), (1, 6, 5), (11, 1), (1,) * 12])
def test_slices_equal_the_whole_sequence(kernel: Kernel, lengths: tuple[int, ...]) -> None:
    """CASES A4, B3: 4..7 and 8..11 attend to all before them; backward starts at the last slice."""
    whole = qkv(12)
    expected = reference(*whole)
    grad = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, whole, grad)
    store, outputs, parts = KVStore(), [], []
    bounds = list(itertools.accumulate(lengths, initial=0))
    for start, stop in itertools.pairwise(bounds):
        part = tuple(t[:, :, start:stop].detach().requires_grad_() for t in whole)
        table = (Segment(first=0, length=stop - start, sequence=7, start=start, total=12),)
        outputs.append(attend(part, Segments(table, store, kernel)))
        parts.append(part)
    assert torch.allclose(torch.cat(outputs, 2), expected, atol=1e-6)
    found = []
    for (start, stop), out, part in reversed(
        list(zip(itertools.pairwise(bounds), outputs, parts, strict=True))
    ):
        found.append(torch.autograd.grad(out, part, grad[:, :, start:stop]))
    for index, gradient in enumerate(gradients):
        assert torch.allclose(
            torch.cat([f[index] for f in reversed(found)], 2), gradient, atol=1e-5
        )
    assert len(store) == (len(lengths) > 1)


def test_memory_of_a_pack_grows_with_its_tokens_not_their_square() -> None:
    """CASES A12: 64 sequences of 128 tokens make no tensor near (64 * 128)^2 elements."""
    length, count = 128, 64
    tokens = length * count
    table = tuple(
        Segment(first=i * length, length=length, sequence=i, start=0, total=length)
        for i in range(count)
    )
    tensors = qkv(tokens)
    with CpuMemory(tensors) as memory:
        before = memory.current_bytes
        out = attend(tensors, Segments(table, KVStore(), CpuKernel()))
        out.sum().backward()
        grown = memory.peak_bytes - before
    assert grown < 16 * tokens * HEADS * HEAD_DIM * 4
    assert grown < tokens * tokens * 4 / 10


def test_a_chunk_without_its_segment_table_is_refused() -> None:
    """CASES A2, A9: never run unisolated."""
    with pytest.raises(AssertionError, match="without the plan's segment table"):
        chunk_attention(SimpleNamespace(layer_idx=0), *qkv(4), None, scaling=SCALE)
    short = Segments(
        (Segment(first=0, length=3, sequence=0, start=0, total=3),), KVStore(), CpuKernel()
    )
    with pytest.raises(AssertionError, match="gives this rank 3 tokens, the layer has 4"):
        chunk_attention(SimpleNamespace(layer_idx=0), *qkv(4), None, scaling=SCALE, segments=short)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_cuda_kernel_equals_the_cpu_kernel() -> None:
    tensors = [t.detach() for t in qkv(700)]
    grad = torch.randn(1, HEADS, 700, HEAD_DIM)
    results = []
    for device, kernel in (("cpu", CpuKernel()), ("cuda", BlockKernel())):
        q, k, v, g = (t.to(device) for t in (*tensors, grad))
        attended = kernel.forward(q, k, v, True, SCALE)
        gradients = kernel.backward(g, q, k, v, attended, True, SCALE)
        results.append([t.cpu() for t in (*attended, *gradients)])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-4)
