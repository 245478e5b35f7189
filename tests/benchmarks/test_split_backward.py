"""I and W in place of B: valid, within memory, as predicted, and never slower.

They are as fast as known where that is known.
"""

from __future__ import annotations

import copy
import hashlib
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import infinipipe
from benchmarks.split_backward import MemoryCursor, split_backwards
from infinipipe.costs import PackedProgram, check_predictions
from infinipipe.errors import InputError
from infinipipe.ir import (
    Header,
    Op,
    OpKind,
    Replica,
    Step,
    loss_denominator,
    show_program,
    verify_header,
    verify_step,
)
from infinipipe.planner.passes.chunking import Chunks, cut_chunks
from infinipipe.planner.passes.schedule import (
    Schedule,
    fit_schedule,
    make_replica,
    order_memories,
    price_chains,
)
from infinipipe.planner.problem import Problem
from infinipipe.profiles import Curve, LayerTime, pack_profile
from tests.planner.toys import (
    NO_LINKS,
    ROOMY,
    TOY_WINDOWS,
    ToyWindow,
    cut,
    drawn_recompute,
    in_whole,
    toy_leads,
    toy_problem,
    with_limits,
    with_profile,
)
from tests.plans import make_header, split_some

NO_ATTENTION = {"s_per_pair": 0.0, "s_per_slice": 0.0}
NO_CONTEXT = {"s_per_context": 0.0, "s_per_context_token": 0.0, "s_per_continued_token": 0.0}


def with_times(problem: Problem, **times: object) -> Problem:
    profile = problem.pipeline.costs.profile
    changed = msgspec.structs.replace(profile.times, **times)
    return with_profile(problem, msgspec.structs.replace(profile, times=changed))


def with_prices(problem: Problem, cost: float = 1.05) -> Problem:
    """Let I have all attention of B and half of the rest, W the other half, both so many times."""
    backward = problem.pipeline.costs.profile.times.layer_backward
    curve = replace_curve(backward.curve, cost / 2)
    inputs = msgspec.structs.replace(backward, curve=curve)
    return with_times(
        problem,
        layer_input_backward=inputs,
        layer_weight_backward=LayerTime(curve=curve, **NO_ATTENTION, **NO_CONTEXT),
    )


def replace_curve(curve: Curve, scale: float) -> Curve:
    return Curve(tokens=curve.tokens, seconds=tuple(scale * seconds for seconds in curve.seconds))


def ordered(problem: Problem, parts: int, window: ToyWindow) -> Schedule | None:
    """Cut into so many parts, order by a window and recompute what memory asks for.

    Return None if that is not enough.
    """
    chunks, _, _ = cut(problem, parts, 1000, even=True)
    return scheduled(problem, chunks, window)


def scheduled(problem: Problem, chunks: Chunks, window: ToyWindow) -> Schedule | None:
    chains, num_stages = price_chains(problem, chunks), problem.pipeline.num_stages
    leads = toy_leads(chunks, num_stages, window, num_stages)
    found = fit_schedule(problem, chains, order_memories(problem, chains, leads))
    return found if isinstance(found, Schedule) else None


def as_step(problem: Problem, replica: Replica, makespan_s: float) -> tuple[Header, Step]:
    pipeline, sequences = problem.pipeline, problem.sequences
    costs = pipeline.costs
    profile = pack_profile(costs.profile)
    header = make_header(
        model=costs.model,
        model_sha256=costs.model.sha256,
        dtype=costs.profile.dtype,
        stages=pipeline.stages,
        memory_limit_bytes=pipeline.limits,
        batch_size=len(sequences),
        logits_tokens=costs.logits_tokens,
        profile=msgspec.Raw(profile),
        profile_sha256=hashlib.sha256(profile).hexdigest(),
    )
    step = Step(
        index=0,
        sequences=sequences,
        denominator=loss_denominator(sequences, "token"),
        replicas=(replica,),
        makespan_s=makespan_s,
        bound_s=0.0,
        step_s=makespan_s + costs.end_of_step_s,
    )
    return header, step


def kinds(replica: Replica) -> list[str]:
    return ["".join(op.kind.value for op in program) for program in replica.programs]


CASES = st.tuples(
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.integers(1, 12),
    st.sampled_from(TOY_WINDOWS),
    st.floats(0.0, 1.0),
)


