"""Time and bytes of chunks, ops and whole programs, from a profile (design, section 5). Pure numpy.

The bytes follow the runtime: F keeps activations until B; a split sequence's K and V
stay in a slot from its first F until its first slice's B, and their gradients from its
first B on; one transfer a direction is posted ahead and one may be unfinished.

The runtime does not split B into I and W. Where a profile prices them: I does all that B does for activations,
recompute, attention and K and V included, and leaves for W the inputs of a layer's products and the gradients of
their outputs. The head's weight has its gradient since F, so the last stage's W is of layers only; the
embedding has nothing but a W.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infinipipe.aliases import Floats, Ints
from infinipipe.ir import Chunk, Model, Op, OpKind, Sequence, Stage
from infinipipe.profiles.profile import Curve, LayerTime, Line, Profile


def curve_seconds(curve: Curve, tokens: Ints) -> Floats:
    """Evaluate a piecewise-linear curve, extrapolating with its last slope.

    Between 0 and the first measured size it stays at the first value: a smaller chunk is not faster.
    """
    x, y = np.asarray(curve.tokens, dtype=float), np.asarray(curve.seconds)
    slope = max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2]))
    return np.asarray(np.interp(tokens, x, y) + slope * np.maximum(0, tokens - x[-1]))


def layer_seconds(
    time: LayerTime,
    tokens: Ints,
    pairs: Ints,
    slices: Ints,
    context: Ints | int = 0,
    continued: Ints | int = 0,
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
        whole=np.array(
            [len(c.slices) > (p is not None) for c, p in zip(chunks, pieces, strict=True)],
            dtype=bool,
        ),
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


@dataclass(frozen=True)
class SplitCosts:
    """Seconds and bytes of C chunks on P stages where B is split into I and W. Arrays are as those of `Costs`."""

    input_s: Floats
    """Without recompute, which adds to I what it would add to B."""
    weight_s: Floats
    left_bytes: Floats
    """(C,) from I to W for each layer, whether it was recomputed or not."""
    embedding_left_bytes: Floats
    """From I to W besides: on the first stage the embedding's tokens and the gradient of its output."""
    input_peak_bytes: Floats
    """Needed in I for a moment."""
    weight_peak_bytes: Floats
    """Needed in W for a moment."""


def chunk_costs(
    profile: Profile, stages: SequenceOf[Stage], loads: Loads, logits_tokens: int
) -> Costs:
    """Price chunks on every stage."""
    times, sizes = profile.times, profile.bytes
    layers = np.array([[s.num_layers] for s in stages])
    first = np.array([[s.embedding] for s in stages])
    last = np.array([[s.head] for s in stages])
    tokens = loads.tokens
    dropped_peak = _line_values(sizes.recompute_forward_peak, tokens)
    full = tokens * sizes.layer_full_per_token + np.where(
        loads.whole, tokens * sizes.layer_kv_per_token, 0
    )
    activation: Floats = np.multiply(tokens, sizes.activation_per_token, dtype=np.float64)
    piece = np.minimum(tokens, logits_tokens) * sizes.logits_per_token
    forward_peak = _line_values(sizes.layer_forward_peak, tokens)
    head_peak = _line_values(sizes.head_forward_peak, tokens) + piece
    embedding_peak = _line_values(sizes.embedding_backward_peak, tokens)
    return Costs(
        forward_s=times.chunk_forward_s
        + layers * _layer_seconds(times.layer_forward, loads)
        + first * curve_seconds(times.embedding_forward, tokens)
        + last * curve_seconds(times.head_forward, tokens),
        backward_s=times.chunk_backward_s
        + layers * _layer_seconds(times.layer_backward, loads)
        + first * curve_seconds(times.embedding_backward, tokens)
        + last * curve_seconds(times.head_backward, tokens),
        recompute_s=_layer_seconds(times.layer_recompute, loads),
        transfer_s=_line_values(times.transfer_s, activation),
        kept_bytes=layers * full
        + tokens
        * (sizes.chunk_per_token + first * sizes.embedding_per_token + last * sizes.head_per_token),
        saved_bytes=full - activation,
        forward_peak_bytes=np.maximum(forward_peak, last * head_peak),
        # What the head keeps is not there yet when the layers run.
        recompute_excess_bytes=np.maximum(
            0.0,
            dropped_peak
            - np.maximum(forward_peak, last * head_peak)
            - last * tokens * sizes.head_per_token,
        ),
        # The embedding's backward runs when the layers' activations are gone, so only its excess counts.
        backward_peak_bytes=np.maximum(
            _layers_backward_peak(profile, stages, loads), first * (embedding_peak - layers * full)
        ),
        activation_bytes=activation,
    )


