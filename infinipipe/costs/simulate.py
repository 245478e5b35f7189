"""The one simulator: replays programs event by event, as the runtime runs them.

* A stage runs its program in order. An op starts when the op before it has ended and its message is there.
* Of each direction a stage has one receive posted: receive k when the op that consumes message k-1 starts.
* Sends are asynchronous, but a stage hands over send k of a channel only when send k-1 has completed, and
  waits for that. A transfer starts when it is handed over and its receive is posted.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from infinipipe.aliases import Floats
from infinipipe.ir import Op, OpKind

DOWN, STAY, UP = 1, 0, -1
DIRECTIONS = {
    OpKind.FORWARD: DOWN,
    OpKind.BACKWARD: UP,
    OpKind.BACKWARD_INPUT: UP,
    OpKind.BACKWARD_WEIGHT: STAY,
}
"""Where an op's output travels: F to the next stage, B and I to the one before."""


@dataclass(frozen=True)
class Timeline:
    """When every op of every stage runs; one array of shape (ops,) per stage."""

    start_s: tuple[Floats, ...]
    end_s: tuple[Floats, ...]

    @property
    def makespan_s(self) -> float:
        """Seconds from the first op to the end of the last."""
        return max((float(end[-1]) for end in self.end_s if len(end)), default=0.0)

    def busy_s(self, stage: int) -> float:
        """Seconds in which a stage computes."""
        return float((self.end_s[stage] - self.start_s[stage]).sum())


def simulate(
    programs: SequenceOf[SequenceOf[Op]],
    seconds: SequenceOf[SequenceOf[float]],
    transfer_s: SequenceOf[float],
) -> Timeline:
    """Replay programs whose ops take the given seconds; `transfer_s` is per chunk.

    The programs must be free of deadlock, as `infinipipe.ir.verify` proves.
    """
    directions = [[DIRECTIONS[op.kind] for op in program] for program in programs]
    chunks = [[op.chunk for op in program] for program in programs]
    return replay(directions, chunks, seconds, transfer_s)


def replay(
    directions: SequenceOf[SequenceOf[int]],
    chunks: SequenceOf[SequenceOf[int]],
    seconds: SequenceOf[SequenceOf[float]],
    transfer_s: SequenceOf[float],
) -> Timeline:
    """Do what `simulate` does for programs given as directions and chunks."""
    ends = connect(directions, chunks, transfer_s)
    stages = [_Stage(directions[s], seconds[s], *ends[s]) for s in range(len(directions))]
    run_stages(stages)
    assert all(len(stage.start) == len(stage.directions) for stage in stages), "deadlock"
    return Timeline(
        start_s=tuple(np.array(stage.start, dtype=np.float64) for stage in stages),
        end_s=tuple(np.array(stage.end, dtype=np.float64) for stage in stages),
    )


class Advancing(Protocol):
    """A stage that runs its ops."""

    def advance(self) -> bool:
        """Go on until the stage waits or ends; return whether anything happened that a neighbour may wait for."""


def run_stages(stages: SequenceOf[Advancing]) -> None:
    """Let every stage go on until all have ended, or none can."""
    awake, queued = list(range(len(stages))), [True] * len(stages)
    while awake:
        number = awake.pop()
        queued[number] = False
        if stages[number].advance():
            for neighbour in (number - 1, number + 1):
                if 0 <= neighbour < len(stages) and not queued[neighbour]:
                    queued[neighbour] = True
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

    def arrival(self, number: int) -> float | None:
        """Return when a transfer is complete, None if that is not known yet."""
        arrivals, consumed = self.arrivals, self.consumed
        while (known := len(arrivals)) <= number:
            if known == len(self.handed) or known > len(consumed):
                return None
            posted = consumed[known - 1] if known else 0.0
            handed = self.handed[known]
            arrivals.append((handed if handed > posted else posted) + self.durations[known])
        return arrivals[number]


Channels = tuple[Channel | None, Channel | None, Channel | None]
"""Of one stage, by direction: STAY, DOWN and UP are 0, 1 and -1."""


class _Stage:
    """How far a stage is."""

    def __init__(
        self,
        directions: SequenceOf[int],
        seconds: SequenceOf[float],
        inputs: Channels,
        outputs: Channels,
    ) -> None:
        self.directions = directions
        self.seconds = seconds
        self.inputs = inputs
        self.outputs = outputs
        self.start: list[float] = []
        self.end: list[float] = []
        self.free = 0.0
        self.sending: Channel | None = None

    def advance(self) -> bool:
        """See `Advancing`."""
        free, sending, any_event = self.free, self.sending, False
        for position in range(len(self.start), len(self.directions) + 1):
            if sending is not None:
                handed = sending.handed
                if handed:
                    arrival = sending.arrival(len(handed) - 1)
                    if arrival is None:
                        break
                    free = arrival if arrival > free else free
                handed.append(free)
                sending, any_event = None, True
            if position == len(self.directions):
                break
            direction = self.directions[position]
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
        self.free, self.sending = free, sending
        return any_event


def connect(
    directions: SequenceOf[SequenceOf[int]],
    chunks: SequenceOf[SequenceOf[int]],
    transfer_s: SequenceOf[float],
) -> list[tuple[Channels, Channels]]:
    """Join stages by channels; return every stage's inputs and outputs."""
    orders = {
        direction: [
            [c for c, d in zip(chunks[s], directions[s], strict=True) if d == direction]
            for s in range(len(directions))
        ]
        for direction in (DOWN, UP)
    }
    down: list[Channel | None] = [Channel(order, transfer_s) for order in orders[DOWN][:-1]]
    up: list[Channel | None] = [Channel(order, transfer_s) for order in orders[UP][1:]]
    # down[s] leaves stage s - 1 and up[s] leaves stage s, so that both ends stay open.
    down, up = [None, *down, None], [None, *up, None]
    return [
        ((None, down[s], up[s + 1]), (None, down[s + 1], up[s])) for s in range(len(directions))
    ]
