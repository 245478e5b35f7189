"""What users of other systems met: memory that surprised them, unbalanced stages, lame solvers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence as SequenceOf
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyscipopt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from infinipipe.costs import Work
from infinipipe.costs.chunks import attention_bytes_per_token
from infinipipe.dataset import BYTES, Dataset, open_dataset
from infinipipe.errors import InfeasibleError, VerifyError
from infinipipe.ir import (
    Chunk,
    Header,
    Layout,
    OpKind,
    Replica,
    Sequence,
    Slice,
    Step,
    open_plan,
    verify_plan,
    verify_step,
)
from infinipipe.planner import POLICIES, CompileOptions, compile_plan
from infinipipe.planner.batches import Batches, steps_per_epoch
from infinipipe.planner.compare import compare_policies
from infinipipe.planner.compile import draw_batches
from infinipipe.planner.passes.chunking import cut_chunks
from infinipipe.planner.passes.order import windowed_order
from infinipipe.planner.passes.packing import pack
from infinipipe.planner.passes.partition import balanced_costs, make_stages
from infinipipe.planner.passes.recompute import Shortage, fit_recompute
from infinipipe.planner.passes.schedule import (
    Result,
    Schedule,
    make_replica,
    order_memories,
    price_chains,
)
from infinipipe.planner.policies import paper
from infinipipe.planner.policies import tied_recompute as diagonals
from infinipipe.planner.policies.baselines import plan_1f1b
from infinipipe.planner.policies.epp import plan_epp
from infinipipe.planner.problem import Pipeline, Problem
from infinipipe.profiles import PRESETS, Profile, read_model
from infinipipe.profiles.analytic import analytic_profile
from infinipipe.profiles.models import model_from_config
from infinipipe.reports.compiled import plan_report
from infinipipe.units import show_bytes
from tests.planner.toys import (
    ROOMY,
    ROUNDING,
    draw_lengths,
    in_whole,
    roomy_limits,
    toy_costs,
    toy_problem,
    toy_profile,
    toy_sequences,
    with_profile,
)

TOKENS = Work(s_per_token=1.0, s_per_pair=0.0, s_per_slice=0.0)
GB = 10**9


def dataset_of(folder: Path, lengths: SequenceOf[int]) -> Dataset:
    path = folder / "dataset.jsonl"
    path.write_text("".join(json.dumps({"length": length}) + "\n" for length in lengths))
    return open_dataset(path, BYTES, 256)


def compiled(
    folder: Path, lengths: SequenceOf[int], profile: Profile, **options: Any
) -> tuple[Header, list[Step]]:
    """Compile for one pipeline, read the plan back and verify it."""
    checked = CompileOptions(**{"sequence_parallel": 1, "num_replicas": 1, **options})
    compile_plan(dataset_of(folder, lengths), profile, checked, folder / "plan.msgpack")
    with open_plan(folder / "plan.msgpack") as reader:
        verify_plan(reader)
        return reader.header, list(reader)


def limits_of(profile: Profile, counts: SequenceOf[int], extra: float) -> tuple[int, ...]:
    """Return what stages of so many layers hold between steps, and so much more."""
    return roomy_limits(toy_costs(profile, counts), extra)


def lengths_of(chunks: SequenceOf[Chunk]) -> list[int]:
    return [chunk.num_tokens for chunk in chunks]


# Memory: the last stage, chunks in flight, rare long sequences.


@pytest.fixture(scope="module")
def large_vocabulary() -> Profile:
    model = model_from_config("large-vocabulary", PRESETS["tiny"] | {"vocab_size": 151_936})
    return analytic_profile(model, "a800-80g")


def test_logits_of_8192_tokens_and_151936_words_never_stand_together(
    tmp_path: Path, large_vocabulary: Profile
) -> None:
    """The limit is a byte below what all logits in float32 would take: 4.64 GiB."""
    dense = 8192 * 151_936 * 4
    assert dense / 2**30 == pytest.approx(4.64, abs=0.01)
    limits = limits_of(large_vocabulary, [4, 4], dense - 1)
    header, (step,) = compiled(
        tmp_path, [8192], large_vocabulary, num_stages=2, memory_limit_bytes=limits
    )
    assert header.logits_tokens * 151_936 * 4 <= 256 * 2**20
    (replica,) = step.replicas
    assert (
        logits_bytes(large_vocabulary, header, replica)
        <= replica.predicted[1].peak_bytes
        < limits[1]
    )


@pytest.mark.parametrize("pieces", [1.2, 0.4])
def test_a_piece_of_logits_counts_on_the_last_stage(
    tmp_path: Path, large_vocabulary: Profile, pieces: float
) -> None:
    piece = 441 * large_vocabulary.bytes.logits_per_token
    limits = limits_of(large_vocabulary, [7, 1], pieces * piece)
    header, (step,) = compiled(
        tmp_path, [8192], large_vocabulary, num_stages=2, memory_limit_bytes=limits
    )
    assert header.logits_tokens == 441
    (replica,) = step.replicas
    assert (
        logits_bytes(large_vocabulary, header, replica)
        <= replica.predicted[1].peak_bytes
        <= limits[1]
    )
    assert max(lengths_of(replica.chunks)) < pieces * 441 or pieces > 1


def logits_bytes(profile: Profile, header: Header, replica: Replica) -> int:
    """Return what the last stage needs at least.

    That is what it always holds, and the largest block of logits.
    """
    tokens = min(header.logits_tokens, max(lengths_of(replica.chunks)))
    counts = [stage.num_layers for stage in header.stages]
    return limits_of(profile, counts, tokens * profile.bytes.logits_per_token)[-1]


def test_no_room_for_any_logits_is_refused_on_the_last_stage(
    tmp_path: Path, large_vocabulary: Profile
) -> None:
    limits = (
        2**40,
        limits_of(large_vocabulary, [7, 1], 4 * large_vocabulary.bytes.logits_per_token)[1],
    )
    with pytest.raises(
        InfeasibleError, match=r"stage 1 needs [\d.]+ MiB in the best plan found, [\d.]+ MiB more"
    ):
        compiled(tmp_path, [8192], large_vocabulary, num_stages=2, memory_limit_bytes=limits)


def test_stages_of_1_2_2_3_layers_report_the_peak_of_the_heaviest(tmp_path: Path) -> None:
    profile = toy_profile(8)
    limits = limits_of(profile, [1, 2, 2, 3], 1_000_000)
    options = {"num_stages": 4, "memory_limit_bytes": limits}
    header, (step,) = compiled(tmp_path, [20] * 8, profile, **options)
    assert [stage.num_layers for stage in header.stages] == [1, 2, 2, 3]
    peaks = [predicted.peak_bytes for predicted in step.replicas[0].predicted]
    assert max(peaks) == peaks[3] > limits_of(profile, [1, 2, 2, 3], 0)[3]
    # Spread evenly, the same layers would seem to need much less.
    assert peaks[3] > 1.3 * sum(limits_of(profile, [1, 2, 2, 3], 0)) / 4
    dataset = dataset_of(tmp_path, [20] * 8)
    request = CompileOptions(**options).resolve(profile, len(dataset))
    (row,) = compare_policies(dataset, profile, request, draw_batches(dataset, request), ["epp"])
    assert row.feasible
    assert row.peak_bytes == tuple(peaks)


def test_stages_of_8_16_16_and_8_gb_recompute_differently_and_keep_to_their_limits(
    tmp_path: Path,
) -> None:
    shape = {
        "num_hidden_layers": 24,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    }
    shape |= {"head_dim": 128, "intermediate_size": 5504, "vocab_size": 32_000}
    profile = analytic_profile(model_from_config("llama-1.3b", PRESETS["tiny"] | shape), "a800-80g")
    limits = (8 * GB, 16 * GB, 16 * GB, 8 * GB)
    header, (step,) = compiled(
        tmp_path, [2048] * 48, profile, num_stages=4, memory_limit_bytes=limits
    )
    assert header.memory_limit_bytes == limits
    (replica,) = step.replicas
    shares = [
        (sum(counts) + sum(without_attention)) / len(counts) / stage.num_layers
        for counts, without_attention, stage in zip(
            replica.recompute, replica.keep_attention, header.stages, strict=True
        )
    ]
    assert shares[0] > 0.5
    assert shares[1] < 0.5 * shares[0]
    assert shares[2] < shares[3]
    assert all(
        predicted.peak_bytes <= limit
        for predicted, limit in zip(replica.predicted, limits, strict=True)
    )


def test_ten_thousand_short_and_one_long_at_the_end_fail_before_any_step_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [10] * 10_000 + [3000]
    limits = limits_of(toy_profile(6), [3, 3], 2_000_000)
    calls: list[int] = []

    def counted(problem: Problem) -> Result:
        calls.append(len(problem.members))
        return plan_epp(problem)

    monkeypatch.setitem(POLICIES, "epp", counted)
    with pytest.raises(InfeasibleError) as failure:
        compiled(
            tmp_path,
            lengths,
            toy_profile(6),
            num_stages=2,
            batch_size=32,
            memory_limit_bytes=limits,
        )
    # One plan, of the long sequence alone; nothing is written.
    assert calls == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["dataset.jsonl"]
    rows = dataset_of(tmp_path, lengths).rows
    batches = Batches(rows, 32, steps_per_epoch(10_001, 32), 0)
    index = next(index for index, drawn in enumerate(batches.rows_of_steps()) if 10_000 in drawn)
    found = re.fullmatch(
        r"step (\d+) does not fit: stage (\d) needs ([\d.]+) MiB in the best plan found, "
        r"([\d.]+) (\w+) more than its "
        r"limit of ([\d.]+) MiB; raise --memory or --devices, or lower --max-length",
        str(failure.value),
    )
    assert found
    assert int(found[1]) == index
    assert float(found[6]) == pytest.approx(limits[int(found[2])] / 2**20, abs=0.05)
    assert float(found[3]) - float(found[6]) == pytest.approx(
        float(found[4]) / (1024 if found[5] == "KiB" else 1), 0.1
    )


def test_a_rare_long_sequence_sets_the_peak_that_is_reported(tmp_path: Path) -> None:
    profile = toy_profile(6)
    _, steps = compiled(
        tmp_path,
        [10] * 63 + [900],
        profile,
        num_stages=2,
        batch_size=8,
        memory_limit_bytes=limits_of(profile, [3, 3], 2**40),
    )
    (worst,) = (
        step for step in steps if max(sequence.length for sequence in step.sequences) == 900
    )
    peaks = [predicted.peak_bytes for predicted in worst.replicas[0].predicted]
    others = [
        p.peak_bytes for step in steps if step is not worst for p in step.replicas[0].predicted
    ]
    assert max(others) < min(peaks)
    with open_plan(tmp_path / "plan.msgpack") as reader:
        report = "\n".join(plan_report(reader, 0, 1.0))
    for stage, peak in enumerate(peaks):
        assert re.search(rf"stage {stage} +3 layers, peak {show_bytes(peak)} of 1.00 TiB", report)


@pytest.mark.parametrize("num_layers", [24, 23])
def test_recompute_counts_need_not_divide_the_layers(num_layers: int) -> None:
    problem = toy_problem([30] * 6, [num_layers])
    chains = price_chains(problem, cut_chunks(problem, TOKENS, 30, 30))
    (memory,) = order_memories(
        problem, chains, np.minimum(windowed_order(chains.chunks, 1, "uniform", 1) + 2, 6)
    )
    none, full = (
        float(memory.during(in_whole(np.full(6, count))).max()) for count in (0, num_layers)
    )
    seen: set[int] = set()
    for limit in np.linspace(full + 2, none, 60):
        counts = fit_recompute(memory, chains.ladder, float(limit))
        assert not isinstance(counts, float)
        assert memory.during(in_whole(counts)).max() <= limit
        assert 0 <= counts.min() <= counts.max() <= num_layers
        seen |= set(counts.tolist())
    assert {7, num_layers} <= seen


def capped(problem: Problem, most_tokens: int) -> Problem:
    """Return a problem of a model so wide that kernels can index no more tokens of a chunk."""
    profile = problem.pipeline.costs.profile
    model = msgspec.structs.replace(profile.model, intermediate_size=(2**31 - 1) // most_tokens)
    return with_profile(problem, msgspec.structs.replace(profile, model=model))


@pytest.mark.parametrize("policy", ["epp", "paper", "terapipe", "seq1f1b", "chunkflow"])
@pytest.mark.parametrize("counts", [[2, 2], [4]])
@pytest.mark.parametrize("cap", [8, 10])
def test_a_sequence_of_20_tokens_is_sliced_where_a_chunk_can_have_fewer(
    policy: str, counts: list[int], cap: int
) -> None:
    found = POLICIES[policy](capped(toy_problem([20], counts), cap))
    assert isinstance(found, Schedule)
    lengths = lengths_of(found.chains.ir_chunks)
    assert sum(lengths) == 20
    assert len(lengths) >= 20 / cap
    assert max(lengths) <= cap


@pytest.mark.parametrize("policy", ["gpipe", "1f1b"])
def test_packers_refuse_a_sequence_of_20_tokens_where_a_chunk_can_have_8(policy: str) -> None:
    assert isinstance(POLICIES[policy](capped(toy_problem([20], [2, 2]), 8)), Shortage)


@pytest.mark.parametrize("policy", POLICIES)
def test_eight_sevens_make_eight_chunks_where_a_chunk_can_have_8(policy: str) -> None:
    found = POLICIES[policy](capped(toy_problem([7] * 8, [2, 2]), 8))
    assert isinstance(found, Schedule)
    lengths = lengths_of(found.chains.ir_chunks)
    assert max(lengths) <= 7
    assert len(lengths) >= 8
    assert policy not in ("gpipe", "1f1b") or lengths == [7] * 8


def test_a_sequence_too_long_for_one_kernel_is_sliced(tmp_path: Path) -> None:
    """At 11,008 elements a token, 2**31 are reached at 195,084 tokens."""
    profile = analytic_profile(read_model("llama-7b"), "a800-80g")
    _, (step,) = compiled(
        tmp_path, [300_000, 2000], profile, num_stages=1, memory_limit_bytes=(2**50,)
    )
    lengths = lengths_of(step.replicas[0].chunks)
    assert sum(lengths) == 302_000
    assert max(lengths) * 11_008 < 2**31


# Balance, planner, solver.


def attention_s(*slices: tuple[int, int]) -> float:
    """Return what attention adds to F of one chunk of (start, length) on a layer between others."""
    profile = toy_profile(3)
    chunk = Chunk((*(Slice(i, start, length) for i, (start, length) in enumerate(slices)),))
    sequences = tuple(
        Sequence(i, start + length + 1, 1) for i, (start, length) in enumerate(slices)
    )
    seconds = []
    for s_per_pair in (0.0, 1.0):
        layer = msgspec.structs.replace(profile.times.layer_forward, s_per_pair=s_per_pair)
        times = msgspec.structs.replace(profile.times, layer_forward=layer)
        priced = msgspec.structs.replace(profile, times=times)
        costed = toy_costs(priced, [1, 1, 1], 1024).price((chunk,), sequences)
        seconds.append(float(costed.forward_s[1, 0]))
    return seconds[1] - seconds[0]


def test_attention_of_1024_tokens_costs_twice_that_of_two_times_512() -> None:
    halves = attention_s((0, 512)) + attention_s((0, 512))
    assert attention_s((0, 1024)) == pytest.approx(2 * halves, rel=1e-3)


def test_four_equal_slices_of_4096_tokens_cost_1_3_5_and_7() -> None:
    work = Work(s_per_token=1e-12, s_per_pair=1.0, s_per_slice=0.0)
    for costs in (
        [attention_s((start, 1024)) for start in range(0, 4096, 1024)],
        [work.between(start, start + 1024) for start in range(0, 4096, 1024)],
    ):
        assert [cost / costs[0] for cost in costs] == pytest.approx([1, 3, 5, 7], rel=4e-3)


def test_a_pack_of_512_and_512_costs_two_squares_not_one() -> None:
    assert attention_s((0, 512), (0, 512)) == pytest.approx(512**2, rel=3e-3)
    assert attention_s((0, 1024)) == pytest.approx(1024**2 / 2, rel=3e-3)


def test_every_sequence_of_a_bin_counts() -> None:
    work = toy_costs(toy_profile(6), [3, 3]).work
    shorts = [
        Slice(i, 0, length)
        for i, length in enumerate(sorted(draw_lengths("wikipedia", 100, 0), reverse=True))
    ]
    target = sum(work.between(0, piece.length) for piece in shorts) / 7
    packed = pack(shorts, [], work, target, 10**6).full
    assert len(packed) == 7
    assert max(len(each.slices) for each in packed) > 10
    for each in packed:
        assert each.work == pytest.approx(sum(work.between(p.start, p.stop) for p in each.slices))
        assert each.tokens == sum(p.length for p in each.slices)


@pytest.mark.parametrize("num_stages", [4, 8])
def test_a_large_vocabulary_makes_the_last_stage_smaller_and_the_step_no_slower(
    num_stages: int,
) -> None:
    profile = analytic_profile(read_model("llama3-8b"), "a800-80g")
    lengths = draw_lengths("wikipedia", 64, 0)
    limits = (2**45,) * num_stages
    found = balanced_costs(profile, Layout(num_stages=num_stages), limits, np.array(lengths))
    counts = [stage.num_layers for stage in found.stages]
    assert counts[-1] == min(counts) < 32 // num_stages
    makespans = []
    for stages in (found.stages, make_stages([32 // num_stages] * num_stages)):
        pipeline = Pipeline(found.with_stages(stages), limits, context_tokens=1)
        schedule = plan_epp(Problem(pipeline, toy_sequences(lengths), tuple(range(len(lengths)))))
        assert isinstance(schedule, Schedule)
        makespans.append(schedule.makespan_s)
    assert makespans[0] < makespans[1]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_less_memory_than_the_weights_names_the_stage_its_need_and_its_limit(
    tmp_path: Path, stage: int
) -> None:
    profile = toy_profile(8)
    needs = limits_of(profile, [1, 1, 1, 1], 0)
    limits = (*(ROOMY,) * stage, needs[stage] // 2, *(ROOMY,) * (3 - stage))
    need, limit = needs[stage] / 2**20, needs[stage] / 2**21
    message = rf"stage {stage} needs {need:.2f} MiB for .* limit is {limit:.2f} MiB;"
    with pytest.raises(InfeasibleError, match=message):
        compiled(tmp_path, [20], profile, num_stages=4, memory_limit_bytes=limits)


SHORT_AND_LONG = [600, *[20] * 60]


def tight_problem() -> Problem:
    """Return a problem for which the paper's algorithm asks its solver."""
    kept = 600 * 2 * toy_profile(8).bytes.layer_full_per_token
    return toy_problem(SHORT_AND_LONG, [2, 2, 2, 2], 0.9 * kept)