def _layer_seconds(time: LayerTime, loads: Loads) -> Floats:
    return layer_seconds(
        time, loads.tokens, loads.pairs, loads.slices, loads.context, loads.continued
    )


def _line_values(line: Line, counts: Ints | Floats) -> Floats:
    return np.asarray(line.constant + line.rate * counts)


def _layers_backward_peak(profile: Profile, stages: SequenceOf[Stage], loads: Loads) -> Floats:
    """(P, C) bytes that the backward of head and layers needs for a moment."""
    sizes, tokens = profile.bytes, loads.tokens
    last = np.array([[s.head] for s in stages])
    # The gradients of the context's K and V come and go within attention, which is not where a layer peaks otherwise.
    slice_peak = sizes.slice_backward_per_token * tokens + sizes.context_per_token * loads.context
    layer_peak = np.maximum(
        _line_values(sizes.layer_backward_peak, tokens),
        np.where(loads.context > 0, slice_peak, 0.0),
    )
    # What the head kept is gone when the layers run backward, but for the gradient that it hands them.
    after_head = last * (tokens * sizes.activation_per_token - tokens * sizes.head_per_token)
    return np.asarray(
        np.maximum(layer_peak + after_head, last * _line_values(sizes.head_backward_peak, tokens))
    )


def split_costs(profile: Profile, stages: SequenceOf[Stage], loads: Loads) -> SplitCosts | None:
    """Price I and W of chunks on every stage; None if the profile does not."""
    times, sizes, tokens = profile.times, profile.bytes, loads.tokens
    input_time, weight_time, per_token = (
        times.layer_input_backward,
        times.layer_weight_backward,
        sizes.layer_split_per_token,
    )
    if input_time is None or weight_time is None or per_token is None:
        return None
    layers = np.array([[s.num_layers] for s in stages])
    first = np.array([[s.embedding] for s in stages])
    last = np.array([[s.head] for s in stages])

    left: Floats = np.multiply(tokens, per_token, dtype=np.float64)
    embedding_left: Floats = tokens * np.float64(
        sizes.activation_per_token + sizes.embedding_per_token
    )
    embedding_peak = _line_values(sizes.embedding_backward_peak, tokens)
    return SplitCosts(
        input_s=times.chunk_backward_s
        + layers * _layer_seconds(input_time, loads)
        + last * curve_seconds(times.head_backward, tokens),
        # Coming back to a chunk costs what coming to it does.
        weight_s=times.chunk_backward_s
        + layers * _layer_seconds(weight_time, loads)
        + first * curve_seconds(times.embedding_backward, tokens),
        left_bytes=left,
        embedding_left_bytes=first * embedding_left,
        input_peak_bytes=_layers_backward_peak(profile, stages, loads),
        # One weight's gradient before it is added; the embedding's comes when what the layers left is gone.
        weight_peak_bytes=np.maximum(
            sizes.layer_backward_peak.constant, first * (embedding_peak - layers * left)
        ),
    )


