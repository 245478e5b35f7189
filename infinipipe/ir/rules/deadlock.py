"""Proof that a step's programs end even when every send blocks until its receive is posted.

The model is the runtime's. F on stage s > 0 receives what F of the same chunk sent on stage s-1,
computes, and sends to stage s+1; B and I go the other way; W stays at home. Of each direction a
stage has exactly one receive posted: the next one, posted when the op before it (of that direction)
has begun. A send blocks its stage until that receive is posted. A runtime that buffers more
only waits less, so what ends here ends there. With `posted_ahead=0` a receive is posted no sooner
than the stage comes to the op that needs it, which few schedules survive: that is only reported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from infinipipe.ir.plan import Op, OpKind


@dataclass(frozen=True)
class Wait:
    """A stage that waits for a neighbour for ever."""

    stage: int
    position: int
    """Of the op in its program."""
    neighbour: int
    sending: bool
    """Whether the op has run and cannot send, or has not received what it needs."""


def find_deadlock(programs: SequenceOf[SequenceOf[Op]], posted_ahead: int = 1) -> tuple[Wait, ...]:
    """Return stages that wait for each other in a circle; none if all programs end.

    The transfers must be matched: neighbours have the same F in the same order, and the same B and I.
    """
    state = _Pipeline(programs, posted_ahead)
    state.run()
    waits = {stage: state.wait(stage) for stage in range(len(programs)) if not state.ended(stage)}
    return _circle(waits) if waits else ()


class _Pipeline:
    """Counts of begun ops, per stage and direction. Which chunk it is need not be known, as orders match."""

    def __init__(self, programs: SequenceOf[SequenceOf[Op]], posted_ahead: int) -> None:
        self.posted_ahead = posted_ahead
        # Direction +1 for F, -1 for B and I, 0 for W, which has no transfer.
        direction = {
            OpKind.FORWARD: 1,
            OpKind.BACKWARD: -1,
            OpKind.BACKWARD_INPUT: -1,
            OpKind.BACKWARD_WEIGHT: 0,
        }
        self.directions = [[direction[op.kind] for op in program] for program in programs]
        # Ops that each stage has begun, by direction.
        self.begun = {d: [0] * len(programs) for d in (-1, 1)}
        self.positions = [0] * len(programs)
        self.sending = [False] * len(programs)

    def ended(self, stage: int) -> bool:
        return self.positions[stage] == len(self.directions[stage])

    def run(self) -> None:
        """Let every stage go as far as it can, until none can."""
        awake = deque(range(len(self.directions)))
        asleep = [False] * len(self.directions)
        while awake:
            stage = awake.popleft()
            asleep[stage] = True
            if self._advance(stage):
                for neighbour in (stage - 1, stage + 1):
                    if 0 <= neighbour < len(asleep) and asleep[neighbour]:
                        asleep[neighbour] = False
                        awake.append(neighbour)

    def wait(self, stage: int) -> Wait:
        """Say what a stage that cannot go on waits for."""
        direction, sending = self.directions[stage][self.positions[stage]], self.sending[stage]
        neighbour = stage + direction if sending else stage - direction
        return Wait(stage, self.positions[stage], neighbour, sending)

    def _advance(self, stage: int) -> bool:
        """Go on until the stage waits or ends; return whether it began any op."""
        directions, position, sending, any_begun = (
            self.directions[stage],
            self.positions[stage],
            self.sending[stage],
            False,
        )
        last = len(self.directions) - 1
        while position < len(directions):
            direction = directions[position]
            if direction:
                begun, source, target = self.begun[direction], stage - direction, stage + direction
                if not sending:
                    if 0 <= source <= last and begun[source] <= begun[stage]:
                        break
                    begun[stage] += 1
                    sending = any_begun = True
                if 0 <= target <= last and begun[target] + self.posted_ahead < begun[stage]:
                    break
                sending = False
            position += 1
        self.positions[stage], self.sending[stage] = position, sending
        return any_begun


def _circle(waits: dict[int, Wait]) -> tuple[Wait, ...]:
    # Only a broken plan pays for importing networkx.
    import networkx

    graph = networkx.DiGraph((wait.stage, wait.neighbour) for wait in waits.values())
    return tuple(waits[stage] for stage, _ in networkx.find_cycle(graph))
