"""The recompute levels of a fixed order as a mixed-integer program, and what two solvers say of it.

With the order fixed, the makespan depends by linear rows on the counts of rungs: of lower and of
upper ones of each chunk on each stage. Columns are these counts, one start time per op, and the
makespan. A row for each pair of ops says that the second one starts when the first has ended and
what it sends has arrived. A row for each op that may be tight says that the chunks in flight free
what is missing. That upper rungs come after all lower ones is left to what they cost. Of the
simulator's rules for transfers only how long they take is kept. So the optimum bounds every choice
of levels in this order. Without integers it is a linear program.

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
from infinipipe.planner.passes.ladder import Ladder
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
    """The chunks' cells (`_Columns`), for lower rungs, upper ones or both."""
    freed: Floats
    """What a rung of each frees; the largest entry is 1."""
    least: float


@dataclass(frozen=True)
class _Columns:
    """Where the columns stand: counts, then the start times of all ops stage by stage, then the
    makespan.

    A cell is a chunk on a stage: `stage * num_chunks + chunk` for the count of lower rungs, and as
    many more as there are of those for that of upper ones.
    """

    counted: Bools
    """(cells,) which have a count; recompute of the others frees nothing that is needed."""

    @cached_property
    def num_counts(self) -> int:
        """How many counts there are."""
        return int(self.counted.sum())

    @cached_property
    def num_columns(self) -> int:
        """Of all kinds: every chunk has an F and a B on each stage, as it has two cells."""
        num_ops = len(self.counted)
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
    """The choice of levels for one order as a mixed-integer program."""

    schedule: Schedule
    columns: _Columns
    linear_program: highspy.HighsLp

    def levels(self, counts: Floats) -> Floats:
        """Return (stages, chunks) the levels that the first columns' values stand for."""
        cells = np.zeros(len(self.columns.counted))
        cells[self.columns.counted] = counts
        levels: Floats = cells.reshape(2, *self.schedule.levels.shape).sum(axis=0)
        return levels

    def counts(self, levels: Ints) -> Ints:
        """Return the values of the first columns for (stages, chunks) levels."""
        lower = np.minimum(levels, self.schedule.chains.num_layers)
        cells = np.stack([lower, levels - lower]).ravel()
        return cells[self.columns.counted]

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
    """No levels are faster in this order; 0 if there is no bound: then the rest means nothing."""
    levels: Floats
    """(stages, chunks)"""
    criticality: Floats
    """(stages, chunks) what a second more of each B adds to the makespan, in seconds."""


class IntegerSolution(NamedTuple):
    """What SCIP says of the mixed-integer program."""

    status: str
    bound_s: float
    """No levels are faster in this order; 0 if there is no bound."""
    levels: Ints
    """(stages, chunks)"""


def formulate(schedule: Schedule) -> IntegerProgram | None:
    """Write down the mixed-integer program of an order; None if it is too large for a solver."""
    if schedule.levels.size > _MOST_CELLS:
        return None
    memory_rows = _memory_rows(schedule)
    if memory_rows is None:
        return None
    counted = np.zeros(2 * schedule.levels.size, dtype=np.bool_)
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
    # One row a pair: after - before - seconds of rungs * counts >= seconds of `before` + transfer.
    first_ops = _first_ops(schedule, pairs, columns.counted)
    after = columns.starts(pairs.after)
    before = columns.starts(pairs.before)
    lower = columns.counts(first_ops.cells)
    upper = columns.counts(first_ops.cells + schedule.levels.size)
    ones = np.ones(len(after))
    lower_added = first_ops.lower_s / unit_s
    upper_added = first_ops.upper_s / unit_s
    pair_columns = np.stack([after, before, lower, upper], axis=1)
    pair_values = np.stack([ones, -ones, -lower_added, -upper_added], axis=1)
    # A first op without counts has no third and fourth entry.
    used = pair_values != 0
    indices = pair_columns[used]
    values = pair_values[used]
    least = (first_ops.lasting_s + pairs.transfer_s) / unit_s

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
    """(cells,) the layers that can be recomputed, as many as there are rungs of each kind."""
    layers = [float(memory.num_layers) for memory in schedule.memories]
    of_lower = np.repeat(layers, schedule.chains.num_chunks)
    return np.tile(of_lower, 2)


