"""Recompute levels chosen for the makespan of a fixed order.

The choice is a mixed-integer program (`infinipipe.planner.passes.recompute_program`). Without
integers it is a linear program: its solution (HiGHS) bounds the makespan and says what a second of
recompute costs where. The solution's levels are rounded within memory; a local search then moves
recompute away from the critical path; SCIP goes on from there where there are few counts. The
simulator and `StageMemory.during` judge all of it, never a solver's tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from infinipipe.aliases import Bools, Floats, Ints
from infinipipe.costs import StageMemory
from infinipipe.ir import Direction
from infinipipe.planner.passes.ladder import Ladder
from infinipipe.planner.passes.recompute import SPARE_BYTES, fit_recompute
from infinipipe.planner.passes.recompute_program import (
    IntegerProgram,
    formulate,
    solve_integers,
    solve_relaxed,
)
from infinipipe.planner.passes.schedule import Schedule, simulate_schedule

# Integers up to which SCIP is asked, two a chunk where attention's output can be kept: mostly some
# hundredths of a second, half a second at most.
_MOST_COUNTS = 120
# Chunks times stages that the local search simulates, give or take: so many tries as that allows,
# within the two limits below. More tries find better counts and take longer.
_EFFORT = 40_000
# However large a schedule is: fewer can change less, more take long, as each simulates all of it.
_LEAST_TRIES = 8
# However small it is: more may find a little more, but cheap tries add up as well.
_MOST_TRIES = 60
# How much of the local search's weights each simulation renews: less remembers longer what was
# critical, more follows sooner what is.
_RENEWED = 0.1
# What a second of recompute costs at least, in seconds of the makespan, so that nothing is
# recomputed for nothing.
_LEAST_WEIGHT = 0.02
# What it is taken to cost to begin with where no linear program has told. What is critical costs 1
# more in a try, so this says how much dearer that is: less moves recompute away from it
# sooner, more heeds the bytes that a second of recompute frees.
_FIRST_WEIGHT = 0.3
# Relative tolerance of the solvers; nobody looks for less.
_CLOSE = 1e-6


@dataclass(frozen=True)
class Solved:
    """What the last solver said."""

    solver: str
    """HiGHS or SCIP."""
    status: str
    """In the solver's words."""
    gap: float | None
    """Makespan over the proved bound of this order, less 1; None without a bound."""


def polish(schedule: Schedule) -> tuple[Schedule, Solved | None]:
    """Return the same chunks and programs with better recompute levels, or the schedule itself if
    none are found.

    Without recompute, or where there are too many chunks for a solver, there is no `Solved`.
    """
    if not schedule.levels.any():
        return schedule, None
    integer_program = formulate(schedule)
    if integer_program is None:
        weights = np.full(schedule.levels.shape, _FIRST_WEIGHT)
        return _move_recompute(schedule, weights, 0.0), None
    return _solve(schedule, integer_program)


def _solve(schedule: Schedule, integer_program: IntegerProgram) -> tuple[Schedule, Solved]:
    relaxation = solve_relaxed(integer_program)
    solver = "HiGHS"
    status = relaxation.status
    bound_s = relaxation.bound_s
    weights = np.full(schedule.levels.shape, _FIRST_WEIGHT)
    best = schedule
    if bound_s > 0:
        weights = relaxation.criticality
        # What is an integer but for the solver's tolerance stays that integer.
        up = np.ceil(relaxation.levels - _CLOSE)
        down = np.floor(relaxation.levels + _CLOSE)
        for rounded in (up, down):
            levels = rounded.astype(np.int64)
            refitted = _refit(schedule, levels, weights)
            best = _faster(best, refitted)
    best = _move_recompute(best, weights, bound_s)
    if integer_program.num_counts <= _MOST_COUNTS and not _is_proved(best, bound_s):
        solution = solve_integers(integer_program, best)
        solver = "SCIP"
        status = solution.status
        refitted = _refit(best, solution.levels, weights)
        best = _faster(best, refitted)
        bound_s = max(bound_s, solution.bound_s)
    gap = None
    if bound_s > 0:
        over_bound = best.makespan_s / bound_s
        gap = max(0.0, over_bound - 1)
    return best, Solved(solver, status, gap)


def _is_proved(schedule: Schedule, bound_s: float) -> bool:
    """Return whether no levels can be faster, within the solvers' tolerance."""
    return schedule.makespan_s <= bound_s * (1 + _CLOSE)


def _faster(best: Schedule, other: Schedule | None) -> Schedule:
    if other is None or other.makespan_s >= best.makespan_s:
        return best
    return other


def _refit(schedule: Schedule, levels: Ints, weights: Floats) -> Schedule | None:
    """Raise levels until they fit, lower them where there is room, and simulate.

    Return None if that fails or is nothing new.

    Args:
        schedule: whose programs these are. A stage with the same levels as there is left as it is.
        levels: (stages, chunks)
        weights: (stages, chunks) seconds of the makespan per second of recompute.
    """
    problem = schedule.problem
    ladder = schedule.chains.ladder
    refitted = schedule.levels.copy()
    changed = (levels != refitted).any(axis=1)
    for stage in np.flatnonzero(changed).tolist():
        memory = schedule.memories[stage]
        limit = problem.pipeline.limits[stage]
        weighed = ladder.weighed(weights[stage] + _LEAST_WEIGHT)
        raised = fit_recompute(memory, weighed, limit, levels[stage])
        if isinstance(raised, float):
            return None
        refitted[stage] = _lower(memory, weighed, limit, raised)
        during = memory.during(ladder.recompute(refitted[stage], memory.num_layers))
        if during.max() > limit:
            return None
    if (refitted == schedule.levels).all():
        return None
    simulated = simulate_schedule(problem, schedule.chains, schedule.memories, refitted)
    return replace(schedule, levels=refitted, timeline=simulated.timeline)


