"""What the cost model says between steps, and before there are chunks."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from infinipipe.costs import check_predictions, max_sequence_tokens
from infinipipe.dataset import BYTES, open_dataset
from infinipipe.errors import VerifyError
from infinipipe.ir import ONE_NODE, Stage, open_plan, verify_plan
from infinipipe.planner import CompileOptions, compile_plan
from infinipipe.profiles import Line, Profile, read_model
from infinipipe.profiles.analytic import analytic_profile
from tests.costs.rounds import FIRST, LAST, round_costs, round_profile
from tests.planner.toys import ROOMY, toy_costs, toy_profile

MIB = 2**20


def with_times(profile: Profile, **times: object) -> Profile:
    return msgspec.structs.replace(profile, times=msgspec.structs.replace(profile.times, **times))


def test_parameters_count_embedding_head_and_a_tied_copy_once() -> None:
    """By the bytes that stages hold between steps, 16 for each parameter."""
    profile = round_profile()
    model = profile.model
    tied = msgspec.structs.replace(profile, model=msgspec.structs.replace(model, tied=True))
    costs = round_costs((FIRST, LAST), profile=profile)
    first, last = 2 * model.layer_parameters + 256 * 128, 3 * model.layer_parameters + 256 * 128
    assert costs.static_bytes(0) == 16 * first
    # And the final norm.
    assert costs.static_bytes(1) == 16 * (last + 128)
    assert costs.static_bytes_per_layer == 16 * model.layer_parameters
    whole = (Stage(first_layer=0, num_layers=8, embedding=True, head=True),)
    apart, once = (round_costs(whole, profile=each).static_bytes(0) for each in (profile, tied))
    assert apart - once == 16 * 256 * 128
    # A tied head on a stage of its own is a copy.
    assert round_costs((FIRST, LAST), profile=tied).static_bytes(1) == costs.static_bytes(1)
    line = profile.times.optimizer_s
    assert costs.optimizer_s(1) == line.constant + line.rate * (last + 128)


def gradient_bytes(stage: int) -> int:
    """Return the bytes of a stage's gradients in float32, of the stages FIRST and LAST."""
    return 4 * round_costs().static_bytes(stage) // 16


def test_one_replica_has_nothing_to_add_up() -> None:
    costs = round_costs()
    assert [costs.gradient_sync_s(stage) for stage in (0, 1)] == [0.0, 0.0]
    optimizer_s = [costs.optimizer_s(stage) for stage in (0, 1)]
    assert costs.end_of_step_s == max(optimizer_s)


def with_rings(profile: Profile, num_ranks: int, scatter: Line, gather: Line) -> Profile:
    """Return a profile whose two exchanges in a ring were measured among so many ranks."""
    links = msgspec.structs.replace(
        profile.times.links, reduce_scatter_s=scatter, all_gather_s=gather, num_ranks=num_ranks
    )
    return with_times(profile, links=links)


@pytest.mark.parametrize("measured_ranks", [2, 4, 8])
@pytest.mark.parametrize("num_replicas", [2, 3, 8])
def test_copies_exchange_gradients_and_parameters_as_measured_among_other_ranks(
    measured_ranks: int, num_replicas: int
) -> None:
    scatter = Line(constant=6e-5, rate=1e-9)
    gather = Line(constant=2e-5, rate=3e-9)
    profile = with_rings(round_profile(), measured_ranks, scatter, gather)
    costs = round_costs(profile=profile, num_replicas=num_replicas)
    for stage in (0, 1):
        # A ring of N ranks has N - 1 messages, in which each sends (N - 1) / N of the buffer.
        messages = (num_replicas - 1) / (measured_ranks - 1)
        share = (num_replicas - 1) / num_replicas / ((measured_ranks - 1) / measured_ranks)
        num_bytes = gradient_bytes(stage)
        # What decays and what does not is exchanged apart.
        expected = 2 * messages * (6e-5 + 2e-5)
        # Parameters in bfloat16 are half of gradients in float32.
        expected += share * (1e-9 * num_bytes + 3e-9 * num_bytes / 2)
        assert costs.gradient_sync_s(stage) == pytest.approx(expected, rel=1e-12)
    if measured_ranks == num_replicas:
        whole = 2 * 8e-5 + 2.5e-9 * gradient_bytes(0)
        assert costs.gradient_sync_s(0) == pytest.approx(whole, rel=1e-12)


