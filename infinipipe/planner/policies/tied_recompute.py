"""The paper's recompute: counts tied along diagonals, by a sweep and by an integer program.

A stage that recomputes makes the others wait, so ckpt(p, k) = c[k + P - p] for stage p (from 1) and
chunk k in the order of B: chunks that are on different stages at one time recompute equally many
layers (arXiv 2509.21275).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from infinipipe.aliases import Ints
from infinipipe.costs import Recompute, StageMemory
from infinipipe.planner.passes.ladder import plain_ladder
from infinipipe.planner.passes.recompute import Shortage, fit_recompute

if TYPE_CHECKING:
    # Imported where it is used, so that nothing else waits for it.
    from pyscipopt import Model, Variable

# The paper stops SCIP where it is within 2 % of the best.
_GAP = 0.02
# Nodes that SCIP explores at most, and terms of all rows up to which it is asked: what it solves in
# seconds. They are no clock, so that plans are the same on every machine.
_MOST_NODES = 200
_MOST_TERMS = 50_000
# SCIP says infinity, or next to it, where it has no bound; a plan holds finite gaps only.
_MOST_GAP = 1e6


class TiedSolution(NamedTuple):
    """What SCIP says of the integer program."""

    counts: Ints
    """(chunks + stages - 1,) c."""
    status: str
    """How it ended."""
    gap: float | None
    """How far the sum of counts may be from the least, relative to it; None without a bound."""


def sweep_diagonals(
    memories: SequenceOf[StageMemory], limits: SequenceOf[int], start: Ints | None = None
) -> Ints | Shortage:
    """Return c, raised stage by stage from a start (none) until all programs fit.

    Args:
        memories: of each stage's program.
        limits: bytes per stage.
        start: c to start from.
    """
    num_stages = len(memories)
    num_chunks = len(memories[0].activation_bytes)
    num_diagonals = num_chunks + num_stages - 1
    counts = np.zeros(num_diagonals, dtype=np.int64)
    if start is not None:
        counts = start.copy()
    # Every count costs the same: the program minimises their sum.
    prices = np.ones(num_chunks)
    for stage, memory in enumerate(memories):
        limit = limits[stage]
        diagonals = chunk_diagonals(memory, num_stages, stage)
        # A diagonal may ask for more layers than this stage has.
        before = np.minimum(counts[diagonals], memory.num_layers)
        ladder = plain_ladder(memory.freed_per_layer_bytes, prices)
        fitted = fit_recompute(memory, ladder, limit, before)
        if isinstance(fitted, float):
            return Shortage(stage, fitted, limit)
        own = counts[diagonals]
        counts[diagonals] = np.maximum(own, fitted)
    return counts


def solve_diagonals(
    memories: SequenceOf[StageMemory], limits: SequenceOf[int], start: Ints
) -> TiedSolution:
    """Return c of the least sum within memory (SCIP, gap 2 %, limited by nodes).

    The rows are the paper's: what chunks keep in flight. What an op needs while it runs may come on
    top.

    Args:
        memories: of each stage's program.
        limits: bytes per stage.
        start: c that fits.
    """
    tight: list[list[_TightRow]] = []
    num_terms = 0
    for memory, limit in zip(memories, limits, strict=True):
        rows = _tight_rows(memory, limit)
        tight.append(rows)
        for row in rows:
            num_terms += len(row.in_flight)
    if num_terms > _MOST_TERMS:
        return TiedSolution(start, "too large", None)
    model, columns = _formulate(memories, tight, len(start))
    solution = model.createSol()
    for column, value in zip(columns, start.tolist(), strict=True):
        model.setSolVal(solution, column, value)
    model.addSol(solution)
    model.optimize()
    status = str(model.getStatus())
    gap = float(model.getGap())
    known_gap = None if model.isInfinity(gap) or gap > _MOST_GAP else gap
    if model.getNSols() == 0:
        return TiedSolution(start, status, known_gap)
    best = model.getBestSol()
    values = [model.getSolVal(best, column) for column in columns]
    # Integers, but for SCIP's tolerance.
    integers = [round(value) for value in values]
    counts = np.array(integers, dtype=np.int64)
    return TiedSolution(counts, status, known_gap)


def _formulate(
    memories: SequenceOf[StageMemory], tight: SequenceOf[SequenceOf[_TightRow]], num_diagonals: int
) -> tuple[Model, list[Variable]]:
    """Return the integer program and its columns, one for each diagonal."""
    from pyscipopt import Model, quicksum

    model = Model()
    model.hideOutput()
    # Ctrl-C is for the command, and no answer may depend on it.
    model.setParam("misc/catchctrlc", False)
    model.setParam("limits/gap", _GAP)
    model.setParam("limits/nodes", _MOST_NODES)
    model.setParam("randomization/randomseedshift", 0)
    columns = []
    for most in _most_layers(memories, num_diagonals).tolist():
        columns.append(model.addVar(vtype="I", lb=0, ub=most))
    for stage, memory in enumerate(memories):
        diagonals = chunk_diagonals(memory, len(memories), stage)
        for row in tight[stage]:
            # In units of what is missing, which keeps the numbers near one.
            freed = memory.freed_per_layer_bytes[row.in_flight]
            shares = freed / row.missing_bytes
            own_diagonals = diagonals[row.in_flight]
            terms = []
            for share, diagonal in zip(shares.tolist(), own_diagonals.tolist(), strict=True):
                terms.append(share * columns[diagonal])
            model.addCons(quicksum(terms) >= 1.0)
    model.setObjective(quicksum(columns), "minimize")
    return model, columns


def _most_layers(memories: SequenceOf[StageMemory], num_diagonals: int) -> Ints:
    """Return (diagonals,) the most layers that any stage of a diagonal has."""
    most = np.zeros(num_diagonals, dtype=np.int64)
    for stage, memory in enumerate(memories):
        diagonals = chunk_diagonals(memory, len(memories), stage)
        np.maximum.at(most, diagonals, memory.num_layers)
    return most


def diagonal_counts(memories: SequenceOf[StageMemory], counts: Ints) -> Ints:
    """Return (stages, chunks) the recompute counts that c stands for."""
    rows = []
    for stage, memory in enumerate(memories):
        diagonals = chunk_diagonals(memory, len(memories), stage)
        own = counts[diagonals]
        rows.append(np.minimum(own, memory.num_layers))
    return np.array(rows, dtype=np.int64)


def chunk_diagonals(memory: StageMemory, num_stages: int, stage: int) -> Ints:
    """Return (chunks,) each chunk's diagonal on one stage."""
    backwards = memory.program.backward_chunks
    stages_after = num_stages - 1 - stage
    places = np.arange(len(backwards))
    diagonals = np.empty(len(backwards), dtype=np.int64)
    diagonals[backwards] = places + stages_after
    return diagonals


class _TightRow(NamedTuple):
    """What chunks in flight have to free at an op."""

    in_flight: Ints
    missing_bytes: float


def _tight_rows(memory: StageMemory, limit: int) -> list[_TightRow]:
    """Return the ops at which a program does not fit as it is.

    Before an F there is less in flight than in it, so only ops that no F follows matter.
    """
    program = memory.program
    num_chunks = len(memory.activation_bytes)
    nothing = np.zeros(num_chunks, dtype=np.int64)
    # One byte more, so that what fills the limit exactly is left some room.
    missing = memory.during(Recompute(nothing, nothing)) - limit + 1
    next_is_forward = np.append(program.is_forward[1:], False)
    followed = program.is_forward & next_is_forward
    is_tight = ~followed & (missing > 0)
    rows = []
    for position in np.flatnonzero(is_tight).tolist():
        begun = program.forward_places <= position
        not_ended = program.backward_places >= position
        in_flight = np.flatnonzero(begun & not_ended)
        missing_bytes = float(missing[position])
        rows.append(_TightRow(in_flight, missing_bytes))
    return rows