@settings(max_examples=40)
@given(CASES)
def test_valid_within_memory_as_predicted_and_never_slower(
    case: tuple[list[int], list[int], int, ToyWindow, float],
) -> None:
    lengths, counts, parts, window, share = case
    problem = with_prices(toy_problem(lengths, counts))
    roomy = ordered(problem, parts, window)
    assert roomy is not None
    # Limits between what full recompute takes and what none does.
    limits = []
    for stage, memory in enumerate(roomy.memories):
        full = np.full(len(memory.activation_bytes), counts[stage])
        least, most = memory.during(in_whole(full)).max(), memory.during(in_whole(0 * full)).max()
        limits.append(int(least + share * (most - least)) + 2)
    tight = with_limits(problem, limits)
    for found in (roomy, ordered(tight, parts, window)):
        assert found is not None
        replica, makespan_s = split_backwards(found)
        assert makespan_s <= found.makespan_s
        header, step = as_step(found.problem, replica, makespan_s)
        verify_header(header)
        # Peaks are within the limits, and the simulator and the ledger say the same of the plan.
        verify_step(header, step)
        check_predictions(header, step)
        # No order has changed.
        for before, after in zip(make_replica(found).programs, replica.programs, strict=True):
            whole = [
                Op(OpKind.BACKWARD, op.chunk) if op.kind == OpKind.BACKWARD_INPUT else op
                for op in after
            ]
            assert [op for op in whole if op.kind != OpKind.BACKWARD_WEIGHT] == list(before)


def equal_chunks(num_stages: int, num_chunks: int, room_bytes: float = ROOMY) -> Problem:
    """Every chunk takes each stage 1 s for F, 2 s for B, 1 s for I and 1 s for W.

    It transfers nothing.
    """

    def layer(seconds: float) -> LayerTime:
        return LayerTime(curve=constant(seconds), **NO_ATTENTION, **NO_CONTEXT)

    def constant(seconds: float) -> Curve:
        return Curve(tokens=(1, 2), seconds=(seconds, seconds))

    return with_times(
        toy_problem([8] * num_chunks, [1] * num_stages, room_bytes),
        layer_forward=layer(1.0),
        layer_backward=layer(2.0),
        layer_input_backward=layer(1.0),
        layer_weight_backward=layer(1.0),
        chunk_forward_s=0.0,
        chunk_backward_s=0.0,
        embedding_forward=constant(0.0),
        embedding_backward=constant(0.0),
        head_forward=constant(0.0),
        head_backward=constant(0.0),
        links=NO_LINKS,
    )


def equal_schedule(problem: Problem, window: ToyWindow = "adaptive") -> Schedule:
    work = problem.pipeline.costs.work
    found = scheduled(
        problem, cut_chunks(problem, replace(work, s_per_token=1.0), 8.0, 8, even=True), window
    )
    assert found is not None
    assert len(found.chains.ir_chunks) == len(problem.members)
    return found


@pytest.mark.parametrize(
    ("num_stages", "num_chunks"), [(2, 4), (2, 20), (3, 6), (3, 20), (4, 8), (8, 24)]
)
def test_w_fills_the_drain_of_1f1b(num_stages: int, num_chunks: int) -> None:
    """Where F, I and W take as long, stages wait for the first F only: (P - 1) (F + I - W).

    See Qi et al. 2023.
    """
    found = equal_schedule(equal_chunks(num_stages, num_chunks))
    assert found.makespan_s == 3 * (num_chunks + num_stages - 1)
    replica, makespan_s = split_backwards(found)
    assert makespan_s == 3 * num_chunks + num_stages - 1
    assert replica.predicted[-1].bubble_s == num_stages - 1
    assert {predicted.busy_s for predicted in replica.predicted} == {3.0 * num_chunks}


def test_programs_of_two_stages_by_hand() -> None:
    replica, makespan_s = split_backwards(equal_schedule(equal_chunks(2, 3)))
    assert makespan_s == 10
    # Stage 1 hands I over as early as it can, and does all W at the end. Stage 0 waits from 2 to 3
    # only.
    assert show_program(0, replica.programs[0]) == "0F0 0F1 0I0 0F2 0B1 0B2 0W0"
    assert show_program(1, replica.programs[1]) == "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2"


def test_one_stage_has_nothing_to_wait_for() -> None:
    found = equal_schedule(equal_chunks(1, 4))
    assert split_backwards(found) == (make_replica(found), found.makespan_s)


