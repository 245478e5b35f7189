"""A complete schedule of one replica: chunks, programs, recompute, and what the simulator says."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np

from infinipipe.aliases import Floats, Ints
from infinipipe.costs import (
    CostedChunks,
    PackedProgram,
    Recompute,
    StageMemory,
    Timeline,
    simulate,
)
from infinipipe.ir import Chunk, Replica, Search, StagePrediction
from infinipipe.planner.passes.chunking import Chunks
from infinipipe.planner.passes.ladder import Ladder, inputs_only
from infinipipe.planner.passes.order import backward_order
from infinipipe.planner.passes.recompute import Shortage, fit_recompute
from infinipipe.planner.problem import Problem


@dataclass(frozen=True)
class CostedChains:
    """Chunks, chain by chain, and what they cost on every stage."""

    chunks: Chunks
    costs: CostedChunks
    ladder: Ladder
    """What recompute there is to choose from."""
    num_layers: Ints
    """Of each stage, as a column."""

    @property
    def ir_chunks(self) -> tuple[Chunk, ...]:
        """The chunks of all chains, by number."""
        return self.chunks.chunks

    @property
    def num_chunks(self) -> int:
        """Chunks of all chains."""
        return len(self.ir_chunks)

    def recompute(self, levels: Ints) -> Recompute:
        """Return what layers keep at (stages, chunks) levels."""
        return self.ladder.recompute(levels, self.num_layers)

    def recompute_s(self, levels: Ints) -> Floats:
        """Return (stages, chunks) the seconds that levels add to B."""
        return self.ladder.seconds(levels, self.num_layers)


# What a schedule says that no search has named yet.
_BY_HAND = Search(winner="by hand")


@dataclass(frozen=True)
class Schedule:
    """One replica's chunks, ordered and fitted."""

    problem: Problem
    chains: CostedChains
    memories: tuple[StageMemory, ...]
    """One per stage; they hold the programs."""
    levels: Ints
    """(stages, chunks) of recompute, on the ladder of the chains."""
    timeline: Timeline
    search: Search = _BY_HAND

    @property
    def makespan_s(self) -> float:
        """Simulated seconds."""
        return self.timeline.makespan_s

    @property
    def programs(self) -> list[PackedProgram]:
        """One per stage."""
        return [memory.program for memory in self.memories]

    @property
    def forwards_before(self) -> Ints:
        """(stages, chunks) how many F come before each B, in the order of B."""
        num_earlier = np.arange(self.chains.num_chunks)
        rows: list[Ints] = []
        for program in self.programs:
            # Before each B stand all earlier B, and F.
            places = np.flatnonzero(program.is_backward)
            rows.append(places - num_earlier)
        return np.array(rows)

    def won_by(self, winner: str) -> Schedule:
        """Say what made it."""
        return replace(self, search=Search(winner=winner))


Result = Schedule | Shortage
"""What planning comes to: a schedule, or which stage lacks how many bytes."""

NOTHING = Shortage(0, math.inf, 0.0)
"""Before anything has been tried: everything is better."""


def makespan_of(result: Result) -> float:
    """Return the simulated seconds of a result, infinity if it is a shortage."""
    return result.makespan_s if isinstance(result, Schedule) else math.inf


def is_better(result: Result, incumbent: Result) -> bool:
    """Return whether a schedule is faster, or a shortage smaller, than the best so far."""
    match result, incumbent:
        case Schedule(), Schedule():
            return result.makespan_s < incumbent.makespan_s
        case Shortage(), Shortage():
            return result.missing < incumbent.missing
        case _:
            return isinstance(result, Schedule)


def price_chains(
    problem: Problem, chunks: Chunks, make_ladder: Callable[[CostedChunks], Ladder] = inputs_only
) -> CostedChains:
    """Price chunks on every stage, with some ladder of recompute."""
    costs = problem.pipeline.costs
    priced = costs.price(chunks.chunks, problem.sequences)
    num_layers = [stage.num_layers for stage in problem.pipeline.stages]
    return CostedChains(chunks, priced, make_ladder(priced), np.array(num_layers)[:, None])


def order_memories(
    problem: Problem, chains: CostedChains, forwards_before: Ints
) -> tuple[StageMemory, ...]:
    """Return every stage's program and its bytes.

    Args:
        problem: whose pipeline has the stages.
        chains: what the stages run.
        forwards_before: (stages, chunks) how many F come before each B.
    """
    costs = problem.pipeline.costs
    backwards = backward_order(chains.chunks)
    memories: list[StageMemory] = []
    for stage, row in enumerate(forwards_before):
        program = PackedProgram.interleave(row, backwards)
        memories.append(costs.memory(stage, chains.costs, program))
    return tuple(memories)


