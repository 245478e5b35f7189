"""The recompute counts of a fixed order as a mixed-integer program, and what two solvers say of it.

With the order fixed, the makespan depends on the counts by linear rows. Columns are the counts, one
start time per op, and the makespan. A row for each pair of ops says that the second one starts when
the first has ended and what it sends has arrived. A row for each op that may be tight says that the
chunks in flight free what is missing. Of the simulator's rules for transfers only how long they
take is kept, so the optimum bounds every choice of counts in this order. Without integers it is a
linear program.

Time is in thousandths of the given makespan, and each memory row is scaled by its largest entry,
which keeps the numbers near one, where solvers are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import highspy
import numpy as np

from infinipipe.aliases import Bools, Floats, Ints
from infinipipe.costs import StageMemory
from infinipipe.highs import QuietHighs
from infinipipe.planner.passes.schedule import Schedule

# Makespan of the given schedule in the unit of time of the mixed-integer program.
_UNITS = 1000.0
# Chunks times stages, and entries of the matrix, up to which HiGHS is asked: mostly a tenth of a
# second, 0.3 s at most.
_MOST_CELLS = 2500
_MOST_ENTRIES = 50_000
# Iterations of HiGHS at most, and nodes of SCIP. They are no clocks, so that plans are the same on
# every machine.
_MOST_ITERATIONS = 20_000
_MOST_NODES = 10
# Bytes per layer by which a slope has to be steeper than the one before to get a row of its own. A
# smaller difference can come from the rounding of large floats, and a byte is of no account.
_LEAST_BEND = 1.0


class _MemoryRow(NamedTuple):
    """What chunks in flight have to free by recompute: `freed @ counts >= least`.

    Both sides are over the bytes of the largest entry.
    """

    cells: Ints
    """The chunks' cells (`_Columns`)."""
    freed: Floats
    """What a layer of each frees; the largest entry is 1."""
    least: float


@dataclass(frozen=True)
class _Columns:
    """Where the columns stand: counts, then the start times of all ops stage by stage, then the
    makespan.

    A cell is a chunk on a stage: cell `stage * num_chunks + chunk`.
    """

    counted: Bools
    """(cells,) which have a count; recompute of the others frees nothing that is needed."""

    @cached_property
    def num_counts(self) -> int:
        """How many counts there are."""
        return int(self.counted.sum())

    @cached_property
    def num_columns(self) -> int:
        """Of all kinds: every cell has an F and a B."""
        num_ops = 2 * len(self.counted)
        return self.num_counts + num_ops + 1

    @cached_property
    def _rank(self) -> Ints:
        return np.cumsum(self.counted) - 1

    def counts(self, cells: Ints) -> Ints:
        """Return the columns of cells' counts."""
        return self._rank[cells]

    def starts(self, ops: Ints) -> Ints:
        """Return the columns of ops' start times; the one after the last op is the makespan."""
        return self.num_counts + ops


class _Precedence(NamedTuple):
    """Pairs of ops, counted stage by stage: the second one waits for the first."""

    before: Ints
    after: Ints
    """One past the last op for the end of the step."""
    transfer_s: Floats
    """Between the end of one and the start of the other."""


@dataclass(frozen=True)
class IntegerProgram:
    """The choice of counts for one order as a mixed-integer program."""

    schedule: Schedule
    columns: _Columns
    linear_program: highspy.HighsLp

    @property
    def counted(self) -> Bools:
        """(stages, chunks) whose counts are columns."""
        return self.columns.counted.reshape(self.schedule.recompute.shape)

    @property
    def num_counts(self) -> int:
        """How many integers there are to choose."""
        return self.columns.num_counts

    @property
    def unit_s(self) -> float:
        """Seconds of its unit of time."""
        return self.schedule.makespan_s / _UNITS


class Relaxation(NamedTuple):
    """What HiGHS says of the linear program."""

    status: str
    bound_s: float
    """No counts are faster in this order; 0 if there is no bound: then the rest means nothing."""
    counts: Floats
    """(stages, chunks)"""
    criticality: Floats
    """(stages, chunks) what a second more of each B adds to the makespan, in seconds."""