def paper_plan(problem: Problem) -> tuple[Schedule, Replica]:
    found = paper.plan_paper(problem)
    assert isinstance(found, Schedule)
    replica = make_replica(found)
    for predicted, limit in zip(replica.predicted, problem.pipeline.limits, strict=True):
        assert predicted.peak_bytes <= limit
    return found, replica


def test_a_solver_that_may_not_search_still_gives_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = tight_problem()
    whole, _ = paper_plan(problem)
    monkeypatch.setattr(diagonals, "_MOST_NODES", 0)
    monkeypatch.setattr(diagonals, "_GAP", 1e9)
    found, replica = paper_plan(problem)
    assert found.levels.any()
    assert found.makespan_s >= whole.makespan_s
    told = replica.search
    assert told is not None
    assert told.solver == "SCIP"
    assert told.status is not None
    assert "nodelimit" in told.status
    assert told.gap is None


def test_a_solver_that_ends_says_so_in_the_plan() -> None:
    _, replica = paper_plan(tight_problem())
    told = replica.search
    assert told is not None
    assert (told.solver, told.gap) == ("SCIP", pytest.approx(0, abs=0.02))
    assert told.status is not None
    assert set(told.status.split(", ")) <= {"optimal", "gaplimit"}


@pytest.mark.parametrize("silenced", ["addSol", "getNSols"])
def test_a_solver_without_a_solution_leaves_what_the_sweep_found(
    monkeypatch: pytest.MonkeyPatch, silenced: str
) -> None:
    """One that loses its start before it may search, or has none at the end.

    That is no reason to call it infeasible.
    """
    problem = tight_problem()
    solved, _ = paper_plan(problem)
    lame = type("Lame", (pyscipopt.Model,), {silenced: lambda *_: 0})
    monkeypatch.setattr(pyscipopt, "Model", lame)
    monkeypatch.setattr(diagonals, "_MOST_NODES", 0)
    found, replica = paper_plan(problem)
    assert found.levels.any()
    assert solved.makespan_s <= found.makespan_s <= 1.2 * solved.makespan_s
    assert replica.search is not None
    assert replica.search.status != "optimal"


