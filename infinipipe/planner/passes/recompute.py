"""Stage-aware chunk-level recompute: how many layers of each chunk a stage drops so that its program fits."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infinipipe.aliases import Floats, Ints
from infinipipe.costs.cost import Costs, Loads, layers_excess_bytes, static_bytes
from infinipipe.ir import Sequence
from infinipipe.planner.problem import Pipeline


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


@dataclass(frozen=True)
class StageMemory:
    """One stage's program and its bytes, the activations apart that recompute can drop."""

    directions: Ints
    chunks: Ints
    fixed: Floats
    """(ops,) the most while the op runs, without what chunks keep from F to B."""
    kept: Floats
    """(chunks,) with no recompute."""
    saved: Floats
    """(chunks,) less for each recomputed layer."""
    activation: Floats
    """(chunks,) the input that a recomputed layer still keeps."""
    gradients: Floats
    """(chunks,) what each layer's gradients of K and V take that the chunk's B brings."""
    forward_excess: Floats
    """(chunks,) what F needs besides for a moment where all layers are recomputed; less than `saved`."""
    num_layers: int

    def during(self, recompute: Ints) -> Floats:
        """Return the most bytes while each op runs; equals `infinipipe.costs.cost.replay_memory`."""
        kept = (self.kept - self.saved * recompute)[self.chunks]
        backward = self.directions < 0
        held = np.cumsum(np.where(backward, -kept, kept))
        forward_excess = self.forward_excess * (recompute == self.num_layers)
        excess = self.saved * (recompute == self.num_layers)
        for chunk in np.flatnonzero(self.gradients):
            excess[chunk] = self.excess(int(chunk), int(recompute[chunk]))
        moment = np.where(backward, kept + excess[self.chunks], forward_excess[self.chunks])
        return np.asarray(self.fixed + held + moment)

    def least(self) -> Floats:
        """Return what no recompute counts can undercut while each op runs: all other chunks recompute all layers."""
        kept = (self.kept - self.saved * self.num_layers)[self.chunks]
        backward = self.directions < 0
        others = np.cumsum(np.where(backward, -kept, kept)) - np.where(backward, 0.0, kept)
        # A chunk that recomputes all but one layer keeps that one, and its F needs no more for a moment. In its B no
        # count is better than all layers: the last layer is there in any case, and so is the first one's moment.
        own = self.kept - self.saved * self.num_layers
        forward, own_backward = own + np.minimum(self.forward_excess, self.saved), own + self.saved
        for chunk in np.flatnonzero(self.gradients).tolist():
            own_backward[chunk] = own[chunk] + self.excess(chunk, self.num_layers)
        return np.asarray(
            self.fixed
            + others
            + np.where(backward, own_backward[self.chunks], forward[self.chunks])
        )

    def excess(self, chunk: int, recompute: int) -> float:
        """Return what a chunk's B needs above what is held; see `layers_excess_bytes`."""
        saved, activation = float(self.saved[chunk]), float(self.activation[chunk])
        return layers_excess_bytes(
            self.num_layers, recompute, saved + activation, activation, float(self.gradients[chunk])
        )


def stage_memory(
    pipeline: Pipeline,
    stage: int,
    sequences: SequenceOf[Sequence],
    loads: Loads,
    costs: Costs,
    directions: Ints,
    chunks: Ints,
) -> StageMemory:
    """Collect the bytes of one stage's program of F and B."""
    place, sizes = pipeline.stages[stage], pipeline.profile.bytes
    forwards, backwards = (_places(directions == direction, chunks) for direction in (1, -1))
    fixed = float(static_bytes(pipeline.profile, place)) + place.num_layers * _slot_bytes(
        sequences,
        loads,
        forwards,
        backwards,
        sizes.layer_kv_per_token,
        sizes.layer_kv_grad_per_token,
    )
    receives_down, receives_up = not place.embedding, not place.head
    activation = costs.activation_bytes
    fixed += _buffer_bytes(activation, directions > 0, chunks, receives_down, receives_up)
    fixed += _buffer_bytes(activation, directions < 0, chunks, receives_up, receives_down)
    backward = costs.backward_peak_bytes[stage] + receives_up * activation
    fixed += np.where(directions > 0, costs.forward_peak_bytes[stage][chunks], backward[chunks])
    gradients = np.zeros(len(activation))
    for chunk in _tails(loads)[1].tolist():
        gradients[chunk] = sequences[loads.split[chunk]].length * sizes.layer_kv_grad_per_token
    return StageMemory(
        directions,
        chunks,
        fixed,
        costs.kept_bytes[stage],
        costs.saved_bytes,
        activation,
        gradients,
        costs.recompute_excess_bytes[stage],
        place.num_layers,
    )


