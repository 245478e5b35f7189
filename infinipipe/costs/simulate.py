"""The one simulator: replays programs event by event, as the runtime runs them.

* A stage runs its program in order. An op starts when the op before it has ended and its message
  is there.
* Of each direction a stage has one receive posted: receive k when the op that consumes message k-1
  starts.
* Sends are asynchronous, but a stage hands over send k of a channel only when send k-1 has
  completed, and waits for that. A transfer starts when it is handed over and its receive is posted.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

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
    starts: list[list[float]] = []
    replays: list[Iterator[int]] = []
    ends = connect(programs, transfer_s)
    for program, stage_s, (inputs, outputs) in zip(programs, seconds, ends, strict=True):
        # Lists, because single elements of arrays are slow.
        travels: list[int] = program.travels.tolist()
        durations: list[float] = stage_s.tolist()
        start: list[float] = []
        starts.append(start)
        replays.append(_replay(travels, durations, inputs, outputs, start))
    run_stages(replays)
    start_s = [np.array(start, dtype=np.float64) for start in starts]
    end_s = [start + stage_s for start, stage_s in zip(start_s, seconds, strict=True)]
    return Timeline(tuple(start_s), tuple(end_s))


def run_stages(stages: SequenceOf[Iterator[int]]) -> None:
    """Let every stage go on until all have ended.

    Each yields while it waits for a neighbour, and what it yields tells its waits apart. In which
    order stages are let go on does not matter for what comes out.
    """
    up = tuple(reversed(stages))
    waits: list[int | None] = []
    while True:
        before = waits
        # F goes down the stages, and B up.
        for stage in stages:
            next(stage, None)
        waits = [next(stage, None) for stage in up]
        if not any(wait is not None for wait in waits):
            return
        assert waits != before, "deadlock"


class Channel(NamedTuple):
    """Transfers from one stage to a neighbour, in order."""

    durations: list[float]
    handed: list[float]
    """When the sender let go of each, as far as it is."""
    consumed: list[float]
    """When the op started that consumes each, as far as the receiver is."""


_OptionalChannel = Channel | None
Channels = tuple[_OptionalChannel, _OptionalChannel, _OptionalChannel]
"""Of one stage, indexed by `Direction`; None where there is no neighbour."""


def _replay(
    travels: SequenceOf[int],
    seconds: SequenceOf[float],
    inputs: Channels,
    outputs: Channels,
    start: list[float],
) -> Iterator[int]:
    """Run one stage's ops and append when each starts; yield while the stage waits.

    This loop is much of what planning does, so what `Channel` means is written out twice: transfer
    k arrives so many seconds after it was handed over and its receive was posted, which is when the
    op started that consumed transfer k - 1.
    """
    free = 0.0
    for position, direction in enumerate(travels):
        source = inputs[direction]
        if source is not None:
            durations, handed, consumed = source
            number = len(consumed)
            while len(handed) == number:
                yield 2 * position
            begins = handed[number]
            if number and consumed[-1] > begins:
                begins = consumed[-1]
            arrival = begins + durations[number]
            if arrival > free:
                free = arrival
            consumed.append(free)
        start.append(free)
        free += seconds[position]
        target = outputs[direction]
        if target is not None:
            durations, handed, consumed = target
            if handed:
                # What was sent before has to arrive first.
                last = len(handed) - 1
                while len(consumed) < last:
                    yield 2 * position + 1
                begins = handed[last]
                if last and consumed[last - 1] > begins:
                    begins = consumed[last - 1]
                arrival = begins + durations[last]
                if arrival > free:
                    free = arrival
            handed.append(free)


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
        down.append(_channel(order, edge_s))
    down.append(None)
    up: list[_OptionalChannel] = [None]
    for program, edge_s in zip(programs[1:], durations, strict=True):
        order = program.backward_chunks.tolist()
        up.append(_channel(order, edge_s))
    up.append(None)
    # down[s] leads to stage s from the one before, and up[s] leads back from stage s to that one.
    ends = []
    for stage in range(len(programs)):
        after = stage + 1
        inputs = _channels(down=down[stage], up=up[after])
        outputs = _channels(down=down[after], up=up[stage])
        ends.append((inputs, outputs))
    return ends


def _channel(order: SequenceOf[int], transfer_s: SequenceOf[float]) -> Channel:
    durations = [transfer_s[chunk] for chunk in order]
    return Channel(durations, handed=[], consumed=[])


def _channels(*, down: _OptionalChannel, up: _OptionalChannel) -> Channels:
    """Return channels that a `Direction` indexes: 0 stays, 1 goes down, and -1, the last, up."""
    return (None, down, up)