def op_seconds(
    costs: Costs, split: SplitCosts | None, stage: int, recompute: SequenceOf[int]
) -> dict[OpKind, list[float]]:
    """Return the seconds of each chunk's ops on one stage, by kind; I and W only where `split` prices them."""
    recompute_s = np.asarray(recompute) * costs.recompute_s
    columns = {
        OpKind.FORWARD: costs.forward_s[stage],
        OpKind.BACKWARD: costs.backward_s[stage] + recompute_s,
    }
    if split is not None:
        columns[OpKind.BACKWARD_INPUT] = split.input_s[stage] + recompute_s
        columns[OpKind.BACKWARD_WEIGHT] = split.weight_s[stage]
    return {kind: column.tolist() for kind, column in columns.items()}


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
    split: SplitCosts | None = None,
) -> MemoryTrace:
    """Replay one stage's program and return the bytes it holds, static ones included.

    `split` prices its I and W, if it has any.
    """
    memory = Memory(profile, stages, stage, sequences, loads, costs, program, recompute, split)
    during, after = np.zeros(len(program)), np.zeros(len(program))
    for position, op in enumerate(program):
        during[position] = memory.run(op)
        after[position] = memory.held
    return MemoryTrace(during=during, after=after)


class Memory:
    """The bytes that one stage holds, op by op. A shallow copy goes on by itself.

    The ops may come in another order than in the program, and its B be split or not, but F come in its order of F, and
    B and I in its order of both.
    """

    held: float
    """After the ops so far, static bytes included."""

    def __init__(
        self,
        profile: Profile,
        stages: SequenceOf[Stage],
        stage: int,
        sequences: SequenceOf[Sequence],
        loads: Loads,
        costs: Costs,
        program: SequenceOf[Op],
        recompute: SequenceOf[int],
        split: SplitCosts | None = None,
    ) -> None:
        self.held = float(static_bytes(profile, stages[stage]))
        self._stage, self._place, self._sizes = stage, stages[stage], profile.bytes
        self._costs, self._split = costs, split
        self._contexts: list[int] = loads.context.tolist()
        self._sequences: list[int] = loads.split.tolist()
        self._lengths = [sequences[s].length if s >= 0 else 0 for s in self._sequences]
        self._forwards = [op.chunk for op in program if op.kind == OpKind.FORWARD]
        self._backwards = [
            op.chunk for op in program if op.kind in (OpKind.BACKWARD, OpKind.BACKWARD_INPUT)
        ]
        self._recompute = recompute
        self._kept = costs.kept_bytes[stage] - costs.saved_bytes * np.asarray(recompute)
        self._full = costs.saved_bytes + costs.activation_bytes
        self._num_forward = self._num_backward = 0
        self._slots: frozenset[int] = frozenset()
        self._slot_grads: frozenset[int] = frozenset()

    def run(self, op: Op) -> float:
        """Run an op and return the most bytes that are held meanwhile."""
        match op.kind:
            case OpKind.FORWARD:
                return self._forward(op.chunk)
            case OpKind.BACKWARD:
                return self._backward(op.chunk)
            case OpKind.BACKWARD_INPUT:
                return self._backward_input(op.chunk)
            case OpKind.BACKWARD_WEIGHT:
                return self._backward_weight(op.chunk)

    def _forward(self, chunk: int) -> float:
        moment = self._buffers(OpKind.FORWARD)
        sequence = self._sequences[chunk]
        if sequence >= 0 and sequence not in self._slots:
            self._slots |= {sequence}
            self.held += (
                self._place.num_layers * self._lengths[chunk] * self._sizes.layer_kv_per_token
            )
        self.held += self._kept[chunk]
        self._num_forward += 1
        moment += self.held + self._costs.forward_peak_bytes[self._stage, chunk]
        if self._recompute[chunk] == self._place.num_layers:
            moment += self._costs.recompute_excess_bytes[self._stage, chunk]
        return float(moment)

    def _backward(self, chunk: int) -> float:
        moment = (
            self._begin_backward(chunk, 0.0) + self._costs.backward_peak_bytes[self._stage, chunk]
        )
        self._end_backward(chunk)
        return float(moment)

    def _backward_input(self, chunk: int) -> float:
        split = self._priced()
        left = float(split.left_bytes[chunk])
        moment = self._begin_backward(chunk, left) + split.input_peak_bytes[self._stage, chunk]
        self._end_backward(chunk)
        self.held += self._place.num_layers * left + float(
            split.embedding_left_bytes[self._stage, chunk]
        )
        return max(float(moment), self.held)

    def _backward_weight(self, chunk: int) -> float:
        split = self._priced()
        moment = (
            self.held
            + self._buffers(OpKind.BACKWARD_WEIGHT)
            + split.weight_peak_bytes[self._stage, chunk]
        )
        left = (
            self._place.num_layers * split.left_bytes[chunk]
            + split.embedding_left_bytes[self._stage, chunk]
        )
        self.held -= float(left)
        return float(moment)

    def _priced(self) -> SplitCosts:
        assert self._split is not None, "I and W need their prices"
        return self._split

    def _begin_backward(self, chunk: int, left: float) -> float:
        """Let gradients of K and V come; return what is held while the layers run, their peak apart."""
        moment, gradients = self._buffers(OpKind.BACKWARD), 0.0
        sequence, num_layers = self._sequences[chunk], self._place.num_layers
        if sequence >= 0 and sequence not in self._slot_grads:
            self._slot_grads |= {sequence}
            gradients = float(self._lengths[chunk] * self._sizes.layer_kv_grad_per_token)
            self.held += num_layers * gradients
        activation = float(self._costs.activation_bytes[chunk])
        excess = layers_excess_bytes(
            num_layers,
            self._recompute[chunk],
            float(self._full[chunk]),
            activation,
            gradients,
            left,
        )
        self._num_backward += 1
        return moment + self.held + excess + (not self._place.head) * activation

    def _end_backward(self, chunk: int) -> None:
        """Let go of what the chunk kept, and of the slot with its first slice."""
        self.held -= self._kept[chunk]
        if self._sequences[chunk] >= 0 and self._contexts[chunk] == 0:
            per_token = self._sizes.layer_kv_per_token + self._sizes.layer_kv_grad_per_token
            self.held -= self._place.num_layers * self._lengths[chunk] * per_token

    def _buffers(self, kind: OpKind) -> float:
        """Bytes of transfers while an op of a kind runs; I is a B here."""
        costs, receives, sends = self._costs, not self._place.embedding, not self._place.head
        down = _buffer_bytes(
            costs, self._forwards, self._num_forward, kind == OpKind.FORWARD, receives, sends
        )
        up = _buffer_bytes(
            costs, self._backwards, self._num_backward, kind == OpKind.BACKWARD, sends, receives
        )
        return down + up


