"""Rules of a replica: the shape of what it holds, and what its stages do together.

A broken one raises `VerifyError`; the message names step, replica and stage, and shows the ops
around with a marker. `SHAPE_RULES` run before the rules of every program, so that these may index
freely, and `PIPELINE_RULES` after them: a transfer has two ends only where programs are complete.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from infinipipe.errors import VerifyError
from infinipipe.ir.ops import TRAITS, Direction, kinds_that_travel
from infinipipe.ir.plan import Header, Op, OpKind, Replica, Step, chunk_chains
from infinipipe.ir.rules.deadlock import Wait, find_deadlock
from infinipipe.ir.rules.step import ROUNDING
from infinipipe.ir.text import excerpt, show_op

# Far above what rounding does to a stage's busy and bubble, which are summed apart from the
# makespan, and far below anything that a schedule could gain by.
_MAKESPAN_ROUNDING = 1 + 1e-6

# Kinds of op whose transfers have one order at both ends.
_TRAVELLING = (
    kinds_that_travel(Direction.DOWN),
    kinds_that_travel(Direction.UP),
)

# An error about a recompute count names the first of these: which one the program has is not known
# before its own rules have run.
_RECOMPUTING = [kind for kind in OpKind if TRAITS[kind].recomputes]

# How many layers of each chunk are recomputed: two numbers a chunk, by stage.
_COUNTS = ("recompute", "keep_attention")

_Kinds = tuple[OpKind, ...]
_Program = tuple[Op, ...]


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
        chains = chunk_chains(self.replica.chunks, self.step.sequences)
        return [chain for chain in chains if len(chain) > 1]

    def around(self, stage: int, chunk: int) -> str:
        """Show the ops around a chunk's last op, if the program has one.

        No rule need have looked at the program yet.
        """
        program = self.replica.programs[stage]
        last = None
        for position, op in enumerate(program):
            if op.chunk == chunk:
                last = position
        if last is None:
            return ""
        return f": {excerpt(stage, program, last)}"

    def fault(self, stage: int, why: str) -> VerifyError:
        """Return the error of a stage."""
        step = self.step.index
        return VerifyError(f"step {step}, replica {self.number}, stage {stage}: {why}")


def check_replica_shape(case: ReplicaCase) -> None:
    """Every stage has a program, a prediction and both recompute counts for every chunk."""
    replica = case.replica
    num_stages = len(case.header.stages)
    for name in (*_COUNTS, "programs", "predicted"):
        count = len(getattr(replica, name))
        if count != num_stages:
            first_wrong = min(count, num_stages)
            why = f"{name} of {count} stages; the header has {num_stages}"
            raise case.fault(first_wrong, why)
    num_chunks = len(replica.chunks)
    for name in _COUNTS:
        for stage, counts in enumerate(getattr(replica, name)):
            if len(counts) != num_chunks:
                raise case.fault(stage, f"{len(counts)} {name} counts for {num_chunks} chunks")


def check_recompute(case: ReplicaCase) -> None:
    """A stage recomputes from none to all of its layers, in whole or without attention."""
    replica = case.replica
    for stage, counts in enumerate(replica.recompute):
        num_layers = case.header.stages[stage].num_layers
        pairs = zip(counts, replica.keep_attention[stage], strict=True)
        for chunk, (recompute, keep_attention) in enumerate(pairs):
            none_below_zero = min(recompute, keep_attention) >= 0
            if none_below_zero and recompute + keep_attention <= num_layers:
                continue
            op = Op(_RECOMPUTING[0], chunk)
            shown = show_op(stage, op)
            around = case.around(stage, chunk)
            kinds = f"{recompute} layers and {keep_attention} without attention"
            why = f"op {shown} recomputes {kinds}, of {num_layers}{around}"
            raise case.fault(stage, why)


def check_predictions(case: ReplicaCase) -> None:
    """Predicted times are finite and fit the makespan."""
    makespan_s = case.step.makespan_s
    for stage, prediction in enumerate(case.replica.predicted):
        recompute_s = prediction.recompute_s
        busy_s = prediction.busy_s
        bubble_s = prediction.bubble_s
        times = (recompute_s, busy_s, bubble_s)
        if not all(math.isfinite(t) and t >= 0 for t in times):
            raise case.fault(stage, f"predicted times of {times} seconds; expected finite ones")
        recompute_fits = recompute_s <= busy_s * ROUNDING
        busy_fits = busy_s + bubble_s <= makespan_s * _MAKESPAN_ROUNDING
        if not (recompute_fits and busy_fits):
            why = f"recompute, busy and bubble of {times} seconds in a makespan of {makespan_s}"
            raise case.fault(stage, why)


def check_peaks(case: ReplicaCase) -> None:
    """The predicted peak is within the stage's memory limit."""
    for stage, prediction in enumerate(case.replica.predicted):
        peak_bytes = prediction.peak_bytes
        limit = case.header.memory_limit_bytes[stage]
        if not 0 <= peak_bytes <= limit:
            why = f"a predicted peak of {peak_bytes} bytes; the limit is {limit}"
            raise case.fault(stage, why)


SHAPE_RULES = (check_replica_shape, check_recompute, check_predictions, check_peaks)


def check_transfers(case: ReplicaCase) -> None:
    """Every transfer is matched, in the same order at both ends."""
    for kinds in _TRAVELLING:
        orders = [_chunk_order(program, kinds) for program in case.replica.programs]
        for stage, (order, order_below) in enumerate(pairwise(orders)):
            if order != order_below:
                raise _transfer_fault(case, stage, kinds)


def _chunk_order(program: _Program, kinds: _Kinds) -> list[int]:
    return [op.chunk for op in program if op.kind in kinds]


def _transfer_fault(case: ReplicaCase, stage: int, kinds: _Kinds) -> VerifyError:
    """Return the error of the first transfer between a stage and the next whose ends differ.

    Both stages have every chunk once, so that there is such a transfer.
    """
    next_stage = stage + 1
    program = case.replica.programs[stage]
    next_program = case.replica.programs[next_stage]
    positions = _positions(program, kinds)
    next_positions = _positions(next_program, kinds)
    for here, there in zip(positions, next_positions, strict=True):
        if program[here].chunk != next_program[there].chunk:
            break
    op = show_op(stage, program[here])
    other = show_op(next_stage, next_program[there])
    around = excerpt(stage, program, here)
    around_other = excerpt(next_stage, next_program, there)
    why = f"op {op} meets {other} on stage {next_stage}: {around}; {around_other}"
    return case.fault(stage, why)


def _positions(program: _Program, kinds: _Kinds) -> list[int]:
    return [position for position, op in enumerate(program) if op.kind in kinds]


def check_deadlock(case: ReplicaCase) -> None:
    """All programs end even when every send blocks until its receive is posted, one ahead in each
    direction.
    """
    circle = find_deadlock(case.replica.programs)
    if circle:
        shown = [_show_wait(case, wait) for wait in circle]
        first = circle[0].stage
        raise case.fault(first, f"deadlock: {'; '.join(shown)}")


def _show_wait(case: ReplicaCase, wait: Wait) -> str:
    stage = wait.stage
    position = wait.position
    program = case.replica.programs[stage]
    op = show_op(stage, program[position])
    need = "post its receive" if wait.sending else "send"
    around = excerpt(stage, program, position)
    return f"op {op} waits for stage {wait.neighbour} to {need}: {around}"


PIPELINE_RULES = (check_transfers, check_deadlock)
