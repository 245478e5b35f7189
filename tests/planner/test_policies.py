"""Every policy: valid plans from any lengths, its own rules kept, and none better than `epp`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyscipopt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinipipe.costs import StageMemory
from infinipipe.ir import Layout, OpKind, Slice, chunk_chains, show_program
from infinipipe.planner import POLICIES
from infinipipe.planner.bound import makespan_bound
from infinipipe.planner.passes.order import join_orders, overlap_orders, windowed_order
from infinipipe.planner.passes.partition import balanced_costs
from infinipipe.planner.passes.recompute import Shortage
from infinipipe.planner.passes.schedule import (
    Schedule,
    is_better,
    make_replica,
    order_memories,
    price_chains,
)
from infinipipe.planner.policies import DEFAULT_POLICY, ONE_STAGE, epp, paper
from infinipipe.planner.policies import tied_recompute as diagonals
from infinipipe.planner.policies.epp import SearchSpace, plan_alone, plan_epp, polish_result
from infinipipe.planner.policies.epp.search import search_schedule
from infinipipe.planner.policies.paper import make_chains, plan_paper
from infinipipe.planner.policies.tied_recompute import (
    chunk_diagonals,
    diagonal_counts,
    solve_diagonals,
    sweep_diagonals,
)
from infinipipe.planner.problem import Pipeline, Problem
from infinipipe.profiles import read_model
from infinipipe.profiles.analytic import analytic_profile
from tests.planner.toys import (
    ROOMY,
    ROUNDING,
    cut,
    draw_lengths,
    in_whole,
    toy_problem,
    toy_sequences,
    with_limits,
)

PIPELINES = [policy for policy in POLICIES if policy not in ONE_STAGE]
RIVALS = [policy for policy in PIPELINES if policy != DEFAULT_POLICY]


def planned(policy: str, problem: Problem) -> Schedule:
    found = POLICIES[policy](problem)
    assert isinstance(found, Schedule)
    return found


def analytic_problem(lengths: list[int], num_stages: int, gib: int) -> Problem:
    profile = analytic_profile(read_model("llama-7b"), "a800-80g")
    limits = (gib * 2**30,) * num_stages
    costs = balanced_costs(profile, Layout(num_stages=num_stages), limits, np.array(lengths))
    pipeline = Pipeline(costs, limits, context_tokens=max(lengths))
    return Problem(pipeline, toy_sequences(lengths), tuple(range(len(lengths))))


def shown(schedule: Schedule, stage: int) -> str:
    return show_program(stage, schedule.programs[stage].unpack())


def test_all_policies_are_there() -> None:
    assert PIPELINES == ["epp", "paper", "gpipe", "1f1b", "terapipe", "seq1f1b", "chunkflow"]
    assert list(POLICIES) == [*PIPELINES, "deepspeed"]


@pytest.mark.parametrize("policy", PIPELINES)
@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=8),
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=3),
)
def test_within_the_bound_and_the_limit(policy: str, lengths: list[int], counts: list[int]) -> None:
    problem = toy_problem(lengths, counts, 6000 * max(lengths) + 600_000)
    found = POLICIES[policy](problem)
    if isinstance(found, Shortage):
        assert found.bytes_needed > problem.pipeline.limits[found.stage]
        return
    assert found.makespan_s >= makespan_bound(problem.pipeline, problem.sequences, 1)
    for stage, predicted in enumerate(make_replica(found).predicted):
        assert predicted.peak_bytes <= problem.pipeline.limits[stage]


@pytest.mark.parametrize("policy", ["gpipe", "1f1b"])
def test_packers_never_split(policy: str) -> None:
    problem = toy_problem([90, 20, 31, 7, 64, 15, 15, 40], [2, 2])
    found = planned(policy, problem)
    assert all(chunk.split_slice(problem.sequences) is None for chunk in found.chains.ir_chunks)


def test_gpipe_runs_all_forwards_first() -> None:
    found = planned("gpipe", toy_problem([30] * 6, [2, 2]))
    travels = found.programs[0].travels.tolist()
    assert travels == [1] * (len(travels) // 2) + [-1] * (len(travels) // 2)


def test_gpipe_takes_rounds_when_memory_is_short() -> None:
    roomy = planned("gpipe", toy_problem([30] * 8, [2, 2]))
    most = max(
        float(memory.during(in_whole(roomy.levels[s])).max())
        for s, memory in enumerate(roomy.memories)
    )
    tight = toy_problem([30] * 8, [2, 2], 0.2 * most)
    found = planned("gpipe", tight)
    assert found.makespan_s > roomy.makespan_s
    assert found.levels.any() or "B" in shown(found, 0)[: len(shown(found, 0)) // 2]


def test_1f1b_alternates() -> None:
    found = planned("1f1b", toy_problem([30] * 6, [2, 2]))
    assert shown(found, 1).startswith("1F0 1B0 1F1 1B1")
    assert shown(found, 0).startswith("0F0 0F1 0B0 0F2 0B1")


def test_baselines_recompute_statically() -> None:
    roomy = planned("seq1f1b", toy_problem([200, 150, 60, 60, 50], [3, 3]))
    most = float(roomy.memories[0].during(in_whole(roomy.levels[0])).max())
    limit = roomy.problem.pipeline.limits[0]
    static = limit - 2**62
    tight = toy_problem([200, 150, 60, 60, 50], [3, 3], 0.6 * (most - static))
    for policy in ("gpipe", "1f1b", "terapipe", "seq1f1b"):
        found = POLICIES[policy](tight)
        if isinstance(found, Schedule):
            assert np.all(found.levels == found.levels[:, :1])


def test_seq1f1b_slices_equally_and_last_in_first_out() -> None:
    problem = toy_problem([240, 60, 60, 60, 60], [2, 2])
    found = planned("seq1f1b", problem)
    chains = [
        chain for chain in chunk_chains(found.chains.ir_chunks, problem.sequences) if len(chain) > 1
    ]
    lengths = [found.chains.ir_chunks[c].num_tokens for c in chains[0]]
    assert max(lengths) - min(lengths) <= 1
    backwards = found.programs[0].backward_chunks.tolist()
    size = found.chains.chunks.chains[0]
    assert backwards[:size] == list(range(size - 1, -1, -1))


def test_chunkflow_keeps_the_last_chunks_of_a_sequence() -> None:
    free = toy_problem([400, 20], [2, 2])
    kept = 400 * 2 * free.pipeline.costs.profile.bytes.layer_full_per_token
    found = planned("chunkflow", toy_problem([400, 20], [2, 2], 0.75 * kept))
    size = found.chains.chunks.chains[0]
    counts = found.levels[0, :size].tolist()
    assert counts == sorted(counts, reverse=True)
    assert set(counts) <= {0, 2}
    assert counts[0] == 2


@pytest.mark.parametrize(("seed", "tightness"), [(0, 100.0), (1, 1.5), (2, 0.8)])
def test_epp_is_best_on_real_lengths(seed: int, tightness: float) -> None:
    lengths = [max(1, length // 60) for length in draw_lengths("mooncake", 12, seed)]
    free = toy_problem(lengths, [2, 2, 2])
    kept = max(lengths) * 2 * free.pipeline.costs.profile.bytes.layer_full_per_token
    problem = toy_problem(lengths, [2, 2, 2], tightness * kept)
    best = planned("epp", problem).makespan_s
    for policy in RIVALS:
        found = POLICIES[policy](problem)
        assert isinstance(found, Shortage) or best <= found.makespan_s * ROUNDING, policy


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=10),
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    tightness=st.sampled_from([0.6, 1.0, 2.0, 50.0]),
    context=st.sampled_from([1, 200]),
)
def test_epp_is_never_worse_than_another_policy(
    lengths: list[int], counts: list[int], tightness: float, context: int
) -> None:
    kept = (
        max(counts)
        * max(lengths)
        * toy_problem([1], counts).pipeline.costs.profile.bytes.layer_full_per_token
    )
    problem = toy_problem(lengths, counts, tightness * kept)
    problem = replace(problem, pipeline=replace(problem.pipeline, context_tokens=context))
    own, others = plan_epp(problem), [POLICIES[policy](problem) for policy in RIVALS]
    fastest = min(
        (other.makespan_s for other in others if isinstance(other, Schedule)), default=None
    )
    if fastest is not None:
        assert isinstance(own, Schedule)
        assert own.makespan_s <= fastest * ROUNDING


def test_a_schedule_says_which_search_won() -> None:
    problem = toy_problem([200, 150, 60, 60, 50], [3, 3])
    for policy in RIVALS:
        assert planned(policy, problem).search.winner.startswith(f"{policy}: ")
    own = plan_alone(problem, SearchSpace())
    assert isinstance(own, Schedule)
    assert own.search.winner.startswith("epp: ")
    assert planned("epp", problem).search.winner.partition(":")[0] in POLICIES


def test_static_micro_batches_hold_the_longest_sequence_that_training_is_set_up_for() -> None:
    free = toy_problem([60] * 8, [2, 2])
    wide = replace(free, pipeline=replace(free.pipeline, context_tokens=240))
    assert [chunk.num_tokens for chunk in planned("1f1b", wide).chains.ir_chunks] == [240, 240]
    sliced = planned("seq1f1b", wide)
    count = int(sliced.search.winner.removeprefix("seq1f1b: ").split()[0])
    assert count > 1
    assert all(count / 2 < size <= count for size in sliced.chains.chunks.chains[:-1])
    assert max(chunk.num_tokens for chunk in sliced.chains.ir_chunks) <= max(60, 240 // count)
    assert planned("1f1b", wide).makespan_s > planned("1f1b", free).makespan_s
    assert planned("chunkflow", wide).makespan_s == planned("chunkflow", free).makespan_s


def test_what_is_known_already_is_kept_unless_a_rival_beats_it() -> None:
    problem = toy_problem([200, 150, 60, 60, 50], [3, 3])
    by_policy = {policy: planned(policy, problem) for policy in RIVALS}
    best = min(by_policy.values(), key=lambda schedule: schedule.makespan_s)
    assert set(epp._RIVALS) == {POLICIES[policy] for policy in RIVALS}
    for rival in epp._RIVALS:
        assert rival(problem, best).makespan_s == best.makespan_s  # type: ignore[union-attr]
    worst = max(by_policy.values(), key=lambda schedule: schedule.makespan_s)
    found = {rival(problem, worst).makespan_s for rival in epp._RIVALS}  # type: ignore[union-attr]
    assert found == {schedule.makespan_s for schedule in by_policy.values()}


def test_algorithm_1_cuts_every_sequence_by_the_longest_ones_mesh() -> None:
    problem = toy_problem([300, 280, 150, 20, 10, 10], [3, 3])
    work = problem.pipeline.costs.work
    chains = make_chains(problem, work, 6)
    bounds = {
        chain[0].slices[0].sequence: [chunk.split_slice(problem.sequences) for chunk in chain]
        for chain in chains
        if len(chain) > 1
    }
    longest = [piece.stop for piece in bounds[0] if piece]
    assert len(longest) == 6
    works = [work.between(piece.start, piece.stop) for piece in bounds[0] if piece]
    assert works == pytest.approx([works[0]] * 6, rel=0.05)
    second = [piece.stop for piece in bounds[1] if piece]
    assert second[:-1] == longest[: len(second) - 1]
    assert second[-1] == 280
    assert sorted(
        {p.sequence for chain in chains for chunk in chain for p in chunk.slices}
    ) == list(range(6))


def test_one_slice_splits_nothing() -> None:
    problem = toy_problem([300, 280, 150, 20, 10, 10], [3, 3])
    chains = make_chains(problem, problem.pipeline.costs.work, 1)
    assert all(len(chain) == 1 for chain in chains)


def tight_memories(fraction: float) -> tuple[Problem, tuple[StageMemory, ...], list[int]]:
    problem = toy_problem([400, 90, 80, 60, 50, 40], [2, 2, 2])
    chunks, _, _ = cut(problem, 20)
    leads = windowed_order(chunks, 3, "uniform", 3)
    memories = order_memories(problem, price_chains(problem, chunks), leads)
    limits = []
    for memory in memories:
        nothing = np.zeros(len(memory.activation_bytes), dtype=np.int64)
        none, full = (memory.during(in_whole(nothing + n)).max() for n in (0, 2))
        limits.append(int(full + fraction * (none - full)))
    return problem, memories, limits


@pytest.mark.parametrize("fraction", [0.15, 0.4, 0.8])
def test_integer_program_fits_and_is_no_worse_than_the_sweep(fraction: float) -> None:
    _, memories, limits = tight_memories(fraction)
    swept = sweep_diagonals(memories, limits)
    assert not isinstance(swept, Shortage)
    solved, status, gap = solve_diagonals(memories, limits, swept)
    assert status in ("optimal", "gaplimit")
    assert gap is not None
    assert 0 <= gap <= 0.02
    assert solved.sum() <= swept.sum()
    repaired = sweep_diagonals(memories, limits, solved)
    assert not isinstance(repaired, Shortage)
    assert np.all(repaired >= solved)
    for memory, row, limit in zip(
        memories, diagonal_counts(memories, repaired), limits, strict=True
    ):
        assert memory.during(in_whole(row)).max() <= limit


@pytest.mark.slow
@pytest.mark.parametrize(("data", "num_stages"), [("mooncake", 8), ("wikipedia", 8)])
def test_epp_is_no_worse_than_the_paper_where_memory_is_short(data: str, num_stages: int) -> None:
    lengths = draw_lengths(data, 64, 1)
    problem = analytic_problem([min(length, 49_152) for length in lengths], num_stages, 40)
    own, alone = plan_epp(problem), plan_paper(problem)
    assert isinstance(own, Schedule)
    assert isinstance(alone, Schedule)
    assert own.makespan_s <= alone.makespan_s
    # As a rival it is pruned, but finds what it finds alone if only that would win.
    slower = replace(
        alone,
        timeline=replace(alone.timeline, end_s=tuple(1.001 * e for e in alone.timeline.end_s)),
    )
    again = plan_paper(problem, slower)
    assert isinstance(again, Schedule)
    assert again.makespan_s == alone.makespan_s


def test_scips_counts_are_used_where_they_are_better(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = analytic_problem(
        [min(length, 49_152) for length in draw_lengths("mooncake", 64, 0)], 8, 40
    )
    solved = plan_paper(problem)
    monkeypatch.setattr(
        paper,
        "solve_diagonals",
        lambda memories, limits, start: diagonals.TiedSolution(start, "not asked", None),
    )
    swept = plan_paper(problem)
    assert isinstance(solved, Schedule)
    assert isinstance(swept, Schedule)
    assert solved.makespan_s < swept.makespan_s
    assert "sweep" not in str(solved.search.status)
    assert swept.search.status == "not asked; the sweep's counts are as good"


def test_slice_numbers_that_do_not_fit_end_no_search() -> None:
    # One slice fits, two to four do not, more do.
    found = plan_paper(analytic_problem([100_000], 4, 77))
    assert isinstance(found, Schedule)
    assert len(found.chains.ir_chunks) > 4


def test_ctrl_c_is_not_scips(monkeypatch: pytest.MonkeyPatch) -> None:
    """SCIP would swallow it and end with an answer that depends on when it came."""
    caught = []

    class Model(pyscipopt.Model):  # type: ignore[misc]
        def optimize(self) -> None:
            caught.append(self.getParam("misc/catchctrlc"))
            super().optimize()

    monkeypatch.setattr(pyscipopt, "Model", Model)
    _, memories, limits = tight_memories(0.3)
    swept = sweep_diagonals(memories, limits)
    solve_diagonals(memories, limits, swept)
    assert caught == [False]
    for tightness in (2.0, 1.5, 1.2, 1.0, 0.8):
        kept = 2 * 60 * toy_problem([1], [2, 2]).pipeline.costs.profile.bytes.layer_full_per_token
        problem = toy_problem([60, 20, 10], [2, 2], tightness * kept)
        found = plan_alone(problem, SearchSpace())
        if isinstance(found, Schedule) and found.search.solver == "SCIP":
            break
    assert len(caught) > 1
    assert not any(caught)


def test_a_program_too_large_for_scip_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _, memories, limits = tight_memories(0.3)
    swept = sweep_diagonals(memories, limits)
    assert not isinstance(swept, Shortage)
    monkeypatch.setattr(diagonals, "_MOST_TERMS", 3)
    solved, status, gap = solve_diagonals(memories, limits, swept)
    assert (solved.tolist(), status, gap) == (swept.tolist(), "too large", None)


def test_the_stage_that_lacks_most_decides() -> None:
    worse, better = Shortage(0, 50.0, 10.0), Shortage(1, 80.0, 70.0)
    assert is_better(better, worse)
    assert not is_better(worse, better)


def test_counts_are_tied_along_diagonals() -> None:
    _, memories, limits = tight_memories(0.3)
    swept = sweep_diagonals(memories, limits)
    assert not isinstance(swept, Shortage)
    counts = diagonal_counts(memories, swept)
    order = [memory.program.backward_chunks for memory in memories]
    for stage in range(2):
        # ckpt(p, k) = ckpt(p + 1, k + 1), k counted in the order of B
        assert (
            counts[stage][order[stage]][:-1].tolist()
            == counts[stage + 1][order[stage + 1]][1:].tolist()
        )
    assert chunk_diagonals(memories[0], 3, 0)[order[0][0]] == 2


def test_paper_groups_long_chains_apart_when_memory_is_short() -> None:
    lengths = [600, *[20] * 60]
    roomy = planned("paper", toy_problem(lengths, [2, 2, 2, 2]))
    kept = 600 * 2 * roomy.problem.pipeline.costs.profile.bytes.layer_full_per_token
    found = plan_paper(toy_problem(lengths, [2, 2, 2, 2], 0.9 * kept))
    assert isinstance(found, Schedule)
    assert found.makespan_s > roomy.makespan_s
    assert found.levels.any()
    assert found.search.solver == "SCIP"
    assert found.search.gap is not None
    assert make_replica(found).search == found.search


def test_backward_ops_only() -> None:
    replica = make_replica(planned("epp", toy_problem([50, 20], [2, 2])))
    assert {op.kind for program in replica.programs for op in program} == {
        OpKind.FORWARD,
        OpKind.BACKWARD,
    }


def test_stages_keep_to_their_own_limits() -> None:
    free = toy_problem([60, 50, 40, 30] * 4, [2, 2, 2, 2])
    roomy = planned("epp", free)
    most = [
        float(memory.during(in_whole(roomy.levels[s])).max())
        for s, memory in enumerate(roomy.memories)
    ]
    static = [limit - ROOMY for limit in free.pipeline.limits]
    shares = (0.5, 2.0, 2.0, 0.5)
    limits = tuple(
        int(s + share * (m - s)) for s, m, share in zip(static, most, shares, strict=True)
    )
    problem = with_limits(free, limits)
    found = planned("epp", problem)
    sums = found.levels.sum(axis=1).tolist()
    assert sums[0] > 0
    assert sums[3] > 0
    assert sums[1:3] == [0, 0]
    for predicted, limit in zip(make_replica(found).predicted, limits, strict=True):
        assert predicted.peak_bytes <= limit


def test_a_smaller_space_is_never_better() -> None:
    lengths = [max(1, length // 60) for length in draw_lengths("mooncake", 30, 7)]
    problem = toy_problem(lengths, [2, 2, 2])
    whole = planned("epp", problem).makespan_s
    for space in (SearchSpace(attentions=(0.0,)), SearchSpace(ramps=("no",))):
        found = plan_alone(problem, space)
        assert isinstance(found, Schedule)
        assert found.makespan_s >= 0.999 * whole


def test_a_solver_cut_short_still_gives_what_the_sweep_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, memories, limits = tight_memories(0.3)
    swept = sweep_diagonals(memories, limits)
    assert not isinstance(swept, Shortage)
    monkeypatch.setattr(diagonals, "_GAP", 1e9)
    monkeypatch.setattr(diagonals, "_MOST_NODES", 0)
    solved, status, _ = solve_diagonals(memories, limits, swept)
    assert "limit" in status
    assert solved.sum() <= swept.sum()
    for memory, row, limit in zip(memories, diagonal_counts(memories, solved), limits, strict=True):
        assert memory.during(in_whole(row)).max() <= limit * 1.001


def test_a_sequence_that_fills_a_stage_runs_by_itself() -> None:
    lengths = draw_lengths("mooncake", 64, 0)
    problem, longest = analytic_problem(lengths, 4, 80), max(lengths)
    together = polish_result(search_schedule(problem, SearchSpace()))
    apart = plan_alone(problem, SearchSpace())
    assert isinstance(together, Schedule)
    assert isinstance(apart, Schedule)
    assert apart.makespan_s < 0.9 * together.makespan_s
    # It is the first chunk, and alone in flight but for what waits for its last B.
    assert apart.chains.ir_chunks[0].slices == (Slice(lengths.index(longest), 0, longest),)
    assert shown(apart, 3).startswith("3F0 3B0 3F1")
    for stage, predicted in enumerate(make_replica(apart).predicted):
        assert predicted.peak_bytes <= problem.pipeline.limits[stage]


def test_parts_follow_one_another_and_overlap_as_deep_as_1f1b() -> None:
    first, second = np.array([[2, 2], [2, 2], [1, 2]]), np.array([[3, 3, 3], [2, 3, 3], [1, 2, 3]])
    one_by_one = join_orders([first, second])
    assert one_by_one.tolist() == [[2, 2, 5, 5, 5], [2, 2, 4, 5, 5], [1, 2, 3, 4, 5]]
    assert overlap_orders(one_by_one, [2, 5]).tolist() == [
        [3, 4, 5, 5, 5],
        [2, 3, 4, 5, 5],
        [1, 2, 3, 4, 5],
    ]
