"""Rules of a step's programs: what every stage does, and in which order. A broken one raises `VerifyError`.

The message names step, replica, stage and op, and shows the ops around with a marker. Rules run in the
order of `SHAPE_RULES`, `PROGRAM_RULES` (for every stage) and `PIPELINE_RULES` (between stages).
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from infinipipe.errors import VerifyError
from infinipipe.ir.plan import Header, Op, OpKind, Replica, Step, chunk_chains
from infinipipe.ir.rules.deadlock import find_deadlock
from infinipipe.ir.rules.step import ROUNDING
from infinipipe.ir.text import show_op, window

FORWARDS = (OpKind.FORWARD,)
# What travels upstream: W stays at home.
BACKWARDS = (OpKind.BACKWARD, OpKind.BACKWARD_INPUT)


@dataclass(frozen=True)
class ReplicaCase:
    """One replica of a step, to be checked."""

    header: Header
    step: Step
    number: int
    replica: Replica

    @cached_property
    def chains(self) -> list[tuple[int, ...]]:
        """Chains of more than one chunk."""
        return [c for c in chunk_chains(self.replica.chunks, self.step.sequences) if len(c) > 1]

    def around(self, stage: int, chunk: int) -> str:
        """Show the ops around the end of a chunk, if the program has it; no rule has looked at the program yet."""
        program = self.replica.programs[stage]
        found = [position for position, op in enumerate(program) if op.chunk == chunk]
        return f": {window(stage, program, found[-1])}" if found else ""

    def fault(self, stage: int, why: str) -> VerifyError:
        """Return the error of a stage."""
        return VerifyError(f"step {self.step.index}, replica {self.number}, stage {stage}: {why}")


def check_replica_shape(case: ReplicaCase) -> None:
    """Every stage has a program, a prediction and a recompute count for every chunk."""
    replica, num_stages = case.replica, len(case.header.stages)
    for name in ("recompute", "programs", "predicted"):
        found = len(getattr(replica, name))
        if found != num_stages:
            raise case.fault(
                min(found, num_stages), f"{name} of {found} stages; the header has {num_stages}"
            )
    for stage, counts in enumerate(replica.recompute):
        if len(counts) != len(replica.chunks):
            raise case.fault(
                stage, f"{len(counts)} recompute counts for {len(replica.chunks)} chunks"
            )


def check_recompute(case: ReplicaCase) -> None:
    """A stage recomputes from none to all of its layers."""
    for stage, counts in enumerate(case.replica.recompute):
        num_layers = case.header.stages[stage].num_layers
        for chunk, count in enumerate(counts):
            if not 0 <= count <= num_layers:
                why = f"op {stage}B{chunk} recomputes {count} of {num_layers} layers"
                raise case.fault(stage, why + case.around(stage, chunk))


def check_predictions(case: ReplicaCase) -> None:
    """Predicted times are finite and fit the makespan."""
    most = case.step.makespan_s * (1 + 1e-6)
    for stage, found in enumerate(case.replica.predicted):
        times = (found.recompute_s, found.busy_s, found.bubble_s)
        if not all(math.isfinite(t) and t >= 0 for t in times):
            raise case.fault(stage, f"predicted times of {times} seconds; expected finite ones")
        if found.recompute_s > found.busy_s * ROUNDING or found.busy_s + found.bubble_s > most:
            raise case.fault(
                stage,
                f"recompute, busy and bubble of {times} seconds in a makespan of {case.step.makespan_s}",
            )


def check_peaks(case: ReplicaCase) -> None:
    """The predicted peak is within the stage's memory limit."""
    for stage, found in enumerate(case.replica.predicted):
        limit = case.header.memory_limit_bytes[stage]
        if not 0 <= found.peak_bytes <= limit:
            raise case.fault(
                stage, f"a predicted peak of {found.peak_bytes} bytes; the limit is {limit}"
            )


def check_transfers(case: ReplicaCase) -> None:
    """Every transfer is matched, in the same order at both ends."""
    for kinds in (FORWARDS, BACKWARDS):
        orders = [
            [op.chunk for op in program if op.kind in kinds] for program in case.replica.programs
        ]
        for stage, (order, below) in enumerate(pairwise(orders)):
            if order != below:
                raise _transfer_fault(case, stage, kinds)


def _transfer_fault(case: ReplicaCase, stage: int, kinds: SequenceOf[OpKind]) -> VerifyError:
    """Show the first transfer between a stage and the next whose ends differ. Both have every chunk once."""
    ends = []
    for number in (stage, stage + 1):
        program = case.replica.programs[number]
        ends.append([(position, op) for position, op in enumerate(program) if op.kind in kinds])
    (here, op), (there, other) = next(
        pair for pair in zip(*ends, strict=True) if pair[0][1].chunk != pair[1][1].chunk
    )
    return case.fault(
        stage,
        f"op {show_op(stage, op)} meets {show_op(stage + 1, other)} on stage {stage + 1}: "
        f"{window(stage, case.replica.programs[stage], here)}; "
        f"{window(stage + 1, case.replica.programs[stage + 1], there)}",
    )


