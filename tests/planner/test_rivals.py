"""Rivals of another kind: what they are priced at, and what they can and cannot plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from infinipipe.costs import CostModel
from infinipipe.errors import InputError
from infinipipe.ir import Chunk, Layout, Sequence, Slice
from infinipipe.planner import CompileOptions, compare_systems
from infinipipe.planner.passes.partition import balanced_costs, make_stages
from infinipipe.planner.passes.recompute import Shortage
from infinipipe.planner.passes.schedule import Schedule
from infinipipe.planner.policies import POLICIES
from infinipipe.planner.problem import Pipeline, Problem
from infinipipe.planner.rivals.flexsp import MixedGroups, MixedPlan, partitions, plan_flexsp
from infinipipe.planner.rivals.megatron import RingCosts, ring_pipeline
from infinipipe.planner.systems import SYSTEMS
from infinipipe.profiles import Profile, read_model
from infinipipe.profiles.analytic import analytic_profile
from infinipipe.reports.layouts import contest_rows, contest_tables
from tests.planner.test_compile import dataset_of

pytestmark = pytest.mark.slow

GIB = 2**30
LONG_AND_SHORT = [49_152, 8000, *[700] * 40, *[4000] * 4]


def a800(name: str = "llama-7b") -> Profile:
    return analytic_profile(read_model(name), "a800-80g")


def pipeline_of(
    layout: Layout, profile: Profile, lengths: list[int], memory_gib: int = 80
) -> Pipeline:
    limits = (memory_gib * GIB,) * layout.num_stages
    costs = balanced_costs(profile, layout, limits, np.array(lengths))
    return Pipeline(costs, limits, max(lengths))


def sequences_of(lengths: list[int]) -> tuple[Sequence, ...]:
    return tuple(Sequence(row, length, length - 1) for row, length in enumerate(lengths))


def groups_of(num_devices: int, lengths: list[int], memory_gib: int = 80) -> MixedGroups:
    by_size = {}
    for size in (1, 2, 4, 8, 16, 32):
        if num_devices % size == 0:
            layout = Layout(
                num_stages=1,
                sequence_parallel=size,
                num_replicas=num_devices // size,
                devices_per_node=8,
            )
            by_size[size] = pipeline_of(layout, a800(), lengths, memory_gib)
    return MixedGroups(by_size)


# DeepSpeed


def test_deepspeed_packs_whole_sequences_and_recomputes_by_one_rule() -> None:
    layout = Layout(num_stages=1, sequence_parallel=8, devices_per_node=8)
    pipeline = pipeline_of(layout, a800(), LONG_AND_SHORT, memory_gib=72)
    sequences = sequences_of(LONG_AND_SHORT)
    result = POLICIES["deepspeed"](Problem(pipeline, sequences, tuple(range(len(sequences)))))
    assert isinstance(result, Schedule)
    assert set(result.chains.chunks.chains) == {1}
    for chunk in result.chains.ir_chunks:
        assert all(part.length == sequences[part.sequence].length for part in chunk.slices)
    assert len(set(result.levels.flatten().tolist())) == 1
    assert result.search.winner.startswith("deepspeed: ")


# FlexSP


def test_groupings_are_all_sums_of_sizes() -> None:
    assert sorted(partitions(4, (4, 2, 1))) == [(1, 1, 1, 1), (2, 1, 1), (2, 2), (4,)]
    assert len(list(partitions(16, (16, 8, 4, 2, 1)))) == 36


def test_groups_of_different_sizes_are_at_least_as_fast_as_groups_of_one() -> None:
    """A long sequence needs many devices, and short ones are faster on few."""
    sequences = sequences_of(LONG_AND_SHORT)
    groups = groups_of(16, LONG_AND_SHORT)
    mixed = plan_flexsp(groups, sequences)
    assert isinstance(mixed, MixedPlan)
    seconds = []
    for pipeline in groups.by_size.values():
        only = MixedGroups({pipeline.costs.layout.sequence_parallel: pipeline})
        plan = plan_flexsp(only, sequences)
        if isinstance(plan, MixedPlan):
            seconds.append(plan.makespan_s)
    assert mixed.makespan_s < 0.97 * min(seconds)
    assert mixed.peak_bytes <= 80 * GIB
    # All work on all devices, with nothing in between, is the limit.
    lengths = np.array(LONG_AND_SHORT)
    work_s = groups.by_size[1].costs.work.whole(lengths).sum() / 16
    assert mixed.makespan_s > work_s


def test_flexsp_says_what_the_longest_sequence_lacks() -> None:
    lengths = [400_000, 2000]
    shortage = plan_flexsp(groups_of(8, lengths, memory_gib=60), sequences_of(lengths))
    assert isinstance(shortage, Shortage)
    assert shortage.missing > 0


# Megatron


def chunk_of(length: int) -> tuple[list[Chunk], tuple[Sequence, ...]]:
    return [Chunk((Slice(0, 0, length),))], sequences_of([length])


def ring_costs(layout: Layout, profile: Profile) -> RingCosts:
    return RingCosts(profile, layout, make_stages([16] * layout.num_stages), 8192)


@pytest.mark.parametrize("length", [800, 8192, 98_304])
def test_a_ring_is_seen_where_attention_does_not_hide_it(length: int) -> None:
    """By hand: 7 hops, each of an eighth of K and V, behind an eighth of a rank's attention."""
    profile = a800()
    layout = Layout(num_stages=2, sequence_parallel=8, devices_per_node=8)
    ring = ring_costs(layout, profile)
    costed = ring.price(*chunk_of(length))
    quiet = CostModel.price(ring, *chunk_of(length))
    line = profile.times.links.transfer_s
    num_pairs = length * (length + 1) / 2
    kv_bytes = profile.bytes.layer_kv_per_token * length / 8
    for tensors, time, seconds, quiet_s in (
        (1, profile.times.layer_forward, costed.forward_s, quiet.forward_s),
        (2, profile.times.layer_backward, costed.backward_s, quiet.backward_s),
    ):
        hop_s = line.constant + line.rate * tensors * kv_bytes
        attention_s = time.s_per_pair * num_pairs / 8 / 8
        expected = 16 * 7 * max(0.0, hop_s - attention_s)
        np.testing.assert_allclose(seconds - quiet_s, expected, rtol=1e-9, atol=1e-12)
        assert (expected == 0) == (length == 98_304)
    seen_s = costed.forward_s[0] - quiet.forward_s[0]
    np.testing.assert_allclose(costed.recompute_s - quiet.recompute_s, seen_s / 16, atol=1e-12)