class IntegerSolution(NamedTuple):
    """What SCIP says of the mixed-integer program."""

    status: str
    bound_s: float
    """No counts are faster in this order; 0 if there is no bound."""
    counts: Ints
    """(stages, chunks)"""


def formulate(schedule: Schedule) -> IntegerProgram | None:
    """Write down the mixed-integer program of an order; None if it is too large for a solver."""
    if schedule.recompute.size > _MOST_CELLS:
        return None
    memory_rows = _memory_rows(schedule)
    counted = np.zeros(schedule.recompute.size, dtype=np.bool_)
    for row in memory_rows:
        counted[row.cells] = True
    columns = _Columns(counted)
    linear_program = _linear_program(schedule, columns, memory_rows)
    if len(linear_program.a_matrix_.value_) > _MOST_ENTRIES:
        return None
    return IntegerProgram(schedule, columns, linear_program)


def _linear_program(
    schedule: Schedule, columns: _Columns, memory_rows: Sequence[_MemoryRow]
) -> highspy.HighsLp:
    unit_s = schedule.makespan_s / _UNITS
    pairs = _precedence(schedule)
    # One row a pair: after - before - recompute_s * count >= seconds of `before` + transfer.
    lasting_s, recompute_s, cells = _before_costs(schedule, pairs, columns.counted)
    after = columns.starts(pairs.after)
    before = columns.starts(pairs.before)
    counts = columns.counts(cells)
    ones = np.ones(len(cells))
    added = recompute_s / unit_s
    pair_columns = np.stack([after, before, counts], axis=1)
    pair_values = np.stack([ones, -ones, -added], axis=1)
    # A first op without a count has no third entry.
    used = pair_values != 0
    indices = pair_columns[used]
    values = pair_values[used]
    least = (lasting_s + pairs.transfer_s) / unit_s

    memory_indices = [columns.counts(row.cells) for row in memory_rows]
    memory_values = [row.freed for row in memory_rows]
    memory_least = [row.least for row in memory_rows]
    entries_per_row: list[int] = used.sum(axis=1).tolist()
    entries_per_row += [len(freed) for freed in memory_values]

    linear_program = highspy.HighsLp()
    linear_program.num_col_ = columns.num_columns
    linear_program.num_row_ = len(entries_per_row)
    # The makespan is the last column, and all that costs.
    free = np.zeros(columns.num_columns - 1)
    linear_program.col_cost_ = np.append(free, 1.0)
    linear_program.col_lower_ = np.zeros(columns.num_columns)
    num_times = columns.num_columns - columns.num_counts
    endless = np.full(num_times, highspy.kHighsInf)
    most_layers = _most_layers(schedule)[columns.counted]
    linear_program.col_upper_ = np.append(most_layers, endless)
    linear_program.row_lower_ = np.append(least, memory_least)
    linear_program.row_upper_ = np.full(linear_program.num_row_, highspy.kHighsInf)
    matrix = linear_program.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_ = np.cumsum([0, *entries_per_row])
    matrix.index_ = np.concatenate([indices, *memory_indices])
    matrix.value_ = np.concatenate([values, *memory_values])
    return linear_program


def _most_layers(schedule: Schedule) -> Floats:
    """(cells,) the layers that can be recomputed."""
    layers = [float(memory.num_layers) for memory in schedule.memories]
    return np.repeat(layers, schedule.chains.num_chunks)


