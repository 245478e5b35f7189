"""The bytes of a stage over its program: one ledger, and what recompute does to it.

The bytes follow the runtime. F keeps activations until B. A split sequence's K and V stay in a slot
from its first F until its first slice's B, and their gradients from its first B on: those of the
tokens before the last slice, to which other slices add. Of each direction one transfer is posted
ahead and one may not have left yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from infinipipe.aliases import Bools, Floats, Ints
from infinipipe.costs.chunks import ChunkSizes, CostedChunks, InputWeightCosts, Recompute
from infinipipe.costs.program import PackedProgram
from infinipipe.ir import OpKind, Stage


@dataclass(frozen=True)
class StageBytes:
    """What a stage holds whatever its program is, and what its slots take."""

    stage: Stage
    static_bytes: float
    """Between steps."""
    kv_per_token: float
    """K and V of one layer in a slot, per token of the sequence."""
    kv_gradients_per_token: float
    """Their gradients."""


@dataclass(frozen=True)
class StageMemory:
    """The ledger of one stage's program.

    What chunks keep from F to B is apart from the rest, as recompute changes it (`kept`).
    Everything else is fixed by the program. Arrays are (ops,) or (chunks,).
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
    """(chunks,) less for each layer that keeps only its input."""
    attention_bytes: Floats
    """(chunks,) more than that for each layer that keeps attention's output."""
    boundary_bytes: Floats
    """(chunks,) the input that a recomputed layer still keeps."""
    slot_gradient_bytes: Floats
    """(chunks,) each layer's gradients of K and V that the chunk's B brings, 0 if another does."""
    weight_input_bytes: Floats
    """(chunks,) what the chunk's I leaves of each layer for its W, 0 if it has a B."""
    recompute_transient_bytes: Floats
    """(chunks,) what F needs besides where all layers are recomputed. Taken to be less than a
    layer's activations, which the footprint measures."""
    num_layers: int

    def during(self, recompute: Recompute) -> Floats:
        """Return the most bytes while each op runs, for the recomputed layers of each chunk."""
        program = self.program
        kept = self._kept(recompute)
        # A chunk's B still holds what the chunk kept.
        own = np.where(program.is_backward, kept, 0.0)
        transient = own + self.transient(recompute)
        if program.has_input_weight:
            transient[program.is_kind(OpKind.BACKWARD_WEIGHT)] = 0.0
        held = np.cumsum(program.activation_signs * kept)
        during: Floats = self.fixed_bytes + held + transient
        if program.has_input_weight:
            # What I leaves may be more than what it needed before.
            inputs = program.is_kind(OpKind.BACKWARD_INPUT)
            at_end = self.fixed_after_bytes + held
            during[inputs] = np.maximum(during, at_end)[inputs]
        return during

    def after(self, recompute: Recompute) -> Floats:
        """Return the bytes that are held when each op has ended."""
        kept = self._kept(recompute)
        held = np.cumsum(self.program.activation_signs * kept)
        after: Floats = self.fixed_after_bytes + held
        return after

    def least(self) -> Floats:
        """Return what no recompute can undercut while each op runs, in a program of F and B.

        All other chunks recompute all layers. The op's own chunk does what is best for it alone.
        """
        chunks = self.program.chunks
        backward = self.program.is_backward
        freed = self.freed_per_layer_bytes
        freed_by_all = freed * self.num_layers
        own = self.activation_bytes - freed_by_all
        kept = own[chunks]
        held = np.cumsum(self.program.activation_signs * kept)
        # F has just added its own chunk, B has just taken it away.
        just_added = np.where(backward, 0.0, kept)
        others = held - just_added
        # A chunk that recomputes all but one layer keeps that one, and its F needs no more.
        above_own = np.minimum(self.recompute_transient_bytes, freed)
        in_forward = own + above_own
        # In its B no count is better than all layers: the last layer is there in any case, and so
        # is the time when the first one runs.
        in_backward = own + freed
        uneven = self._uneven_chunks
        in_backward[uneven] += self._gone_before_last(self.boundary_bytes)[uneven]
        forward_needs = in_forward[chunks]
        backward_needs = in_backward[chunks]
        own_needs = np.where(backward, backward_needs, forward_needs)
        least: Floats = self.fixed_bytes + others + own_needs
        return least

    def missing_bytes(self, limit: float) -> Floats:
        """Return the bytes over a limit at each op of a program of F and B without recompute.

        What the op needs besides while it runs, by its own chunk's counts, is in `transient`.
        """
        program = self.program
        assert not program.has_input_weight, "F and B only"
        backward = program.is_backward
        kept = self.activation_bytes[program.chunks]
        held = np.cumsum(np.where(backward, -kept, kept))
        # While B runs, its chunk is still there.
        own = np.where(backward, kept, 0.0)
        needed = self.fixed_bytes + held + own
        missing: Floats = needed - limit
        return missing

    def transient(self, recompute: Recompute) -> Floats:
        """Return (ops,) what F, and B or I, need besides by how their chunk is recomputed."""
        keep_input, keep_attention = recompute
        num_recomputed = keep_input + keep_attention
        if not num_recomputed.any():
            return self._transient_of_none
        all_layers = num_recomputed == self.num_layers
        in_forward = self.recompute_transient_bytes * all_layers
        # If any layer was kept, it runs backward first and frees at least what recomputing another
        # brings back. If none was, the first to run brings back most, or frees as much.
        kept_attention = self.attention_bytes * (keep_attention > 0)
        in_backward = (self.freed_per_layer_bytes - kept_attention) * all_layers
        uneven = self._uneven_chunks
        if len(uneven):
            own = Recompute(keep_input[uneven], keep_attention[uneven])
            in_backward[uneven] = self.layers_transient(uneven, own)
        chunks = self.program.chunks
        transient: Floats = np.where(
            self.program.is_backward, in_backward[chunks], in_forward[chunks]
        )
        return transient

    @cached_property
    def _transient_of_none(self) -> Floats:
        """(ops,) what is transient where nothing is recomputed."""
        transient = np.zeros(len(self.program.chunks))
        chunks = self._uneven_chunks
        kept = self.freed_per_layer_bytes + self.boundary_bytes
        ops = self.program.backward_places[chunks]
        transient[ops] = self._gone_before_last(kept)[chunks]
        return transient

    def _gone_before_last(self, kept: Floats) -> Floats:
        """(chunks,) what `layers_transient` is besides what a layer brings back, if all keep alike.

        At the first layer to run other layers' gradients of K and V have not come; at the last one
        the other layers have freed what they kept.
        """
        freed = kept - self.weight_input_bytes
        gone: Floats = np.minimum(self.slot_gradient_bytes, freed)
        return (1 - self.num_layers) * gone

    def layers_transient(self, chunks: Ints, recompute: Recompute) -> Floats:
        """Return what B or I of some chunks need above what is held; see `layers_transient_bytes`.

        `recompute` has the shape of `chunks`, or one more axis before it.
        """
        boundary = self.boundary_bytes[chunks]
        layer = LayerBytes(
            whole=self.freed_per_layer_bytes[chunks] + boundary,
            input=boundary,
            attention=self.attention_bytes[chunks],
            slot_gradients=self.slot_gradient_bytes[chunks],
            weight_inputs=self.weight_input_bytes[chunks],
        )
        return layers_transient_bytes(self.num_layers, recompute, layer)

    def _kept(self, recompute: Recompute) -> Floats:
        """(ops,) what the op's chunk keeps from F to B."""
        keep_input, keep_attention = recompute
        freed = self.freed_per_layer_bytes * (keep_input + keep_attention)
        kept = self.activation_bytes - freed + self.attention_bytes * keep_attention
        of_ops: Floats = kept[self.program.chunks]
        return of_ops

    @cached_property
    def _uneven_chunks(self) -> Ints:
        """Chunks in whose B the layers do not only free what they kept, one after the other.

        Gradients of K and V come with each layer, or inputs of W stay.
        """
        uneven = self.slot_gradient_bytes + self.weight_input_bytes
        return np.flatnonzero(uneven)


