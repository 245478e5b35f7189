"""The bytes of a stage over its program: one ledger, and what recompute does to it.

The bytes follow the runtime. F keeps activations until B. A split sequence's K and V stay in a slot
from its first F until its first slice's B, and their gradients from its first B on. Of each
direction one transfer is posted ahead and one may not have left yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from infinipipe.aliases import Bools, Floats, Ints
from infinipipe.costs.chunks import ChunkSizes, CostedChunks, InputWeightCosts
from infinipipe.costs.program import PackedProgram
from infinipipe.ir import OpKind, Stage


@dataclass(frozen=True)
class StageBytes:
    """What a stage holds whatever its program is, and what its slots take."""

    stage: Stage
    static_bytes: int
    """Between steps."""
    kv_per_token: int
    """K and V of one layer in a slot, per token of the sequence."""
    kv_gradients_per_token: int
    """Their gradients."""


@dataclass(frozen=True)
class StageMemory:
    """The ledger of one stage's program.

    What chunks keep from F to B is apart from the rest, as recompute changes it:
    `activation_bytes - freed_per_layer_bytes * recompute`. Everything else is fixed by the program.
    Arrays are (ops,) or (chunks,).
    """

    program: PackedProgram
    fixed_bytes: Floats
    """(ops,) the most while the op runs: static bytes, slots, inputs of W, transfers and what the
    op needs only while it runs."""
    fixed_after_bytes: Floats
    """(ops,) what of that is left when the op has ended."""
    activation_bytes: Floats
    """(chunks,) kept from F to B with no recompute."""
    freed_per_layer_bytes: Floats
    """(chunks,) less for each recomputed layer."""
    boundary_bytes: Floats
    """(chunks,) the input that a recomputed layer still keeps."""
    slot_gradient_bytes: Floats
    """(chunks,) each layer's gradients of K and V that the chunk's B brings, 0 if another does."""
    weight_input_bytes: Floats
    """(chunks,) what the chunk's I leaves of each layer for its W, 0 if it has a B."""
    recompute_transient_bytes: Floats
    """(chunks,) what F needs besides where all layers are recomputed; less than
    `freed_per_layer_bytes`."""
    num_layers: int

    def during(self, recompute: Ints) -> Floats:
        """Return the most bytes while each op runs, for the recomputed layers of each chunk."""
        chunks = self.program.chunks
        kept = self._kept(recompute)
        all_layers = recompute == self.num_layers
        in_forward = self.recompute_transient_bytes * all_layers
        in_backward = self.freed_per_layer_bytes * all_layers
        for chunk in self._uneven_chunks:
            in_backward[chunk] = self.layers_transient(int(chunk), int(recompute[chunk]))
        # A chunk's B still holds what the chunk kept.
        backward = kept + in_backward[chunks]
        transient = np.where(self.program.is_backward, backward, in_forward[chunks])
        if self.program.has_input_weight:
            transient[self.program.is_kind(OpKind.BACKWARD_WEIGHT)] = 0.0
        held = np.cumsum(self.program.travels * kept)
        during = np.asarray(self.fixed_bytes + held + transient)
        if self.program.has_input_weight:
            # What I leaves may be more than what it needed before.
            inputs = self.program.is_kind(OpKind.BACKWARD_INPUT)
            during[inputs] = np.maximum(during, self.fixed_after_bytes + held)[inputs]
        return during

    def after(self, recompute: Ints) -> Floats:
        """Return the bytes that are held when each op has ended."""
        kept = self._kept(recompute)
        return np.asarray(self.fixed_after_bytes + np.cumsum(self.program.travels * kept))

    def least(self) -> Floats:
        """Return what no recompute can undercut while each op runs, in a program of F and B.

        All other chunks recompute all layers. The op's own chunk does what is best for it alone.
        """
        own = self.activation_bytes - self.freed_per_layer_bytes * self.num_layers
        kept = own[self.program.chunks]
        backward = self.program.is_backward
        held = np.cumsum(self.program.travels * kept)
        others = held - np.where(backward, 0.0, kept)
        # A chunk that recomputes all but one layer keeps that one, and its F needs no more.
        in_forward = own + np.minimum(self.recompute_transient_bytes, self.freed_per_layer_bytes)
        # In its B no count is better than all layers: the last layer is there in any case, and so
        # is the time when the first one runs.
        in_backward = own + self.freed_per_layer_bytes
        for chunk in self._uneven_chunks:
            in_backward[chunk] = own[chunk] + self.layers_transient(chunk, self.num_layers)
        chunks = self.program.chunks
        return np.asarray(
            self.fixed_bytes + others + np.where(backward, in_backward[chunks], in_forward[chunks])
        )

    def layers_transient(self, chunk: int, recompute: int) -> float:
        """Return what a chunk's B or I needs above what is held; see `layers_transient_bytes`."""
        freed = float(self.freed_per_layer_bytes[chunk])
        boundary = float(self.boundary_bytes[chunk])
        return layers_transient_bytes(
            self.num_layers,
            recompute,
            freed + boundary,
            boundary,
            float(self.slot_gradient_bytes[chunk]),
            float(self.weight_input_bytes[chunk]),
        )

    def _kept(self, recompute: Ints) -> Floats:
        """(ops,) what the op's chunk keeps from F to B."""
        kept = self.activation_bytes - self.freed_per_layer_bytes * recompute
        return np.asarray(kept[self.program.chunks])

    @cached_property
    def _uneven_chunks(self) -> list[int]:
        """Chunks in whose B the layers do not only free what they kept, one after the other."""
        uneven = self.slot_gradient_bytes + self.weight_input_bytes
        return np.flatnonzero(uneven).tolist()


