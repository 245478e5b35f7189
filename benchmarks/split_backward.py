"""A study: what cutting B into I and W would gain, as W can wait until its stage would be idle.

The runtime has F and B only. So no policy plans with this, and no plan that is meant to run comes
from it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from infinipipe.aliases import Floats
from infinipipe.costs import CostedChunks, CostModel, PackedProgram, Recompute, Timeline, simulate
from infinipipe.costs.chunks import InputWeightCosts
from infinipipe.costs.memory import LayerBytes, layers_transient_bytes
from infinipipe.costs.simulate import Channel, Channels, connect, run_stages
from infinipipe.errors import InputError
from infinipipe.ir import TRAITS, Direction, Op, OpKind, Replica
from infinipipe.planner.passes.schedule import Schedule, make_replica

# Factor by which the number of B that are cut at the end of a step climbs. Smaller ones try more
# numbers, each of which costs a simulation.
_CLIMB = 1.5

Programs = tuple[tuple[Op, ...], ...]


def split_backwards(schedule: Schedule) -> tuple[Replica, float]:
    """Return a replica with some B cut that is no slower than a schedule, and its makespan in
    seconds.

    Chunks, recompute, the order of F and that of B, some of which are I now, are the schedule's. A
    W comes when its stage would have to wait for its next op's message, or when that op would not
    fit into memory, or after all others. As I and W together take longer than B, only those B are
    cut whose W fills such a wait, and the last of each stage but the first, in as large a number as
    is best: there the other stages wait for I.

    Raises:
        InputError: the profile does not price I and W.
    """
    costs = schedule.problem.pipeline.costs
    parts = costs.price_input_weight(schedule.chains.costs)
    if parts is None:
        raise InputError(
            "the profile prices F and B only; `infinipipe profile --analytic` makes one that "
            "prices I and W"
        )
    case = _Case(schedule, parts, make_replica(schedule))
    best = case.whole
    makespan_s = schedule.makespan_s
    for stages in _candidates(case):
        programs = tuple(tuple(stage.program) for stage in stages)
        timeline = case.simulate(programs)
        last_end = max(stage.end for stage in stages)
        assert timeline.makespan_s == last_end, "the stages have mistaken the time"
        if timeline.makespan_s < makespan_s:
            best = case.replica(programs, timeline)
            makespan_s = timeline.makespan_s
    return best, makespan_s


class MemoryCursor:
    """The bytes that one stage holds, counted op by op. A shallow copy goes on by itself.

    Of a program's ops it says what the ledger of the program says (`StageMemory`). The ops that are
    run may come in another order than in that program, and its B be cut or not, but F come in its
    order of F, and B and I in its order of both.

    Args:
        costs: of the stages.
        stage_index: of the stage.
        costed: what its chunks cost.
        program: in which F and B have the order that the ops will have.
        recompute: layers of each chunk that are recomputed.
        parts: prices of I and W, where such ops will be run.
    """

    held: float
    """After the ops so far, static bytes included."""

    def __init__(
        self,
        costs: CostModel,
        stage_index: int,
        costed: CostedChunks,
        program: SequenceOf[Op],
        recompute: Recompute,
        parts: InputWeightCosts | None = None,
    ) -> None:
        self.held = float(costs.static_bytes(stage_index))
        self._stage = costs.stages[stage_index]
        self._stage_index = stage_index
        self._costed = costed
        self._parts = parts
        self._recompute = recompute
        keep_input, keep_attention = recompute
        in_whole = costed.freed_per_layer_bytes * keep_input
        but_attention = costed.freed_per_layer_bytes - costed.attention_bytes
        freed = in_whole + but_attention * keep_attention
        self._kept = costed.activation_bytes[stage_index] - freed
        per = costs.profile.bytes
        self._kv_per_token = self._stage.num_layers * per.layer_kv_per_token
        self._layer_gradients_per_token = per.layer_kv_grad_per_token
        # What has come of split sequences, of which there are two chunks or more.
        self._open_slots: frozenset[int] = frozenset()
        # Tokens of each that gradients have come for, a new map with every change.
        self._open_gradients: dict[int, int] = {}
        self._orders = {
            direction: [op.chunk for op in program if TRAITS[op.kind].travels == direction]
            for direction in (Direction.DOWN, Direction.UP)
        }
        self._num_forward = 0
        self._num_backward = 0

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
        transfers = self._transfers(OpKind.FORWARD)
        sequence = int(self._costed.sizes.split[chunk])
        if sequence >= 0 and sequence not in self._open_slots:
            self._open_slots |= {sequence}
            self.held += self._sequence_tokens(chunk) * self._kv_per_token
        self.held += float(self._kept[chunk])
        self._num_forward += 1
        transient = float(self._costed.forward_transient_bytes[self._stage_index, chunk])
        keep_input, keep_attention = self._recompute
        num_recomputed = keep_input[chunk] + keep_attention[chunk]
        if num_recomputed == self._stage.num_layers:
            transient += float(self._costed.recompute_transient_bytes[self._stage_index, chunk])
        return self.held + transfers + transient

    def _backward(self, chunk: int) -> float:
        in_layers = self._begin_backward(chunk, weight_inputs=0.0)
        self._end_backward(chunk)
        return in_layers + float(self._costed.backward_transient_bytes[self._stage_index, chunk])

    def _backward_input(self, chunk: int) -> float:
        parts = self._priced()
        in_layers = self._begin_backward(chunk, float(parts.weight_input_bytes[chunk]))
        self._end_backward(chunk)
        self.held += self._left_for_weight(chunk)
        during = in_layers + float(parts.input_transient_bytes[self._stage_index, chunk])
        # What I leaves may be more than what it needed before.
        return max(during, self.held)

    def _backward_weight(self, chunk: int) -> float:
        transient = float(self._priced().weight_transient_bytes[self._stage_index, chunk])
        during = self.held + self._transfers(OpKind.BACKWARD_WEIGHT) + transient
        self.held -= self._left_for_weight(chunk)
        return during

    def _priced(self) -> InputWeightCosts:
        assert self._parts is not None, "I and W need their prices"
        return self._parts

    def _left_for_weight(self, chunk: int) -> float:
        """Return what I leaves for W, of all layers and of the embedding."""
        parts = self._priced()
        left = self._stage.num_layers * parts.weight_input_bytes[chunk]
        return float(left + parts.embedding_weight_input_bytes[self._stage_index, chunk])

    def _begin_backward(self, chunk: int, weight_inputs: float) -> float:
        """Let gradients of K and V come; return what is held while the layers run, without what
        they need only then."""
        costed = self._costed
        transfers = self._transfers(OpKind.BACKWARD)
        sequence = int(costed.sizes.split[chunk])
        layer_gradients = 0.0
        if sequence >= 0 and sequence not in self._open_gradients:
            # This is its last slice, so they are of the tokens before it.
            num_tokens = int(costed.sizes.context[chunk])
            self._open_gradients = self._open_gradients | {sequence: num_tokens}
            layer_gradients = float(num_tokens * self._layer_gradients_per_token)
            self.held += self._stage.num_layers * layer_gradients
        boundary = float(costed.boundary_bytes[chunk])
        layer = LayerBytes(
            whole=float(costed.freed_per_layer_bytes[chunk]) + boundary,
            input=boundary,
            attention=float(costed.attention_bytes[chunk]),
            slot_gradients=layer_gradients,
            weight_inputs=weight_inputs,
        )
        own = Recompute(self._recompute.keep_input[chunk], self._recompute.keep_attention[chunk])
        in_layers = float(layers_transient_bytes(self._stage.num_layers, own, layer))
        self._num_backward += 1
        received = 0.0 if self._stage.head else boundary
        return self.held + transfers + in_layers + received

    def _end_backward(self, chunk: int) -> None:
        """Let go of what the chunk kept, and of the slot with its first slice."""
        self.held -= float(self._kept[chunk])
        sizes = self._costed.sizes
        sequence = int(sizes.split[chunk])
        if sequence >= 0 and sizes.context[chunk] == 0:
            gradients_per_token = self._stage.num_layers * self._layer_gradients_per_token
            self.held -= self._sequence_tokens(chunk) * self._kv_per_token
            self.held -= self._open_gradients[sequence] * gradients_per_token

    def _sequence_tokens(self, chunk: int) -> int:
        return int(self._costed.sizes.split_tokens[chunk])

    def _transfers(self, kind: OpKind) -> float:
        """Return the bytes of transfers while an op of a kind runs; I is a B here."""
        from_before = not self._stage.embedding
        from_behind = not self._stage.head
        down = self._one_way(
            Direction.DOWN,
            self._num_forward,
            running=kind == OpKind.FORWARD,
            receives=from_before,
            sends=from_behind,
        )
        up = self._one_way(
            Direction.UP,
            self._num_backward,
            running=kind == OpKind.BACKWARD,
            receives=from_behind,
            sends=from_before,
        )
        return down + up

    def _one_way(
        self, direction: Direction, num_done: int, *, running: bool, receives: bool, sends: bool
    ) -> float:
        """Return the bytes of one transfer posted ahead, and of one that may not have left."""
        order = self._orders[direction]
        boundary = self._costed.boundary_bytes
        num_taken = num_done + running
        total = 0.0
        if receives and num_taken < len(order):
            total += float(boundary[order[num_taken]])
        if sends and num_done > 0:
            total += float(boundary[order[num_done - 1]])
        return total


@dataclass(frozen=True)
class _Case:
    """A schedule whose B may be cut."""

    schedule: Schedule
    parts: InputWeightCosts
    whole: Replica
    """The schedule as it is."""

    @property
    def costs(self) -> CostModel:
        """Of the pipeline."""
        return self.schedule.problem.pipeline.costs

    @property
    def costed(self) -> CostedChunks:
        """The chunks' costs."""
        return self.schedule.chains.costs

    @property
    def backwards(self) -> list[int]:
        """Chunks in the order of B, which is that of all stages."""
        return [op.chunk for op in self.whole.programs[0] if op.kind == OpKind.BACKWARD]

    def seconds(self, stage: int) -> dict[OpKind, list[float]]:
        """Return what each chunk's ops take, by kind."""
        num_chunks = len(self.whole.chunks)
        every_op = [Op(kind, chunk) for kind in OpKind for chunk in range(num_chunks)]
        seconds = self._op_seconds(stage, PackedProgram.pack(every_op))
        rows = seconds.reshape(-1, num_chunks).tolist()
        return dict(zip(OpKind, rows, strict=True))

    def memory(self, stage: int) -> MemoryCursor:
        """Return what a stage holds before its first op."""
        program = self.whole.programs[stage]
        recompute = self.recompute(stage)
        return MemoryCursor(self.costs, stage, self.costed, program, recompute, self.parts)

    def recompute(self, stage: int) -> Recompute:
        """Return how many layers of each chunk are recomputed on a stage."""
        return Recompute(
            keep_input=np.array(self.whole.recompute[stage], dtype=np.int64),
            keep_attention=np.array(self.whole.keep_attention[stage], dtype=np.int64),
        )

    def simulate(self, programs: Programs) -> Timeline:
        """Return when every op runs."""
        packed = [PackedProgram.pack(program) for program in programs]
        seconds = [self._op_seconds(stage, program) for stage, program in enumerate(packed)]
        return simulate(packed, seconds, self.costed.transfer_s)

    def _op_seconds(self, stage: int, program: PackedProgram) -> Floats:
        recompute = self.recompute(stage)
        return self.costs.op_seconds(stage, self.costed, program, recompute)

    def replica(self, programs: Programs, timeline: Timeline) -> Replica:
        """Return the IR, with predictions."""
        predicted = []
        for stage, program in enumerate(programs):
            memory = self.costs.memory(stage, self.costed, PackedProgram.pack(program))
            busy_s = timeline.busy_s(stage)
            prediction = replace(
                self.whole.predicted[stage],
                busy_s=busy_s,
                bubble_s=max(0.0, timeline.makespan_s - busy_s),
                peak_bytes=round(memory.during(self.recompute(stage)).max()),
            )
            predicted.append(prediction)
        return replace(self.whole, programs=programs, predicted=tuple(predicted))


