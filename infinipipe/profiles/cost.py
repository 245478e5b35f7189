"""Time and bytes of chunks, ops and whole programs, from a profile (design, section 5). Pure numpy.

The bytes follow the runtime: F keeps activations until B; a split sequence's K and V
stay in a slot from its first F until its first slice's B, and their gradients from its
first B on; one transfer a direction is posted ahead and one may be unfinished.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infinipipe.ir import Chunk, Model, Op, OpKind, Sequence, Stage
from infinipipe.profiles.profile import Curve, LayerTime, Profile

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Logits are computed for so many elements at a time: 256 MiB in float32.
LOGITS_ELEMENTS = 2**26


def logits_tokens(vocabulary_size: int) -> int:
    """Return for how many tokens at most the head computes logits at a time."""
    return min(1024, max(64, LOGITS_ELEMENTS // vocabulary_size))


def curve_seconds(curve: Curve, tokens: Ints) -> Floats:
    """Evaluate a piecewise-linear curve, extrapolating with its last slope.

    Between 0 and the first measured size it stays at the first value: a smaller chunk is not faster.
    """
    x, y = np.asarray(curve.tokens, dtype=float), np.asarray(curve.seconds)
    slope = max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2]))
    return np.asarray(np.interp(tokens, x, y) + slope * np.maximum(0, tokens - x[-1]))


def layer_seconds(
    time: LayerTime, tokens: Ints, pairs: Ints, slices: Ints, context: Ints | int = 0, continued: Ints | int = 0
) -> Floats:
    """Return the seconds of one layer for each chunk; its arguments are those of `Loads`."""
    whole = curve_seconds(time.curve, tokens) + time.s_per_pair * pairs + time.s_per_slice * slices
    second_call = time.s_per_context_token * context + time.s_per_continued_token * continued
    return np.asarray(whole + second_call + time.s_per_context * np.greater(context, 0))


def stage_parameters(model: Model, stage: Stage) -> int:
    """Return the number of parameters a stage holds; a tied head on a stage of its own is a copy."""
    parameters = stage.num_layers * model.layer_parameters
    if stage.embedding:
        parameters += model.embedding_parameters
    if stage.head:
        parameters += model.hidden_size
        if not (model.tied and stage.embedding):
            parameters += model.embedding_parameters
    return parameters


def static_bytes(profile: Profile, stage: Stage) -> int:
    """Return the bytes a stage holds between steps: parameters, gradients and optimizer state."""
    return profile.bytes.static_per_parameter * stage_parameters(profile.model, stage)


def optimizer_seconds(profile: Profile, stage: Stage) -> float:
    """Return the seconds of the optimizer's step on a stage."""
    line = profile.times.optimizer_s
    return line.constant + line.rate * stage_parameters(profile.model, stage)


@dataclass(frozen=True)
class Loads:
    """What the cost of each of C chunks depends on; arrays of shape (C,)."""

    tokens: Ints
    pairs: Ints
    slices: Ints
    context: Ints
    """Start of the split sequence's slice, 0 without one."""
    continued: Ints
    """Tokens of that slice, 0 where it has no context."""
    whole: NDArray[np.bool_]
    """Whether the chunk holds any whole sequence."""
    split: Ints
    """The step's sequence that the chunk holds a slice of, -1 for none."""