def stage_memory(
    held: StageBytes,
    stage_index: int,
    costed: CostedChunks,
    program: PackedProgram,
    input_weight: InputWeightCosts | None = None,
) -> StageMemory:
    """Return the ledger of one stage's program; `input_weight` prices its I and W, if any."""
    stage = held.stage
    opened, closed = _slots(held, costed.sizes, program)
    transient = _transient(stage, stage_index, costed, program)
    weight_inputs = np.zeros(len(costed.boundary_bytes))
    if input_weight is not None:
        inputs = program.is_kind(OpKind.BACKWARD_INPUT)
        input_chunks = program.chunks[inputs]
        weight_inputs[input_chunks] = input_weight.weight_input_bytes[input_chunks]
        # What I leaves is there when it has ended, until W lets it go.
        closed -= _left_by_inputs(stage, stage_index, program, input_weight)
        _set_input_weight_transient(transient, stage, stage_index, costed, program, input_weight)

    total_opened = np.cumsum(opened)
    total_closed = np.cumsum(closed)
    closed_before = total_closed - closed
    in_slots = total_opened - closed_before
    fixed = float(held.static_bytes) + in_slots
    after = held.static_bytes + total_opened - total_closed
    has_previous = not stage.embedding
    has_next = not stage.head
    down = program.is_forward
    up = program.is_backward
    fixed += _transfers(costed, program, down, receives=has_previous, sends=has_next)
    fixed += _transfers(costed, program, up, receives=has_next, sends=has_previous)
    return StageMemory(
        program=program,
        fixed_bytes=fixed + transient,
        fixed_after_bytes=after,
        activation_bytes=costed.activation_bytes[stage_index],
        freed_per_layer_bytes=costed.freed_per_layer_bytes,
        attention_bytes=costed.attention_bytes,
        boundary_bytes=costed.boundary_bytes,
        slot_gradient_bytes=_slot_gradients(held, costed.sizes),
        weight_input_bytes=weight_inputs,
        recompute_transient_bytes=costed.recompute_transient_bytes[stage_index],
        num_layers=stage.num_layers,
    )


