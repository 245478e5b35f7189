"""Recompute counts chosen for the makespan of a fixed order (design, section 6).

With the order fixed, the makespan is a mixed-integer program: one start time per op, one count per stage and chunk,
one memory row per op that may be tight. Its linear relaxation (HiGHS) bounds the order and tells what a second of
recompute costs where. Its counts are rounded within memory; a local search then moves recompute away from the
critical path; SCIP goes on from there where there are few counts. The simulator and `StageMemory.during` judge all
of it, never a solver's tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import highspy
import numpy as np

from infinipipe.aliases import Bools, Floats, Ints
from infinipipe.costs import StageMemory
from infinipipe.highs import QuietHighs
from infinipipe.ir import Direction
from infinipipe.planner.passes.recompute import SPARE_BYTES, fit_recompute
from infinipipe.planner.passes.schedule import Schedule, simulate_schedule

_MOST_CELLS, _MOST_ENTRIES = 2500, 50_000
"""Chunks times stages, and non-zeros, up to which HiGHS is asked: mostly a tenth of a second, 0.3 s at most."""
_MOST_ITERATIONS = 20_000
_MOST_COUNTS = 60
"""Integers up to which SCIP is asked: mostly some hundredths of a second, half a second at most."""
_MOST_NODES = 10
_EFFORT = 40_000
"""Chunks times stages that the local search simulates, give or take."""
_LEAST_TRIES, _MOST_TRIES = 8, 60
_MEMORY = 0.1
"""How much of the local search's weights each simulation renews."""
_LEAST_WEIGHT = 0.02
"""What a second of recompute costs at least, in seconds of the makespan, so that nothing is recomputed for nothing."""
_FIRST_WEIGHT = 0.3
"""The same, where no linear program has told."""
_UNITS = 1000.0
"""Makespan of the given schedule in the programs' unit of time."""
_CLOSE = 1e-6
"""Relative tolerance of the solvers; nobody looks for less."""


@dataclass(frozen=True)
class Solved:
    """What the last solver said."""

    solver: str
    """HiGHS or SCIP."""
    status: str
    """In the solver's words."""
    gap: float | None
    """Makespan over the proved bound of this order, less 1; None without a bound."""


def polish(
    schedule: Schedule,
    *,
    most_iterations: int = _MOST_ITERATIONS,
    most_nodes: int = _MOST_NODES,
) -> tuple[Schedule, Solved | None]:
    """Return the same chunks and programs with better recompute counts, or the schedule itself if
    none are found.

    Without recompute, or where there are too many chunks for a solver, there is no `Solved`.

    Args:
        schedule: whose counts are chosen.
        most_iterations: of HiGHS, of which none may suffice.
        most_nodes: of SCIP.
    """
    if not schedule.recompute.any():
        return schedule, None
    weights = np.full(schedule.recompute.shape, _FIRST_WEIGHT)
    program = _formulate(schedule) if schedule.recompute.size <= _MOST_CELLS else None
    if program is None or len(program.linear.a_matrix_.value_) > _MOST_ENTRIES:
        return _search(schedule, weights, 0.0), None
    solver, (status, bound_s, counts, flow) = "HiGHS", _relax(program, most_iterations)
    best = schedule
    if bound_s > 0:
        weights = flow
        for rounded in (np.ceil(counts - _CLOSE), np.floor(counts + _CLOSE)):
            best = _faster(
                best, _refit(schedule, rounded.astype(np.int64), _prices(schedule, weights))
            )
    best = _search(best, weights, bound_s)
    if program.counted.sum() <= _MOST_COUNTS and best.makespan_s > bound_s * (1 + _CLOSE):
        solver, (status, scip_bound_s, integers) = (
            "SCIP",
            _solve_integers(program, best, most_nodes),
        )
        best, bound_s = (
            _faster(best, _refit(best, integers, _prices(best, weights))),
            max(bound_s, scip_bound_s),
        )
    gap = max(0.0, best.makespan_s / bound_s - 1) if bound_s > 0 else None
    return best, Solved(solver, status, gap)


def _faster(best: Schedule, found: Schedule | None) -> Schedule:
    return best if found is None or found.makespan_s >= best.makespan_s else found


def _prices(schedule: Schedule, weights: Floats) -> Floats:
    """Return (stages, chunks) seconds of the makespan per recomputed layer."""
    return np.asarray(schedule.chains.costs.recompute_s * (weights + _LEAST_WEIGHT))