def test_a_ring_between_nodes_is_slower_and_one_rank_has_none() -> None:
    profile = a800()
    chunks = chunk_of(8192)
    inside = Layout(num_stages=2, sequence_parallel=8, devices_per_node=8)
    between = Layout(num_stages=2, sequence_parallel=8, devices_per_node=4)
    inside_s = ring_costs(inside, profile).price(*chunks).forward_s
    between_s = ring_costs(between, profile).price(*chunks).forward_s
    assert (between_s > inside_s).all()
    alone = Layout(num_stages=2)
    costs = ring_costs(alone, profile)
    plain = CostModel(profile, alone, costs.stages, 8192)
    assert (costs.price(*chunks).forward_s == plain.price(*chunks).forward_s).all()


def test_no_rank_of_a_ring_repeats_heads_of_k_and_v() -> None:
    profile = a800("llama3-8b")
    layout = Layout(num_stages=2, sequence_parallel=16, devices_per_node=16)
    ring = ring_costs(layout, profile).rank_profile
    # 8 heads of K and V among 16 ranks.
    assert ring.bytes.layer_kv_per_token == profile.bytes.layer_kv_per_token / 16
    heads = CostModel(profile, layout, make_stages([16, 16]), 8192).rank_profile
    assert heads.bytes.layer_kv_per_token == profile.bytes.layer_kv_per_token / 8
    # Each rank has all heads of its tokens.
    assert ring.model == profile.model


def test_a_ring_pipeline_keeps_its_stages() -> None:
    pipeline = pipeline_of(Layout(num_stages=2, sequence_parallel=2), a800(), [4000])
    ring = ring_pipeline(pipeline)
    assert ring.stages == pipeline.stages
    assert ring.limits == pipeline.limits
    assert isinstance(ring.costs, RingCosts)


# All of them


def contests(folder: Path, systems: tuple[str, ...] | None = None, **options: Any) -> Any:
    profile = a800()
    dataset = dataset_of(folder, LONG_AND_SHORT)
    asked = CompileOptions(batch_size=len(LONG_AND_SHORT), **options)
    return compare_systems(dataset, profile, asked, [8, 16], [80 * GIB], systems)