@pytest.mark.parametrize("wrong", ["nothing recomputed", "one layer less everywhere"])
def test_a_solvers_answer_that_does_not_fit_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    problem, solve = tight_problem(), diagonals.solve_diagonals
    calls: list[int] = []

    def too_good(*arguments: Any) -> diagonals.TiedSolution:
        solution = solve(*arguments)
        calls.append(int(solution.counts.sum()))
        less = np.zeros_like(solution.counts)
        if wrong == "one layer less everywhere":
            less = np.maximum(0, solution.counts - 1)
        return solution._replace(counts=less)

    monkeypatch.setattr(paper, "solve_diagonals", too_good)
    found, _ = paper_plan(problem)
    assert sum(calls) > 0
    assert found.levels.any()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("room", [0.5, 0.9])
def test_peaks_are_whole_bytes_within_the_limit_and_hold_what_chunks_keep(
    policy: str, room: float
) -> None:
    """Adds up, in exact numbers, what is in flight at every op; no plan may promise less."""
    kept = 600 * 2 * toy_profile(8).bytes.layer_full_per_token
    problem = toy_problem([300, 200, *[20] * 30], [2, 2, 2], room * kept)
    found = POLICIES[policy](problem)
    if isinstance(found, Shortage):
        assert found.bytes_needed > problem.pipeline.limits[found.stage]
        return
    replica, sizes = make_replica(found), problem.pipeline.costs.profile.bytes
    full, activation = Fraction(sizes.layer_full_per_token), Fraction(sizes.activation_per_token)
    attention = attention_bytes_per_token(problem.pipeline.costs.profile)
    for stage, program in enumerate(replica.programs):
        limit, predicted = problem.pipeline.limits[stage], replica.predicted[stage].peak_bytes
        assert isinstance(predicted, int)
        assert predicted <= limit
        place = problem.pipeline.stages[stage]
        static = Fraction(problem.pipeline.costs.static_bytes(stage))
        held = most = static
        for op in program:
            dropped = replica.recompute[stage][op.chunk]
            kept = replica.keep_attention[stage][op.chunk]
            assert 0 <= dropped <= place.num_layers
            own = replica.chunks[op.chunk].num_tokens * (
                (place.num_layers - dropped - kept) * full
                + dropped * activation
                + kept * (activation + attention)
            )
            held += own if op.kind == OpKind.FORWARD else -own
            most = max(most, held)
        assert held == static
        assert held < most <= predicted