def _before_costs(
    schedule: Schedule, pairs: _Precedence, counted: Bools
) -> tuple[Floats, Floats, Ints]:
    """Return of each pair's first op its seconds without recompute, those that each recomputed
    layer adds (0 where it has no count), and its cell."""
    costs = schedule.chains.costs
    num_chunks = schedule.chains.num_chunks
    # (ops,) of all stages.
    is_forward: list[Bools] = []
    op_cells: list[Ints] = []
    for stage, program in enumerate(schedule.programs):
        first_cell = stage * num_chunks
        is_forward.append(program.is_forward)
        op_cells.append(first_cell + program.chunks)
    forward = np.concatenate(is_forward)[pairs.before]
    cells = np.concatenate(op_cells)[pairs.before]
    forward_s = costs.forward_s.ravel()[cells]
    backward_s = costs.backward_s.ravel()[cells]
    lasting_s = np.where(forward, forward_s, backward_s)
    chunks = cells % num_chunks
    fixed = forward | ~counted[cells]
    recompute_s = np.where(fixed, 0.0, costs.recompute_s[chunks])
    return lasting_s, recompute_s, cells


def _precedence(schedule: Schedule) -> _Precedence:
    transfer_s = schedule.chains.costs.transfer_s
    num_stages = len(schedule.memories)
    num_chunks = schedule.chains.num_chunks
    num_ops = 2 * num_chunks
    end = num_stages * num_ops
    # Every op waits for the one before it on its stage, and the end for the last one of each.
    every_op = np.arange(end)
    is_last = every_op % num_ops == num_ops - 1
    following = np.where(is_last, end, every_op + 1)
    before = [every_op]
    after = [following]
    # F waits for F of the same chunk on the stage before, and B for B on the stage after.
    forwards: list[Ints] = []
    backwards: list[Ints] = []
    for stage, program in enumerate(schedule.programs):
        first_op = stage * num_ops
        forwards.append(first_op + program.forward_places)
        backwards.append(first_op + program.backward_places)
    down = np.concatenate(forwards)
    up = np.concatenate(backwards[::-1])
    for visited in (down, up):
        before.append(visited[:-num_chunks])
        after.append(visited[num_chunks:])
    no_transfer = np.zeros(len(every_op))
    # Down over every edge, and up again from the last one.
    transfers = np.concatenate([transfer_s, transfer_s[::-1]])
    return _Precedence(
        before=np.concatenate(before),
        after=np.concatenate(after),
        transfer_s=np.append(no_transfer, transfers.ravel()),
    )


def _memory_rows(schedule: Schedule) -> list[_MemoryRow]:
    """Return the rows of all stages' ops that may not fit."""
    num_chunks = schedule.chains.num_chunks
    limits = schedule.problem.pipeline.limits
    rows = []
    for stage, memory in enumerate(schedule.memories):
        first_cell = stage * num_chunks
        for chunks, freed, least in _stage_rows(memory, limits[stage]):
            cells = first_cell + chunks
            rows.append(_MemoryRow(cells, freed, least))
    return rows


def _stage_rows(memory: StageMemory, limit: int) -> Iterator[tuple[Ints, Floats, float]]:
    """Yield the rows of one stage as those of `_MemoryRow`, but for chunks, not cells.

    What an op needs while it runs depends on its own chunk's count, and is convex in it: a row for
    each slope.
    """
    program = memory.program
    missing = memory.missing_bytes(limit)
    transient = memory.transient_by_count()
    # After an F there is at least as much in flight. Where more is missing then, its own row adds
    # next to nothing.
    needed = missing + transient[:, 0]
    needed_next = np.append(needed[1:], -np.inf)
    covered = program.is_forward & (needed <= needed_next)
    most_needed = missing + transient.max(axis=1)
    may_be_tight = ~covered & (most_needed > 0)
    frees = memory.freed_per_layer_bytes > 0
    for op in np.flatnonzero(may_be_tight).tolist():
        begun = program.forward_places <= op
        not_ended = program.backward_places >= op
        in_flight = np.flatnonzero(begun & not_ended & frees)
        freed_per_layer = memory.freed_per_layer_bytes[in_flight]
        is_own = in_flight == program.chunks[op]
        slopes = np.diff(transient[op])
        # The first slope, and each one that is steeper than the one before.
        changes = np.diff(slopes, prepend=-np.inf)
        for count in np.flatnonzero(changes > _LEAST_BEND).tolist():
            slope = slopes[count]
            # A layer more of the op's own chunk also makes it need `slope` more.
            freed = freed_per_layer - slope * is_own
            needed_then = missing[op] + transient[op, count]
            at_no_count = needed_then - slope * count
            least = float(at_no_count)
            largest = freed.max(initial=0.0)
            if least > 0 and largest > 0:
                yield in_flight, freed / largest, least / largest


