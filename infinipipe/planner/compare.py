"""Compare policies on the same steps: what each costs, against a bound that none can beat."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from itertools import chain
from typing import Literal

import msgspec

from infinipipe.aliases import Progress
from infinipipe.dataset import Dataset
from infinipipe.errors import InfeasibleError, InputError
from infinipipe.ir import (
    Header,
    Layout,
    StagePrediction,
    Step,
    TimeShares,
    verify_header,
    verify_step,
)
from infinipipe.planner.batches import Batches
from infinipipe.planner.compile import draw_batches, make_header, make_pipeline, plan_steps
from infinipipe.planner.options import CompileOptions, Request
from infinipipe.planner.policies import ONE_STAGE, POLICIES
from infinipipe.profiles import Profile


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What one policy makes of all steps."""

    policy: str
    feasible: Literal[True] = True
    step_seconds: float
    """Mean of the simulated steps, the optimizer included."""
    bound_seconds: float
    """Mean of what no schedule can beat, the optimizer included."""
    ratio_to_bound: float
    bubble_fraction: float
    """Of all stages' time."""
    recompute_fraction: float
    """Of the time in which stages compute."""
    peak_bytes: tuple[int, ...]
    """The most of any step, per stage."""
    num_chunks: float
    """Mean per step, over all replicas."""
    plan_seconds: float
    """Mean per step that planning took on this machine."""


class InfeasibleRow(msgspec.Struct, frozen=True, kw_only=True):
    """A policy that has no plan for some step."""

    policy: str
    feasible: Literal[False] = False
    reason: str


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """The policies on one choice of stages and memory."""

    num_stages: int
    memory_limit_bytes: tuple[int, ...]
    rows: tuple[Row | InfeasibleRow, ...]


def compare_grid(
    dataset: Dataset,
    profile: Profile,
    options: CompileOptions,
    stages: SequenceOf[int],
    memories: SequenceOf[int],
    policies: SequenceOf[str] | None = None,
    progress: Progress | None = None,
) -> list[Cell]:
    """Compare policies for every choice of stages and of memory.

    An empty sequence of choices leaves that to `options`. Without policies, all that plan layouts
    of several stages are compared.

    Raises:
        InputError: as `compare_policies`.
    """
    choices = _choices(profile, options, stages, memories)
    requests = [choice.resolve(profile, len(dataset)) for choice in choices]
    if policies is None:
        policies = [policy for policy in POLICIES if policy not in ONE_STAGE]
    # Neither stages nor memory move a row to another step.
    batches = draw_batches(dataset, requests[0])
    cells = []
    for number, request in enumerate(requests):

        def advance(done: int, total: int, number: int = number) -> None:
            if progress is not None:
                progress(number * total + done, len(requests) * total)

        rows: list[Row | InfeasibleRow]
        try:
            rows = compare_policies(dataset, profile, request, batches, policies, advance)
        except InfeasibleError as error:
            rows = [InfeasibleRow(policy=policy, reason=str(error)) for policy in policies]
        cells.append(
            Cell(
                num_stages=request.layout.num_stages,
                memory_limit_bytes=request.limits,
                rows=tuple(rows),
            )
        )
    return cells


def _choices(
    profile: Profile,
    options: CompileOptions,
    stages: SequenceOf[int],
    memories: SequenceOf[int],
) -> Iterator[CompileOptions]:
    """Yield options for one layout each, with one rank a stage and one replica if not given."""
    num_copies = (options.sequence_parallel or 1) * (options.num_replicas or 1)
    num_pipelines = max(1, profile.device.num_devices // num_copies)
    most_stages = min(num_pipelines, profile.model.num_layers)
    for num_stages in stages or (options.num_stages or most_stages,):
        layout = Layout(
            num_stages=num_stages,
            sequence_parallel=options.sequence_parallel or 1,
            num_replicas=options.num_replicas or 1,
            devices_per_node=options.devices_per_node or profile.device.num_devices,
        )
        for memory in memories or (None,):
            limits = options.memory_limit_bytes if memory is None else (memory,)
            yield replace(options.with_layout(layout), memory_limit_bytes=limits)


def compare_policies(
    dataset: Dataset,
    profile: Profile,
    request: Request,
    batches: Batches,
    policies: SequenceOf[str] = tuple(POLICIES),
    progress: Progress | None = None,
) -> list[Row | InfeasibleRow]:
    """Plan the same steps with each policy and return a row for each, in order.

    Every plan is verified.

    Raises:
        InputError: a policy is unknown, or a sequence is too long.
        InfeasibleError: the stages cannot even hold the model.
    """
    unknown = [policy for policy in policies if policy not in POLICIES]
    if unknown:
        known = ", ".join(POLICIES)
        raise InputError(f"--policies {unknown[0]}: no such policy; there are {known}")
    pipeline = make_pipeline(dataset, profile, request)
    total = len(policies) * request.num_steps
    rows: list[Row | InfeasibleRow] = []
    for number, policy in enumerate(policies):
        if policy in ONE_STAGE and request.layout.num_stages > 1:
            reason = f"{policy} plans one stage, not {request.layout.num_stages}"
            rows.append(InfeasibleRow(policy=policy, reason=reason))
            continue
        mine = replace(request, policy=policy)
        header = make_header(dataset, pipeline, mine)
        verify_header(header)
        first = number * request.num_steps

        def advance(done: int, first: int = first) -> None:
            if progress is not None:
                progress(first + done, total)

        steps = plan_steps(pipeline, mine, batches)
        rows.append(_compare(header, steps, advance))
        advance(request.num_steps)
    return rows


def _compare(
    header: Header, steps: Iterator[Step], advance: Callable[[int], None]
) -> Row | InfeasibleRow:
    planned: list[Step] = []
    began = time.perf_counter()
    seconds = 0.0
    try:
        for step in steps:
            seconds += time.perf_counter() - began
            verify_step(header, step)
            planned.append(step)
            advance(len(planned))
            began = time.perf_counter()
    except InfeasibleError as error:
        return InfeasibleRow(policy=header.policy, reason=str(error))
    return summarize(header.policy, planned, seconds)


def summarize(policy: str, steps: SequenceOf[Step], plan_seconds: float) -> Row:
    """Return the row of a policy whose steps took so long to plan in all."""
    count = len(steps)
    step_s = sum(step.step_s for step in steps)
    # No schedule can beat the makespan's bound; what comes after the makespan is the same for all.
    bound_s = sum(step.bound_s + step.step_s - step.makespan_s for step in steps)
    replicas = list(chain.from_iterable(step.replicas for step in steps))
    shares = TimeShares.of(chain.from_iterable(replica.predicted for replica in replicas))
    num_chunks = sum(len(replica.chunks) for replica in replicas)
    by_stage = zip(*(replica.predicted for replica in replicas), strict=True)
    peaks = [_highest_peak(predictions) for predictions in by_stage]
    return Row(
        policy=policy,
        step_seconds=step_s / count,
        bound_seconds=bound_s / count,
        ratio_to_bound=step_s / bound_s,
        bubble_fraction=shares.bubble_fraction or 0.0,
        recompute_fraction=shares.recompute_fraction or 0.0,
        peak_bytes=tuple(peaks),
        num_chunks=num_chunks / count,
        plan_seconds=plan_seconds / count,
    )


def _highest_peak(predictions: SequenceOf[StagePrediction]) -> int:
    return max(prediction.peak_bytes for prediction in predictions)