def test_a_peak_one_byte_above_the_limit_is_refused(tmp_path: Path) -> None:
    profile = toy_profile(6)
    limits = limits_of(profile, [3, 3], 2_000_000)
    header, (step,) = compiled(
        tmp_path, [90, 20, 30], profile, num_stages=2, memory_limit_bytes=limits
    )
    peaks = [predicted.peak_bytes for predicted in step.replicas[0].predicted]
    verify_step(msgspec.structs.replace(header, memory_limit_bytes=tuple(peaks)), step)
    for stage in range(2):
        less = tuple(peak - (s == stage) for s, peak in enumerate(peaks))
        with pytest.raises(
            VerifyError,
            match=f"stage {stage}: a predicted peak of {peaks[stage]} bytes; the limit is",
        ):
            verify_step(msgspec.structs.replace(header, memory_limit_bytes=less), step)


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 12), st.integers(1, 400)), min_size=1, max_size=12),
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    tightness=st.sampled_from([0.4, 1.0, 1e6]),
)
# Plain 1F1B is faster by the last digit, which the quick bound cannot see.
@example(lengths=[1, 1, 1, 1, 9, 7, 6, 42, 1, 230, 269, 324], counts=[3], tightness=1.0)
def test_never_slower_than_plain_1f1b(
    lengths: list[int], counts: list[int], tightness: float
) -> None:
    room = tightness * 6000 * max(lengths) * max(counts) + 300_000
    problem = toy_problem(lengths, counts, room)
    plain, found = plan_1f1b(problem), plan_epp(problem)
    if isinstance(plain, Schedule):
        assert isinstance(found, Schedule)
        assert found.makespan_s <= plain.makespan_s * ROUNDING


