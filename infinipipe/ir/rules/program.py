"""Rules of a program: what one stage does, and in which order.

A broken one raises `VerifyError`; the message names step, replica, stage and op, and shows the ops
around with a marker. They run in the order of `PROGRAM_RULES`: later ones rely on the earlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from infinipipe.errors import VerifyError
from infinipipe.ir.ops import COMPLETE, TRAITS, Direction, kinds_that_travel
from infinipipe.ir.plan import Op, OpKind
from infinipipe.ir.rules.replica import ReplicaCase
from infinipipe.ir.text import show_kind, show_op, window

_DOWNSTREAM = kinds_that_travel(Direction.DOWN)
_UPSTREAM = kinds_that_travel(Direction.UP)

# Pairs of kinds whose ops of a chunk come in this order.
_ORDER = [(traits.needs, kind) for kind, traits in TRAITS.items() if traits.needs is not None]

# Kinds of which every chunk has one, and what each complete set has beside them.
_ALWAYS = [kind for kind in COMPLETE[0] if all(kind in kinds for kinds in COMPLETE)]
_ALTERNATIVES = [[kind for kind in kinds if kind not in _ALWAYS] for kinds in COMPLETE]


@dataclass(frozen=True)
class ProgramCase:
    """One stage's program in one replica of a step, to be checked."""

    parent: ReplicaCase
    stage: int
    program: tuple[Op, ...]

    @property
    def num_chunks(self) -> int:
        """Chunks of the replica, of which the program has to do each."""
        return len(self.parent.replica.chunks)

    @cached_property
    def positions(self) -> dict[OpKind, dict[int, int]]:
        """Where each chunk's op of a kind stands."""
        positions: dict[OpKind, dict[int, int]] = {kind: {} for kind in OpKind}
        for position, op in enumerate(self.program):
            positions[op.kind][op.chunk] = position
        return positions

    def positions_of(self, kinds: tuple[OpKind, ...]) -> dict[int, int]:
        """Return where each chunk's op of one of some kinds stands, of which it has one."""
        merged: dict[int, int] = {}
        for kind in kinds:
            merged |= self.positions[kind]
        return merged

    def fault(self, position: int, why: str) -> VerifyError:
        """Return the error of the op at a position."""
        return self._fault_of(self.program[position], position, why)

    def missing(self, kind: OpKind, chunk: int) -> VerifyError:
        """Return the error of an op that the program does not have."""
        return self._fault_of(Op(kind, chunk), len(self.program), "is missing")

    def _fault_of(self, op: Op, position: int, why: str) -> VerifyError:
        around = window(self.stage, self.program, position)
        return self.parent.fault(self.stage, f"op {show_op(self.stage, op)} {why}: {around}")


def check_op_chunks(case: ProgramCase) -> None:
    """Every op is of a chunk that exists."""
    num_chunks = case.num_chunks
    for position, op in enumerate(case.program):
        if not 0 <= op.chunk < num_chunks:
            raise case.fault(position, f"is of no chunk, there are {num_chunks}")


def check_ops_once(case: ProgramCase) -> None:
    """No op comes twice."""
    num_distinct = sum(map(len, case.positions.values()))
    if num_distinct == len(case.program):
        return
    for position, op in enumerate(case.program):
        last = case.positions[op.kind][op.chunk]
        if position != last:
            raise case.fault(last, f"comes twice, first at position {position}")


def check_ops_complete(case: ProgramCase) -> None:
    """Every chunk has one F, and one B or one I and one W."""
    chunks_with = {kind: set(positions) for kind, positions in case.positions.items()}
    incomplete = set(range(case.num_chunks))
    for kinds in COMPLETE:
        complete = set.intersection(*[chunks_with[kind] for kind in kinds])
        others = [chunks_with[kind] for kind in OpKind if kind not in kinds]
        incomplete -= complete.difference(*others)
    if incomplete:
        raise _incomplete_fault(case, min(incomplete))


def _incomplete_fault(case: ProgramCase, chunk: int) -> VerifyError:
    """Return the error of a chunk whose ops are none of the complete sets."""
    has = [kind for kind, positions in case.positions.items() if chunk in positions]
    begun = [kinds for kinds in _ALTERNATIVES if any(kind in has for kind in kinds)]
    intended = begun[0] if begun else _ALTERNATIVES[0]
    for kind in (*_ALWAYS, *intended):
        if kind not in has:
            return case.missing(kind, chunk)
    # All that is needed is there, so that what is wrong is an op of another alternative.
    others = [show_kind(kind) for kind in OpKind if kind not in (*_ALWAYS, *intended)]
    position = case.positions[intended[0]][chunk]
    return case.fault(position, f"stands beside {' or '.join(others)} of its chunk")


def check_op_order(case: ProgramCase) -> None:
    """F comes before B and I, and I before W."""
    for needed, kind in _ORDER:
        earlier = case.positions[needed]
        for chunk, position in case.positions[kind].items():
            if position < earlier[chunk]:
                needed_op = show_op(case.stage, Op(needed, chunk))
                raise case.fault(position, f"comes before {needed_op}")


def check_chain_order(case: ProgramCase) -> None:
    """Within a chain F ascends and B and I descend."""
    down = case.positions_of(_DOWNSTREAM)
    up = case.positions_of(_UPSTREAM)
    for chain in case.parent.chains:
        for before, after in pairwise(chain):
            if down[before] > down[after]:
                raise case.fault(down[after], f"comes before the slice before it, chunk {before}")
            if up[before] < up[after]:
                raise case.fault(up[before], f"comes before the slice after it, chunk {after}")


PROGRAM_RULES = (
    check_op_chunks,
    check_ops_once,
    check_ops_complete,
    check_op_order,
    check_chain_order,
)
