"""The choice of a layout: what may be chosen, and that the search finds what trying all finds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from infinipipe.dataset import Dataset
from infinipipe.errors import InfeasibleError, InputError
from infinipipe.ir import Layout, open_plan, verify_plan
from infinipipe.planner import CompileOptions, LayoutSearch, choose_layout, compile_plan
from infinipipe.planner.compile import draw_batches, make_pipeline, plan_step
from infinipipe.planner.layouts import search_layouts
from infinipipe.planner.policies import POLICIES
from infinipipe.profiles import Profile, read_model
from infinipipe.profiles.analytic import analytic_profile
from infinipipe.reports.layouts import search_table, verdict
from tests.planner.test_compile import dataset_of
from tests.planner.toys import ROOMY, toy_profile


def machine(num_devices: int, num_layers: int = 6) -> Profile:
    """Return the toys' profile on a machine of so many devices."""
    profile = toy_profile(num_layers)
    device = msgspec.structs.replace(profile.device, num_devices=num_devices)
    return msgspec.structs.replace(profile, device=device)


def names(options: CompileOptions, profile: Profile) -> list[tuple[int, int, int]]:
    return [
        (layout.num_stages, layout.sequence_parallel, layout.num_replicas)
        for layout in options.layouts(profile)
    ]


def test_all_devices_are_used_in_every_way() -> None:
    # The toy has 6 layers, 4 heads, 2 of K and V.
    assert names(CompileOptions(), machine(4)) == [
        *((1, 1, 4), (1, 2, 2), (1, 4, 1)),
        *((2, 1, 2), (2, 2, 1), (4, 1, 1)),
    ]
    # 3 does not divide the heads, 12 is more than there are layers.
    assert names(CompileOptions(num_devices=12), machine(12)) == [
        *((1, 1, 12), (1, 2, 6), (1, 4, 3), (2, 1, 6), (2, 2, 3), (3, 1, 4), (3, 2, 2), (3, 4, 1)),
        *((4, 1, 3), (6, 1, 2), (6, 2, 1)),
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # The devices of the profile are used, or as many as what is given takes.
        ({"num_stages": 2}, [(2, 1, 4), (2, 2, 2), (2, 4, 1)]),
        ({"num_stages": 3}, [(3, 1, 1)]),
        ({"num_stages": 2, "num_replicas": 8}, [(2, 1, 8)]),
        ({"num_stages": 2, "sequence_parallel": 2, "num_replicas": 1}, [(2, 2, 1)]),
        ({"num_devices": 4, "num_replicas": 2}, [(1, 2, 2), (2, 1, 2)]),
        # Limits say how many stages there are.
        ({"memory_limit_bytes": (ROOMY, ROOMY), "num_replicas": 4}, [(2, 1, 4)]),
        # Sequences stay in a node, unless it is asked.
        ({"devices_per_node": 2, "num_stages": 2}, [(2, 1, 4), (2, 2, 2)]),
        ({"devices_per_node": 2, "num_stages": 2, "sequence_parallel": 4}, [(2, 4, 1)]),
        # Its sequences need not.
        ({"policy": "deepspeed", "devices_per_node": 2}, [(1, 1, 8), (1, 2, 4), (1, 4, 2)]),
    ],
)
def test_what_is_given_narrows_the_search(
    options: dict[str, Any], expected: list[tuple[int, int, int]]
) -> None:
    assert names(CompileOptions(**options), machine(8)) == expected


def test_layouts_know_their_nodes() -> None:
    profile = machine(8)
    (layout,) = CompileOptions(num_stages=4, num_replicas=2).layouts(profile)
    assert layout.devices_per_node == 8
    given = CompileOptions(num_stages=4, num_replicas=2, devices_per_node=2)
    assert given.layouts(profile)[0].devices_per_node == 2
    assert given.with_layout(layout).layouts(profile) == (layout,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_devices": 12, "num_stages": 4, "sequence_parallel": 2, "num_replicas": 1},
            "--devices 12: --stages 4 x --sequence-parallel 2 x --replicas 1 takes 8; give another",
        ),
        (
            {"num_devices": 12, "num_stages": 4, "sequence_parallel": 2},
            "--devices 12: --stages 4 x --sequence-parallel 2 takes multiples of 8; give another",
        ),
        ({"num_stages": 7}, "--stages 7: tiny has only 6 layers, .* give at most 6"),
        ({"sequence_parallel": 3}, "--sequence-parallel 3: tiny has 4 heads and 2 of K and V"),
        ({"num_devices": 7, "num_replicas": 1}, "--devices 7: no layout of tiny uses them all"),
        ({"policy": "deepspeed", "num_stages": 2}, "--policy deepspeed: it has one stage, not 2"),
    ],
)
def test_what_no_layout_can_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message).replace(r"\.\*", ".*")):
        CompileOptions(**options).layouts(machine(8))


def found(dataset: Dataset, options: CompileOptions, num_workers: int = 1) -> LayoutSearch:
    profile = machine(4)
    layouts = options.layouts(profile)
    return search_layouts(dataset, profile, options, layouts, num_workers=num_workers)


