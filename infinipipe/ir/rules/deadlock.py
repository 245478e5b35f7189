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

from infinipipe.ir.ops import TRAITS, Direction
from infinipipe.ir.plan import Op

# As plain integers: arithmetic with members of an enum is slower.
_DOWN = int(Direction.DOWN)
_UP = int(Direction.UP)
_DIRECTIONS = {kind: int(traits.travels) for kind, traits in TRAITS.items()}

# More ops than a program can have.
_MORE_THAN_ANY = 2**63


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

    The transfers must be matched: neighbours have the same F in the same order, and the same B
    and I.
    """
    pipeline = _Pipeline(programs, posted_ahead)
    pipeline.run()
    waits = {}
    for stage in range(len(programs)):
        if not pipeline.ended(stage):
            waits[stage] = pipeline.wait(stage)
    return _circle(waits) if waits else ()


class _Pipeline:
    """Counts of begun ops, per stage and direction.

    Which chunk an op is of need not be known, as orders match.
    """

    def __init__(self, programs: SequenceOf[SequenceOf[Op]], posted_ahead: int) -> None:
        num_stages = len(programs)
        self.posted_ahead = posted_ahead
        self.directions = [_directions(program) for program in programs]
        self.begun = {
            _DOWN: _none_begun(num_stages),
            _UP: _none_begun(num_stages),
        }
        self.positions = [0] * num_stages
        # Whether the op at a stage's position has run and is not yet sent.
        self.sending = [False] * num_stages

    def ended(self, stage: int) -> bool:
        num_ops = len(self.directions[stage])
        return self.positions[stage] == num_ops

    def run(self) -> None:
        """Let every stage go as far as it can, until none can."""
        num_stages = len(self.directions)
        awake = deque(range(num_stages))
        asleep = [False] * num_stages
        while awake:
            stage = awake.popleft()
            asleep[stage] = True
            any_begun = self._advance(stage)
            if not any_begun:
                continue
            for neighbour in (stage - 1, stage + 1):
                if 0 <= neighbour < num_stages and asleep[neighbour]:
                    asleep[neighbour] = False
                    awake.append(neighbour)

    def wait(self, stage: int) -> Wait:
        """Say what a stage that cannot go on waits for."""
        position = self.positions[stage]
        direction = self.directions[stage][position]
        sending = self.sending[stage]
        neighbour = stage + direction if sending else stage - direction
        return Wait(stage, position, neighbour, sending)

    def _advance(self, stage: int) -> bool:
        """Go on until the stage waits or ends; return whether it began any op.

        This loop takes most of a proof's time, so that it calls nothing.
        """
        directions = self.directions[stage]
        position = self.positions[stage]
        sending = self.sending[stage]
        any_begun = False
        posted_ahead = self.posted_ahead
        while position < len(directions):
            direction = directions[position]
            # What stays at home is neither received nor sent.
            if not direction:
                position += 1
                continue
            begun = self.begun[direction]
            source = stage - direction
            target = stage + direction
            if not sending:
                if begun[source] <= begun[stage]:
                    break
                begun[stage] += 1
                any_begun = True
                sending = True
            if begun[target] + posted_ahead < begun[stage]:
                break
            sending = False
            position += 1
        self.positions[stage] = position
        self.sending[stage] = sending
        return any_begun


def _directions(program: SequenceOf[Op]) -> list[int]:
    return [_DIRECTIONS[op.kind] for op in program]


def _none_begun(num_stages: int) -> dict[int, int]:
    """Return how many ops of a direction each stage has begun, before any has.

    The stages at the ends have neighbours as well: such as never let anyone wait.
    """
    begun = dict.fromkeys(range(num_stages), 0)
    begun[-1] = _MORE_THAN_ANY
    begun[num_stages] = _MORE_THAN_ANY
    return begun


def _circle(waits: dict[int, Wait]) -> tuple[Wait, ...]:
    """Return waits that form a circle: with stages that never end there is one."""
    # Only a broken plan pays for importing networkx.
    import networkx

    graph = networkx.DiGraph()
    for wait in waits.values():
        graph.add_edge(wait.stage, wait.neighbour)
    edges = networkx.find_cycle(graph)
    return tuple(waits[stage] for stage, _ in edges)