def stage_memory(
    held: StageBytes,
    stage_index: int,
    costed: CostedChunks,
    program: PackedProgram,
    input_weight: InputWeightCosts | None = None,
) -> StageMemory:
    """Return the ledger of one stage's program; `input_weight` prices its I and W, if any."""
    stage = held.stage
    num_chunks = len(costed.boundary_bytes)
    gradients = np.zeros(num_chunks)
    _, lasts = costed.sizes.slice_ends
    gradients[lasts] = costed.sizes.split_tokens[lasts] * held.kv_gradients_per_token

    opened, closed = _slots(held, costed.sizes, program)
    transient = _transient(stage, stage_index, costed, program)
    weight_inputs = np.zeros(num_chunks)
    if input_weight is not None:
        inputs = program.is_kind(OpKind.BACKWARD_INPUT)
        weights = program.is_kind(OpKind.BACKWARD_WEIGHT)
        in_parts = program.chunks[inputs]
        weight_inputs[in_parts] = input_weight.weight_input_bytes[in_parts]
        left = stage.num_layers * input_weight.weight_input_bytes
        left = left + input_weight.embedding_weight_input_bytes[stage_index]
        # Left when I has ended, and let go when W has.
        closed[inputs] -= left[in_parts]
        closed[weights] += left[program.chunks[weights]]
        own = input_weight.input_transient_bytes[stage_index]
        received = 0.0 if stage.head else costed.boundary_bytes
        transient[inputs] = (own + received)[in_parts]
        own = input_weight.weight_transient_bytes[stage_index]
        transient[weights] = own[program.chunks[weights]]

    total_closed = np.cumsum(closed)
    before = np.cumsum(opened) - (total_closed - closed)
    after = held.static_bytes + np.cumsum(opened) - total_closed
    fixed = float(held.static_bytes) + before
    fixed += _transfers(
        costed, program, program.is_forward, receives=not stage.embedding, sends=not stage.head
    )
    fixed += _transfers(
        costed, program, program.is_backward, receives=not stage.head, sends=not stage.embedding
    )
    return StageMemory(
        program=program,
        fixed_bytes=fixed + transient,
        fixed_after_bytes=after,
        activation_bytes=costed.activation_bytes[stage_index],
        freed_per_layer_bytes=costed.freed_per_layer_bytes,
        boundary_bytes=costed.boundary_bytes,
        slot_gradient_bytes=gradients,
        weight_input_bytes=weight_inputs,
        recompute_transient_bytes=costed.recompute_transient_bytes[stage_index],
        num_layers=stage.num_layers,
    )