def seconds_of_all(
    dataset: Dataset, profile: Profile, options: CompileOptions
) -> dict[Layout, float]:
    """Return the mean seconds of a step on every layout that fits, all of them planned."""
    seconds = {}
    for layout in options.layouts(profile):
        request = options.resolve(profile, len(dataset), layout)
        batches = draw_batches(dataset, request)
        try:
            pipeline = make_pipeline(dataset, profile, request)
            steps = [
                plan_step(pipeline, POLICIES[options.policy], batch, "token")
                for batch in batches.steps()
            ]
        except InfeasibleError:
            continue
        seconds[layout] = sum(step.step_s for step in steps) / len(steps)
    return seconds


LENGTHS = {
    "short": [20, 30, 25, 18, 22, 31, 12, 14] * 4,
    "one long": [400, 3, 14, 15, 9, 26, 5, 35] * 2,
    "long": [200, 180, 220, 150],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("policy", ["epp", "1f1b"])
def test_the_search_chooses_what_trying_all_chooses(
    tmp_path: Path, lengths: list[int], policy: str
) -> None:
    dataset = dataset_of(tmp_path, lengths)
    # No more steps than are sampled.
    batch_size = -(-len(lengths) // 3)
    options = CompileOptions(
        batch_size=batch_size, memory_limit_bytes=(ROOMY,), policy=policy, num_steps=3
    )
    search = found(dataset, options)
    exhaustive = seconds_of_all(dataset, machine(4), options)
    best = search.best
    assert best is not None
    assert best.layout is not None
    assert best.step_s == min(exhaustive.values()) == exhaustive[best.layout]
    assert len(search.trials) == 6
    for trial in search.trials:
        assert trial.layout is not None
        # Bounds are not above what they bound.
        assert trial.at_least_s <= exhaustive[trial.layout]
        # And they do not exclude what would be faster.
        assert trial.at_least_s >= best.step_s


def test_workers_do_not_change_the_search(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [50, 3, 14, 15, 92, 65, 35, 8] * 4)
    options = CompileOptions(batch_size=8, memory_limit_bytes=(ROOMY,))
    assert found(dataset, options) == found(dataset, options, num_workers=2)


def tight(profile: Profile) -> int:
    """Return a limit that a half of the model fits into, and not much more."""
    model = profile.model
    per = profile.bytes
    parameters = model.num_layers * model.layer_parameters / 2 + model.embedding_parameters
    return int(parameters * (per.static_per_parameter + per.sharded_per_parameter) * 1.1)


def test_why_a_layout_was_not_chosen_is_said(tmp_path: Path) -> None:
    profile = machine(4)
    dataset = dataset_of(tmp_path, [400, 3, 14, 15, 92, 65, 35, 8] * 2)
    options = CompileOptions(
        num_replicas=1, batch_size=8, memory_limit_bytes=(tight(profile),), policy="1f1b"
    )
    layouts = options.layouts(profile)
    search = search_layouts(dataset, profile, options, layouts)
    best = search.best
    assert best is not None
    reasons = [trial for trial in search.trials if trial.reason is not None]
    assert reasons, "the limit is too low for some layout"
    for trial in search.trials:
        said = verdict(search, trial)
        if trial is best:
            assert said == "fastest"
        elif trial.reason is None:
            assert re.fullmatch(r"(at least )?[\d.]+% slower", said)
        else:
            assert re.search(r"stage \d needs .* more than its limit|do not fit into", said)
            assert ";" not in said
    table = search_table(search)
    assert table.row_count == len(search.trials)


def test_no_layout_fits(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [20, 30])
    options = CompileOptions(memory_limit_bytes=(2**10,))
    with pytest.raises(
        InfeasibleError, match=r"no layout of 4 devices fits; the closest, .* --memory"
    ):
        choose_layout(dataset, machine(4), options)


def test_one_layout_is_not_searched(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [20, 30])
    options = CompileOptions(num_devices=2, num_stages=2, memory_limit_bytes=(2**10,))
    layout, search = choose_layout(dataset, machine(4), options)
    # Whether it fits is for compile to say.
    assert (layout.num_stages, search) == (2, None)


def test_progress_ends_where_it_said(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [50, 3, 14, 15, 92, 65, 35, 8])
    options = CompileOptions(batch_size=4, memory_limit_bytes=(ROOMY,))
    calls: list[tuple[int, int]] = []
    profile = machine(4)
    layouts = options.layouts(profile)
    search_layouts(dataset, profile, options, layouts, lambda *call: calls.append(call))
    assert calls == sorted(calls)
    total = len(layouts) * (1 + 2)
    assert calls[-1] == (total, total)


@pytest.mark.parametrize("layout", [(1, 2, 1), (1, 4, 2), (2, 2, 1), (2, 2, 2)])
def test_plans_of_shared_sequences_verify(tmp_path: Path, layout: tuple[int, int, int]) -> None:
    profile = analytic_profile(read_model("llama3-8b"), "h100-80g")
    dataset = dataset_of(tmp_path, [60_000, 9_000, 4_001, 3, 1, 700, 12_345, 2_000])
    stages, shared, replicas = layout
    options = CompileOptions(
        num_stages=stages,
        sequence_parallel=shared,
        num_replicas=replicas,
        memory_limit_bytes=(120 * 2**30,),
    )
    header = compile_plan(dataset, profile, options, tmp_path / "plan.msgpack")
    assert header.layout.num_ranks == stages * shared * replicas
    with open_plan(tmp_path / "plan.msgpack") as reader:
        verify_plan(reader)
