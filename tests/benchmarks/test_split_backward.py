"""I and W in place of B: valid, within memory, as predicted, never slower, and as fast as known where that is known."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import infinipipe
from infinipipe.costs.cost import optimizer_seconds, static_bytes
from infinipipe.costs.predict import check_predictions
from infinipipe.errors import InputError
from infinipipe.ir import Header, Op, OpKind, Replica, Step, loss_denominator
from infinipipe.ir.text import show_program
from infinipipe.ir.verify import verify_header, verify_step
from infinipipe.planner.passes.chunking import Chunks, cut_chunks
from infinipipe.planner.passes.schedule import (
    Schedule,
    fit_schedule,
    make_replica,
    order_memories,
    price,
)
from infinipipe.planner.problem import Problem, average_work
from infinipipe.planner.split_backward import split_backwards
from infinipipe.profiles import Curve, LayerTime, Line, pack_profile
from tests.planner.toys import ROOMY, TOY_WINDOWS, ToyWindow, toy_leads, toy_problem
from tests.plans import make_header

NO_ATTENTION = {"s_per_pair": 0.0, "s_per_slice": 0.0}
NO_CONTEXT = {"s_per_context": 0.0, "s_per_context_token": 0.0, "s_per_continued_token": 0.0}


def with_profile(problem: Problem, **times: object) -> Problem:
    profile = problem.pipeline.profile
    profile = msgspec.structs.replace(
        profile, times=msgspec.structs.replace(profile.times, **times)
    )
    return replace(problem, pipeline=replace(problem.pipeline, profile=profile))


def with_prices(problem: Problem, cost: float = 1.05) -> Problem:
    """Let I have all attention of B and half of the rest, W the other half, both so many times."""
    backward = problem.pipeline.profile.times.layer_backward
    curve = replace_curve(backward.curve, cost / 2)
    inputs = msgspec.structs.replace(backward, curve=curve)
    return with_profile(
        problem,
        layer_input_backward=inputs,
        layer_weight_backward=LayerTime(curve=curve, **NO_ATTENTION, **NO_CONTEXT),
    )


def replace_curve(curve: Curve, scale: float) -> Curve:
    return Curve(tokens=curve.tokens, seconds=tuple(scale * seconds for seconds in curve.seconds))


def ordered(problem: Problem, parts: int, window: ToyWindow) -> Schedule | None:
    """Cut into so many parts, order by a window and recompute what memory asks for; None if that is not enough."""
    pipeline = problem.pipeline
    work = average_work(pipeline.profile, pipeline.num_stages)
    chunks = cut_chunks(
        problem, work, float(work.whole(problem.lengths).sum()) / parts, 1000, even=True
    )
    return scheduled(problem, chunks, window)


def scheduled(problem: Problem, chunks: Chunks, window: ToyWindow) -> Schedule | None:
    priced, num_stages = price(problem, chunks), problem.pipeline.num_stages
    leads = toy_leads(chunks, num_stages, window, num_stages)
    found = fit_schedule(problem, priced, order_memories(problem, priced, leads))
    return found if isinstance(found, Schedule) else None


def as_step(problem: Problem, replica: Replica, makespan_s: float) -> tuple[Header, Step]:
    pipeline, sequences = problem.pipeline, problem.sequences
    profile = pack_profile(pipeline.profile)
    header = make_header(
        model=pipeline.profile.model,
        model_sha256=pipeline.profile.model.sha256,
        dtype=pipeline.profile.dtype,
        stages=pipeline.stages,
        memory_limit_bytes=pipeline.limits,
        batch_size=len(sequences),
        logits_tokens=pipeline.logits_tokens,
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
        step_s=makespan_s
        + max(optimizer_seconds(pipeline.profile, stage) for stage in pipeline.stages),
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
        full = np.full(len(memory.kept), counts[stage])
        least, most = memory.during(full).max(), memory.during(0 * full).max()
        limits.append(int(least + share * (most - least)) + 2)
    tight = replace(problem, pipeline=replace(problem.pipeline, limits=tuple(limits)))
    for found in (roomy, ordered(tight, parts, window)):
        assert found is not None
        replica, makespan_s = split_backwards(found)
        assert makespan_s <= found.makespan_s
        header, step = as_step(found.problem, replica, makespan_s)
        verify_header(header)
        # Peaks are within the limits, and the simulator and the replay of memory say the same of the plan.
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
    """Every chunk takes each stage 1 s for F, 2 s for B, 1 s for I and 1 s for W, and transfers nothing."""

    def layer(seconds: float) -> LayerTime:
        return LayerTime(curve=constant(seconds), **NO_ATTENTION, **NO_CONTEXT)

    def constant(seconds: float) -> Curve:
        return Curve(tokens=(1, 2), seconds=(seconds, seconds))

    return with_profile(
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
        transfer_s=Line(constant=0.0, rate=0.0),
    )


def equal_schedule(problem: Problem, window: ToyWindow = "adaptive") -> Schedule:
    work = average_work(problem.pipeline.profile, problem.pipeline.num_stages)
    found = scheduled(
        problem, cut_chunks(problem, replace(work, s_per_token=1.0), 8.0, 8, even=True), window
    )
    assert found is not None
    assert len(found.priced.chunks.chunks) == len(problem.members)
    return found


@pytest.mark.parametrize(
    ("num_stages", "num_chunks"), [(2, 4), (2, 20), (3, 6), (3, 20), (4, 8), (8, 24)]
)
def test_w_fills_the_drain_of_1f1b(num_stages: int, num_chunks: int) -> None:
    """Where F, I and W take as long, stages wait for the first F only (Qi et al. 2023): (P - 1) (F + I - W)."""
    found = equal_schedule(equal_chunks(num_stages, num_chunks))
    assert found.makespan_s == 3 * (num_chunks + num_stages - 1)
    replica, makespan_s = split_backwards(found)
    assert makespan_s == 3 * num_chunks + num_stages - 1
    assert replica.predicted[-1].bubble_s == num_stages - 1
    assert {predicted.busy_s for predicted in replica.predicted} == {3.0 * num_chunks}


def test_programs_of_two_stages_by_hand() -> None:
    replica, makespan_s = split_backwards(equal_schedule(equal_chunks(2, 3)))
    assert makespan_s == 10
    # Stage 1 hands I over as early as it can, and does all W at the end. Stage 0 waits from 2 to 3 only.
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
    makespans, static = (
        [],
        [static_bytes(roomy.problem.pipeline.profile, s) for s in roomy.problem.pipeline.stages],
    )
    for share in (0.0, 0.1, 0.3, 1.0):
        limits = tuple(int(a + share * max(0, b - a)) + 2 for a, b in zip(whole, free, strict=True))
        assert all(limit > least for limit, least in zip(limits, static, strict=True))
        pipeline = replace(roomy.problem.pipeline, limits=limits)
        found = equal_schedule(replace(roomy.problem, pipeline=pipeline))
        assert not found.recompute.any()
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
        float(memory.during(roomy.recompute[s]).max()) for s, memory in enumerate(roomy.memories)
    )
    static = static_bytes(problem.pipeline.profile, problem.pipeline.stages[0])
    found = ordered(
        with_prices(toy_problem([30] * 6, [2, 2], 0.8 * (most - static))), 6, "adaptive"
    )
    assert found is not None
    assert found.recompute.any()
    replica, makespan_s = split_backwards(found)
    assert makespan_s < found.makespan_s
    assert replica.recompute == make_replica(found).recompute
    assert [p.recompute_s for p in replica.predicted] == [
        p.recompute_s for p in make_replica(found).predicted
    ]


def test_profiles_without_prices_are_refused() -> None:
    found = ordered(
        with_profile(
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
    users = [
        path.name for path in folder.rglob("*.py") if "planner.split_backward" in path.read_text()
    ]
    assert users == []
