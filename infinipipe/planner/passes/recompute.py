"""Stage-aware chunk-level recompute: how many layers of each chunk a stage drops to fit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from infinipipe.aliases import Floats, Ints
from infinipipe.costs import StageMemory

# Sums of large floats in another order may differ in their last digits, so a byte is left free.
SPARE_BYTES = 1.0
# A layer whose recompute is free must not divide by zero. Far below what any layer takes.
_LEAST_S = 1e-15


@dataclass(frozen=True)
class Shortage:
    """A stage that no recompute makes fit."""

    stage: int
    bytes_needed: float
    limit: float

    @property
    def missing(self) -> float:
        """Bytes that the stage lacks."""
        return self.bytes_needed - self.limit


def fit_recompute(
    memory: StageMemory, recompute_s: Floats, limit: float, start: Ints | None = None
) -> Ints | float:
    """Return the layers of each chunk to recompute so that no op exceeds the limit.

    One sweep over the program. Where an op does not fit, chunks whose F has already run drop
    layers: those with the most bytes times ops until their B per second of recompute.

    Args:
        memory: the ledger of the program, which has F and B.
        recompute_s: (chunks,) what a recomputed layer costs.
        limit: bytes.
        start: (chunks,) counts to start from; none if None.

    Returns:
        (chunks,) counts, or, if there are none, the bytes that it would take.
    """
    num_chunks = len(memory.activation_bytes)
    assert not memory.program.has_input_weight, "F and B only"
    if start is None:
        start = np.zeros(num_chunks, dtype=np.int64)
    most = limit - SPARE_BYTES
    held = memory.during(start)
    if held.max(initial=0.0) <= most:
        return start
    least = float(memory.least().max())
    if least > most:
        return max(least, limit + 1.0)
    sweep = _Sweep(memory, recompute_s, most, start)
    program = memory.program
    is_forward = program.is_forward.tolist()
    chunks = program.chunks.tolist()
    fixed = memory.fixed_bytes.tolist()
    for position, chunk in enumerate(chunks):
        run = sweep.forward if is_forward[position] else sweep.backward
        missing = run(position, chunk, fixed[position])
        if missing > 0:
            # This is only the first op that does not fit; what it takes is the most of any, all
            # recomputed.
            all_layers = np.full(num_chunks, memory.num_layers, dtype=np.int64)
            needed = float(memory.during(all_layers).max())
            return max(limit + missing, needed)
    return np.array(sweep.counts, dtype=np.int64)


class _Sweep:
    """What is in flight at one op of the sweep.

    In lists, because single elements of arrays are slow.
    """

    def __init__(self, memory: StageMemory, recompute_s: Floats, limit: float, start: Ints) -> None:
        self.counts: list[int] = start.tolist()
        self._memory = memory
        self._num_layers = memory.num_layers
        self._limit = limit
        self._slot_gradients = _list(memory.slot_gradient_bytes)
        self._recompute_transient = _list(memory.recompute_transient_bytes)
        self._activations = _list(memory.activation_bytes)
        self._freed = _list(memory.freed_per_layer_bytes)
        self._ends: list[int] = memory.program.backward_places.tolist()
        seconds = np.maximum(recompute_s, _LEAST_S)
        self._bytes_per_s = _list(memory.freed_per_layer_bytes / seconds)
        self._raisable: set[int] = set()
        """Chunks in flight that can drop more layers."""
        self._held = 0.0
        """What chunks in flight keep."""

    def forward(self, position: int, chunk: int, fixed: float) -> float:
        """Let F run; return the bytes that cannot be found."""
        count = self.counts[chunk]
        all_layers = count == self._num_layers
        self._held += self._kept(chunk)
        if not all_layers and self._freed[chunk] > 0:
            self._raisable.add(chunk)
        transient = self._recompute_transient[chunk]
        needed = fixed + self._held
        missing = needed - self._limit
        if all_layers:
            return self._fit(position, missing + transient)
        missing = self._fit(position, missing)
        if self.counts[chunk] == self._num_layers:
            # Its own last layer was dropped to make room.
            missing = self._fit(position, missing + transient)
        return missing

    def backward(self, position: int, chunk: int, fixed: float) -> float:
        """Let B run; return the bytes that cannot be found."""
        self._raisable.discard(chunk)
        count = self.counts[chunk]
        transient = self._transient(chunk, count)
        needed = fixed + self._held + transient
        missing = self._fit(position, needed - self._limit)
        can_drop = self._freed[chunk] > 0
        if missing > 0 and can_drop:
            missing = self._raise_own(chunk, missing)
        self._held -= self._kept(chunk)
        return missing

    def _kept(self, chunk: int) -> float:
        count = self.counts[chunk]
        freed = count * self._freed[chunk]
        return self._activations[chunk] - freed

    def _transient(self, chunk: int, recompute: int) -> float:
        """Return what a chunk's B needs above what is held."""
        if self._slot_gradients[chunk]:
            return self._memory.layers_transient(chunk, recompute)
        if recompute < self._num_layers:
            # What a layer brings back is less than what one that was not recomputed has freed.
            return 0.0
        return self._freed[chunk]

    def _raise_own(self, chunk: int, missing: float) -> float:
        """Recompute more layers of the chunk whose B runs.

        What it keeps shrinks, what comes back may grow.
        """
        now = self.counts[chunk]
        transient_now = self._transient(chunk, now)
        most_more = self._num_layers - now
        for more in range(1, most_more + 1):
            freed = more * self._freed[chunk]
            transient = self._transient(chunk, now + more)
            left = missing - freed + transient - transient_now
            if left <= 0:
                self._raise(chunk, more, freed)
                return left
        return missing

    def _fit(self, position: int, missing: float) -> float:
        """Drop layers in flight until nothing is missing; return what still is."""
        ends = self._ends
        bytes_per_s = self._bytes_per_s
        while missing > 0 and self._raisable:
            # The later a chunk's B, the more ops are spared its bytes.
            best = max(self._raisable, key=lambda c: (bytes_per_s[c] * (ends[c] - position), c))
            room = self._num_layers - self.counts[best]
            missing = self._raise(best, room, missing)
            if self.counts[best] == self._num_layers:
                self._raisable.remove(best)
        return missing

    def _raise(self, chunk: int, room: int, missing: float) -> float:
        """Drop as many layers of a chunk as are missing, at most `room`; return what still is."""
        per_layer = self._freed[chunk]
        wanted = math.ceil(missing / per_layer)
        layers = max(0, min(room, wanted))
        freed = layers * per_layer
        self.counts[chunk] += layers
        self._held -= freed
        return missing - freed


def _list(values: Floats) -> list[float]:
    numbers: list[float] = values.tolist()
    return numbers
