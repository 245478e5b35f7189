"""The bound: no schedule beats it, and the planner comes close to it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, permutations, product

import numpy as np
import pytest

from infinipipe.ir import Chunk, Op, OpKind, Slice, chunk_chains
from infinipipe.ir.deadlock import find_deadlock
from infinipipe.planner.bound import makespan_bound
from infinipipe.planner.epp import plan_epp
from infinipipe.planner.problem import Problem
from infinipipe.planner.schedule import Schedule
from infinipipe.planner.simulate import simulate
from infinipipe.profiles.cost import chunk_costs, chunk_loads
from tests.planner.toys import toy_problem


def cuts(length: int) -> Iterator[list[tuple[int, int]]]:
    """Every way to slice a sequence."""
    for count in range(length):
        for bounds in combinations(range(1, length), count):
            yield list(pairwise((0, *bounds, length)))


def chunkings(lengths: list[int]) -> Iterator[tuple[Chunk, ...]]:
    """Every set of chunks of two sequences at most, each with at most one part of a sequence."""
    if len(lengths) == 1:
        for pieces in cuts(lengths[0]):
            yield tuple(Chunk((Slice(0, a, b - a),)) for a, b in pieces)
        return
    for first in cuts(lengths[0]):
        for second in cuts(lengths[1]):
            a = [Slice(0, start, stop - start) for start, stop in first]
            b = [Slice(1, start, stop - start) for start, stop in second]
            yield (*(Chunk((p,)) for p in a), *(Chunk((p,)) for p in b))
            if len(a) == 1:
                for host in range(len(b)):
                    yield tuple(Chunk((p, *a)) if i == host else Chunk((p,)) for i, p in enumerate(b))
            elif len(b) == 1:
                for host in range(len(a)):
                    yield tuple(Chunk((p, *b)) if i == host else Chunk((p,)) for i, p in enumerate(a))


def orders(num_chunks: int, chains: list[tuple[int, ...]], *, backward: bool) -> Iterator[tuple[int, ...]]:
    for order in permutations(range(num_chunks)):
        place = {chunk: i for i, chunk in enumerate(order)}
        if all((place[a] > place[b]) == backward for chain in chains for a, b in pairwise(chain)):
            yield order


def merges(forwards: tuple[int, ...], backwards: tuple[int, ...]) -> Iterator[tuple[Op, ...]]:
    """Every program in which each F comes before its B."""
    for places in combinations(range(2 * len(forwards)), len(forwards)):
        f, b = iter(forwards), iter(backwards)
        ops = [
            Op(OpKind.FORWARD, next(f)) if p in places else Op(OpKind.BACKWARD, next(b))
            for p in range(2 * len(forwards))
        ]
        seen: set[int] = set()
        if all(op.chunk in seen or (op.kind == OpKind.FORWARD and not seen.add(op.chunk)) for op in ops):  # type: ignore[func-returns-value]
            yield tuple(ops)


def best_of_all(problem: Problem) -> float:
    """Try every chunking of up to three chunks and every order on two stages, without recompute."""
    lengths = [s.length for s in problem.sequences]
    return min(best_order(problem, chunks) for chunks in chunkings(lengths) if len(chunks) <= 3)


def best_order(problem: Problem, chunks: tuple[Chunk, ...]) -> float:
    pipeline, best = problem.pipeline, float("inf")
    loads = chunk_loads(chunks, problem.sequences)
    costs = chunk_costs(pipeline.profile, pipeline.stages, loads, pipeline.logits_tokens)
    seconds = {OpKind.FORWARD: costs.forward_s.tolist(), OpKind.BACKWARD: costs.backward_s.tolist()}
    chains = chunk_chains(chunks, problem.sequences)
    for forwards in orders(len(chunks), chains, backward=False):
        for backwards in orders(len(chunks), chains, backward=True):
            for programs in product(merges(forwards, backwards), repeat=2):
                if not find_deadlock(programs):
                    times = [[seconds[op.kind][s][op.chunk] for op in program] for s, program in enumerate(programs)]
                    best = min(best, simulate(programs, times, costs.transfer_s.tolist()).makespan_s)
    return best


@pytest.mark.parametrize("lengths", [[1], [6], [3, 4], [1, 5], [2, 2]])
@pytest.mark.parametrize("counts", [[2, 2], [1, 3]])
def test_no_schedule_of_a_tiny_batch_beats_the_bound(lengths: list[int], counts: list[int]) -> None:
    problem = toy_problem(lengths, counts)
    bound, best = makespan_bound(problem.pipeline, problem.sequences, 1), best_of_all(problem)
    assert 0.5 * best < bound <= best * (1 + 1e-12)
    found = plan_epp(problem)
    assert isinstance(found, Schedule)
    assert found.makespan_s >= bound
    assert found.makespan_s <= 1.12 * best


def test_many_short_sequences_come_close_to_the_bound() -> None:
    problem = toy_problem([8, 9, 10, 11] * 40, [2, 2, 2])
    found = plan_epp(problem)
    assert isinstance(found, Schedule)
    assert found.makespan_s < 1.15 * makespan_bound(problem.pipeline, problem.sequences, 1)


def test_forced_recompute_raises_the_bound() -> None:
    lengths = [60, 4]
    free = toy_problem(lengths, [3, 3])
    sizes = free.pipeline.profile.bytes
    kept = 60 * 3 * (sizes.layer_full_per_token + sizes.layer_kv_per_token)
    tight = toy_problem(lengths, [3, 3], 0.7 * kept)
    bounds = [makespan_bound(p.pipeline, p.sequences, 1) for p in (free, tight)]
    assert bounds[1] > 1.05 * bounds[0]
    found = plan_epp(tight)
    assert isinstance(found, Schedule)
    assert found.recompute.sum() > 0
    assert found.makespan_s >= bounds[1]


def test_replicas_share_the_work_but_not_a_sequence() -> None:
    problem = toy_problem([50, *[5] * 30], [3, 3])
    one, two, many = (makespan_bound(problem.pipeline, problem.sequences, n) for n in (1, 2, 1000))
    assert one > two > many
    assert many > makespan_bound(problem.pipeline, problem.sequences[:1], 1) * 0.99
    assert makespan_bound(problem.pipeline, (), 1) == 0.0
    assert np.isfinite(one)
