"""Compile: from a dataset and a profile to a plan file, step by step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import msgspec

from infinipipe import __version__
from infinipipe.aliases import Progress
from infinipipe.costs.cost import optimizer_seconds
from infinipipe.costs.sizes import most_chunk_tokens
from infinipipe.dataset import Dataset
from infinipipe.errors import InfeasibleError, InputError
from infinipipe.ir import (
    FORMAT_VERSION,
    Header,
    LossNorm,
    Replica,
    Sequence,
    Step,
    loss_denominator,
)
from infinipipe.ir.file.store import PlanWriter
from infinipipe.ir.verify import verify_header, verify_step
from infinipipe.planner.batches import global_batches
from infinipipe.planner.bound import makespan_bound
from infinipipe.planner.options import CompileOptions
from infinipipe.planner.passes.partition import partition_layers
from infinipipe.planner.passes.recompute import Shortage
from infinipipe.planner.passes.schedule import Schedule, empty_replica, make_replica
from infinipipe.planner.policies import POLICIES, Policy
from infinipipe.planner.problem import Pipeline, Problem, average_work
from infinipipe.planner.workers import ordered_map
from infinipipe.profiles import Profile, pack_profile, profile_sha256
from infinipipe.profiles.logits import logits_tokens
from infinipipe.units import show_bytes

_MAX_ELEMENTS = 2**31 - 1


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
    """Plan every step and write the plan; return its header. With `resume`, go on with an interrupted one.

    The plan's bytes do not depend on `num_workers`, nor on interruptions.

    Raises:
        InputError: the options do not fit the profile or the dataset.
        InfeasibleError: a step does not fit the memory limit.
        PlanFileError: the plan cannot be written.
    """
    pipeline = make_pipeline(dataset, profile, options)
    header = make_header(dataset, pipeline, options)
    verify_header(header)
    check_longest(dataset, pipeline, header)
    with PlanWriter(path, header, resume=resume) as writer:
        for step in plan_steps(dataset, pipeline, header, writer.num_steps, num_workers):
            verify_step(header, step)
            writer.append(step)
            if progress is not None:
                progress(writer.num_steps, header.num_steps)
    return header


def make_pipeline(dataset: Dataset, profile: Profile, options: CompileOptions) -> Pipeline:
    """Return the stages and their limits.

    Raises:
        InputError: the options do not fit the profile, or a sequence is longer than a kernel can index.
        InfeasibleError: the stages cannot even hold the model.
    """
    model = profile.model
    longest, most = int(dataset.rows.lengths.max()), _MAX_ELEMENTS // max(model.kv_size, 1)
    if longest > most:
        raise InputError(
            f"{dataset.path}: a sequence has {longest} tokens, and kernels cannot index more than {most} "
            f"of {model.name}; give --max-length {most} or less"
        )
    limits = options.limits(profile)
    stages = partition_layers(profile, options.stages(profile), limits, dataset.rows.lengths)
    return Pipeline(profile, stages, limits, logits_tokens(model.vocabulary_size), longest)


def make_header(dataset: Dataset, pipeline: Pipeline, options: CompileOptions) -> Header:
    """Return everything that holds for the whole plan."""
    batch_size, num_steps = options.batches(len(dataset))
    profile = pipeline.profile
    return Header(
        format_version=FORMAT_VERSION,
        infinipipe_version=__version__,
        model=profile.model,
        model_sha256=profile.model.sha256,
        dtype=profile.dtype,
        stages=pipeline.stages,
        num_replicas=options.num_replicas,
        sequence_parallel=1,
        memory_limit_bytes=pipeline.limits,
        batch_size=batch_size,
        num_steps=num_steps,
        seed=options.seed,
        max_length=dataset.max_length,
        loss_norm=options.loss_norm,
        logits_tokens=pipeline.logits_tokens,
        dataset=dataset.info,
        policy=options.policy,
        profile_sha256=profile_sha256(profile),
        profile=msgspec.Raw(pack_profile(profile)),
    )


def check_longest(dataset: Dataset, pipeline: Pipeline, header: Header) -> None:
    """Plan the longest sequence by itself: what cannot fit is said at once, not at its step.

    Raises:
        InfeasibleError: not even this sequence alone fits.
    """
    steps = _global_batches(dataset, header, 0)
    index, longest = max(
        ((index, max(sequences, key=lambda s: s.length)) for index, sequences in steps),
        key=lambda found: found[1].length,
    )
    found = POLICIES[header.policy](Problem(pipeline, (longest,), (0,)))
    if isinstance(found, Shortage):
        raise infeasible(pipeline, index, found)


def plan_steps(
    dataset: Dataset, pipeline: Pipeline, header: Header, first: int = 0, num_workers: int = 1
) -> Iterator[Step]:
    """Yield the steps from `first` on."""
    plan = partial(_plan_batch, pipeline, header.policy, header.num_replicas, header.loss_norm)
    num_workers = max(1, min(num_workers, header.num_steps - first))
    yield from ordered_map(plan, _global_batches(dataset, header, first), num_workers)


Batch = tuple[int, tuple[Sequence, ...]]
"""A step's index and its sequences."""