def _lower(memory: StageMemory, ladder: Ladder, limit: int, levels: Ints) -> Ints:
    """Recompute less where there is room: the chunks whose highest rungs are dearest first."""
    levels = levels.copy()
    most = limit - SPARE_BYTES
    num_layers = memory.num_layers
    forwards = memory.program.forward_places
    backwards = memory.program.backward_places
    slack = most - memory.during(ladder.recompute(levels, num_layers))
    is_upper = levels > num_layers
    prices = np.where(is_upper, ladder.upper_s, ladder.lower_s)
    dearest_first = np.argsort(-prices, kind="stable")
    for chunk in dearest_first.tolist():
        for above, freed in ((num_layers, ladder.upper_bytes), (0, ladder.lower_bytes)):
            if levels[chunk] <= above or freed[chunk] <= 0:
                continue
            # From its F to its B, both included.
            in_flight = slice(forwards[chunk], backwards[chunk] + 1)
            least_slack = slack[in_flight].min()
            room = least_slack // freed[chunk]
            rungs = int(min(levels[chunk] - above, room))
            if rungs <= 0:
                break
            levels[chunk] -= rungs
            slack_then = most - memory.during(ladder.recompute(levels, num_layers))
            if slack_then.min() < 0:
                # What its B needs while it runs has grown.
                levels[chunk] += rungs
                break
            slack = slack_then
            if levels[chunk] > above:
                break
    return levels


def _move_recompute(best: Schedule, weights: Floats, bound_s: float) -> Schedule:
    """Let each critical B of a group go down a rung, and other chunks make room for it.

    A group that helps is tried again. What a second of a chunk's recompute costs comes to be how
    often it was critical.
    """
    groups = _groups(weights.shape)
    # A group that failed may help once weights have changed, so each may fail twice in a row.
    most_failed = 2 * len(groups)
    tries = _EFFORT // weights.size
    tries = min(max(tries, _LEAST_TRIES), _MOST_TRIES)
    critical = _critical(best)
    number = 0
    num_failed = 0
    while tries > 0 and num_failed < most_failed and not _is_proved(best, bound_s):
        is_recomputed = best.levels > 0
        taken = groups[number] & critical & is_recomputed
        improved = False
        if taken.any():
            tries -= 1
            levels = best.levels - taken
            other = _refit(best, levels, weights + critical)
            if other is not None:
                critical_then = _critical(other)
                weights = (1 - _RENEWED) * weights + _RENEWED * critical_then
                improved = other.makespan_s < best.makespan_s
                if improved:
                    best = other
                    critical = critical_then
        if improved:
            num_failed = 0
        else:
            num_failed += 1
            number = (number + 1) % len(groups)
    return best


def _groups(shape: tuple[int, ...]) -> list[Bools]:
    """Return (stages, chunks) all, every other diagonal, each stage alone.

    On a diagonal are the chunks whose B run on different stages at one time. Within a split chain,
    where B run backwards, that is where stage + chunk is the same; over chains of one chunk it is
    where chunk - stage is, and both are even or odd together.
    """
    num_stages, num_chunks = shape
    stages = np.arange(num_stages)[:, None]
    chunks = np.arange(num_chunks)
    diagonals = stages + chunks
    is_even = diagonals % 2 == 0
    groups = [np.ones_like(is_even), is_even, ~is_even]
    for stage in range(num_stages):
        is_own = stages == stage
        groups.append(np.broadcast_to(is_own, is_even.shape))
    return groups


def _critical(schedule: Schedule) -> Bools:
    """Return (stages, chunks) whose B lie on a longest path of ops and transfers, as if receives
    were always posted and no send waited.

    The path goes back from the last op: to the op before on the same stage, or to the one that sent
    what this one waited for.
    """
    programs = schedule.programs
    num_stages = len(programs)
    # Lists, because single elements of arrays are slow.
    transfer_s = schedule.chains.costs.transfer_s.tolist()
    ends_s = [end_s.tolist() for end_s in schedule.timeline.end_s]
    travels = [program.travels.tolist() for program in programs]
    chunks = [program.chunks.tolist() for program in programs]
    forwards = [program.forward_places.tolist() for program in programs]
    backwards = [program.backward_places.tolist() for program in programs]
    places: dict[int, list[list[int]]] = {Direction.DOWN: forwards, Direction.UP: backwards}
    critical = np.zeros(schedule.levels.shape, dtype=np.bool_)
    stage = max(range(num_stages), key=lambda s: ends_s[s][-1])
    place = len(ends_s[stage]) - 1
    while place >= 0:
        direction = travels[stage][place]
        chunk = chunks[stage][place]
        if direction == Direction.UP:
            critical[stage, chunk] = True
        sender = stage - direction
        if 0 <= sender < num_stages:
            # The op of the same kind and chunk on the stage before in that direction.
            sent = places[direction][sender][chunk]
            sent_s = ends_s[sender][sent]
            edge = min(sender, stage)
            arrival_s = sent_s + transfer_s[edge][chunk]
            if place == 0 or arrival_s > ends_s[stage][place - 1]:
                stage = sender
                place = sent
                continue
        place -= 1
    return critical