def check_deadlock(case: ReplicaCase) -> None:
    """All programs end even when every send blocks until its receive is posted, one ahead in each direction."""
    circle = find_deadlock(case.replica.programs)
    if not circle:
        return
    parts = []
    for wait in circle:
        program = case.replica.programs[wait.stage]
        need = (
            f"stage {wait.neighbour} to post its receive"
            if wait.sending
            else f"stage {wait.neighbour} to send"
        )
        parts.append(
            f"op {show_op(wait.stage, program[wait.position])} waits for {need}: "
            f"{window(wait.stage, program, wait.position)}"
        )
    raise case.fault(circle[0].stage, f"deadlock: {'; '.join(parts)}")


@dataclass(frozen=True)
class ProgramCase:
    """One stage's program in one replica of a step, to be checked."""

    parent: ReplicaCase
    stage: int
    program: tuple[Op, ...]

    @cached_property
    def positions(self) -> dict[OpKind, dict[int, int]]:
        """Where each chunk's op of a kind stands."""
        found: dict[OpKind, dict[int, int]] = {kind: {} for kind in OpKind}
        for position, op in enumerate(self.program):
            found[op.kind][op.chunk] = position
        return found

    def fault(self, position: int, why: str, op: Op | None = None) -> VerifyError:
        """Return the error of the op at a position, or of an op that should be there."""
        named = show_op(self.stage, op or self.program[position])
        return self.parent.fault(
            self.stage, f"op {named} {why}: {window(self.stage, self.program, position)}"
        )


def check_op_chunks(case: ProgramCase) -> None:
    """Every op is of a chunk that exists."""
    num_chunks = len(case.parent.replica.chunks)
    for position, op in enumerate(case.program):
        if not 0 <= op.chunk < num_chunks:
            raise case.fault(position, f"is of no chunk, there are {num_chunks}")


def check_ops_once(case: ProgramCase) -> None:
    """No op comes twice."""
    if sum(map(len, case.positions.values())) != len(case.program):
        position, op = next(
            (p, op) for p, op in enumerate(case.program) if case.positions[op.kind][op.chunk] != p
        )
        raise case.fault(
            case.positions[op.kind][op.chunk], f"comes twice, first at position {position}"
        )


def check_ops_complete(case: ProgramCase) -> None:
    """Every chunk has one F, and one B or one I and one W."""
    forward, backward, inputs, weights = (case.positions[kind] for kind in OpKind)
    end = len(case.program)
    for chunk in range(len(case.parent.replica.chunks)):
        if chunk not in forward:
            raise case.fault(end, "is missing", Op(OpKind.FORWARD, chunk))
        if chunk in backward:
            if chunk in inputs or chunk in weights:
                raise case.fault(backward[chunk], "stands beside an I or a W of its chunk")
        elif chunk not in inputs:
            kind = OpKind.BACKWARD_INPUT if chunk in weights else OpKind.BACKWARD
            raise case.fault(end, "is missing", Op(kind, chunk))
        elif chunk not in weights:
            raise case.fault(end, "is missing", Op(OpKind.BACKWARD_WEIGHT, chunk))


def check_op_order(case: ProgramCase) -> None:
    """F comes before B and I, and I before W."""
    forward, backward, inputs, weights = (case.positions[kind] for kind in OpKind)
    for earlier, later in ((forward, backward), (forward, inputs), (inputs, weights)):
        for chunk, position in later.items():
            if position < earlier[chunk]:
                raise case.fault(
                    position, f"comes before {show_op(case.stage, case.program[earlier[chunk]])}"
                )


def check_chain_order(case: ProgramCase) -> None:
    """Within a chain F ascends and B and I descend."""
    forward = case.positions[OpKind.FORWARD]
    backward = case.positions[OpKind.BACKWARD] | case.positions[OpKind.BACKWARD_INPUT]
    for chain in case.parent.chains:
        for before, after in pairwise(chain):
            if forward[before] > forward[after]:
                raise case.fault(
                    forward[after], f"comes before the slice before it, chunk {before}"
                )
            if backward[before] < backward[after]:
                raise case.fault(
                    backward[before], f"comes before the slice after it, chunk {after}"
                )


SHAPE_RULES = (check_replica_shape, check_recompute, check_predictions, check_peaks)
PROGRAM_RULES = (
    check_op_chunks,
    check_ops_once,
    check_ops_complete,
    check_op_order,
    check_chain_order,
)
PIPELINE_RULES = (check_transfers, check_deadlock)
