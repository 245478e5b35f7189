"""A complete schedule of one replica: chunks, programs, recompute, and what the simulator says of them."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np

from infinipipe.aliases import Floats, Ints
from infinipipe.costs.cost import Costs, Loads, chunk_costs, chunk_loads, replay_memory
from infinipipe.costs.simulate import Timeline, replay
from infinipipe.ir import Replica, Search, StagePrediction
from infinipipe.planner.passes.chunking import Chunks
from infinipipe.planner.passes.order import backward_order, interleave, make_program
from infinipipe.planner.passes.recompute import Shortage, StageMemory, fit_recompute, stage_memory
from infinipipe.planner.problem import Problem


@dataclass(frozen=True)
class Priced:
    """Chunks and what they cost on every stage."""

    chunks: Chunks
    loads: Loads
    costs: Costs

    @property
    def work_s(self) -> Floats:
        """(stages,) seconds of F and B without recompute."""
        return np.asarray((self.costs.forward_s + self.costs.backward_s).sum(axis=1))


_BY_HAND = Search(winner="by hand")


@dataclass(frozen=True)
class Schedule:
    """One replica's chunks, ordered and fitted."""

    problem: Problem
    priced: Priced
    memories: tuple[StageMemory, ...]
    """One per stage; they hold the programs."""
    recompute: Ints
    """(stages, chunks)"""
    timeline: Timeline
    search: Search = _BY_HAND

    @property
    def makespan_s(self) -> float:
        """Simulated seconds."""
        return self.timeline.makespan_s

    @property
    def leads(self) -> Ints:
        """(stages, chunks) how many F come before each B."""
        return np.array(
            [np.flatnonzero(m.directions < 0) - np.arange(len(m.kept)) for m in self.memories]
        )

    def won_by(self, winner: str) -> Schedule:
        """Say what found it."""
        return replace(self, search=Search(winner=winner))


NOTHING = Shortage(0, math.inf, 0.0)
"""Before anything is found."""


def price(problem: Problem, chunks: Chunks) -> Priced:
    """Price chunks on every stage."""
    pipeline = problem.pipeline
    loads = chunk_loads(chunks.chunks, problem.sequences)
    return Priced(
        chunks, loads, chunk_costs(pipeline.profile, pipeline.stages, loads, pipeline.logits_tokens)
    )


def order_memories(problem: Problem, priced: Priced, leads: Ints) -> tuple[StageMemory, ...]:
    """Return every stage's program and its bytes, from how many F come before each B (`order.stage_leads`)."""
    backwards = backward_order(priced.chunks)
    return tuple(
        stage_memory(
            problem.pipeline,
            s,
            problem.sequences,
            priced.loads,
            priced.costs,
            *interleave(lead, backwards),
        )
        for s, lead in enumerate(leads)
    )


def fit_schedule(
    problem: Problem, priced: Priced, memories: SequenceOf[StageMemory]
) -> Schedule | Shortage:
    """Choose recompute counts for given programs and simulate them."""
    rows = []
    for stage, (memory, limit) in enumerate(zip(memories, problem.pipeline.limits, strict=True)):
        counts = fit_recompute(memory, priced.costs.recompute_s, limit)
        if isinstance(counts, float):
            return Shortage(stage, counts, limit)
        rows.append(counts)
    return simulate_schedule(problem, priced, memories, np.array(rows, dtype=np.int64))


UNIFORM_PARTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Parts of a stage's layers that are tried as the one recompute count of all its chunks."""


def uniform_counts(problem: Problem, priced: Priced, part: float) -> Ints:
    """Return counts that recompute a part of a stage's layers, the same for every chunk."""
    layers = np.array([[stage.num_layers] for stage in problem.pipeline.stages])
    return np.repeat(np.ceil(part * layers).astype(np.int64), len(priced.chunks.chunks), axis=1)


def uniform_schedule(
    problem: Problem, priced: Priced, memories: SequenceOf[StageMemory]
) -> Schedule | Shortage:
    """Recompute the least part of the layers that fits, the same for every chunk, and simulate it."""
    found: Schedule | Shortage = NOTHING
    for part in UNIFORM_PARTS:
        found = fixed_schedule(problem, priced, memories, uniform_counts(problem, priced, part))
        if isinstance(found, Schedule):
            break
    return found


