"""Counts the bytes of a model's parts: what a chunk keeps, and what it needs for a moment."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from infinipipe.measure.bench import Bench
from infinipipe.measure.fit import Slices
from infinipipe.measure.machine import memory_errors
from infinipipe.measure.survey import OutOfMemory
from infinipipe.profiles.profile import Bytes, Line
from infinipipe.runtime.attention import KVStore
from infinipipe.runtime.memory import CpuMemory, CudaMemory
from infinipipe.runtime.optimizer import make_optimizer

TOKENS = (512, 1024)
CONTEXTS = ((16384, 32768), (4096, 8192), (1024, 2048))
"""The first that fit are taken: so long that attention is where the layer peaks."""


@dataclass(frozen=True)
class _Count:
    """Bytes of one forward and backward."""

    kept: int
    forward_peak: int
    backward_peak: int


class Footprint:
    """Counts the bytes of what a bench runs.

    Args:
        bench: what is counted.
        memory: counts all tensors that are alive.
    """

    def __init__(self, bench: Bench, memory: CpuMemory | CudaMemory) -> None:
        self._bench, self._memory = bench, memory

    def count(self) -> Bytes:
        """Count at two sizes and take the lines through them.

        Raises:
            OutOfMemory: a chunk of `TOKENS` does not fit into the device.
        """
        with memory_errors():
            return self._count_all()

    def _count_all(self) -> Bytes:
        bench, (small, large) = self._bench, TOKENS
        whole = [self._layer(((0, n),)) for n in TOKENS]
        split = [self._layer(((n, n),)) for n in TOKENS]
        dropped = [self._layer(((start, n),), recompute=True) for n in TOKENS for start in (0, n)]
        embedding = [self._count(bench.embedding(n), bench.noise(n)) for n in TOKENS]
        head = [self._count(bench.head(n), torch.ones((), device=bench.device)) for n in TOKENS]
        context, beside = self._context(small)
        width = self._allocated(lambda: bench.noise(large)) // large
        kv = self._allocated(lambda: self._slot(large)) // large
        kv_grad = self._allocated(lambda: self._slot(large, gradients=True)) // large - kv
        logits = self._logits()
        head_peaks = [
            h.forward_peak - min(n, bench.piece) * logits for h, n in zip(head, TOKENS, strict=True)
        ]
        return Bytes(
            static_per_parameter=self._static() // sum(p.numel() for p in bench.stage.parameters()),
            activation_per_token=width,
            layer_full_per_token=(whole[1].kept - whole[0].kept) / (large - small) + width - kv,
            layer_kv_per_token=kv,
            layer_kv_grad_per_token=kv_grad,
            chunk_per_token=self._allocated(lambda: bench.rotary(((0, large),))) / large,
            embedding_per_token=embedding[1].kept / large,
            head_per_token=head[1].kept / large,
            # A whole sequence and a slice need different things for a moment; take the larger.
            layer_forward_peak=_line(
                [max(w.forward_peak, s.forward_peak) for w, s in zip(whole, split, strict=True)]
            ),
            recompute_forward_peak=_line(
                [max(c.forward_peak for c in dropped[i : i + 2]) for i in (0, 2)]
            ),
            layer_backward_peak=_line([count.backward_peak for count in whole]),
            slice_backward_per_token=beside,
            context_per_token=context,
            embedding_backward_peak=_line([count.backward_peak for count in embedding]),
            head_forward_peak=_line(head_peaks),
            head_backward_peak=_line([count.backward_peak for count in head]),
            logits_per_token=logits,
        )

    def _context(self, length: int) -> tuple[float, float]:
        """Return the bytes for a moment in a slice's B, per token of its context and per token of its own."""
        for near, far in CONTEXTS:
            try:
                with memory_errors():
                    low, high = (
                        self._layer(((start, length),)).backward_peak for start in (near, far)
                    )
            except OutOfMemory:
                continue
            per_token = (high - low) / (far - near)
            return per_token, (low - per_token * near) / length
        raise OutOfMemory

    def _layer(self, slices: Slices, *, recompute: bool = False) -> _Count:
        hidden, rotary, gradient = self._bench.inputs(slices)
        segments = self._bench.segments(slices)
        run = self._bench.checkpoint_layer if recompute else self._bench.run_layer
        return self._count(lambda: run(hidden, rotary, segments), gradient)

    def _count(self, forward: Callable[[], Tensor], gradient: Tensor) -> _Count:
        memory = self._memory
        gc.collect()
        before = memory.current_bytes
        memory.reset_peak()
        edge = get_gradient_edge(forward())
        kept = memory.current_bytes - before
        forward_peak = memory.peak_bytes - before - kept
        memory.reset_peak()
        torch.autograd.backward((edge,), (gradient,))
        return _Count(
            kept=kept, forward_peak=forward_peak, backward_peak=memory.peak_bytes - before - kept
        )

    def _allocated(self, make: Callable[[], object]) -> int:
        gc.collect()
        before = self._memory.current_bytes
        made = make()
        num_bytes = self._memory.current_bytes - before
        del made
        return num_bytes

    def _logits(self) -> int:
        """Return the bytes of one token's logits."""
        tokens = min(TOKENS[0], self._bench.piece)
        hidden, weight = (
            self._bench.noise(tokens)[0],
            self._bench.stage.whole.lm_head.weight.detach(),
        )
        return self._allocated(lambda: hidden @ weight.t()) // tokens

    def _slot(self, total: int, *, gradients: bool = False) -> KVStore:
        store = KVStore()
        slot = self._bench.write_context(store, 0, 1, total)
        if gradients:
            assert slot.gradients
        return store

    def _static(self) -> int:
        parameters = self._bench.stage.global_parameters()
        optimizer = make_optimizer(parameters, lr=0.0)
        state = [t for p in parameters.values() for t in optimizer.state[p].values() if t.ndim]
        tensors = [
            *parameters.values(),
            *(p.grad for p in parameters.values() if p.grad is not None),
            *state,
        ]
        return sum(t.untyped_storage().nbytes() for t in tensors)


def _line(values: Sequence[float]) -> Line:
    """Return the line through measurements at `TOKENS`, with no negative part."""
    (small, large), (low, high) = TOKENS, values
    rate = max(0.0, (high - low) / (large - small))
    return Line(constant=max(0.0, high - rate * large), rate=rate)
