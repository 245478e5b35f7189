"""The paper's recompute: counts tied along diagonals, by a sweep and by an integer program.

A stage that recomputes makes the others wait, so ckpt(p, k) = c[k + P - p] for stage p (from 1) and chunk k in the
order of B: chunks that are on different stages at one time recompute equally many layers (PAPER.md).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from infinipipe.aliases import Ints
from infinipipe.costs import StageMemory
from infinipipe.planner.passes.recompute import Shortage, fit_recompute

_GAP = 0.02
_MOST_NODES = 200
_MOST_TERMS = 50_000
"""What SCIP solves in seconds."""
_MOST_GAP = 1e6


def sweep_diagonals(
    memories: SequenceOf[StageMemory], limits: SequenceOf[int], start: Ints | None = None
) -> Ints | Shortage:
    """Return c, raised stage by stage from a start (none) until all programs fit."""
    num_stages, num_chunks = len(memories), len(memories[0].activation_bytes)
    counts = (
        np.zeros(num_chunks + num_stages - 1, dtype=np.int64) if start is None else start.copy()
    )
    for stage, (memory, limit) in enumerate(zip(memories, limits, strict=True)):
        places = diagonal_places(memory, num_stages, stage)
        # Every count costs the same: the program minimises their sum.
        found = fit_recompute(
            memory, np.ones(num_chunks), limit, np.minimum(counts[places], memory.num_layers)
        )
        if isinstance(found, float):
            return Shortage(stage, found, limit)
        counts[places] = np.maximum(counts[places], found)
    return counts


def solve_diagonals(
    memories: SequenceOf[StageMemory], limits: SequenceOf[int], start: Ints
) -> tuple[Ints, str, float | None]:
    """Return c of the least sum within memory, from a start that fits (SCIP, gap 2 %, limited by nodes).

    The rows are the paper's: what chunks keep in flight. What an op needs for a moment may come on top.

    Besides, how SCIP ended, and how far the sum may be from the least, relative to it; None where SCIP has no bound.
    """
    from pyscipopt import Model, quicksum

    num_stages = len(memories)
    tight = [_tight_rows(memory, limit) for memory, limit in zip(memories, limits, strict=True)]
    if sum(len(in_flight) for rows in tight for in_flight, _ in rows) > _MOST_TERMS:
        return start, "too large", None
    model = Model()
    model.hideOutput()
    model.setParam(
        "misc/catchctrlc", False
    )  # Ctrl-C is for the command, and no answer may depend on it
    model.setParam("limits/gap", _GAP)
    model.setParam("limits/nodes", _MOST_NODES)
    model.setParam("randomization/randomseedshift", 0)
    most = np.zeros(len(start), dtype=np.int64)
    for stage, memory in enumerate(memories):
        np.maximum.at(most, diagonal_places(memory, num_stages, stage), memory.num_layers)
    columns = [model.addVar(vtype="I", lb=0, ub=int(bound)) for bound in most]
    for stage, (memory, rows) in enumerate(zip(memories, tight, strict=True)):
        places = diagonal_places(memory, num_stages, stage)
        for in_flight, excess in rows:
            # In units of the excess, which keeps the numbers near one.
            terms = (
                float(memory.freed_per_layer_bytes[chunk] / excess) * columns[places[chunk]]
                for chunk in in_flight
            )
            model.addCons(quicksum(terms) >= 1.0)
    model.setObjective(quicksum(columns), "minimize")
    solution = model.createSol()
    for column, value in zip(columns, start.tolist(), strict=True):
        model.setSolVal(solution, column, value)
    model.addSol(solution)
    model.optimize()
    gap = float(model.getGap())
    told = str(model.getStatus()), None if model.isInfinity(gap) or gap > _MOST_GAP else gap
    if model.getNSols() == 0:
        return start, *told
    best = model.getBestSol()
    return np.array(
        [round(model.getSolVal(best, column)) for column in columns], dtype=np.int64
    ), *told


def diagonal_counts(memories: SequenceOf[StageMemory], diagonals: Ints) -> Ints:
    """Return the recompute counts of every stage and chunk."""
    rows = [
        np.minimum(diagonals[diagonal_places(memory, len(memories), stage)], memory.num_layers)
        for stage, memory in enumerate(memories)
    ]
    return np.array(rows, dtype=np.int64)


def diagonal_places(memory: StageMemory, num_stages: int, stage: int) -> Ints:
    """Return each chunk's diagonal on one stage."""
    backwards = memory.program.backward_chunks
    places = np.empty(len(backwards), dtype=np.int64)
    places[backwards] = np.arange(len(backwards)) + num_stages - 1 - stage
    return places


def _tight_rows(memory: StageMemory, limit: int) -> list[tuple[Ints, float]]:
    """Return chunks in flight and missing bytes where a program does not fit as it is.

    Before an F there is less in flight than in it, so only ops that no F follows matter.
    """
    program = memory.program
    none = np.zeros(len(memory.activation_bytes), dtype=np.int64)
    excess = memory.during(none) - limit + 1
    next_is_forward = np.append(program.is_forward[1:], False)
    followed = next_is_forward & program.is_forward
    rows = []
    for position in np.flatnonzero(~followed & (excess > 0)).tolist():
        begun = program.forward_places <= position
        not_ended = program.backward_places >= position
        rows.append((np.flatnonzero(begun & not_ended), float(excess[position])))
    return rows