def _slots(held: StageBytes, sizes: ChunkSizes, program: PackedProgram) -> tuple[Floats, Floats]:
    """Return the bytes of slots that come when each op begins, and those that go when it has ended.

    K and V come with the first slice's F, their gradients with the last slice's B, and the first
    slice's B ends both. Of gradients there are those of the tokens before the last slice, as no
    other slice adds to its own.
    """
    num_ops = len(program.chunks)
    num_layers = held.stage.num_layers
    firsts, lasts = sizes.slice_ends
    tokens = sizes.split_tokens[firsts].astype(np.float64)
    kv = num_layers * tokens * held.kv_per_token
    added_up = sizes.context[lasts].astype(np.float64)
    gradients = num_layers * added_up * held.kv_gradients_per_token
    first_forwards = program.forward_places[firsts]
    first_backwards = program.backward_places[lasts]
    last_backwards = program.backward_places[firsts]
    opened = np.zeros(num_ops)
    opened[first_forwards] = kv
    opened[first_backwards] = gradients
    closed = np.zeros(num_ops)
    closed[last_backwards] = kv + gradients
    return opened, closed


def _slot_gradients(held: StageBytes, sizes: ChunkSizes) -> Floats:
    """(chunks,) bytes of one layer's gradients of K and V that the chunk's B brings.

    The B of a split sequence's last slice, which is its first B, brings those of all slices before.
    """
    _, lasts = sizes.slice_ends
    gradients = np.zeros(len(sizes.tokens))
    gradients[lasts] = sizes.context[lasts] * held.kv_gradients_per_token
    return gradients


def _transient(
    stage: Stage, stage_index: int, costed: CostedChunks, program: PackedProgram
) -> Floats:
    """(ops,) bytes that F and B need only while they run."""
    forward = costed.forward_transient_bytes[stage_index]
    backward = costed.backward_transient_bytes[stage_index]
    if not stage.head:
        # The gradient that came from the next stage.
        backward = backward + costed.boundary_bytes
    in_forward = forward[program.chunks]
    in_backward = backward[program.chunks]
    transient: Floats = np.where(program.is_forward, in_forward, in_backward)
    return transient