def test_memory_holds_w_back() -> None:
    """With less memory, fewer I wait for their W, and with just enough for B, none does."""
    roomy = equal_schedule(equal_chunks(3, 9))
    replica, _ = split_backwards(roomy)
    whole = [predicted.peak_bytes for predicted in make_replica(roomy).predicted]
    free = [predicted.peak_bytes for predicted in replica.predicted]
    assert any(b > a for a, b in zip(whole, free, strict=True))
    makespans, costs = [], roomy.problem.pipeline.costs
    static = [costs.static_bytes(stage) for stage in range(3)]
    for share in (0.0, 0.1, 0.3, 1.0):
        limits = tuple(int(a + share * max(0, b - a)) + 2 for a, b in zip(whole, free, strict=True))
        assert all(limit > least for limit, least in zip(limits, static, strict=True))
        found = equal_schedule(with_limits(roomy.problem, limits))
        assert not found.levels.any()
        replica, makespan_s = split_backwards(found)
        assert all(
            p.peak_bytes <= limit for p, limit in zip(replica.predicted, limits, strict=True)
        )
        makespans.append(makespan_s)
    assert makespans == sorted(makespans, reverse=True)
    assert makespans[0] > makespans[-1] == 3 * 9 + 2


def test_dear_splits_are_left_whole() -> None:
    found = ordered(
        with_prices(toy_problem([30, 20, 9, 9, 9, 9], [2, 2, 2]), cost=4.0), 8, "adaptive"
    )
    assert found is not None
    assert split_backwards(found) == (make_replica(found), found.makespan_s)


def test_recompute_is_done_in_i_and_kept_until_w() -> None:
    problem = with_prices(toy_problem([30] * 6, [2, 2]))
    roomy = ordered(problem, 6, "adaptive")
    assert roomy is not None
    most = max(
        float(memory.during(in_whole(roomy.levels[s])).max())
        for s, memory in enumerate(roomy.memories)
    )
    static = problem.pipeline.costs.static_bytes(0)
    found = ordered(
        with_prices(toy_problem([30] * 6, [2, 2], 0.8 * (most - static))), 6, "adaptive"
    )
    assert found is not None
    assert found.levels.any()
    replica, makespan_s = split_backwards(found)
    assert makespan_s < found.makespan_s
    assert replica.recompute == make_replica(found).recompute
    assert [p.recompute_s for p in replica.predicted] == [
        p.recompute_s for p in make_replica(found).predicted
    ]


def test_profiles_without_prices_are_refused() -> None:
    found = ordered(
        with_times(
            toy_problem([9, 9], [1, 1]), layer_input_backward=None, layer_weight_backward=None
        ),
        2,
        "serial",
    )
    assert found is not None
    with pytest.raises(InputError, match=r"prices F and B only; .*--analytic"):
        split_backwards(found)


def test_nothing_that_plans_for_a_run_comes_here() -> None:
    folder = Path(infinipipe.__file__).parent
    users = [path.name for path in folder.rglob("*.py") if "split_backward" in path.read_text()]
    assert users == []


@settings(max_examples=40)
@given(CASES, st.integers(0, 2**32))
def test_bytes_counted_op_by_op_are_those_of_the_ledger(
    case: tuple[list[int], list[int], int, ToyWindow, float], seed: int
) -> None:
    """Of programs with some B cut and each W anywhere behind its I."""
    lengths, counts, parts, window, _ = case
    problem = with_prices(toy_problem(lengths, counts))
    costs, generator = problem.pipeline.costs, np.random.default_rng(seed)
    found = ordered(problem, parts, window)
    assert found is not None
    replica, _ = split_backwards(found)
    costed = found.chains.costs
    input_weight = costs.price_input_weight(costed)
    for stage, whole in enumerate(make_replica(found).programs):
        for program in (whole, replica.programs[stage], split_some(whole, generator)):
            recompute = drawn_recompute(generator, counts[stage], len(replica.chunks))
            memory = costs.memory(stage, costed, PackedProgram.pack(program))
            cursor = MemoryCursor(costs, stage, costed, program, recompute, input_weight)
            during, after = [], []
            for op in program:
                during.append(cursor.run(op))
                after.append(cursor.held)
            assert during == pytest.approx(memory.during(recompute).tolist(), rel=1e-12)
            assert after == pytest.approx(memory.after(recompute).tolist(), rel=1e-12)


def test_a_copy_of_a_cursor_goes_on_by_itself() -> None:
    found = ordered(toy_problem([30, 9], [2, 2]), 4, "uniform")
    assert found is not None
    costs, program = found.problem.pipeline.costs, make_replica(found).programs[0]
    cursor = MemoryCursor(costs, 0, found.chains.costs, program, in_whole(found.levels[0]))
    for place, op in enumerate(program):
        copied = copy.copy(cursor)
        ahead = [copied.run(each) for each in program[place:]]
        assert copied.held == costs.static_bytes(0)
        assert cursor.run(op) == ahead[0]