def _global_batches(dataset: Dataset, header: Header, first: int) -> Iterator[Batch]:
    batches = global_batches(len(dataset), header.batch_size, header.num_steps, header.seed)
    lengths, targets = dataset.rows.lengths, dataset.rows.targets
    for index, rows in enumerate(islice(batches, first, None), start=first):
        columns = zip(rows.tolist(), lengths[rows].tolist(), targets[rows].tolist(), strict=True)
        yield index, tuple(Sequence(*column) for column in columns)


def _plan_batch(
    pipeline: Pipeline, policy: str, num_replicas: int, loss_norm: LossNorm, batch: Batch
) -> Step:
    return plan_step(pipeline, POLICIES[policy], *batch, num_replicas, loss_norm)


def plan_step(
    pipeline: Pipeline,
    policy: Policy,
    index: int,
    sequences: tuple[Sequence, ...],
    num_replicas: int,
    loss_norm: LossNorm,
) -> Step:
    """Plan one global batch.

    Raises:
        InfeasibleError: no schedule was found that fits the memory limits.
    """
    schedules = []
    for members in deal(pipeline, sequences, num_replicas):
        found = policy(Problem(pipeline, sequences, members)) if members else None
        if isinstance(found, Shortage):
            raise infeasible(pipeline, index, found)
        schedules.append(found)
    makespan = max((schedule.makespan_s for schedule in schedules if schedule), default=0.0)
    optimizer = max(optimizer_seconds(pipeline.profile, stage) for stage in pipeline.stages)
    return Step(
        index=index,
        sequences=sequences,
        denominator=loss_denominator(sequences, loss_norm),
        replicas=tuple(_replica(pipeline, schedule, makespan) for schedule in schedules),
        makespan_s=makespan,
        bound_s=makespan_bound(pipeline, sequences, num_replicas),
        step_s=makespan + optimizer,
    )


def deal(
    pipeline: Pipeline, sequences: tuple[Sequence, ...], num_replicas: int
) -> list[tuple[int, ...]]:
    """Deal sequences out by work: the longest first, to the replica with the least so far."""
    if num_replicas == 1:
        return [tuple(range(len(sequences)))]
    work = average_work(pipeline.profile, pipeline.num_stages)
    hands: list[list[int]] = [[] for _ in range(num_replicas)]
    totals = [0.0] * num_replicas
    for member in sorted(range(len(sequences)), key=lambda m: (-sequences[m].length, m)):
        least = min(range(num_replicas), key=lambda replica: (totals[replica], replica))
        hands[least].append(member)
        totals[least] += work.between(0, sequences[member].length)
    return [tuple(sorted(hand)) for hand in hands]


def infeasible(pipeline: Pipeline, index: int, shortage: Shortage) -> InfeasibleError:
    """Say which stage needs how much, and what would help."""
    limit = pipeline.limits[shortage.stage]
    if math.isinf(shortage.bytes_needed):
        return InfeasibleError(
            f"step {index} does not fit: the policy does not split sequences, and one has more tokens than kernels can "
            f"index, {most_chunk_tokens(pipeline):,}; choose another --policy, or lower --max-length"
        )
    return InfeasibleError(
        f"step {index} does not fit: stage {shortage.stage} needs {show_bytes(shortage.bytes_needed)} in the best plan "
        f"found, {show_bytes(shortage.missing)} more than its limit of {show_bytes(limit)}; "
        "raise --memory or --stages, or lower --max-length"
    )


def _replica(pipeline: Pipeline, schedule: Schedule | None, makespan_s: float) -> Replica:
    return (
        empty_replica(pipeline.num_stages, makespan_s)
        if schedule is None
        else make_replica(schedule)
    )
