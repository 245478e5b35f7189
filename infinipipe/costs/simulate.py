"""The one simulator: replays programs event by event, as the runtime runs them.

* A stage runs its program in order. An op starts when the op before it has ended and its message
  is there.
* Of each direction a stage has one receive posted: receive k when the op that consumes message k-1
  starts.
* Sends are asynchronous, but a stage hands over send k of a channel only when send k-1 has
  completed, and waits for that. A transfer starts when it is handed over and its receive is posted.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from infinipipe.aliases import Floats
from infinipipe.costs.program import PackedProgram


@dataclass(frozen=True)
class Timeline:
    """When every op of every stage runs; one array of shape (ops,) per stage."""

    start_s: tuple[Floats, ...]
    end_s: tuple[Floats, ...]

    @property
    def makespan_s(self) -> float:
        """Seconds from the first op to the end of the last."""
        # A stage may have nothing to do.
        busy = [end_s for end_s in self.end_s if len(end_s) > 0]
        last_ends = [float(end_s[-1]) for end_s in busy]
        return max(last_ends, default=0.0)

    def busy_s(self, stage: int) -> float:
        """Seconds in which a stage computes."""
        start_s = self.start_s[stage]
        end_s = self.end_s[stage]
        seconds = end_s - start_s
        return float(seconds.sum())


def simulate(
    programs: SequenceOf[PackedProgram],
    seconds: SequenceOf[Floats],
    transfer_s: Floats,
) -> Timeline:
    """Replay the programs of all stages.

    They must be free of deadlock, as `infinipipe.ir.verify` proves.

    Args:
        programs: one per stage.
        seconds: (ops,) for each stage, how long its ops take.
        transfer_s: (edges, chunks) how long a chunk's activation travels from stage e to the next,
            or its gradient back; edges are pairs of neighbours, one less than stages.
    """
    stages: list[StageReplay] = []
    ends = connect(programs, transfer_s)
    for program, stage_s, (inputs, outputs) in zip(programs, seconds, ends, strict=True):
        stages.append(StageReplay(program, stage_s, inputs, outputs))
    run_stages(stages)
    for stage in stages:
        assert stage.has_ended, "deadlock"
    start_s = [np.array(stage.start, dtype=np.float64) for stage in stages]
    end_s = [np.array(stage.end, dtype=np.float64) for stage in stages]
    return Timeline(tuple(start_s), tuple(end_s))


def run_stages(stages: SequenceOf[StageReplay]) -> None:
    """Let every stage go on until all have ended, or none can.

    In which order stages are let go on does not matter for what comes out.
    """
    num_stages = len(stages)
    awake = list(range(num_stages))
    is_awake = [True] * num_stages
    while awake:
        number = awake.pop()
        is_awake[number] = False
        if not stages[number].advance():
            continue
        for neighbour in (number - 1, number + 1):
            exists = 0 <= neighbour < num_stages
            if exists and not is_awake[neighbour]:
                is_awake[neighbour] = True
                awake.append(neighbour)


class Channel:
    """Transfers from one stage to a neighbour, in order."""

    def __init__(self, order: list[int], transfer_s: SequenceOf[float]) -> None:
        self.durations = [transfer_s[chunk] for chunk in order]
        self.handed: list[float] = []
        """When the sender let go of each."""
        self.consumed: list[float] = []
        """When the op started that consumes each."""
        self.arrivals: list[float] = []
        """When each was complete, as far as that is known."""

    def arrival(self, number: int) -> float | None:
        """Return when a transfer is complete, None if that is not known yet."""
        arrivals = self.arrivals
        consumed = self.consumed
        while (known := len(arrivals)) <= number:
            if known == len(self.handed) or known > len(consumed):
                return None
            # The receive is posted when the op starts that consumes the transfer before.
            posted = consumed[known - 1] if known else 0.0
            handed = self.handed[known]
            begins = handed if handed > posted else posted
            arrivals.append(begins + self.durations[known])
        return arrivals[number]


_OptionalChannel = Channel | None
Channels = tuple[_OptionalChannel, _OptionalChannel, _OptionalChannel]
"""Of one stage, indexed by `Direction`; None where there is no neighbour."""


class StageReplay:
    """How far a stage is."""

    def __init__(
        self, program: PackedProgram, seconds: Floats, inputs: Channels, outputs: Channels
    ) -> None:
        # Lists, because single elements of arrays are slow.
        self.travels: list[int] = program.travels.tolist()
        self.seconds: list[float] = seconds.tolist()
        self.inputs = inputs
        self.outputs = outputs
        self.start: list[float] = []
        """When each op starts, as far as the stage is."""
        self.end: list[float] = []
        self.free = 0.0
        """When the stage can do something else."""
        self.sending: Channel | None = None
        """Where the last op's result has still to be handed over."""

    @property
    def has_ended(self) -> bool:
        """Whether all ops have run."""
        return len(self.start) == len(self.travels)

    def advance(self) -> bool:
        """Go on until the stage waits or ends.

        Return whether anything happened that a neighbour may wait for.
        """
        # Local names: this loop is most of what planning does.
        free = self.free
        sending = self.sending
        any_event = False
        # One more than there are ops: the last one's result has to be handed over as well.
        for position in range(len(self.start), len(self.travels) + 1):
            if sending is not None:
                handed = sending.handed
                if handed:
                    arrival = sending.arrival(len(handed) - 1)
                    if arrival is None:
                        break
                    free = arrival if arrival > free else free
                handed.append(free)
                sending = None
                any_event = True
            if position == len(self.travels):
                break
            direction = self.travels[position]
            channel = self.inputs[direction]
            if channel is not None:
                arrival = channel.arrival(len(channel.consumed))
                if arrival is None:
                    break
                free = arrival if arrival > free else free
                channel.consumed.append(free)
                any_event = True
            self.start.append(free)
            free += self.seconds[position]
            self.end.append(free)
            sending = self.outputs[direction]
        self.free = free
        self.sending = sending
        return any_event


def connect(
    programs: SequenceOf[PackedProgram], transfer_s: Floats
) -> list[tuple[Channels, Channels]]:
    """Join stages by channels; return every stage's inputs and outputs.

    `transfer_s` is that of `simulate`.
    """
    durations: list[list[float]] = transfer_s.tolist()
    # Nothing comes from before the first stage, and nothing goes beyond the last one.
    down: list[_OptionalChannel] = [None]
    for program, edge_s in zip(programs[:-1], durations, strict=True):
        order = program.forward_chunks.tolist()
        down.append(Channel(order, edge_s))
    down.append(None)
    up: list[_OptionalChannel] = [None]
    for program, edge_s in zip(programs[1:], durations, strict=True):
        order = program.backward_chunks.tolist()
        up.append(Channel(order, edge_s))
    up.append(None)
    # down[s] leads to stage s from the one before, and up[s] leads back from stage s to that one.
    ends = []
    for stage in range(len(programs)):
        after = stage + 1
        inputs = _channels(down=down[stage], up=up[after])
        outputs = _channels(down=down[after], up=up[stage])
        ends.append((inputs, outputs))
    return ends


def _channels(*, down: _OptionalChannel, up: _OptionalChannel) -> Channels:
    """Return channels that a `Direction` indexes: 0 stays, 1 goes down, and -1, the last, up."""
    return (None, down, up)