def chunk_loads(chunks: SequenceOf[Chunk], sequences: SequenceOf[Sequence]) -> Loads:
    """Collect the loads of chunks."""
    pieces = [chunk.split_slice(sequences) for chunk in chunks]
    return Loads(
        tokens=np.array([c.num_tokens for c in chunks], dtype=np.int64),
        pairs=np.array([c.num_pairs for c in chunks], dtype=np.int64),
        slices=np.array([len(c.slices) for c in chunks], dtype=np.int64),
        context=np.array([p.start if p else 0 for p in pieces], dtype=np.int64),
        continued=np.array([p.length if p and p.start else 0 for p in pieces], dtype=np.int64),
        whole=np.array([len(c.slices) > (p is not None) for c, p in zip(chunks, pieces, strict=True)], dtype=bool),
        split=np.array([p.sequence if p else -1 for p in pieces], dtype=np.int64),
    )


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes of C chunks on P stages. Arrays are (P, C), or (C,) where all stages agree."""

    forward_s: Floats
    backward_s: Floats
    """Without recompute."""
    recompute_s: Floats
    """(C,) added to B for each recomputed layer."""
    transfer_s: Floats
    """(C,) one activation (or its gradient) between neighbours."""
    kept_bytes: Floats
    """From F to B, with no recompute."""
    saved_bytes: Floats
    """(C,) not kept for each recomputed layer."""
    forward_peak_bytes: Floats
    """Needed in F for a moment above what it keeps."""
    recompute_excess_bytes: Floats
    """The same besides where all layers are recomputed: a layer that keeps nothing peaks above what it keeps.

    With any layer that is not recomputed, its activations are more than that.
    """
    backward_peak_bytes: Floats
    """Needed in B for a moment."""
    activation_bytes: Floats
    """(C,) one transfer."""


def chunk_costs(profile: Profile, stages: SequenceOf[Stage], loads: Loads, logits_tokens: int) -> Costs:
    """Price chunks on every stage."""
    times, sizes = profile.times, profile.bytes
    layers = np.array([[s.num_layers] for s in stages])
    first = np.array([[s.embedding] for s in stages])
    last = np.array([[s.head] for s in stages])
    tokens = loads.tokens

    def layer(time: LayerTime) -> Floats:
        return layer_seconds(time, tokens, loads.pairs, loads.slices, loads.context, loads.continued)

    dropped_peak = sizes.recompute_forward_peak.constant + sizes.recompute_forward_peak.rate * tokens
    full = tokens * sizes.layer_full_per_token + np.where(loads.whole, tokens * sizes.layer_kv_per_token, 0)
    activation: Floats = np.multiply(tokens, sizes.activation_per_token, dtype=np.float64)
    piece = np.minimum(tokens, logits_tokens) * sizes.logits_per_token
    forward_peak = sizes.layer_forward_peak.constant + sizes.layer_forward_peak.rate * tokens
    head_peak = sizes.head_forward_peak.constant + sizes.head_forward_peak.rate * tokens + piece
    # The gradients of the context's K and V come and go within attention, which is not where a layer peaks otherwise.
    slice_peak = sizes.slice_backward_per_token * tokens + sizes.context_per_token * loads.context
    backward_peak = np.maximum(
        sizes.layer_backward_peak.constant + sizes.layer_backward_peak.rate * tokens,
        np.where(loads.context > 0, slice_peak, 0.0),
    )
    # What the head kept is gone when the layers run backward, but for the gradient that it hands them.
    head_backward_peak = sizes.head_backward_peak.constant + sizes.head_backward_peak.rate * tokens
    after_head = last * (activation - tokens * sizes.head_per_token)
    embedding_peak = sizes.embedding_backward_peak.constant + sizes.embedding_backward_peak.rate * tokens
    return Costs(
        forward_s=times.chunk_forward_s
        + layers * layer(times.layer_forward)
        + first * curve_seconds(times.embedding_forward, tokens)
        + last * curve_seconds(times.head_forward, tokens),
        backward_s=times.chunk_backward_s
        + layers * layer(times.layer_backward)
        + first * curve_seconds(times.embedding_backward, tokens)
        + last * curve_seconds(times.head_backward, tokens),
        recompute_s=layer(times.layer_recompute),
        transfer_s=np.asarray(times.transfer_s.constant + times.transfer_s.rate * activation),
        kept_bytes=layers * full
        + tokens * (sizes.chunk_per_token + first * sizes.embedding_per_token + last * sizes.head_per_token),
        saved_bytes=full - activation,
        forward_peak_bytes=np.maximum(forward_peak, last * head_peak),
        # What the head keeps is not there yet when the layers run.
        recompute_excess_bytes=np.maximum(
            0.0, dropped_peak - np.maximum(forward_peak, last * head_peak) - last * tokens * sizes.head_per_token
        ),
        # The embedding's backward runs when the layers' activations are gone, so only its excess counts.
        backward_peak_bytes=np.maximum.reduce(
            [backward_peak + after_head, last * head_backward_peak, first * (embedding_peak - layers * full)]
        ),
        activation_bytes=activation,
    )


@dataclass(frozen=True)
class MemoryTrace:
    """Bytes on one stage over its program; arrays of shape (ops,)."""

    during: Floats
    """The most while the op runs."""
    after: Floats
    """What is left when it has ended."""


def replay_memory(
    profile: Profile,
    stages: SequenceOf[Stage],
    stage: int,
    sequences: SequenceOf[Sequence],
    loads: Loads,
    costs: Costs,
    program: SequenceOf[Op],
    recompute: SequenceOf[int],
) -> MemoryTrace:
    """Replay one stage's program and return the bytes it holds, static ones included."""
    full = costs.saved_bytes + costs.activation_bytes
    sizes, num_layers = profile.bytes, stages[stage].num_layers
    receives_forward, receives_backward = not stages[stage].embedding, not stages[stage].head
    forwards = [op.chunk for op in program if op.kind == OpKind.FORWARD]
    backwards = [op.chunk for op in program if op.kind in (OpKind.BACKWARD, OpKind.BACKWARD_INPUT)]
    kept = costs.kept_bytes[stage] - costs.saved_bytes * np.asarray(recompute)
    held = float(static_bytes(profile, stages[stage]))
    during, after = np.zeros(len(program)), np.zeros(len(program))
    num_f = num_b = 0
    slots: set[int] = set()
    slot_grads: set[int] = set()
    for position, op in enumerate(program):
        chunk, sequence = op.chunk, int(loads.split[op.chunk])
        length = sequences[sequence].length if sequence >= 0 else 0
        activation = float(costs.activation_bytes[chunk])
        moment = _buffer_bytes(costs, forwards, num_f, op.kind == OpKind.FORWARD, receives_forward, receives_backward)
        moment += _buffer_bytes(costs, backwards, num_b, op.kind != OpKind.FORWARD, receives_backward, receives_forward)
        match op.kind:
            case OpKind.FORWARD:
                if sequence >= 0 and sequence not in slots:
                    slots.add(sequence)
                    held += num_layers * length * sizes.layer_kv_per_token
                held += kept[chunk]
                moment += held + costs.forward_peak_bytes[stage, chunk]
                if recompute[chunk] == num_layers:
                    moment += costs.recompute_excess_bytes[stage, chunk]
                num_f += 1
                after[position] = held
            case OpKind.BACKWARD | OpKind.BACKWARD_INPUT:
                gradients = 0.0
                if sequence >= 0 and sequence not in slot_grads:
                    slot_grads.add(sequence)
                    gradients = float(length * sizes.layer_kv_grad_per_token)
                    held += num_layers * gradients
                excess = layers_excess_bytes(num_layers, recompute[chunk], full[chunk], activation, gradients)
                moment += held + costs.backward_peak_bytes[stage, chunk] + excess + receives_backward * activation
                num_b += 1
                if op.kind == OpKind.BACKWARD:
                    held -= kept[chunk]
                if sequence >= 0 and loads.context[chunk] == 0:
                    held -= num_layers * length * (sizes.layer_kv_per_token + sizes.layer_kv_grad_per_token)
                after[position] = held
            case OpKind.BACKWARD_WEIGHT:
                moment += held + costs.backward_peak_bytes[stage, chunk]
                held -= kept[chunk]
                after[position] = held
        during[position] = moment
    return MemoryTrace(during=during, after=after)