def solve_relaxed(integer_program: IntegerProgram) -> Relaxation:
    """Solve the linear program with HiGHS: one thread, limited by iterations, alike everywhere."""
    solver = QuietHighs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("solver", "simplex")
    solver.setOptionValue("simplex_iteration_limit", _MOST_ITERATIONS)
    solver.passModel(integer_program.linear_program)
    solver.run()
    ended = solver.getModelStatus()
    status = str(solver.modelStatusToString(ended))
    counted = integer_program.counted
    counts = np.zeros(counted.shape)
    criticality = np.zeros(counted.shape)
    if ended != highspy.HighsModelStatus.kOptimal:
        return Relaxation(status, 0.0, counts, criticality)
    solution = solver.getSolution()
    counts[counted] = solution.col_value[: integer_program.num_counts]
    # The dual of a pair's row is what a second more between the two adds to the makespan. An op
    # that takes longer delays all that wait for it.
    before = _precedence(integer_program.schedule).before
    duals = solution.row_dual[: len(before)]
    through = np.bincount(before, weights=duals)
    by_stage = through.reshape(len(counted), -1)
    for stage, program in enumerate(integer_program.schedule.programs):
        backwards = program.backward_places
        criticality[stage] = by_stage[stage][backwards]
    makespan = float(solver.getObjectiveValue())
    return Relaxation(status, makespan * integer_program.unit_s, counts, criticality)


def solve_integers(integer_program: IntegerProgram, start: Schedule) -> IntegerSolution:
    """Let SCIP go on from a schedule of the same order."""
    from pyscipopt import Model, quicksum

    model = Model()
    model.hideOutput()
    # Ctrl-C is for the command, and no answer may depend on it.
    model.setParam("misc/catchctrlc", False)
    model.setParam("limits/nodes", _MOST_NODES)
    model.setParam("randomization/randomseedshift", 0)
    linear_program = integer_program.linear_program
    num_counts = integer_program.num_counts
    num_times = linear_program.num_col_ - num_counts
    kinds = "I" * num_counts + "C" * num_times
    columns = []
    for kind, most in zip(kinds, linear_program.col_upper_, strict=True):
        columns.append(model.addVar(vtype=kind, ub=most))
    matrix = linear_program.a_matrix_
    terms = []
    for value, index in zip(matrix.value_, matrix.index_, strict=True):
        terms.append(value * columns[index])
    spans = pairwise(matrix.start_)
    for least, (first, last) in zip(linear_program.row_lower_, spans, strict=True):
        row = quicksum(terms[first:last])
        model.addCons(row >= least)
    model.setObjective(columns[-1], "minimize")

    solution = model.createSol()
    values = _column_values(integer_program, start)
    for column, value in zip(columns, values, strict=True):
        model.setSolVal(solution, column, value)
    model.addSol(solution)
    model.optimize()
    status = str(model.getStatus())
    counts = start.recompute.copy()
    if model.getNSols() == 0:
        return IntegerSolution(status, 0.0, counts)
    best = model.getBestSol()
    values = [model.getSolVal(best, column) for column in columns[:num_counts]]
    # Integers, but for SCIP's tolerance.
    counts[integer_program.counted] = [round(value) for value in values]
    bound = max(0.0, float(model.getDualbound()))
    return IntegerSolution(status, bound * integer_program.unit_s, counts)


def _column_values(integer_program: IntegerProgram, schedule: Schedule) -> list[float]:
    """Return the values of the columns for a schedule of the same order."""
    starts_s = np.concatenate(schedule.timeline.start_s)
    seconds = np.append(starts_s, schedule.makespan_s)
    times = seconds / integer_program.unit_s
    counts = schedule.recompute[integer_program.counted]
    values = np.append(counts, times)
    numbers: list[float] = values.tolist()
    return numbers