def _refit(schedule: Schedule, counts: Ints, prices: Floats) -> Schedule | None:
    """Raise counts until they fit, lower them where there is room, and simulate; None if that fails or is nothing new.

    Args:
        schedule: whose programs these are. A stage with the same counts as there is left as it is.
        counts: (stages, chunks)
        prices: (stages, chunks) what a recomputed layer costs.
    """
    found = schedule.recompute.copy()
    for stage in np.flatnonzero((counts != found).any(axis=1)).tolist():
        memory, limit = schedule.memories[stage], schedule.problem.pipeline.limits[stage]
        fitted = fit_recompute(memory, prices[stage], limit, counts[stage])
        if isinstance(fitted, float):
            return None
        found[stage] = _lower(memory, limit, fitted, prices[stage])
        if memory.during(found[stage]).max() > limit:
            return None
    if (found == schedule.recompute).all():
        return None
    simulated = simulate_schedule(schedule.problem, schedule.chains, schedule.memories, found)
    return replace(schedule, recompute=found, timeline=simulated.timeline)


def _lower(memory: StageMemory, limit: int, counts: Ints, prices: Floats) -> Ints:
    """Recompute fewer layers where there is room, the dearest first."""
    counts, limit_bytes = counts.copy(), limit - SPARE_BYTES
    first, last = memory.program.forward_places, memory.program.backward_places
    slack = limit_bytes - memory.during(counts)
    for chunk in np.argsort(-prices, kind="stable").tolist():
        if counts[chunk] == 0 or memory.freed_per_layer_bytes[chunk] <= 0:
            continue
        room = slack[first[chunk] : last[chunk] + 1].min() // memory.freed_per_layer_bytes[chunk]
        layers = int(min(counts[chunk], room))
        if layers > 0:
            counts[chunk] -= layers
            slack_then = limit_bytes - memory.during(counts)
            if slack_then.min() >= 0:
                slack = slack_then
            else:
                counts[chunk] += layers
    return counts