def _places(where: NDArray[np.bool_], chunks: Ints) -> Ints:
    """Return where in the program each chunk's op of one direction stands."""
    places = np.empty(len(chunks) // 2, dtype=np.int64)
    places[chunks[where]] = np.flatnonzero(where)
    return places


def _slot_bytes(
    sequences: SequenceOf[Sequence],
    loads: Loads,
    forwards: Ints,
    backwards: Ints,
    kv_bytes: int,
    grad_bytes: int,
) -> Floats:
    """Bytes of one layer's K and V slots and their gradients, at every op; the arguments give each chunk's F and B.

    K and V are there from the first slice's F on, their gradients from the last slice's B on, and the
    first slice's B ends both.
    """
    heads, tails = _tails(loads)
    tokens = np.array(
        [sequences[sequence].length for sequence in loads.split[heads]], dtype=np.float64
    )
    change = np.zeros(2 * len(forwards) + 1)
    np.add.at(change, forwards[heads], tokens * kv_bytes)
    np.add.at(change, backwards[tails], tokens * grad_bytes)
    np.add.at(change, backwards[heads] + 1, -tokens * (kv_bytes + grad_bytes))
    return np.asarray(np.cumsum(change)[:-1])


def _tails(loads: Loads) -> tuple[Ints, Ints]:
    """Return the chunks with each split sequence's first slice, and those with its last."""
    order = np.lexsort((loads.context, loads.split))
    order = order[loads.split[order] >= 0]
    firsts = np.flatnonzero(loads.context[order] == 0)
    return order[firsts], order[np.append(firsts[1:], len(order)) - 1] if len(firsts) else order


def _buffer_bytes(
    activation: Floats, where: NDArray[np.bool_], chunks: Ints, receives: bool, sends: bool
) -> Floats:
    """Bytes of one direction's transfers at every op: one posted ahead, one that may not have left yet."""
    sizes = activation[chunks[where]]
    done = np.cumsum(where, dtype=np.int64) - where
    ahead = np.append(sizes, 0.0)[np.minimum(done + where, len(sizes))]
    behind = np.append(0.0, sizes)[done]
    return np.asarray(receives * ahead + sends * behind)


def fit_recompute(
    memory: StageMemory, recompute_s: Floats, limit: float, start: Ints | None = None
) -> Ints | float:
    """Return the layers of each chunk to recompute so that no op exceeds the limit, or the bytes it would take.

    One sweep over the program. Where an op does not fit, chunks in flight drop more layers than in `start`,
    looking back: those whose bytes, times the ops that will be spared them, cost the least recompute.
    """
    if start is None:
        start = np.zeros(len(memory.kept), dtype=np.int64)
    if memory.during(start).max(initial=0.0) <= limit - _ROUNDING_BYTES:
        return start
    if (least := float(memory.least().max())) > limit - _ROUNDING_BYTES:
        return max(least, limit + 1.0)
    sweep = _Sweep(memory, recompute_s, limit - _ROUNDING_BYTES, start)
    ops = zip(
        memory.directions.tolist(), memory.chunks.tolist(), memory.fixed.tolist(), strict=True
    )
    for position, (direction, chunk, fixed) in enumerate(ops):
        missing = (
            sweep.forward(position, chunk, fixed)
            if direction > 0
            else sweep.backward(position, chunk, fixed)
        )
        if missing > 0:
            # This is only the first op that does not fit; what it takes is the most of any, all recomputed.
            full = np.full(len(start), memory.num_layers, dtype=np.int64)
            return max(limit + missing, float(memory.during(full).max()))
    return np.array(sweep.counts, dtype=np.int64)


class _Sweep:
    """What is in flight at one op of the sweep."""

    def __init__(self, memory: StageMemory, recompute_s: Floats, limit: float, start: Ints) -> None:
        self.counts: list[int] = start.tolist()
        self._memory = memory
        self._gradients: list[float] = memory.gradients.tolist()
        self._forward_excess: list[float] = memory.forward_excess.tolist()
        self._num_layers = memory.num_layers
        self._limit = limit
        self._kept: list[float] = memory.kept.tolist()
        self._saved: list[float] = memory.saved.tolist()
        self._ends: list[int] = _places(memory.directions < 0, memory.chunks).tolist()
        self._rates: list[float] = (memory.saved / np.maximum(recompute_s, 1e-15)).tolist()
        self._raisable: set[int] = set()
        self._held = 0.0

    def forward(self, position: int, chunk: int, fixed: float) -> float:
        """Let F run; return the bytes that cannot be found."""
        self._held += self._kept[chunk] - self.counts[chunk] * self._saved[chunk]
        if self._saved[chunk] > 0 and self.counts[chunk] < self._num_layers:
            self._raisable.add(chunk)
        excess, full = self._forward_excess[chunk], self.counts[chunk] == self._num_layers
        missing = self._fit(position, fixed + self._held - self._limit + full * excess)
        if not full and self.counts[chunk] == self._num_layers:
            missing = self._fit(position, missing + excess)
        return missing

    def backward(self, position: int, chunk: int, fixed: float) -> float:
        """Let B run; return the bytes that cannot be found."""
        self._raisable.discard(chunk)
        missing = self._fit(
            position, fixed + self._held + self._excess(chunk, self.counts[chunk]) - self._limit
        )
        if missing > 0 and self._saved[chunk] > 0:
            missing = self._raise_own(chunk, missing)
        self._held -= self._kept[chunk] - self.counts[chunk] * self._saved[chunk]
        return missing

    def _excess(self, chunk: int, recompute: int) -> float:
        if self._gradients[chunk]:
            return self._memory.excess(chunk, recompute)
        return self._saved[chunk] if recompute == self._num_layers else 0.0

    def _raise_own(self, chunk: int, missing: float) -> float:
        """Recompute more layers of the chunk whose B runs: what it keeps shrinks, what comes back may grow."""
        now = self.counts[chunk]
        base = self._excess(chunk, now)
        for count in range(now + 1, self._num_layers + 1):
            left = missing - (count - now) * self._saved[chunk] + self._excess(chunk, count) - base
            if left <= 0:
                self._raise(chunk, count - now, (count - now) * self._saved[chunk])
                return left
        return missing

    def _fit(self, position: int, missing: float) -> float:
        ends, rates = self._ends, self._rates
        while missing > 0 and self._raisable:
            best = max(self._raisable, key=lambda c: (rates[c] * (ends[c] - position), c))
            missing = self._raise(best, self._num_layers - self.counts[best], missing)
            if self.counts[best] == self._num_layers:
                self._raisable.remove(best)
        return missing

    def _raise(self, chunk: int, room: int, missing: float) -> float:
        layers = max(0, min(room, math.ceil(missing / self._saved[chunk])))
        self.counts[chunk] += layers
        self._held -= layers * self._saved[chunk]
        return missing - layers * self._saved[chunk]


# Sums of large floats in another order may differ in their last digits, so a byte is left free.
_ROUNDING_BYTES = 1.0
