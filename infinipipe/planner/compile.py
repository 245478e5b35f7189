"""Compile: from a dataset and a profile to a plan file, step by step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec

from infinipipe import __version__
from infinipipe.aliases import Progress
from infinipipe.costs import max_sequence_tokens
from infinipipe.dataset import Dataset
from infinipipe.errors import InfeasibleError, InputError
from infinipipe.ir import (
    FORMAT_VERSION,
    Header,
    LossNorm,
    PlanWriter,
    Step,
    loss_denominator,
    verify_header,
    verify_step,
)
from infinipipe.planner.batches import Batch, Batches
from infinipipe.planner.bound import makespan_bound
from infinipipe.planner.options import CompileOptions, Request
from infinipipe.planner.passes.partition import balanced_costs
from infinipipe.planner.passes.recompute import Shortage
from infinipipe.planner.passes.schedule import empty_replica, make_replica
from infinipipe.planner.policies import POLICIES, Policy
from infinipipe.planner.problem import Pipeline, Problem
from infinipipe.planner.replicas import plan_replicas
from infinipipe.planner.workers import ordered_map
from infinipipe.profiles import Profile, pack_profile, profile_sha256
from infinipipe.units import show_bytes


def compile_plan(
    dataset: Dataset,
    profile: Profile,
    options: CompileOptions,
    path: Path,
    progress: Progress | None = None,
    *,
    resume: bool = False,
    num_workers: int = 1,
) -> Header:
    """Plan every step and write the plan; return its header.

    With `resume`, go on with an interrupted one. The plan's bytes do not depend on `num_workers`,
    nor on interruptions.

    Raises:
        InputError: the options do not fit the profile or the dataset.
        InfeasibleError: a step does not fit the memory limit.
        PlanFileError: the plan cannot be written.
    """
    request = options.resolve(profile, len(dataset))
    pipeline = make_pipeline(dataset, profile, request)
    batches = draw_batches(dataset, request)
    header = make_header(dataset, pipeline, request)
    verify_header(header)
    check_longest(pipeline, request.policy, batches.longest())
    with PlanWriter(path, header, resume=resume) as writer:
        for step in plan_steps(pipeline, request, batches, writer.num_steps, num_workers):
            verify_step(header, step)
            writer.append(step)
            if progress is not None:
                progress(writer.num_steps, header.num_steps)
    return header


def make_pipeline(dataset: Dataset, profile: Profile, request: Request) -> Pipeline:
    """Return the stages, what they cost, and their limits.

    Raises:
        InputError: a sequence is longer than a kernel can index.
        InfeasibleError: the stages cannot even hold the model.
    """
    lengths = dataset.rows.lengths
    longest = int(lengths.max())
    most = max_sequence_tokens(profile.model, request.layout.sequence_parallel)
    if longest > most:
        raise InputError(
            f"{dataset.path}: a sequence has {longest} tokens, and kernels cannot index more than "
            f"{most} of {profile.model.name}; give --max-length {most} or less"
        )
    costs = balanced_costs(profile, request.layout, request.limits, lengths)
    return Pipeline(costs, request.limits, longest)


def draw_batches(dataset: Dataset, request: Request) -> Batches:
    """Return the global batches of all steps."""
    return Batches(dataset.rows, request.batch_size, request.num_steps, request.seed)


def make_header(dataset: Dataset, pipeline: Pipeline, request: Request) -> Header:
    """Return everything that holds for the whole plan."""
    costs = pipeline.costs
    profile = costs.profile
    return Header(
        format_version=FORMAT_VERSION,
        infinipipe_version=__version__,
        model=profile.model,
        model_sha256=profile.model.sha256,
        dtype=profile.dtype,
        stages=costs.stages,
        num_replicas=costs.layout.num_replicas,
        sequence_parallel=costs.layout.sequence_parallel,
        devices_per_node=costs.layout.devices_per_node,
        memory_limit_bytes=pipeline.limits,
        batch_size=request.batch_size,
        num_steps=request.num_steps,
        seed=request.seed,
        max_length=dataset.max_length,
        loss_norm=request.loss_norm,
        logits_tokens=costs.logits_tokens,
        dataset=dataset.info,
        policy=request.policy,
        profile_sha256=profile_sha256(profile),
        profile=msgspec.Raw(pack_profile(profile)),
    )


def check_longest(pipeline: Pipeline, policy: str, longest: Batch) -> None:
    """Plan the longest sequence by itself: what cannot fit is said at once, not at its step.

    Raises:
        InfeasibleError: not even this sequence alone fits.
    """
    result = POLICIES[policy](Problem(pipeline, longest.sequences, (0,)))
    if isinstance(result, Shortage):
        raise infeasible(pipeline, longest.index, result)


def plan_steps(
    pipeline: Pipeline,
    request: Request,
    batches: Batches,
    first: int = 0,
    num_workers: int = 1,
) -> Iterator[Step]:
    """Yield the steps from `first` on.

    Raises:
        InfeasibleError: a step does not fit the memory limit.
    """
    plan = partial(_plan_batch, pipeline, request.policy, request.loss_norm)
    # No more workers than there are steps left, and one where none are.
    num_left = request.num_steps - first
    num_workers = max(1, min(num_workers, num_left))
    yield from ordered_map(plan, batches.steps(first), num_workers)


def _plan_batch(pipeline: Pipeline, policy: str, loss_norm: LossNorm, batch: Batch) -> Step:
    # Policies go to worker processes by name.
    return plan_step(pipeline, POLICIES[policy], batch, loss_norm)


def plan_step(pipeline: Pipeline, policy: Policy, batch: Batch, loss_norm: LossNorm) -> Step:
    """Plan one global batch.

    Raises:
        InfeasibleError: no schedule was found that fits the memory limits.
    """
    hands = plan_replicas(pipeline, policy, batch.sequences)
    if isinstance(hands, Shortage):
        raise infeasible(pipeline, batch.index, hands)
    makespan_s = max(hand.makespan_s for hand in hands)
    replicas = [
        make_replica(hand.schedule)
        if hand.schedule
        else empty_replica(pipeline.num_stages, makespan_s)
        for hand in hands
    ]
    return Step(
        index=batch.index,
        sequences=batch.sequences,
        denominator=loss_denominator(batch.sequences, loss_norm),
        replicas=tuple(replicas),
        makespan_s=makespan_s,
        bound_s=makespan_bound(pipeline, batch.sequences, pipeline.num_replicas),
        step_s=makespan_s + pipeline.costs.end_of_step_s,
    )


def infeasible(pipeline: Pipeline, index: int, shortage: Shortage) -> InfeasibleError:
    """Say which stage needs how much, and what would help."""
    limit = pipeline.limits[shortage.stage]
    if math.isinf(shortage.bytes_needed):
        most = pipeline.costs.max_chunk_tokens
        return InfeasibleError(
            f"step {index} does not fit: the policy does not split sequences, and one has more "
            f"tokens than kernels can index, {most:,}; choose another --policy, or lower "
            "--max-length"
        )
    error = InfeasibleError(
        f"step {index} does not fit: stage {shortage.stage} needs "
        f"{show_bytes(shortage.bytes_needed)} in the best plan found, "
        f"{show_bytes(shortage.missing)} more than its limit of {show_bytes(limit)}; "
        "raise --memory or --devices, or lower --max-length"
    )
    error.missing_bytes = shortage.missing
    return error
