"""Layers to stages: balanced in time, embedding and head counted, within memory."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import msgspec
import numpy as np
import pytest

from infinipipe.errors import InfeasibleError
from infinipipe.ir import Layout, Stage
from infinipipe.planner.passes.partition import balanced_costs
from infinipipe.profiles import Profile, read_model
from infinipipe.profiles.analytic import analytic_profile
from tests.planner.toys import roomy_limits, toy_costs, toy_profile

LENGTHS = np.array([1000, 5000, 300])
ROOMY = 2**45


def balanced(profile: Profile, limits: SequenceOf[int]) -> tuple[Stage, ...]:
    return balanced_costs(profile, Layout(num_stages=len(limits)), limits, LENGTHS).stages


def counts(profile: Profile, num_stages: int, limit: int = ROOMY) -> list[int]:
    stages = balanced(profile, [limit] * num_stages)
    assert [stage.first_layer for stage in stages] == np.cumsum(
        [0, *(s.num_layers for s in stages[:-1])]
    ).tolist()
    assert [(s.embedding, s.head) for s in stages] == [
        (i == 0, i == num_stages - 1) for i in range(num_stages)
    ]
    return [stage.num_layers for stage in stages]


def test_thirty_layers_over_four_stages_sum_to_thirty() -> None:
    found = counts(toy_profile(30), 4)
    assert sum(found) == 30
    assert max(found) - min(found) <= 1
    assert found[0] <= found[-2]


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_every_stage_has_a_layer(num_stages: int) -> None:
    found = counts(toy_profile(8), num_stages)
    assert sum(found) == 8
    assert min(found) >= 1


def test_a_large_vocabulary_takes_layers_off_the_last_stage() -> None:
    profile = analytic_profile(read_model("llama3-8b"), "a800-80g")
    found = counts(profile, 8)
    assert sum(found) == 32
    assert found[-1] == min(found) < 4
    assert found[0] in (4, 5)
    small = counts(analytic_profile(read_model("llama-7b"), "a800-80g"), 8)
    assert small[-1] > found[-1]


def test_memory_moves_layers() -> None:
    profile = toy_profile(12)
    limits = list(roomy_limits(toy_costs(profile, [3, 3, 3, 3]), 0))
    limits[1] -= 1
    limits[2] += toy_costs(profile, [3, 3, 3, 3]).static_bytes_per_layer
    assert [stage.num_layers for stage in balanced(profile, limits)] == [3, 2, 4, 3]


def test_too_little_memory_names_the_stage_or_the_model() -> None:
    profile = toy_profile(12)
    # Of a stage between others.
    one = roomy_limits(toy_costs(profile, [1, 1, 1]), 0)[1]
    with pytest.raises(
        InfeasibleError,
        match=r"stage 0 needs 3\.\d+ MiB .* one layer and the embedding, .*--memory",
    ):
        balanced(profile, [one] * 3)
    three = roomy_limits(toy_costs(profile, [3, 3, 3]), 0)
    with pytest.raises(
        InfeasibleError,
        match=r"12 layers of tiny do not fit into 3 stages .* room for 9; raise --stages",
    ):
        balanced(profile, three)


def test_uneven_stages_are_no_slower() -> None:
    profile = analytic_profile(read_model("llama3-8b"), "a800-80g")
    layer = (
        profile.times.layer_forward.curve.seconds[10]
        + profile.times.layer_backward.curve.seconds[10]
    )
    head = profile.times.head_forward.seconds[10] + profile.times.head_backward.seconds[10]
    found = counts(profile, 8)
    assert max(max(found[:-1]) * layer, found[-1] * layer + head) <= 4 * layer + head


def test_profiles_without_attention_or_head_cost_balance_too() -> None:
    profile = toy_profile(8)
    flat = msgspec.structs.replace(profile.times.head_forward, seconds=(0.0, 0.0))
    free = msgspec.structs.replace(
        profile.times,
        head_forward=flat,
        head_backward=flat,
        embedding_forward=flat,
        embedding_backward=flat,
    )
    assert counts(msgspec.structs.replace(profile, times=free), 4) == [2, 2, 2, 2]