def fit_schedule(
    problem: Problem, chains: CostedChains, memories: SequenceOf[StageMemory]
) -> Result:
    """Choose recompute levels for given programs and simulate them.

    A shortage is that of the first stage that does not fit; later ones may lack more. (Where levels
    are given, `fixed_schedule` looks at all and returns the largest.)
    """
    rows: list[Ints] = []
    for stage, memory in enumerate(memories):
        limit = problem.pipeline.limits[stage]
        levels = fit_recompute(memory, chains.ladder, limit)
        if isinstance(levels, float):
            return Shortage(stage, levels, limit)
        rows.append(levels)
    return simulate_schedule(problem, chains, memories, np.array(rows, dtype=np.int64))


def fixed_schedule(
    problem: Problem, chains: CostedChains, memories: SequenceOf[StageMemory], levels: Ints
) -> Result:
    """Simulate given programs with given recompute levels, if they fit.

    If they do not, return the largest shortage of all stages.
    """
    shortages = []
    for stage, memory in enumerate(memories):
        limit = problem.pipeline.limits[stage]
        recompute = chains.ladder.recompute(levels[stage], memory.num_layers)
        during = memory.during(recompute)
        most = float(during.max())
        if most > limit:
            shortages.append(Shortage(stage, most, limit))
    if shortages:
        return max(shortages, key=lambda shortage: shortage.missing)
    return simulate_schedule(problem, chains, memories, levels)


def simulate_schedule(
    problem: Problem, chains: CostedChains, memories: SequenceOf[StageMemory], levels: Ints
) -> Schedule:
    """Simulate given programs with given recompute levels."""
    costs = problem.pipeline.costs
    programs = [memory.program for memory in memories]
    seconds: list[Floats] = []
    for stage, program in enumerate(programs):
        recompute = chains.ladder.recompute(levels[stage], memories[stage].num_layers)
        seconds.append(costs.op_seconds(stage, chains.costs, program, recompute))
    timeline = simulate(programs, seconds, chains.costs.transfer_s)
    return Schedule(problem, chains, tuple(memories), levels, timeline)


def quick_bound_s(chains: CostedChains, levels: Ints | None = None) -> float:
    """Return what no order of these chunks can undercut, for much less than it takes to simulate.

    F runs by chunk number in every order, and B backwards within chains. So a stage waits until the
    first chunk comes down, and when its last B has ended that one goes all the way up.
    """
    costs = chains.costs
    first = 0
    last = int(backward_order(chains.chunks)[-1])
    forward_s = costs.forward_s[:-1, first]
    backward_s = costs.backward_s[:-1, last]
    down_s = np.cumsum(forward_s + costs.transfer_s[:, first])
    up_s = np.cumsum(backward_s + costs.transfer_s[:, last])
    work_s = costs.work_s
    if levels is not None:
        recompute_s = chains.recompute_s(levels)
        work_s = work_s + recompute_s.sum(axis=1)
    # The first stage neither waits nor drains.
    waits_s = np.concatenate([[0.0], down_s])
    drains_s = np.concatenate([[0.0], up_s])
    least_s = waits_s + work_s + drains_s
    return float(least_s.max())


def cannot_beat(incumbent: Result, chains: CostedChains, levels: Ints | None = None) -> bool:
    """Return whether no order of these chunks is faster than the incumbent."""
    if not isinstance(incumbent, Schedule):
        return False
    return quick_bound_s(chains, levels) >= incumbent.makespan_s


def empty_replica(num_stages: int, makespan_s: float) -> Replica:
    """Return a replica that waits for the others."""
    idle = StagePrediction(busy_s=0.0, recompute_s=0.0, bubble_s=makespan_s, peak_bytes=0)
    return Replica(
        chunks=(),
        recompute=((),) * num_stages,
        keep_attention=((),) * num_stages,
        programs=((),) * num_stages,
        predicted=(idle,) * num_stages,
    )


def make_replica(schedule: Schedule) -> Replica:
    """Turn a schedule into the IR."""
    recompute = schedule.chains.recompute(schedule.levels)
    keep_input = [tuple(row.tolist()) for row in recompute.keep_input]
    keep_attention = [tuple(row.tolist()) for row in recompute.keep_attention]
    recompute_s = schedule.chains.costs.recompute_seconds(recompute).sum(axis=1)
    programs = [program.unpack() for program in schedule.programs]
    stages = range(len(schedule.memories))
    predicted = [_predict_stage(schedule, stage, float(recompute_s[stage])) for stage in stages]
    return Replica(
        chunks=schedule.chains.ir_chunks,
        recompute=tuple(keep_input),
        keep_attention=tuple(keep_attention),
        programs=tuple(programs),
        predicted=tuple(predicted),
        search=schedule.search,
    )


def _predict_stage(schedule: Schedule, stage: int, recompute_s: float) -> StagePrediction:
    memory = schedule.memories[stage]
    recompute = schedule.chains.ladder.recompute(schedule.levels[stage], memory.num_layers)
    busy_s = schedule.timeline.busy_s(stage)
    during = memory.during(recompute)
    return StagePrediction(
        busy_s=busy_s,
        recompute_s=recompute_s,
        bubble_s=max(0.0, schedule.makespan_s - busy_s),
        peak_bytes=round(during.max()),
    )
