"""What splitting B into I and W would gain: W can wait until its stage has nothing else to do.

The runtime has F and B only. So no policy plans with this, and no plan that is meant to run comes from it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from infinipipe.costs.cost import Memory, SplitCosts, op_seconds, split_costs
from infinipipe.costs.simulate import (
    DIRECTIONS,
    Channel,
    Channels,
    Timeline,
    connect,
    run_stages,
    simulate,
)
from infinipipe.errors import InputError
from infinipipe.ir import Op, OpKind, Replica
from infinipipe.planner.passes.schedule import Schedule, make_replica

_STEP = 1.5
"""Factor by which the number of B that are split at the end of a step climbs."""

Programs = tuple[tuple[Op, ...], ...]


def split_backwards(schedule: Schedule) -> tuple[Replica, float]:
    """Return a replica with some B split that is no slower than a schedule, and its makespan in seconds.

    Chunks, recompute, the order of F and that of B, some of which are I now, are the schedule's. A W comes when its
    stage would have to wait for its next op's message, or when that op would not fit into memory, or after all
    others. As I and W together take longer than B, only those B are split whose W fills such a wait, and the last
    of each stage but the first, in as large a number as is best: there the other stages wait for I.

    Raises:
        InputError: the profile does not price I and W.
    """
    pipeline = schedule.problem.pipeline
    split = split_costs(pipeline.profile, pipeline.stages, schedule.priced.loads)
    if split is None:
        raise InputError(
            "the profile prices F and B only; `infinipipe profile --analytic` makes one that prices I and W"
        )
    case = _Case(schedule, split, make_replica(schedule))
    best, makespan_s = case.whole, schedule.makespan_s
    for stages in _candidates(case):
        programs = tuple(tuple(stage.program) for stage in stages)
        timeline = case.simulate(programs)
        assert timeline.makespan_s == max(stage.end for stage in stages), (
            "the stages have mistaken the time"
        )
        if timeline.makespan_s < makespan_s:
            best, makespan_s = case.replica(programs, timeline), timeline.makespan_s
    return best, makespan_s


@dataclass(frozen=True)
class _Case:
    """A schedule whose B may be split."""

    schedule: Schedule
    split: SplitCosts
    whole: Replica
    """The schedule as it is."""

    @property
    def backwards(self) -> list[int]:
        """Chunks in the order of B, which is that of all stages."""
        return [op.chunk for op in self.whole.programs[0] if op.kind == OpKind.BACKWARD]

    def seconds(self, stage: int) -> dict[OpKind, list[float]]:
        """Return what each chunk's ops take, by kind."""
        return op_seconds(
            self.schedule.priced.costs, self.split, stage, self.whole.recompute[stage]
        )

    def memory(self, stage: int) -> Memory:
        """Return what a stage holds before its first op."""
        problem, priced = self.schedule.problem, self.schedule.priced
        pipeline, program, recompute = (
            problem.pipeline,
            self.whole.programs[stage],
            self.whole.recompute[stage],
        )
        return Memory(
            pipeline.profile,
            pipeline.stages,
            stage,
            problem.sequences,
            priced.loads,
            priced.costs,
            program,
            recompute,
            self.split,
        )

    def simulate(self, programs: Programs) -> Timeline:
        """Say when every op runs."""
        tables = map(self.seconds, range(len(programs)))
        seconds = [
            [table[op.kind][op.chunk] for op in program]
            for table, program in zip(tables, programs, strict=True)
        ]
        return simulate(programs, seconds, self.schedule.priced.costs.transfer_s.tolist())

    def replica(self, programs: Programs, timeline: Timeline) -> Replica:
        """Return the IR, with predictions."""
        predicted = []
        for stage, (told, program) in enumerate(zip(self.whole.predicted, programs, strict=True)):
            memory, busy_s = self.memory(stage), timeline.busy_s(stage)
            peak_bytes = round(max(memory.run(op) for op in program))
            bubble_s = max(0.0, timeline.makespan_s - busy_s)
            predicted.append(replace(told, busy_s=busy_s, bubble_s=bubble_s, peak_bytes=peak_bytes))
        return replace(self.whole, programs=programs, predicted=tuple(predicted))


def _candidates(case: _Case) -> Iterator[list[_Stage]]:
    """Yield stages that have run with ever more B split, and last with all."""
    order, num_stages = case.backwards, len(case.whole.programs)
    all_split = _fill_waits(case, [frozenset(order)] * num_stages)
    filling = [frozenset(stage.filling) for stage in all_split]
    counts = [0]
    while counts[-1] < len(order):
        counts.append(min(int(_STEP * counts[-1]) + 1, len(order)))
    for count in counts:
        last = frozenset(order[len(order) - count :])
        chosen = [filling[0], *(chunks | last for chunks in filling[1:])]
        yield _fill_waits(case, chosen)
    yield all_split


def _fill_waits(case: _Case, chosen: list[frozenset[int]]) -> list[_Stage]:
    """Run all stages, splitting the B of each stage's chosen chunks."""
    schedule = case.schedule
    ends = connect(
        [memory.directions.tolist() for memory in schedule.memories],
        [memory.chunks.tolist() for memory in schedule.memories],
        schedule.priced.costs.transfer_s.tolist(),
    )
    stages = [_Stage(case, stage, chunks, *ends[stage]) for stage, chunks in enumerate(chosen)]
    run_stages(stages)
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
        self._seconds, self._memory = case.seconds(stage), case.memory(stage)
        self._limit = case.schedule.problem.pipeline.limits[stage]
        self._largest = Op(
            OpKind.BACKWARD_WEIGHT, int(case.split.weight_peak_bytes[stage].argmax())
        )
        self._inputs, self._outputs = inputs, outputs
        self._waiting: list[Op] = []
        """W, the oldest first."""
        self._sending: Channel | None = None
        self._num_done = 0
        self._free = 0.0

    def advance(self) -> bool:
        """See `infinipipe.costs.simulate.Advancing`."""
        any_event = False
        while self._sending is None or self._hand_over(self._sending):
            any_event |= self._sending is not None
            self._sending = None
            if self._num_done == len(self._order):
                self._run_waiting()
                break
            direction = DIRECTIONS[self._order[self._num_done].kind]
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
        """Let go of what is to be sent, once what was sent before has arrived; return whether that is known."""
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
        """Run W until the next op fits; return that op, which is I for a B that can be split."""
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

    def _fits(self, op: Op, memory: Memory) -> bool:
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