def test_a_step_ends_with_the_slowest_stages_gradients_and_optimizer() -> None:
    """One stage after the other is the slower one: what counts is the sum."""
    for optimizer in (Line(constant=0.5, rate=0.0), Line(constant=0.0, rate=1e-6)):
        profile = with_times(round_profile(), optimizer_s=optimizer)
        profile = with_rings(
            profile, 8, Line(constant=1.0, rate=1e-8), Line(constant=0.0, rate=0.0)
        )
        costs = round_costs(profile=profile, num_replicas=2)
        sums = [costs.gradient_sync_s(stage) + costs.optimizer_s(stage) for stage in (0, 1)]
        assert sums[1] > sums[0] > 0
        assert costs.end_of_step_s == sums[1]
        turned = round_costs((msgspec.structs.replace(LAST, num_layers=1), FIRST), profile=profile)
        sums = [turned.gradient_sync_s(stage) + turned.optimizer_s(stage) for stage in (0, 1)]
        assert turned.end_of_step_s == max(sums)


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_a_step_takes_its_makespan_and_what_ends_it(tmp_path: Path, num_replicas: int) -> None:
    ring = Line(constant=0.25, rate=1e-6)
    profile = with_rings(toy_profile(6), 4, ring, ring)
    lengths = (90, 3, 14, 15, 92, 65, 35, 8)
    dataset = tmp_path / "dataset.jsonl"
    dataset.write_text("".join(json.dumps({"length": length}) + "\n" for length in lengths))
    options = CompileOptions(
        num_stages=2,
        num_replicas=num_replicas,
        devices_per_node=ONE_NODE,
        batch_size=4,
        memory_limit_bytes=(ROOMY,),
    )
    compile_plan(open_dataset(dataset, BYTES, 256), profile, options, tmp_path / "plan.msgpack")
    costs = toy_costs(profile, [3, 3], num_replicas=num_replicas)
    assert (costs.gradient_sync_s(0) > 0.05) == (num_replicas > 1)
    with open_plan(tmp_path / "plan.msgpack") as reader:
        verify_plan(reader)
        header, steps = reader.header, list(reader)
    assert header.stages == costs.stages
    assert len(steps) == 2
    for step in steps:
        assert step.step_s == step.makespan_s + costs.end_of_step_s
        check_predictions(header, step)
        lying = msgspec.structs.replace(step, step_s=step.makespan_s + costs.optimizer_s(0))
        if num_replicas > 1:
            with pytest.raises(VerifyError, match=f"a predicted step_s of {lying.step_s}; "):
                check_predictions(header, lying)


def test_what_a_chunk_and_a_sequence_may_have_at_most() -> None:
    """Kernels index elements with 32 bits; a layer of LLaMA 7B is 11,008 wide."""
    profile = analytic_profile(read_model("llama-7b"), "a800-80g")
    costs = toy_costs(profile, [16, 16])
    assert costs.max_chunk_tokens == (2**31 - 1) // 11_008
    assert max_sequence_tokens(profile.model, 1) == (2**31 - 1) // profile.model.kv_size
    assert max_sequence_tokens(profile.model, 64) == (2**31 - 1) // profile.model.head_dim


def test_slots_and_boundaries_by_hand() -> None:
    costs = round_costs()
    assert costs.boundary_bytes(7) == 70
    tokens = np.array([12.0, 3.0])
    assert costs.slot_bytes(1, tokens).tolist() == [12 * 3 * 20, 3 * 3 * 20]
    assert costs.slot_gradient_bytes(0, tokens).tolist() == [12 * 2 * 40, 3 * 2 * 40]


def test_other_stages_of_the_same_layout() -> None:
    costs = toy_costs(toy_profile(6), [3, 3], num_replicas=2)
    others = costs.with_stages(toy_costs(toy_profile(6), [2, 4]).stages)
    assert [stage.num_layers for stage in others.stages] == [2, 4]
    assert (others.layout, others.profile) == (costs.layout, costs.profile)
    with pytest.raises(AssertionError, match="how many stages"):
        costs.with_stages(costs.stages[:1])