def _candidates(case: _Case) -> Iterator[list[_Stage]]:
    """Yield stages that have run with ever more B cut, and last with all."""
    order = case.backwards
    num_stages = len(case.whole.programs)
    all_split = _fill_waits(case, [frozenset(order)] * num_stages)
    filling = [frozenset(stage.filling) for stage in all_split]
    counts = [0]
    while counts[-1] < len(order):
        counts.append(min(int(_CLIMB * counts[-1]) + 1, len(order)))
    for count in counts:
        last = frozenset(order[len(order) - count :])
        chosen = [filling[0], *(chunks | last for chunks in filling[1:])]
        yield _fill_waits(case, chosen)
    yield all_split


def _fill_waits(case: _Case, chosen: list[frozenset[int]]) -> list[_Stage]:
    """Run all stages, cutting the B of each stage's chosen chunks."""
    ends = connect(case.schedule.programs, case.costed.transfer_s)
    stages = [_Stage(case, stage, chunks, *ends[stage]) for stage, chunks in enumerate(chosen)]
    # They advance as a `StageReplay` does, which is all that is asked of them.
    run_stages(stages)  # type: ignore[arg-type]
    return stages


class _Stage:
    """A stage that chooses its ops while it is simulated (`infinipipe.costs.simulate`)."""

    def __init__(
        self, case: _Case, stage: int, chosen: frozenset[int], inputs: Channels, outputs: Channels
    ) -> None:
        self.program: list[Op] = []
        self.filling: list[int] = []
        """Chunks whose W came while the stage would have waited."""
        self.end = 0.0
        """When the last op has ended."""
        self._order = case.whole.programs[stage]
        self._chosen = chosen
        self._seconds = case.seconds(stage)
        self._memory = case.memory(stage)
        self._limit = case.schedule.problem.pipeline.limits[stage]
        largest = int(case.parts.weight_transient_bytes[stage].argmax())
        self._largest = Op(OpKind.BACKWARD_WEIGHT, largest)
        self._inputs = inputs
        self._outputs = outputs
        self._waiting: list[Op] = []
        """W, the oldest first."""
        self._sending: Channel | None = None
        self._num_done = 0
        self._free = 0.0

    def advance(self) -> bool:
        """See `infinipipe.costs.simulate.StageReplay`."""
        any_event = False
        while self._sending is None or self._hand_over(self._sending):
            any_event |= self._sending is not None
            self._sending = None
            if self._num_done == len(self._order):
                self._run_waiting()
                break
            direction = TRAITS[self._order[self._num_done].kind].travels
            channel = self._inputs[direction]
            arrival = 0.0 if channel is None else channel.arrival(len(channel.consumed))
            if arrival is None:
                break
            self._fill_wait(arrival)
            op = self._make_room(self._order[self._num_done])
            self._free = max(self._free, arrival)
            if channel is not None:
                channel.consumed.append(self._free)
                any_event = True
            self._run(op)
            self._num_done += 1
            self._sending = self._outputs[direction]
        return any_event

    def _hand_over(self, channel: Channel) -> bool:
        """Let go of what is to be sent, once what was sent before has arrived.

        Return whether that is known.
        """
        if channel.handed:
            arrival = channel.arrival(len(channel.handed) - 1)
            if arrival is None:
                return False
            self._free = max(self._free, arrival)
        channel.handed.append(self._free)
        return True

    def _fill_wait(self, arrival: float) -> None:
        while self._waiting and self._free < arrival:
            self.filling.append(self._waiting[0].chunk)
            self._run(self._waiting[0])

    def _make_room(self, op: Op) -> Op:
        """Run W until the next op fits; return that op, which is I for a B that can be cut."""
        inputs = Op(OpKind.BACKWARD_INPUT, op.chunk)
        if op.kind == OpKind.BACKWARD and op.chunk in self._chosen and self._can_fit(inputs):
            op = inputs
        while self._waiting and not self._fits(op, self._memory):
            self._run(self._waiting[0])
        return op

    def _can_fit(self, op: Op) -> bool:
        """Return whether an op fits, if need be after all W that wait."""
        if self._fits(op, self._memory):
            return True
        memory = copy.copy(self._memory)
        for waiting in self._waiting:
            memory.run(waiting)
        return self._fits(op, memory)

    def _fits(self, op: Op, memory: MemoryCursor) -> bool:
        """Return whether an op fits, and any W after it."""
        memory = copy.copy(memory)
        return memory.run(op) <= self._limit and memory.run(self._largest) <= self._limit

    def _run_waiting(self) -> None:
        while self._waiting:
            self._run(self._waiting[0])

    def _run(self, op: Op) -> None:
        self._memory.run(op)
        self._free += self._seconds[op.kind][op.chunk]
        self.end = self._free
        self.program.append(op)
        match op.kind:
            case OpKind.BACKWARD_INPUT:
                self._waiting.append(Op(OpKind.BACKWARD_WEIGHT, op.chunk))
            case OpKind.BACKWARD_WEIGHT:
                self._waiting.remove(op)