def _set_input_weight_transient(
    transient: Floats,
    stage: Stage,
    stage_index: int,
    costed: CostedChunks,
    program: PackedProgram,
    input_weight: InputWeightCosts,
) -> None:
    """Put in, in place, what I and W need only while they run."""
    inputs = program.is_kind(OpKind.BACKWARD_INPUT)
    weights = program.is_kind(OpKind.BACKWARD_WEIGHT)
    in_input = input_weight.input_transient_bytes[stage_index]
    in_weight = input_weight.weight_transient_bytes[stage_index]
    if not stage.head:
        # The gradient that came from the next stage.
        in_input = in_input + costed.boundary_bytes
    chunks = program.chunks
    transient[inputs] = in_input[chunks[inputs]]
    transient[weights] = in_weight[chunks[weights]]


def _left_by_inputs(
    stage: Stage, stage_index: int, program: PackedProgram, input_weight: InputWeightCosts
) -> Floats:
    """(ops,) bytes that an I leaves, and, below zero, that a W lets go."""
    per_chunk = stage.num_layers * input_weight.weight_input_bytes
    per_chunk = per_chunk + input_weight.embedding_weight_input_bytes[stage_index]
    per_op = per_chunk[program.chunks]
    inputs = program.is_kind(OpKind.BACKWARD_INPUT)
    weights = program.is_kind(OpKind.BACKWARD_WEIGHT)
    left = np.zeros(len(program.chunks))
    left[inputs] = per_op[inputs]
    left[weights] = -per_op[weights]
    return left


def _transfers(
    costed: CostedChunks, program: PackedProgram, that_way: Bools, *, receives: bool, sends: bool
) -> Floats:
    """(ops,) bytes of one direction's transfers: one posted ahead, one that may not have left."""
    chunks = program.chunks[that_way]
    sizes = costed.boundary_bytes[chunks]
    num_begun = np.cumsum(that_way, dtype=np.int64)
    num_done = num_begun - that_way
    total = np.zeros(len(that_way))
    if receives:
        # The receive for the next op is posted when this one begins; none follows the last op.
        ahead = np.append(sizes, 0.0)
        total += ahead[num_begun]
    if sends:
        # The result of the op before; there is none before the first op.
        behind = np.append(0.0, sizes)
        total += behind[num_done]
    return total


class LayerBytes(NamedTuple):
    """What one layer holds of some chunks; arrays of any one shape, or numbers."""

    whole: Floats | float
    """What it keeps that is not recomputed."""
    input: Floats | float
    """What it keeps that is."""
    attention: Floats | float
    """What it keeps besides if attention is not run again."""
    slot_gradients: Floats | float = 0.0
    """Gradients of K and V if this B is the one that brings them."""
    weight_inputs: Floats | float = 0.0
    """What an I leaves for W, which a B does not."""


def layers_transient_bytes(num_layers: int, recompute: Recompute, layer: LayerBytes) -> Floats:
    """Return the most that a stage's layers hold within a B or I, above what the chunk kept and all
    its slot gradients.

    The layers run backward from the last to the first. Each frees what it kept; each brings, in the
    first B of a split sequence, its gradients of K and V; and those that are recomputed bring back
    what they did not keep. First are those that keep only their input, then those that keep
    attention's output besides.

    Args:
        num_layers: of the stage.
        recompute: how many of them are recomputed; its shape is the result's.
        layer: bytes of each.
    """
    keep_input, keep_attention = recompute
    num_recomputed = keep_input + keep_attention
    first = np.ones_like(num_recomputed)
    last = num_layers * first
    # Between these layers the sum changes evenly, so it is largest at one of them.
    corners = (last, num_recomputed + 1, num_recomputed, keep_input + 1, keep_input, first)
    number = np.clip(corners, first, last)
    # Of all layers up to this one.
    with_attention = np.clip(number - keep_input, 0, keep_attention)
    whole = np.maximum(number - num_recomputed, 0)
    kept = number * layer.input
    kept = kept + with_attention * layer.attention + whole * (layer.whole - layer.input)
    kept_by_all = num_layers * layer.input + keep_attention * layer.attention
    kept_by_all = kept_by_all + (num_layers - num_recomputed) * (layer.whole - layer.input)
    left = (num_layers - number) * layer.weight_inputs
    own_attention = (number > keep_input) * layer.attention
    not_kept = layer.whole - layer.input - own_attention
    brought_back = (number <= num_recomputed) * not_kept
    missing_gradients = (number - 1) * layer.slot_gradients
    held = brought_back + kept - kept_by_all + left - missing_gradients
    return np.asarray(held.max(axis=0))