class _FirstOps(NamedTuple):
    """What each pair's first op takes; arrays are (pairs,)."""

    lasting_s: Floats
    """Without recompute."""
    lower_s: Floats
    """That a lower rung adds, 0 where it has no count."""
    upper_s: Floats
    """That an upper one adds."""
    cells: Ints
    """Of its lower rungs."""


def _first_ops(schedule: Schedule, pairs: _Precedence, counted: Bools) -> _FirstOps:
    costs = schedule.chains.costs
    ladder = schedule.chains.ladder
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
    has_lower = ~forward & counted[cells]
    has_upper = ~forward & counted[cells + schedule.levels.size]
    return _FirstOps(
        lasting_s=lasting_s,
        lower_s=np.where(has_lower, ladder.lower_s[chunks], 0.0),
        upper_s=np.where(has_upper, ladder.upper_s[chunks], 0.0),
        cells=cells,
    )


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


def _memory_rows(schedule: Schedule) -> list[_MemoryRow] | None:
    """Return the rows of all stages' ops that may not fit; None if these alone have too
    many entries."""
    num_chunks = schedule.chains.num_chunks
    limits = schedule.problem.pipeline.limits
    num_upper_before = schedule.levels.size
    num_entries = 0
    rows = []
    for stage, memory in enumerate(schedule.memories):
        first_cell = stage * num_chunks
        for row in _stage_rows(memory, schedule.chains.ladder, limits[stage]):
            lower = first_cell + row.chunks
            cells = np.append(lower, lower + num_upper_before)
            freed = np.append(row.lower_bytes, row.upper_bytes)
            largest = freed.max(initial=0.0)
            if row.least_bytes > 0 and largest > 0:
                used = np.flatnonzero(freed)
                shares = freed[used] / largest
                rows.append(_MemoryRow(cells[used], shares, row.least_bytes / largest))
                num_entries += len(used)
            if num_entries > _MOST_ENTRIES:
                return None
    return rows


class _StageRow(NamedTuple):
    """What chunks in flight have to free on a stage."""

    chunks: Ints
    lower_bytes: Floats
    """That a lower rung of each frees."""
    upper_bytes: Floats
    """That an upper one frees."""
    least_bytes: float


def _stage_rows(memory: StageMemory, ladder: Ladder, limit: int) -> Iterator[_StageRow]:
    """Yield the rows of one stage.

    What an op needs while it runs depends on its own chunk's level, and is convex over the lower
    rungs, and over the upper ones: a row for each slope.
    """
    program = memory.program
    num_layers = memory.num_layers
    missing = memory.missing_bytes(limit)
    transient = _transient_by_level(memory, ladder)
    # After an F there is at least as much in flight. Where more is missing then, its own row adds
    # next to nothing.
    needed = missing + transient[:, 0]
    needed_next = np.append(needed[1:], -np.inf)
    covered = program.is_forward & (needed <= needed_next)
    most_needed = missing + transient.max(axis=1)
    may_be_tight = ~covered & (most_needed > 0)
    frees = ladder.lower_bytes > 0
    for op in np.flatnonzero(may_be_tight).tolist():
        begun = program.forward_places <= op
        not_ended = program.backward_places >= op
        in_flight = np.flatnonzero(begun & not_ended & frees)
        lower_bytes = ladder.lower_bytes[in_flight]
        upper_bytes = ladder.upper_bytes[in_flight]
        is_own = in_flight == program.chunks[op]
        slopes = np.diff(transient[op])
        for level in _bends(slopes, num_layers):
            # A rung more of the op's own chunk also makes it need a slope more.
            lower_slope = slopes[min(level, num_layers - 1)]
            upper_slope = slopes[level] if level >= num_layers else 0.0
            lower_rungs = min(level, num_layers)
            needed_at_no_rung = (
                missing[op]
                + transient[op, level]
                - lower_slope * lower_rungs
                - upper_slope * (level - lower_rungs)
            )
            yield _StageRow(
                chunks=in_flight,
                lower_bytes=lower_bytes - lower_slope * is_own,
                upper_bytes=upper_bytes - upper_slope * is_own,
                least_bytes=float(needed_at_no_rung),
            )


