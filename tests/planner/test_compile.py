"""Compile: any lengths give plans that verify, the same inputs the same bytes.

Errors name what helps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinipipe.dataset import BYTES, Dataset, open_dataset
from infinipipe.errors import InfeasibleError, InputError
from infinipipe.ir import Header, Layout, Step, open_plan, verify_header, verify_plan, verify_step
from infinipipe.planner import CompileOptions, compile_plan
from infinipipe.planner.compile import draw_batches, make_header, make_pipeline, plan_steps
from infinipipe.profiles import read_model
from infinipipe.profiles.analytic import analytic_profile
from tests.planner.toys import (
    ROOMY,
    roomy_limits,
    toy_costs,
    toy_profile,
)


def dataset_of(folder: Path, lengths: SequenceOf[int]) -> Dataset:
    path = folder / "dataset.jsonl"
    path.write_text("".join(json.dumps({"length": length}) + "\n" for length in lengths))
    return open_dataset(path, BYTES, 256)


def plan(folder: Path, lengths: SequenceOf[int], **options: Any) -> tuple[Header, list[Step]]:
    dataset, profile = dataset_of(folder, lengths), toy_profile(6)
    checked = CompileOptions(**{"memory_limit_bytes": (ROOMY,), **options})
    request = checked.resolve(profile, len(dataset))
    pipeline = make_pipeline(dataset, profile, request)
    header = make_header(dataset, pipeline, request)
    verify_header(header)
    steps = list(plan_steps(pipeline, request, draw_batches(dataset, request)))
    for step in steps:
        verify_step(header, step)
    return header, steps


def room(counts: SequenceOf[int], extra: float) -> tuple[int, ...]:
    return roomy_limits(toy_costs(toy_profile(sum(counts)), counts), extra)


@pytest.mark.slow
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None
)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 12), st.integers(1, 400)), min_size=1, max_size=10),
    num_stages=st.integers(1, 6),
    num_replicas=st.integers(1, 3),
    batch_size=st.integers(3, 9),
    tightness=st.floats(0.05, 3),
)
def test_any_lengths_give_a_plan_that_verifies(
    tmp_path: Path,
    lengths: list[int],
    num_stages: int,
    num_replicas: int,
    batch_size: int,
    tightness: float,
) -> None:
    dataset, profile = dataset_of(tmp_path, lengths), toy_profile(6)
    roomy = CompileOptions(num_stages=num_stages, memory_limit_bytes=(ROOMY,))
    stages = make_pipeline(dataset, profile, roomy.resolve(profile, len(dataset))).stages
    extra = tightness * max(lengths) * 6 / num_stages * 5000 + 300_000
    limits = room([stage.num_layers for stage in stages], extra)
    options = {"num_stages": num_stages, "num_replicas": num_replicas, "batch_size": batch_size}
    try:
        header, steps = plan(tmp_path, lengths, memory_limit_bytes=limits, **options)
    except InfeasibleError:
        return
    assert sorted(s.row for step in steps for s in step.sequences) == list(range(len(lengths)))
    assert [step.index for step in steps] == list(range(header.num_steps))
    for step in steps:
        assert step.bound_s <= step.makespan_s < step.step_s
        for replica in step.replicas:
            peaks = [predicted.peak_bytes for predicted in replica.predicted]
            assert all(
                peak <= limit for peak, limit in zip(peaks, header.memory_limit_bytes, strict=True)
            )


def test_a_sequence_larger_than_memory_is_sliced(tmp_path: Path) -> None:
    # Room for the inputs and slots of 20 tokens and for the activations of about 8 at a time.
    profile = toy_profile(6)
    sizes = profile.bytes
    held = (
        20
        * 3
        * (sizes.activation_per_token + sizes.layer_kv_per_token + sizes.layer_kv_grad_per_token)
    )
    held += 20 * (sizes.chunk_per_token + sizes.head_per_token + 2 * sizes.context_per_token)
    moment = sizes.layer_backward_peak.constant + 8 * (
        sizes.layer_backward_peak.rate + sizes.layer_full_per_token + 3 * sizes.activation_per_token
    )
    head = sizes.head_forward_peak.constant + 8 * (
        sizes.head_forward_peak.rate + sizes.logits_per_token
    )
    limits = room([3, 3], held + max(moment, head))
    _, steps = plan(tmp_path, [20], num_stages=2, memory_limit_bytes=limits)
    lengths = [chunk.num_tokens for chunk in steps[0].replicas[0].chunks]
    assert sum(lengths) == 20
    assert 3 <= len(lengths) <= 6
    assert max(max(row) for row in steps[0].replicas[0].recompute) == 3
    with pytest.raises(InfeasibleError, match="step 0 does not fit: stage"):
        plan(tmp_path, [20], num_stages=2, memory_limit_bytes=room([3, 3], held * 0.6))


def test_one_long_sequence_at_the_end_is_found_before_anything_is_written(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [10] * 200 + [3000])
    limits = room([3, 3], 2_000_000)
    options = CompileOptions(num_stages=2, batch_size=32, memory_limit_bytes=limits)
    message = (
        r"step . does not fit: stage . needs [\d.]+ MiB in the best plan found, "
        r"[\d.]+ \w+ more than its limit of"
    )
    calls: list[tuple[int, ...]] = []
    with pytest.raises(InfeasibleError, match=message):
        compile_plan(
            dataset,
            toy_profile(6),
            options,
            tmp_path / "plan.msgpack",
            lambda *call: calls.append(call),
        )
    assert calls == []
    assert [path.name for path in tmp_path.iterdir()] == ["dataset.jsonl"]


def test_the_file_is_the_same_every_time_and_the_seed_matters(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, [3, 90, 14, 15, 92, 65, 35, 8, 9, 79])
    written = []
    for seed in (0, 0, 1):
        np.random.seed(len(written))
        options = CompileOptions(num_stages=3, batch_size=4, seed=seed, memory_limit_bytes=(ROOMY,))
        calls: list[tuple[int, ...]] = []
        compile_plan(
            dataset,
            toy_profile(6),
            options,
            tmp_path / "p",
            lambda *call, calls=calls: calls.append(call),
        )
        assert calls == [(1, 3), (2, 3), (3, 3)]
        written.append((tmp_path / "p").read_bytes())
        with open_plan(tmp_path / "p") as reader:
            assert verify_plan(reader).num_sequences == 10
    assert written[0] == written[1] != written[2]


def rows_per_step(steps: list[Step]) -> list[list[int]]:
    return [[s.row for s in step.sequences] for step in steps]


def test_stages_and_replicas_do_not_move_a_sequence_to_another_step(tmp_path: Path) -> None:
    lengths = [3, 90, 14, 15, 92, 65, 35, 8, 9, 79]
    expected = rows_per_step(plan(tmp_path, lengths, num_stages=1, batch_size=4)[1])
    for num_stages, num_replicas in ((3, 1), (2, 2), (6, 3)):
        options = {"num_stages": num_stages, "num_replicas": num_replicas, "batch_size": 4}
        assert rows_per_step(plan(tmp_path, lengths, **options)[1]) == expected


def test_more_steps_than_an_epoch(tmp_path: Path) -> None:
    _, steps = plan(tmp_path, [5, 6, 7], num_stages=2, batch_size=2, num_steps=5)
    assert [len(step.sequences) for step in steps] == [2, 1, 2, 1, 2]
    assert sorted(row for rows in rows_per_step(steps)[:2] for row in rows) == [0, 1, 2]


def test_replicas_without_work_are_empty(tmp_path: Path) -> None:
    _, steps = plan(tmp_path, [50, 5, 6], num_stages=2, num_replicas=4)
    replicas = steps[0].replicas
    assert [len(replica.chunks) > 0 for replica in replicas] == [True, True, True, False]
    assert replicas[3].programs == ((), ())
    assert replicas[3].predicted[0].bubble_s == steps[0].makespan_s


def test_loss_norms(tmp_path: Path) -> None:
    assert plan(tmp_path, [5, 1, 3], num_stages=1)[1][0].denominator == 6
    assert plan(tmp_path, [5, 1, 3], num_stages=1, loss_norm="sequence")[1][0].denominator == 2


def test_defaults_come_from_the_profile_and_the_dataset() -> None:
    profile = analytic_profile(read_model("llama-7b"), "a800-80g")
    fixed = {"num_stages": 2, "sequence_parallel": 2}
    request = CompileOptions(**fixed).resolve(profile, 10_000)
    assert request.layout == Layout(
        num_stages=2, sequence_parallel=2, num_replicas=2, devices_per_node=8
    )
    assert request.limits == (77 * 2**30,) * 2
    assert (request.batch_size, request.num_steps) == (512, 20)
    few = CompileOptions(**fixed).resolve(profile, 10)
    assert (few.batch_size, few.num_steps) == (10, 1)
    given_ones = CompileOptions(**fixed, batch_size=4, num_steps=9).resolve(profile, 10)
    assert (given_ones.batch_size, given_ones.num_steps) == (4, 9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_stages": 0}, "--stages 0: at least 1 is needed"),
        ({"num_replicas": 0}, "--replicas 0: at least 1"),
        ({"num_devices": 0}, "--devices 0: at least 1"),
        ({"sequence_parallel": 0}, "--sequence-parallel 0: at least 1"),
        ({"devices_per_node": 0}, "--devices-per-node 0: at least 1"),
        ({"batch_size": -1}, "--batch-size -1: at least 1"),
        ({"num_steps": 0}, "--steps 0: at least 1"),
        ({"seed": -1}, "--seed -1: a number from 0 up"),
        ({"memory_limit_bytes": (0,)}, "--memory: a positive size"),
        ({"memory_limit_bytes": ()}, "--memory: a positive size"),
        ({"policy": "best"}, "--policy best: no such policy; there are epp"),
        ({"loss_norm": "mean"}, "--loss-norm mean: token or sequence"),
    ],
)
def test_options_are_checked_when_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        CompileOptions(**options)


def test_options_that_do_not_fit_the_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--stages 7: tiny has only 6 layers, .* give at most 6"):
        plan(tmp_path, [5], num_stages=7)
    with pytest.raises(
        InputError, match="--memory: 2 limits for 3 stages; give one, or one for each stage"
    ):
        plan(tmp_path, [5], num_stages=3, memory_limit_bytes=(ROOMY, ROOMY))
    with pytest.raises(
        InputError, match=r"has 2147483647 tokens, .* more than 33554431 of tiny; give --max-length"
    ):
        plan(tmp_path, [2**31 - 1], num_stages=3)


def test_a_policy_that_does_not_split_says_so_of_a_sequence_that_no_kernel_can_index(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        InfeasibleError,
        match=r"policy does not split .* choose another --policy, or lower --max-len",
    ):
        plan(tmp_path, [30_000_000, 20], policy="1f1b")