def _slots(held: StageBytes, sizes: ChunkSizes, program: PackedProgram) -> tuple[Floats, Floats]:
    """Return the bytes of slots that come when each op begins, and those that go when it has ended.

    K and V come with the first slice's F, their gradients with the last slice's B, and the first
    slice's B ends both.
    """
    firsts, lasts = sizes.slice_ends
    tokens = sizes.split_tokens[firsts].astype(np.float64)
    kv = held.stage.num_layers * tokens * held.kv_per_token
    gradients = held.stage.num_layers * tokens * held.kv_gradients_per_token
    opened = np.zeros(len(program.chunks))
    opened[program.forward_places[firsts]] = kv
    opened[program.backward_places[lasts]] = gradients
    closed = np.zeros(len(program.chunks))
    closed[program.backward_places[firsts]] = kv + gradients
    return opened, closed


def _transient(
    stage: Stage, stage_index: int, costed: CostedChunks, program: PackedProgram
) -> Floats:
    """(ops,) bytes that F and B need only while they run."""
    forward = costed.forward_transient_bytes[stage_index]
    backward = costed.backward_transient_bytes[stage_index]
    if not stage.head:
        # The gradient that came from the next stage.
        backward = backward + costed.boundary_bytes
    chunks = program.chunks
    return np.asarray(np.where(program.is_forward, forward[chunks], backward[chunks]))


def _transfers(
    costed: CostedChunks, program: PackedProgram, that_way: Bools, *, receives: bool, sends: bool
) -> Floats:
    """(ops,) bytes of one direction's transfers: one posted ahead, one that may not have left."""
    sizes = costed.boundary_bytes[program.chunks[that_way]]
    num_done = np.cumsum(that_way, dtype=np.int64) - that_way
    ahead = np.append(sizes, 0.0)[np.minimum(num_done + that_way, len(sizes))]
    behind = np.append(0.0, sizes)[num_done]
    return np.asarray(receives * ahead + sends * behind)


def layers_transient_bytes(
    num_layers: int,
    recompute: int,
    layer: float,
    boundary: float,
    slot_gradients: float,
    weight_inputs: float = 0.0,
) -> float:
    """Return the most that a stage's layers hold within a B or I, above what the chunk kept and all
    its slot gradients.

    The layers run backward from the last to the first. Each frees what it kept; each brings, in the
    first B of a split sequence, its gradients of K and V; and the first `recompute` of them bring
    their activations back.

    Args:
        num_layers: of the stage.
        recompute: layers of the chunk that are recomputed.
        layer: bytes that one layer keeps of the chunk when it is not recomputed.
        boundary: bytes of its input, which it keeps when it is.
        slot_gradients: bytes of one layer's gradients of K and V if this B is the one that brings
            them, else 0.
        weight_inputs: bytes that an I leaves of one layer for W, which a B does not.
    """
    most = -float("inf")
    # Between these layers the sum changes evenly, so it is largest at one of them.
    corners = {num_layers, recompute + 1, recompute, 1}
    for number in corners & set(range(1, num_layers + 1)):
        num_done = num_layers - number
        done_whole = min(num_done, num_layers - recompute)
        done_recomputed = num_done - done_whole
        freed = done_whole * layer + done_recomputed * boundary - num_done * weight_inputs
        brought_back = layer - boundary if number <= recompute else 0.0
        missing_gradients = (number - 1) * slot_gradients
        most = max(most, brought_back - freed - missing_gradients)
    return most