def _search(best: Schedule, weights: Floats, bound_s: float) -> Schedule:
    """Take a layer each from critical B, in various groups, and let other chunks make room for it.

    A group that helps is tried again. What a second of a chunk's recompute costs comes to be how often it was critical.
    """
    groups, number, num_failed = _groups(weights.shape), 0, 0
    critical = _critical(best)
    tries = min(max(_EFFORT // weights.size, _LEAST_TRIES), _MOST_TRIES)
    while tries and num_failed < 2 * len(groups) and best.makespan_s > bound_s * (1 + _CLOSE):
        taken = groups[number] & critical & (best.recompute > 0)
        improved = False
        if taken.any():
            tries -= 1
            found = _refit(best, best.recompute - taken, _prices(best, weights + critical))
            if found is not None:
                critical_then = _critical(found)
                weights = (1 - _MEMORY) * weights + _MEMORY * critical_then
                improved = found.makespan_s < best.makespan_s
                if improved:
                    best, critical = found, critical_then
        num_failed = 0 if improved else num_failed + 1
        number = number if improved else (number + 1) % len(groups)
    return best


def _groups(shape: tuple[int, ...]) -> list[Bools]:
    """Return all, every other diagonal (chunks that are on different stages at one time), each stage alone."""
    num_stages, num_chunks = shape
    stages = np.arange(num_stages)[:, None]
    even = (stages + np.arange(num_chunks)) % 2 == 0
    return [
        np.ones_like(even),
        even,
        ~even,
        *(np.broadcast_to(stages == s, even.shape) for s in range(num_stages)),
    ]


def _critical(schedule: Schedule) -> Bools:
    """Return (stages, chunks) whose B lie on a longest path through the timeline."""
    memories, transfer = schedule.memories, schedule.chains.costs.transfer_s.tolist()
    ends = [end.tolist() for end in schedule.timeline.end_s]
    travels = [memory.program.travels.tolist() for memory in memories]
    chunks = [memory.program.chunks.tolist() for memory in memories]
    places: dict[int, list[list[int]]] = {
        Direction.DOWN: [memory.program.forward_places.tolist() for memory in memories],
        Direction.UP: [memory.program.backward_places.tolist() for memory in memories],
    }
    critical = np.zeros(schedule.recompute.shape, dtype=np.bool_)
    stage, place = max(range(len(ends)), key=lambda s: ends[s][-1]), len(ends[0]) - 1
    while place >= 0:
        direction, chunk = travels[stage][place], chunks[stage][place]
        if direction < 0:
            critical[stage, chunk] = True
        sender = stage - direction
        if 0 <= sender < len(ends):
            sent = places[direction][sender][chunk]
            if place == 0 or ends[sender][sent] + transfer[chunk] > ends[stage][place - 1]:
                stage, place = sender, sent
                continue
        place -= 1
    return critical


@dataclass(frozen=True)
class _Program:
    """An order as a mixed-integer program."""

    linear: highspy.HighsLp
    """Columns: counts, start times of all ops stage by stage, the makespan. Rows: those of time, those of memory."""
    counted: Bools
    """(stages, chunks) whose counts are columns; recompute of the others frees nothing that is needed."""
    schedule: Schedule

    @property
    def unit_s(self) -> float:
        """Seconds of its unit of time."""
        return self.schedule.makespan_s / _UNITS


def _formulate(schedule: Schedule) -> _Program:
    """Write down the program of an order; of the simulator's rules for transfers it keeps only how long they take."""
    memories, costs, unit_s = schedule.memories, schedule.chains.costs, schedule.makespan_s / _UNITS
    num_stages, num_chunks = schedule.recompute.shape
    memory_rows = [
        (stage * num_chunks + chunks, saved, least)
        for stage, (memory, limit) in enumerate(
            zip(memories, schedule.problem.pipeline.limits, strict=True)
        )
        for chunks, saved, least in _memory_rows(memory, limit)
    ]
    counted = np.zeros(num_stages * num_chunks, dtype=np.bool_)
    for cells, _, _ in memory_rows:
        counted[cells] = True
    # Where a count's column is.
    count, num_counts = np.cumsum(counted) - 1, int(counted.sum())
    # One row a pair of ops: after - before - recompute * count >= lasting + transfer.
    before, after, transfer_s = _precedence(schedule)
    cells = np.concatenate(
        [stage * num_chunks + memory.program.chunks for stage, memory in enumerate(memories)]
    )[before]
    forward = np.concatenate([memory.program.is_forward for memory in memories])[before]
    lasting_s = np.where(forward, costs.forward_s.ravel()[cells], costs.backward_s.ravel()[cells])
    slope = np.where(
        forward | ~counted[cells], 0.0, -costs.recompute_s[cells % num_chunks] / unit_s
    )
    columns = np.stack([num_counts + after, num_counts + before, count[cells]], axis=1)
    values = np.stack([np.ones(len(before)), -np.ones(len(before)), slope], axis=1)
    used = values != 0
    lengths = [0, *used.sum(axis=1).tolist(), *(len(saved) for _, saved, _ in memory_rows)]

    linear = highspy.HighsLp()
    linear.num_col_, linear.num_row_ = num_counts + 2 * len(counted) + 1, len(lengths) - 1
    linear.col_cost_, linear.col_lower_ = (
        np.append(np.zeros(linear.num_col_ - 1), 1.0),
        np.zeros(linear.num_col_),
    )
    layers = np.repeat([float(memory.num_layers) for memory in memories], num_chunks)[counted]
    linear.col_upper_ = np.append(layers, np.full(linear.num_col_ - num_counts, highspy.kHighsInf))
    linear.row_lower_ = np.append(
        (lasting_s + transfer_s) / unit_s, [least for _, _, least in memory_rows]
    )
    linear.row_upper_ = np.full(linear.num_row_, highspy.kHighsInf)
    linear.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    linear.a_matrix_.start_ = np.cumsum(lengths)
    linear.a_matrix_.index_ = np.concatenate(
        [columns[used], *(count[cells] for cells, _, _ in memory_rows)]
    )
    linear.a_matrix_.value_ = np.concatenate(
        [values[used], *(saved for _, saved, _ in memory_rows)]
    )
    return _Program(linear, counted.reshape(num_stages, num_chunks), schedule)


def _precedence(schedule: Schedule) -> tuple[Ints, Ints, Floats]:
    """Return pairs of ops, counted stage by stage, and the seconds between them; the end comes after all ops."""
    memories, transfer_s = schedule.memories, schedule.chains.costs.transfer_s
    num_stages, num_ops = len(memories), 2 * len(transfer_s)
    before = [np.arange(num_stages * num_ops)]
    after = [np.where(before[0] % num_ops < num_ops - 1, before[0] + 1, num_stages * num_ops)]
    forwards = [s * num_ops + m.program.forward_places for s, m in enumerate(memories)]
    backwards = [s * num_ops + m.program.backward_places for s, m in enumerate(memories)]
    for places in (forwards, backwards[::-1]):
        visited = np.concatenate(places)
        before.append(visited[: -len(transfer_s)])
        after.append(visited[len(transfer_s) :])
    seconds = np.append(np.zeros(num_stages * num_ops), np.tile(transfer_s, 2 * (num_stages - 1)))
    return np.concatenate(before), np.concatenate(after), seconds


def _memory_rows(memory: StageMemory, limit: int) -> Iterator[tuple[Ints, Floats, float]]:
    """Yield chunks in flight, what a layer of each saves, and what they have to save, in layers of the largest.

    What an op needs for a moment depends on its own chunk's count, and is convex in it: a row for each slope.
    """
    backward, num_layers = memory.program.is_backward, memory.num_layers
    kept, first, last = (
        memory.activation_bytes[memory.program.chunks],
        memory.program.forward_places,
        memory.program.backward_places,
    )
    missing = (
        memory.fixed_bytes
        + np.cumsum(np.where(backward, -kept, kept))
        + np.where(backward, kept, 0.0)
        - limit
    )
    moment = np.zeros((len(kept), num_layers + 1))
    moment[:, -1] = np.where(
        backward,
        memory.freed_per_layer_bytes[memory.program.chunks],
        memory.recompute_transient_bytes[memory.program.chunks],
    )
    for op in np.flatnonzero(
        backward & (memory.slot_gradient_bytes[memory.program.chunks] > 0)
    ).tolist():
        moment[op] = [
            memory.layers_transient(int(memory.program.chunks[op]), count)
            for count in range(num_layers + 1)
        ]
    # After an F there is at least as much in flight. Where more is missing then, its own row adds next to nothing.
    needed = missing + moment[:, 0]
    covered = ~backward & (needed <= np.append(needed[1:], -np.inf))
    for op in np.flatnonzero(~covered & (missing + moment.max(axis=1) > 0)).tolist():
        in_flight = np.flatnonzero(
            (first <= op) & (last >= op) & (memory.freed_per_layer_bytes > 0)
        )
        slopes = np.diff(moment[op])
        for count in np.flatnonzero(np.diff(slopes, prepend=-np.inf) > SPARE_BYTES).tolist():
            saved = memory.freed_per_layer_bytes[in_flight] - slopes[count] * (
                in_flight == memory.program.chunks[op]
            )
            least, largest = (
                float(missing[op] + moment[op, count] - slopes[count] * count),
                saved.max(initial=0.0),
            )
            if least > 0 and largest > 0:
                yield in_flight, saved / largest, least / largest


def _relax(program: _Program, most_iterations: int) -> tuple[str, float, Floats, Floats]:
    """Solve the linear relaxation with HiGHS: one thread, limited by iterations, so the same everywhere.

    Return how it ended, the bound in seconds (0 if it has none), and two arrays of shape (stages, chunks): counts, and
    what a second more of each B adds to the makespan. Without a bound they mean nothing.
    """
    solver, counted = QuietHighs(), program.counted  # type: ignore[no-untyped-call]
    solver.setOptionValue("solver", "simplex")
    solver.setOptionValue("simplex_iteration_limit", most_iterations)
    solver.passModel(program.linear)
    solver.run()
    ended, solution = solver.getModelStatus(), solver.getSolution()
    status, counts, flow = (
        str(solver.modelStatusToString(ended)),
        np.zeros(counted.shape),
        np.zeros(counted.shape),
    )
    if ended != highspy.HighsModelStatus.kOptimal:
        return status, 0.0, counts, flow
    counts[counted] = solution.col_value[: counted.sum()]
    before = _precedence(program.schedule)[0]
    through = np.bincount(before, weights=solution.row_dual[: len(before)]).reshape(
        len(counted), -1
    )
    for stage, memory in enumerate(program.schedule.memories):
        flow[stage] = through[stage][memory.program.backward_places]
    return status, float(solver.getObjectiveValue()) * program.unit_s, counts, flow


def _solve_integers(program: _Program, start: Schedule, most_nodes: int) -> tuple[str, float, Ints]:
    """Let SCIP go on from a schedule; return how it ended, seconds that no counts undercut, and its counts."""
    from pyscipopt import Model, quicksum

    linear, counted, num_counts = program.linear, program.counted, int(program.counted.sum())
    model = Model()
    model.hideOutput()
    model.setParam(
        "misc/catchctrlc", False
    )  # Ctrl-C is for the command, and no answer may depend on it
    model.setParam("limits/nodes", most_nodes)
    model.setParam("randomization/randomseedshift", 0)
    kinds = "I" * num_counts + "C" * (linear.num_col_ - num_counts)
    columns = [
        model.addVar(vtype=kind, ub=most)
        for kind, most in zip(kinds, linear.col_upper_, strict=True)
    ]
    matrix = linear.a_matrix_
    terms = [
        value * columns[index] for value, index in zip(matrix.value_, matrix.index_, strict=True)
    ]
    for least, begin, end in zip(
        linear.row_lower_, matrix.start_[:-1], matrix.start_[1:], strict=True
    ):
        model.addCons(quicksum(terms[begin:end]) >= least)
    model.setObjective(columns[-1], "minimize")
    times = np.append(np.concatenate(start.timeline.start_s), start.makespan_s) / program.unit_s
    solution = model.createSol()
    for column, value in zip(
        columns, np.append(start.recompute[counted], times).tolist(), strict=True
    ):
        model.setSolVal(solution, column, value)
    model.addSol(solution)
    model.optimize()
    counts = start.recompute.copy()
    if model.getNSols():
        best = model.getBestSol()
        counts[counted] = [round(model.getSolVal(best, column)) for column in columns[:num_counts]]
    bound = max(0.0, float(model.getDualbound())) if model.getNSols() else 0.0
    return str(model.getStatus()), bound * program.unit_s, counts
