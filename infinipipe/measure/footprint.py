"""Counts the bytes of a model's parts: what a chunk keeps, and what is transient."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from infinipipe.measure.bench import Bench
from infinipipe.measure.fit import Slices
from infinipipe.measure.machine import memory_errors
from infinipipe.measure.survey import OutOfMemory
from infinipipe.profiles import Bytes, Line
from infinipipe.runtime.attention import KVStore
from infinipipe.runtime.memory import CpuMemory, CudaMemory
from infinipipe.runtime.optimizer import Optimizer

SMALL = 512
"""Tokens of the smaller chunk; see `LARGE`."""
LARGE = 1024
"""Tokens of the two chunks that lines go through.

Large enough that the allocator's rounding does not matter, small enough for any device that can
train.
"""
CONTEXTS = ((16384, 32768), (4096, 8192), (1024, 2048))
"""The first that fit are taken: so long that attention is where the layer peaks."""


@dataclass(frozen=True)
class _Count:
    """Bytes of one forward and backward."""

    kept: int
    forward_peak: int
    backward_peak: int


@dataclass(frozen=True)
class _Counts:
    """Counts at both sizes."""

    small: _Count
    large: _Count

    @property
    def forward_peak(self) -> Line:
        return _line(self.small.forward_peak, self.large.forward_peak)

    @property
    def backward_peak(self) -> Line:
        return _line(self.small.backward_peak, self.large.backward_peak)


class Footprint:
    """Counts the bytes of what a bench runs.

    Args:
        bench: what is counted.
        memory: counts all tensors that are alive.
    """

    def __init__(self, bench: Bench, memory: CpuMemory | CudaMemory) -> None:
        self._bench = bench
        self._memory = memory

    def count(self) -> Bytes:
        """Count at two sizes and take the lines through them.

        Raises:
            OutOfMemory: a chunk of `LARGE` tokens does not fit into the device.
        """
        with memory_errors():
            return self._count_all()

    def _count_all(self) -> Bytes:
        bench = self._bench
        whole = self._at_both(lambda tokens: self._layer(((0, tokens),)))
        later = self._at_both(lambda tokens: self._layer(((tokens, tokens),)))
        embedding = self._at_both(self._embedding)
        head = self._at_both(self._head)
        per_context, per_own = self._slice_backward(SMALL)
        activation = self._allocated(lambda: bench.noise(LARGE)) // LARGE
        kv = self._allocated(lambda: self._slot(LARGE)) // LARGE
        kv_with_grad = self._allocated(lambda: self._slot(LARGE, gradients=True)) // LARGE
        kept = (whole.large.kept - whole.small.kept) / (LARGE - SMALL)
        logits = self._logits_per_token()
        whole_per_parameter, sharded_per_parameter = self._static_per_parameter()
        return Bytes(
            static_per_parameter=whole_per_parameter,
            sharded_per_parameter=sharded_per_parameter,
            activation_per_token=activation,
            # The layer's input was there before the count began.
            layer_full_per_token=kept + activation - kv,
            layer_kv_per_token=kv,
            layer_kv_grad_per_token=kv_with_grad - kv,
            chunk_per_token=self._allocated(lambda: bench.rotary(((0, LARGE),))) / LARGE,
            embedding_per_token=embedding.large.kept / LARGE,
            head_per_token=head.large.kept / LARGE,
            layer_forward_peak=_larger_forward_peak(whole, later),
            recompute_forward_peak=self._recompute_forward_peak(),
            layer_backward_peak=whole.backward_peak,
            slice_backward_per_token=per_own,
            context_per_token=per_context,
            embedding_backward_peak=embedding.backward_peak,
            head_forward_peak=self._head_forward_peak(head, logits),
            head_backward_peak=head.backward_peak,
            logits_per_token=logits,
        )

    def _at_both(self, count: Callable[[int], _Count]) -> _Counts:
        return _Counts(count(SMALL), count(LARGE))

    def _recompute_forward_peak(self) -> Line:
        whole = self._at_both(lambda tokens: self._layer(((0, tokens),), recompute=True))
        later = self._at_both(lambda tokens: self._layer(((tokens, tokens),), recompute=True))
        return _larger_forward_peak(whole, later)

    def _head_forward_peak(self, head: _Counts, logits: int) -> Line:
        """Return what is transient besides the block of logits."""
        small_block = min(SMALL, self._bench.block_tokens)
        large_block = min(LARGE, self._bench.block_tokens)
        return _line(
            head.small.forward_peak - small_block * logits,
            head.large.forward_peak - large_block * logits,
        )

    def _slice_backward(self, length: int) -> tuple[float, float]:
        """Return what is transient in a slice's B, per token of its context and of its own."""
        for near, far in CONTEXTS:
            try:
                with memory_errors():
                    low = self._layer(((near, length),)).backward_peak
                    high = self._layer(((far, length),)).backward_peak
            except OutOfMemory:
                continue
            per_context = (high - low) / (far - near)
            return per_context, (low - per_context * near) / length
        raise OutOfMemory

    def _layer(self, slices: Slices, *, recompute: bool = False) -> _Count:
        hidden, rotary, gradient = self._bench.inputs(slices)
        segments = self._bench.segments(slices)
        run = self._bench.run_layer_recomputed if recompute else self._bench.run_layer
        return self._count(lambda: run(hidden, rotary, segments), gradient)

    def _embedding(self, tokens: int) -> _Count:
        return self._count(self._bench.embedding(tokens), self._bench.noise(tokens))

    def _head(self, tokens: int) -> _Count:
        loss_gradient = torch.ones((), device=self._bench.device)
        return self._count(self._bench.head(tokens), loss_gradient)

    def _count(self, forward: Callable[[], Tensor], gradient: Tensor) -> _Count:
        memory = self._memory
        # Cycles of earlier counts would be freed during this one.
        gc.collect()
        before = memory.current_bytes
        memory.reset_peak()
        # The edge alone is held, as the runtime does: the output is on its way to the next stage.
        edge = get_gradient_edge(forward())
        kept = memory.current_bytes - before
        forward_peak = memory.peak_bytes - before - kept
        memory.reset_peak()
        torch.autograd.backward((edge,), (gradient,))
        backward_peak = memory.peak_bytes - before - kept
        return _Count(kept=kept, forward_peak=forward_peak, backward_peak=backward_peak)

    def _allocated(self, make: Callable[[], object]) -> int:
        gc.collect()
        before = self._memory.current_bytes
        made = make()
        num_bytes = self._memory.current_bytes - before
        del made
        return num_bytes

    def _logits_per_token(self) -> int:
        tokens = min(SMALL, self._bench.block_tokens)
        hidden = self._bench.noise(tokens)[0]
        weight = self._bench.stage_model.whole.lm_head.weight.detach()
        return self._allocated(lambda: hidden @ weight.t()) // tokens

    def _slot(self, total: int, *, gradients: bool = False) -> KVStore:
        store = KVStore()
        slot = self._bench.write_context(store, 0, 1, total)
        if gradients:
            slot.gradients = slot.no_gradients(total)
        return store

    def _static_per_parameter(self) -> tuple[int, int]:
        """Return the bytes of a parameter and its gradient, and those of its optimizer state."""
        flat = self._bench.stage_model.flat
        state = Optimizer(flat, None, lr=0.0).state_tensors()
        # The counts of steps are tensors too, one for each part, and no matter of its size.
        state_bytes = sum(tensor.nbytes for tensor in state if tensor.ndim > 0)
        whole_bytes = flat.parameters.nbytes + flat.gradients.nbytes
        num_parameters = flat.parameters.numel()
        return whole_bytes // num_parameters, state_bytes // num_parameters


def _larger_forward_peak(whole: _Counts, later: _Counts) -> Line:
    """A whole sequence and a later slice have different transients; take the larger."""
    return _line(
        max(whole.small.forward_peak, later.small.forward_peak),
        max(whole.large.forward_peak, later.large.forward_peak),
    )


def _line(small: int, large: int) -> Line:
    """Return the line through what `SMALL` and `LARGE` tokens need, with no negative part."""
    rate = max(0.0, (large - small) / (LARGE - SMALL))
    return Line(constant=max(0.0, large - rate * LARGE), rate=rate)