def test_every_system_is_on_its_best_layout(tmp_path: Path) -> None:
    found = contests(tmp_path)
    assert [contest.num_devices for contest in found] == [8, 16]
    for contest in found:
        assert tuple(contest.searches) == SYSTEMS
        bests = {system: search.best for system, search in contest.searches.items()}
        for system, best in bests.items():
            assert best is not None, system
            assert best.makespan_s / contest.searches[system].pure_work_s > 1
        # Its rivals on the same layouts are among what it tries.
        for rival in ("seq1f1b", "1f1b"):
            assert bests["epp"].step_s <= bests[rival].step_s
        assert bests["deepspeed"].layout.num_stages == 1
        assert bests["flexsp"].layout is None
    rows = contest_rows(found)
    assert json.loads(msgspec.json.encode(rows)) == [msgspec.to_builtins(row) for row in rows]
    assert sum(row["best"] for row in rows) == 2 * len(SYSTEMS)
    assert len(contest_tables(found).renderables) == 4


def test_systems_that_cannot_have_what_is_asked_say_so(tmp_path: Path) -> None:
    found = contests(tmp_path, ("1f1b", "deepspeed", "flexsp"), num_stages=2)
    for contest in found:
        assert contest.searches["1f1b"].best is not None
        for system in ("deepspeed", "flexsp"):
            (trial,) = contest.searches[system].trials
            assert trial.reason == f"{system} has one stage, not 2"
    rows = contest_rows(found)
    assert [row["feasible"] for row in rows if row["policy"] == "flexsp"] == [False, False]


def test_a_system_without_a_layout_leaves_the_others_theirs(tmp_path: Path) -> None:
    profile = analytic_profile(read_model("tiny"), "a800-80g")
    dataset = dataset_of(tmp_path, [2000] * 4)
    systems = ("1f1b", "deepspeed", "flexsp")
    options = CompileOptions(num_replicas=1)
    (contest,) = compare_systems(dataset, profile, options, [8], [GIB], systems)
    best = contest.searches["1f1b"].best
    assert best is not None
    # Eight ranks cannot share four heads, and without replicas there is nothing else.
    for system in ("deepspeed", "flexsp"):
        (trial,) = contest.searches[system].trials
        assert trial.reason.startswith("--devices 8: no layout")


def test_a_ring_needs_no_heads_to_share(tmp_path: Path) -> None:
    profile = analytic_profile(read_model("tiny"), "a800-80g")
    dataset = dataset_of(tmp_path, [2000] * 4)
    (contest,) = compare_systems(dataset, profile, CompileOptions(), [8], [GIB], ("megatron",))
    names = [trial.name for trial in contest.searches["megatron"].trials]
    assert "1 x 8 x 1" in names


def test_flexsp_is_never_slower_than_groups_of_one_size(tmp_path: Path) -> None:
    profile = analytic_profile(read_model("tiny"), "a800-80g")
    dataset = dataset_of(tmp_path, [3000, 2500, 900, 800, 400, 100])
    systems = ("deepspeed", "flexsp")
    (contest,) = compare_systems(dataset, profile, CompileOptions(), [8], [GIB], systems)
    deepspeed, flexsp = (contest.searches[system].best for system in systems)
    assert flexsp.step_s <= deepspeed.step_s


def test_what_does_not_fit_is_a_row_with_a_reason(tmp_path: Path) -> None:
    profile = a800()
    dataset = dataset_of(tmp_path, [2000] * 4)
    options = CompileOptions(num_replicas=1)
    (contest,) = compare_systems(dataset, profile, options, [2], [20 * GIB], ("epp", "flexsp"))
    for search in contest.searches.values():
        assert search.best is None
        assert all(trial.reason for trial in search.trials)
    assert len(contest_tables([contest]).renderables) == 2


def test_unknown_systems_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--policies best: no such system; there are epp, paper"):
        contests(tmp_path, ("epp", "best"))


def test_workers_do_not_change_a_contest(tmp_path: Path) -> None:
    profile = a800()
    dataset = dataset_of(tmp_path, LONG_AND_SHORT)
    options = CompileOptions(batch_size=16)
    asked = (dataset, profile, options, [4], [80 * GIB], ("1f1b", "flexsp"))
    one = compare_systems(*asked)
    assert one == compare_systems(*asked, num_workers=2)
