"""What each kind of op is: the table that rules, proofs, timelines, costs and the runtime read.

A new kind of op is a member of `OpKind`, a row of `TRAITS`, its place in `COMPLETE`, and a handler
in the runtime.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from infinipipe.ir.plan import OpKind


class Direction(enum.IntEnum):
    """Where an op's result goes, as the difference between two stages."""

    DOWN = 1
    """To the next stage: an activation."""
    STAY = 0
    """Nowhere: no other stage waits for it."""
    UP = -1
    """To the stage before: a gradient."""


class Held(enum.Enum):
    """What a stage holds of a chunk between two of its ops."""

    ACTIVATIONS = enum.auto()
    """What the layers keep for their backward."""
    WEIGHT_INPUTS = enum.auto()
    """Inputs of a layer's products, and the gradients of their outputs."""


@dataclass(frozen=True)
class Traits:
    """What holds for every op of a kind."""

    name: str
    travels: Direction
    """Where its result goes. Its input comes the same way: from the stage on the other side."""
    needs: OpKind | None
    """The op of the same chunk on the same stage that has to come before."""
    opens: Held | None
    """What the stage holds from this op on."""
    closes: Held | None
    """What it lets go when the op has ended."""

    @property
    def recomputes(self) -> bool:
        """Whether dropped activations are computed again: by the op that needs them last."""
        return self.closes is Held.ACTIVATIONS


TRAITS: dict[OpKind, Traits] = {
    OpKind.FORWARD: Traits(
        name="forward",
        travels=Direction.DOWN,
        needs=None,
        opens=Held.ACTIVATIONS,
        closes=None,
    ),
    OpKind.BACKWARD: Traits(
        name="backward",
        travels=Direction.UP,
        needs=OpKind.FORWARD,
        opens=None,
        closes=Held.ACTIVATIONS,
    ),
    OpKind.BACKWARD_INPUT: Traits(
        name="backward input",
        travels=Direction.UP,
        needs=OpKind.FORWARD,
        opens=Held.WEIGHT_INPUTS,
        closes=Held.ACTIVATIONS,
    ),
    OpKind.BACKWARD_WEIGHT: Traits(
        name="backward weight",
        travels=Direction.STAY,
        needs=OpKind.BACKWARD_INPUT,
        opens=None,
        closes=Held.WEIGHT_INPUTS,
    ),
}

COMPLETE = (
    (OpKind.FORWARD, OpKind.BACKWARD),
    (OpKind.FORWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT),
)
"""Sets of ops that do all of a chunk's work on a stage: what one opens, a later one closes."""


def kinds_that_travel(direction: Direction) -> tuple[OpKind, ...]:
    """Return the kinds of op whose result goes one way."""
    return tuple(kind for kind, traits in TRAITS.items() if traits.travels == direction)