def layers_excess_bytes(num_layers: int, recompute: int, full: float, activation: float, gradients: float) -> float:
    """Return the most that a stage's layers hold within a B, above what the chunk kept and all its slot gradients.

    The layers run backward from the last to the first. Each frees what it kept; each brings, in the first B of a
    split sequence, its gradients of K and V; and the first `recompute` of them bring their activations back.

    Args:
        num_layers: of the stage.
        recompute: layers of the chunk that are recomputed.
        full: bytes that one layer keeps of the chunk when it is not recomputed.
        activation: bytes of its input, which it keeps when it is.
        gradients: bytes of one layer's gradients of K and V if this B is the one that brings them, else 0.
    """
    most = -float("inf")
    # Between these layers the sum changes evenly, so it is largest at one of them.
    for layer in {num_layers, recompute + 1, recompute, 1} & set(range(1, num_layers + 1)):
        freed_full = min(num_layers - layer, num_layers - recompute)
        freed_inputs = num_layers - layer - freed_full
        back = full - activation if layer <= recompute else 0.0
        most = max(most, back - freed_full * full - freed_inputs * activation - (layer - 1) * gradients)
    return most


def _buffer_bytes(costs: Costs, order: SequenceOf[int], done: int, running: bool, receives: bool, sends: bool) -> float:
    """Bytes of one direction's transfers while an op runs: one posted ahead, one that may not have left yet."""
    upcoming, total = done + running, 0.0
    if receives and upcoming < len(order):
        total += float(costs.activation_bytes[order[upcoming]])
    if sends and done > 0:
        total += float(costs.activation_bytes[order[done - 1]])
    return total