def _transient_by_level(memory: StageMemory, ladder: Ladder) -> Floats:
    """(ops, levels) what each op needs while it runs, by its chunk's level.

    Chunks without upper rungs need the same on all of them.
    """
    num_layers = memory.num_layers
    highest = ladder.num_rungs(num_layers)
    columns = []
    for level in range(highest.max() + 1):
        levels = np.minimum(level, highest)
        columns.append(memory.transient(ladder.recompute(levels, num_layers)))
    return np.stack(columns, axis=1)


def _bends(slopes: Floats, num_layers: int) -> list[int]:
    """Return the levels at which a slope begins: the first, and each that is steeper than the one
    before. Upper rungs begin with a slope of 0."""
    # The slope before each level; of the first level's there is always a row.
    before = np.append(-np.inf, slopes[:-1])
    before[num_layers : num_layers + 1] = 0.0
    return np.flatnonzero(slopes - before > _LEAST_BEND).tolist()


def solve_relaxed(integer_program: IntegerProgram) -> Relaxation:
    """Solve the linear program with HiGHS: one thread, limited by iterations, alike everywhere."""
    solver = QuietHighs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("solver", "simplex")
    solver.setOptionValue("simplex_iteration_limit", _MOST_ITERATIONS)
    solver.passModel(integer_program.linear_program)
    solver.run()
    ended = solver.getModelStatus()
    status = str(solver.modelStatusToString(ended))
    shape = integer_program.schedule.levels.shape
    criticality = np.zeros(shape)
    if ended != highspy.HighsModelStatus.kOptimal:
        return Relaxation(status, 0.0, np.zeros(shape), criticality)
    solution = solver.getSolution()
    counts = np.array(solution.col_value[: integer_program.num_counts])
    levels = integer_program.levels(counts)
    # The dual of a pair's row is what a second more between the two adds to the makespan. An op
    # that takes longer delays all that wait for it.
    before = _precedence(integer_program.schedule).before
    duals = solution.row_dual[: len(before)]
    through = np.bincount(before, weights=duals)
    by_stage = through.reshape(len(criticality), -1)
    for stage, program in enumerate(integer_program.schedule.programs):
        backwards = program.backward_places
        criticality[stage] = by_stage[stage][backwards]
    makespan = float(solver.getObjectiveValue())
    return Relaxation(status, makespan * integer_program.unit_s, levels, criticality)


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
    if model.getNSols() == 0:
        return IntegerSolution(status, 0.0, start.levels)
    best = model.getBestSol()
    values = [model.getSolVal(best, column) for column in columns[:num_counts]]
    # Integers, but for SCIP's tolerance.
    counts = np.array([round(value) for value in values], dtype=np.float64)
    levels = integer_program.levels(counts).astype(np.int64)
    bound = max(0.0, float(model.getDualbound()))
    return IntegerSolution(status, bound * integer_program.unit_s, levels)


def _column_values(integer_program: IntegerProgram, schedule: Schedule) -> list[float]:
    """Return the values of the columns for a schedule of the same order."""
    starts_s = np.concatenate(schedule.timeline.start_s)
    seconds = np.append(starts_s, schedule.makespan_s)
    times = seconds / integer_program.unit_s
    counts = integer_program.counts(schedule.levels)
    values = np.append(counts, times)
    numbers: list[float] = values.tolist()
    return numbers