def first_fit_decreasing(lengths: SequenceOf[int], capacity: int) -> int:
    """Return how many bins first fit decreasing needs.

    A longer sequence fills bins and leaves its tail in another.
    """
    num_full, bins = 0, []
    for length in sorted(lengths, reverse=True):
        if length > capacity:
            num_full += length // capacity
            bins.append(length % capacity or capacity)
            num_full -= length % capacity == 0
            continue
        place = next((i for i, tokens in enumerate(bins) if tokens + length <= capacity), None)
        if place is None:
            bins.append(length)
        else:
            bins[place] += length
    return num_full + len(bins)


@pytest.mark.parametrize(
    ("name", "count", "capacities"),
    [("wikipedia", 512, (2048, 8192, 65_536)), ("mooncake", 128, (4096, 32_768, 131_072))],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_real_lengths_need_no_more_bins_than_first_fit_decreasing(
    name: str, count: int, capacities: tuple[int, ...], seed: int
) -> None:
    lengths = draw_lengths(name, count, seed)
    problem = toy_problem(lengths, [3, 3])
    for capacity in capacities:
        chunks = cut_chunks(problem, TOKENS, capacity, capacity).chunks
        assert max(lengths_of(chunks)) <= capacity
        assert sum(lengths_of(chunks)) == sum(lengths)
        assert len(chunks) <= first_fit_decreasing(lengths, capacity)
