"""Recompute counts: they fit, they agree with the cost model's replay, and they do not waste."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinipipe.costs.cost import replay_memory
from infinipipe.planner.passes.chunking import cut_chunks
from infinipipe.planner.passes.order import make_program
from infinipipe.planner.passes.recompute import StageMemory, fit_recompute
from infinipipe.planner.passes.schedule import Priced, order_memories, price
from infinipipe.planner.problem import Problem, average_work
from tests.planner.toys import TOY_WINDOWS, ToyWindow, toy_leads, toy_problem

CASES = st.tuples(
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.integers(1, 12),
    st.booleans(),
    st.sampled_from(TOY_WINDOWS),
    st.integers(0, 2**32),
)


def ordered(
    problem: Problem, parts: int, even: bool, window: ToyWindow
) -> tuple[Priced, tuple[StageMemory, ...]]:
    pipeline = problem.pipeline
    work = average_work(pipeline.profile, pipeline.num_stages)
    target = float(work.whole(problem.lengths).sum()) / parts
    priced = price(problem, cut_chunks(problem, work, target, 1000, even=even))
    leads = toy_leads(priced.chunks, pipeline.num_stages, window, pipeline.num_stages)
    return priced, order_memories(problem, priced, leads)


def replayed(
    problem: Problem, priced: Priced, stage: int, memory: StageMemory, recompute: list[int]
) -> list[float]:
    pipeline = problem.pipeline
    program = make_program(memory.directions.tolist(), memory.chunks.tolist())
    return replay_memory(
        pipeline.profile,
        pipeline.stages,
        stage,
        problem.sequences,
        priced.loads,
        priced.costs,
        program,
        recompute,
    ).during.tolist()


@given(CASES)
def test_bytes_equal_the_cost_models_replay(
    case: tuple[list[int], list[int], int, bool, ToyWindow, int],
) -> None:
    lengths, counts, parts, even, window, seed = case
    problem = toy_problem(lengths, counts)
    priced, memories = ordered(problem, parts, even, window)
    generator = np.random.default_rng(seed)
    for stage, memory in enumerate(memories):
        recompute = generator.integers(0, counts[stage] + 1, len(memory.kept))
        expected = replayed(problem, priced, stage, memory, recompute.tolist())
        assert memory.during(recompute).tolist() == pytest.approx(expected, rel=1e-12)


@given(CASES)
def test_no_counts_need_less_than_the_least(
    case: tuple[list[int], list[int], int, bool, ToyWindow, int],
) -> None:
    lengths, counts, parts, even, window, seed = case
    _, memories = ordered(toy_problem(lengths, counts), parts, even, window)
    generator = np.random.default_rng(seed)
    for stage, memory in enumerate(memories):
        least, num_chunks = memory.least(), len(memory.kept)
        for recompute in generator.integers(0, counts[stage] + 1, (5, num_chunks)):
            assert np.all(memory.during(recompute) >= least - 1e-3)
        # Each op alone can do with it.
        for position, chunk in enumerate(memory.chunks.tolist()):
            others = np.full(num_chunks, counts[stage])
            own = [
                np.where(np.arange(num_chunks) == chunk, count, others)
                for count in range(counts[stage] + 1)
            ]
            assert min(memory.during(each)[position] for each in own) == pytest.approx(
                least[position]
            )
        assert isinstance(fit_recompute(memory, np.ones(num_chunks), float(least.max()) - 2), float)


@given(CASES)
def test_fits_whenever_full_recompute_does(
    case: tuple[list[int], list[int], int, bool, ToyWindow, int],
) -> None:
    lengths, counts, parts, even, window, seed = case
    problem = toy_problem(lengths, counts)
    priced, memories = ordered(problem, parts, even, window)
    generator = np.random.default_rng(seed)
    for stage, memory in enumerate(memories):
        full = np.full(len(memory.kept), counts[stage])
        least, most = memory.during(full).max(), memory.during(0 * full).max()
        limit = least + generator.uniform(-0.1, 1.0) * (most - least)
        found = fit_recompute(memory, priced.costs.recompute_s, limit)
        if isinstance(found, float):
            assert limit - 1 < least
            assert found > limit - 1
        else:
            assert np.all((found >= 0) & (found <= counts[stage]))
            assert max(replayed(problem, priced, stage, memory, found.tolist())) <= limit
            assert found.sum() == 0 or limit < most + 1


def test_nothing_is_recomputed_with_room() -> None:
    problem = toy_problem([20] * 6, [2, 2])
    priced, memories = ordered(problem, 12, True, "uniform")
    for memory in memories:
        found = fit_recompute(
            memory, priced.costs.recompute_s, memory.during(np.zeros(12, dtype=int)).max() + 1
        )
        assert not isinstance(found, float)
        assert found.tolist() == [0] * 12


def test_a_steady_window_recomputes_no_more_than_it_must() -> None:
    # Four equal chunks are in flight and one of each chunk's two layers has to go.
    problem = toy_problem([8] * 40, [2, 2, 2, 2])
    priced, memories = ordered(problem, 40, True, "adaptive")
    memory, saved = memories[0], priced.costs.saved_bytes[0]
    limit = memory.during(np.zeros(40, dtype=int)).max() - 4 * saved + 1
    found = fit_recompute(memory, priced.costs.recompute_s, limit)
    assert not isinstance(found, float)
    assert 38 <= found.sum() <= 42
