"""Stage-aware chunk-level recompute: how far up its ladder each chunk goes on a stage to fit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from infinipipe.aliases import Floats, Ints
from infinipipe.costs import Recompute, StageMemory
from infinipipe.planner.passes.ladder import Ladder

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
    memory: StageMemory, ladder: Ladder, limit: float, start: Ints | None = None
) -> Ints | float:
    """Return the level of each chunk's recompute so that no op exceeds the limit.

    One sweep over the program. Where an op does not fit, chunks whose F has already run go up:
    those whose next rung frees most bytes, times ops until their B, for a second of recompute.

    Args:
        memory: the ledger of the program, which has F and B.
        ladder: of the chunks.
        limit: bytes.
        start: (chunks,) levels to start from; none if None.

    Returns:
        (chunks,) levels, or, if there are none, the bytes that it would take.
    """
    num_chunks = len(memory.activation_bytes)
    num_layers = memory.num_layers
    assert not memory.program.has_input_weight, "F and B only"
    if start is None:
        start = np.zeros(num_chunks, dtype=np.int64)
    most = limit - SPARE_BYTES
    held = memory.during(ladder.recompute(start, num_layers))
    if held.max(initial=0.0) <= most:
        return start
    least = float(memory.least().max())
    if least > most:
        return max(least, limit + 1.0)
    sweep = _Sweep(memory, ladder, most, start)
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
            highest = ladder.num_rungs(num_layers)
            needed = float(memory.during(ladder.recompute(highest, num_layers)).max())
            return max(limit + missing, needed)
    return np.array(sweep.levels, dtype=np.int64)


class _Sweep:
    """What is in flight at one op of the sweep.

    In lists, because single elements of arrays are slow.
    """

    def __init__(self, memory: StageMemory, ladder: Ladder, limit: float, start: Ints) -> None:
        self.levels: list[int] = start.tolist()
        self._memory = memory
        self._ladder = ladder
        self._num_layers = memory.num_layers
        self._limit = limit
        self._highest: list[int] = ladder.num_rungs(memory.num_layers).tolist()
        self._slot_gradients = _list(memory.slot_gradient_bytes)
        self._recompute_transient = _list(memory.recompute_transient_bytes)
        self._activations = _list(memory.activation_bytes)
        self._ends: list[int] = memory.program.backward_places.tolist()
        lower_s = np.maximum(ladder.lower_s, _LEAST_S)
        upper_s = np.maximum(ladder.upper_s, _LEAST_S)
        self._lower = _list(ladder.lower_bytes)
        self._upper = _list(ladder.upper_bytes)
        self._upper_per_s = _list(ladder.upper_bytes / upper_s)
        self._bytes_per_s = _list(ladder.lower_bytes / lower_s)
        """Of the rungs that come next."""
        for chunk in np.flatnonzero(ladder.has_upper & (start >= memory.num_layers)).tolist():
            self._bytes_per_s[chunk] = self._upper_per_s[chunk]
        self._raisable: set[int] = set()
        """Chunks in flight that can go up."""
        self._held = 0.0
        """What chunks in flight keep."""

    def forward(self, position: int, chunk: int, fixed: float) -> float:
        """Let F run; return the bytes that cannot be found."""
        level = self.levels[chunk]
        all_layers = level >= self._num_layers
        self._held += self._kept(chunk, level)
        if level < self._highest[chunk] and self._lower[chunk] > 0:
            self._raisable.add(chunk)
        transient = self._recompute_transient[chunk]
        needed = fixed + self._held
        missing = needed - self._limit
        if all_layers:
            return self._fit(position, missing + transient)
        missing = self._fit(position, missing)
        if self.levels[chunk] >= self._num_layers:
            # Its own last layer was dropped to make room.
            missing = self._fit(position, missing + transient)
        return missing

    def backward(self, position: int, chunk: int, fixed: float) -> float:
        """Let B run; return the bytes that cannot be found."""
        self._raisable.discard(chunk)
        transient = self._transient(chunk, self.levels[chunk])
        needed = fixed + self._held + transient
        missing = self._fit(position, needed - self._limit)
        can_drop = self._lower[chunk] > 0
        if missing > 0 and can_drop:
            missing = self._raise_own(chunk, missing)
        self._held -= self._kept(chunk, self.levels[chunk])
        return missing

    def _kept(self, chunk: int, level: int) -> float:
        lower = min(level, self._num_layers)
        freed = lower * self._lower[chunk] + (level - lower) * self._upper[chunk]
        return self._activations[chunk] - freed

    def _transient(self, chunk: int, level: int) -> float:
        """Return what a chunk's B needs above what is held."""
        num_layers = self._num_layers
        upper = max(0, level - num_layers)
        if self._slot_gradients[chunk]:
            return self._with_slot_gradients[chunk][level]
        if level < num_layers:
            # What a layer brings back is less than what one that was not recomputed has freed.
            return 0.0
        # The first layer to run brings back what it did not keep.
        first_dropped_attention = upper == num_layers
        return self._lower[chunk] + self._upper[chunk] * first_dropped_attention

    @cached_property
    def _with_slot_gradients(self) -> dict[int, list[float]]:
        """What B of chunks needs that bring gradients of K and V, by level."""
        num_layers = self._num_layers
        chunks = np.flatnonzero(self._memory.slot_gradient_bytes)
        highest = self._ladder.num_rungs(num_layers)
        levels = np.minimum(np.arange(highest.max() + 1)[:, None], highest)
        keep_input, keep_attention = self._ladder.recompute(levels, num_layers)
        own = Recompute(keep_input[:, chunks], keep_attention[:, chunks])
        transient = self._memory.layers_transient(chunks, own)
        return dict(zip(chunks.tolist(), transient.T.tolist(), strict=True))

    def _raise_own(self, chunk: int, missing: float) -> float:
        """Recompute more of the chunk whose B runs.

        What it keeps shrinks, what comes back may grow.
        """
        now = self.levels[chunk]
        needed_now = self._kept(chunk, now) + self._transient(chunk, now)
        for level in range(now + 1, self._highest[chunk] + 1):
            kept = self._kept(chunk, level)
            left = missing - needed_now + kept + self._transient(chunk, level)
            if left <= 0:
                self._held -= self._kept(chunk, now) - kept
                self.levels[chunk] = level
                return left
        return missing

    def _fit(self, position: int, missing: float) -> float:
        """Let chunks in flight go up until nothing is missing; return what still is."""
        bytes_per_s = self._bytes_per_s
        while missing > 0 and self._raisable:
            best = self._best(position)
            missing = self._raise(best, missing)
            if self.levels[best] == self._highest[best]:
                self._raisable.remove(best)
            elif self.levels[best] == self._num_layers:
                bytes_per_s[best] = self._upper_per_s[best]
        return missing

    def _best(self, position: int) -> int:
        """Return the chunk that spares most for a second: the later its B, the more ops are spared
        its bytes."""
        ends = self._ends
        bytes_per_s = self._bytes_per_s
        best = -1
        most = -1.0
        # By hand, because `max` with a key takes twice as long, and nothing here takes longer.
        for chunk in self._raisable:
            spared = bytes_per_s[chunk] * (ends[chunk] - position)
            if spared > most or (spared == most and chunk > best):
                best = chunk
                most = spared
        return best

    def _raise(self, chunk: int, missing: float) -> float:
        """Let a chunk go up as many rungs of one kind as are missing; return what still is."""
        level = self.levels[chunk]
        is_lower = level < self._num_layers
        per_rung = self._lower[chunk] if is_lower else self._upper[chunk]
        last = self._num_layers if is_lower else self._highest[chunk]
        wanted = math.ceil(missing / per_rung)
        rungs = max(0, min(last - level, wanted))
        freed = rungs * per_rung
        self.levels[chunk] += rungs
        self._held -= freed
        return missing - freed


def _list(values: Floats) -> list[float]:
    numbers: list[float] = values.tolist()
    return numbers