def layers_excess_bytes(
    num_layers: int,
    recompute: int,
    full: float,
    activation: float,
    gradients: float,
    left: float = 0.0,
) -> float:
    """Return the most that a stage's layers hold within a B or I, above what the chunk kept and all its slot gradients.

    The layers run backward from the last to the first. Each frees what it kept; each brings, in the first B of a
    split sequence, its gradients of K and V; and the first `recompute` of them bring their activations back.

    Args:
        num_layers: of the stage.
        recompute: layers of the chunk that are recomputed.
        full: bytes that one layer keeps of the chunk when it is not recomputed.
        activation: bytes of its input, which it keeps when it is.
        gradients: bytes of one layer's gradients of K and V if this B is the one that brings them, else 0.
        left: bytes that an I leaves of one layer for W, which a B does not.
    """
    most = -float("inf")
    # Between these layers the sum changes evenly, so it is largest at one of them.
    for layer in {num_layers, recompute + 1, recompute, 1} & set(range(1, num_layers + 1)):
        freed_full = min(num_layers - layer, num_layers - recompute)
        freed_inputs = num_layers - layer - freed_full
        back = full - activation if layer <= recompute else 0.0
        freed = freed_full * full + freed_inputs * activation - (num_layers - layer) * left
        most = max(most, back - freed - (layer - 1) * gradients)
    return most


def _buffer_bytes(
    costs: Costs, order: SequenceOf[int], done: int, running: bool, receives: bool, sends: bool
) -> float:
    """Bytes of one direction's transfers while an op runs: one posted ahead, one that may not have left yet."""
    upcoming, total = done + running, 0.0
    if receives and upcoming < len(order):
        total += float(costs.activation_bytes[order[upcoming]])
    if sends and done > 0:
        total += float(costs.activation_bytes[order[done - 1]])
    return total
