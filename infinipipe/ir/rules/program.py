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
from infinipipe.ir.text import excerpt, show_kind, show_op

_DOWNSTREAM = kinds_that_travel(Direction.DOWN)
_UPSTREAM = kinds_that_travel(Direction.UP)

# Kinds of which every chunk has one; below is what each complete set has beside them.
_ALWAYS = set(OpKind).intersection(*COMPLETE)


def _beside_always(kinds: tuple[OpKind, ...]) -> list[OpKind]:
    return [kind for kind in kinds if kind not in _ALWAYS]


_ALTERNATIVES = [_beside_always(kinds) for kinds in COMPLETE]

_Positions = dict[int, int]
"""Where in a program the op of a chunk stands."""


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
    def positions(self) -> dict[OpKind, _Positions]:
        """Where each chunk's op of a kind stands; the last of them, where it comes twice."""
        positions: dict[OpKind, _Positions] = {kind: {} for kind in OpKind}
        for position, op in enumerate(self.program):
            positions[op.kind][op.chunk] = position
        return positions

    def positions_of(self, kinds: tuple[OpKind, ...]) -> _Positions:
        """Return where each chunk's op of one of some kinds stands, of which it has one."""
        merged: _Positions = {}
        for kind in kinds:
            merged |= self.positions[kind]
        return merged

    def fault(self, position: int, why: str) -> VerifyError:
        """Return the error of the op at a position."""
        return self._fault_of(self.program[position], position, why)

    def missing(self, kind: OpKind, chunk: int) -> VerifyError:
        """Return the error of an op that the program does not have."""
        end = len(self.program)
        return self._fault_of(Op(kind, chunk), end, "is missing")

    def _fault_of(self, op: Op, position: int, why: str) -> VerifyError:
        shown = show_op(self.stage, op)
        around = excerpt(self.stage, self.program, position)
        return self.parent.fault(self.stage, f"op {shown} {why}: {around}")


def check_op_chunks(case: ProgramCase) -> None:
    """Every op is of a chunk that exists."""
    num_chunks = case.num_chunks
    for position, op in enumerate(case.program):
        if not 0 <= op.chunk < num_chunks:
            raise case.fault(position, f"is of no chunk, there are {num_chunks}")


def check_ops_once(case: ProgramCase) -> None:
    """No op comes twice."""
    positions = case.positions
    num_distinct = sum(map(len, positions.values()))
    if num_distinct == len(case.program):
        return
    for position, op in enumerate(case.program):
        last = positions[op.kind][op.chunk]
        if position != last:
            raise case.fault(last, f"comes twice, first at position {position}")


def check_ops_complete(case: ProgramCase) -> None:
    """Every chunk has one F, and one B or one I and one W."""
    chunks_with = {kind: set(positions) for kind, positions in case.positions.items()}
    incomplete = set(range(case.num_chunks))
    for kinds in COMPLETE:
        with_these = [chunks_with[kind] for kind in kinds]
        with_others = [chunks_with[kind] for kind in OpKind if kind not in kinds]
        complete = set.intersection(*with_these)
        incomplete -= complete.difference(*with_others)
    if incomplete:
        first = min(incomplete)
        raise _incomplete_fault(case, first)


def _incomplete_fault(case: ProgramCase, chunk: int) -> VerifyError:
    """Return the error of a chunk whose ops are none of the complete sets."""
    has = {kind for kind in OpKind if chunk in case.positions[kind]}
    # What the program seems to mean: the first alternative of which it has anything.
    begun = [kinds for kinds in _ALTERNATIVES if has.intersection(kinds)]
    intended = begun[0] if begun else _ALTERNATIVES[0]
    needed = [kind for kind in OpKind if kind in _ALWAYS or kind in intended]
    for kind in needed:
        if kind not in has:
            return case.missing(kind, chunk)
    # All that is needed is there, so that what is wrong is an op of another alternative.
    others = [show_kind(kind) for kind in OpKind if kind not in needed]
    listed = " or ".join(others)
    position = case.positions[intended[0]][chunk]
    return case.fault(position, f"stands beside {listed} of its chunk")


def check_op_order(case: ProgramCase) -> None:
    """F comes before B and I, and I before W."""
    for kind, traits in TRAITS.items():
        if traits.needs is None:
            continue
        needed = case.positions[traits.needs]
        later = case.positions[kind]
        for chunk, position in later.items():
            if position < needed[chunk]:
                shown = show_op(case.stage, Op(traits.needs, chunk))
                raise case.fault(position, f"comes before {shown}")


def check_chain_order(case: ProgramCase) -> None:
    """Within a chain F ascends and B and I descend."""
    down = case.positions_of(_DOWNSTREAM)
    up = case.positions_of(_UPSTREAM)
    for chain in case.parent.chains:
        for before, after in pairwise(chain):
            if down[before] > down[after]:
                why = f"comes before the slice before it, chunk {before}"
                raise case.fault(down[after], why)
            if up[before] < up[after]:
                why = f"comes before the slice after it, chunk {after}"
                raise case.fault(up[before], why)


PROGRAM_RULES = (
    check_op_chunks,
    check_ops_once,
    check_ops_complete,
    check_op_order,
    check_chain_order,
)