def fixed_schedule(
    problem: Problem, priced: Priced, memories: SequenceOf[StageMemory], recompute: Ints
) -> Schedule | Shortage:
    """Simulate given programs with given recompute counts, if they fit."""
    shortages = [
        Shortage(stage, most, limit)
        for stage, (memory, limit) in enumerate(zip(memories, problem.pipeline.limits, strict=True))
        if (most := float(memory.during(recompute[stage]).max())) > limit
    ]
    if shortages:
        return max(shortages, key=lambda shortage: shortage.missing)
    return simulate_schedule(problem, priced, memories, recompute)


def least_seconds(priced: Priced, recompute: Ints | None = None) -> float:
    """Return what chunks in this order cannot undercut, for much less than it takes to simulate them.

    A stage waits until the first chunk comes down, and when its last B has ended that one goes all the way up.
    """
    costs, backwards = priced.costs, backward_order(priced.chunks)
    first, last = 0, int(backwards[-1])
    down = np.concatenate([[0.0], np.cumsum(costs.forward_s[:-1, first] + costs.transfer_s[first])])
    up = np.concatenate([[0.0], np.cumsum(costs.backward_s[:-1, last] + costs.transfer_s[last])])
    work = priced.work_s
    if recompute is not None:
        work = work + recompute @ costs.recompute_s
    return float((down + work + up).max())


def is_better(found: Schedule | Shortage, best: Schedule | Shortage) -> bool:
    """Return whether a schedule is faster, or a shortage smaller, than the best so far."""
    match found, best:
        case Schedule(), Schedule():
            return found.makespan_s < best.makespan_s
        case Shortage(), Shortage():
            return found.missing < best.missing
        case _:
            return isinstance(found, Schedule)


def simulate_schedule(
    problem: Problem, priced: Priced, memories: SequenceOf[StageMemory], recompute: Ints
) -> Schedule:
    """Simulate given programs with given recompute counts."""
    costs, seconds = priced.costs, []
    for stage, memory in enumerate(memories):
        forward, backward = (
            costs.forward_s[stage],
            costs.backward_s[stage] + recompute[stage] * costs.recompute_s,
        )
        seconds.append(
            np.where(
                memory.directions > 0, forward[memory.chunks], backward[memory.chunks]
            ).tolist()
        )
    timeline = replay(
        [memory.directions.tolist() for memory in memories],
        [memory.chunks.tolist() for memory in memories],
        seconds,
        costs.transfer_s.tolist(),
    )
    return Schedule(problem, priced, tuple(memories), recompute, timeline)


def empty_replica(num_stages: int, makespan_s: float) -> Replica:
    """Return a replica that waits for the others."""
    idle = StagePrediction(busy_s=0.0, recompute_s=0.0, bubble_s=makespan_s, peak_bytes=0)
    return Replica(
        chunks=(),
        recompute=((),) * num_stages,
        programs=((),) * num_stages,
        predicted=(idle,) * num_stages,
    )


def make_replica(schedule: Schedule) -> Replica:
    """Turn a schedule into the IR; its peaks come from the cost model's own replay of the programs."""
    programs = [make_program(m.directions.tolist(), m.chunks.tolist()) for m in schedule.memories]
    recompute = [tuple(row.tolist()) for row in schedule.recompute]
    predicted = []
    for stage, program in enumerate(programs):
        busy = schedule.timeline.busy_s(stage)
        pipeline, priced = schedule.problem.pipeline, schedule.priced
        trace = replay_memory(
            pipeline.profile,
            pipeline.stages,
            stage,
            schedule.problem.sequences,
            priced.loads,
            priced.costs,
            program,
            recompute[stage],
        )
        predicted.append(
            StagePrediction(
                busy_s=busy,
                recompute_s=float(schedule.recompute[stage] @ priced.costs.recompute_s),
                bubble_s=max(0.0, schedule.makespan_s - busy),
                peak_bytes=round(trace.during.max()),
            )
        )
    return Replica(
        chunks=schedule.priced.chunks.chunks,
        recompute=tuple(recompute),
        programs=tuple(programs),
        predicted=tuple(predicted),
        search=schedule.search,
    )
