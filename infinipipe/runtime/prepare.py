"""What a run is asked for, and whether plan, dataset, model and machine fit together."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from infinipipe.dataset import BYTES, IDS, LENGTHS, check_same_dataset, tokenizer_sha256
from infinipipe.errors import InputError, PlanFileError
from infinipipe.ir import DatasetInfo, Header, OpKind, PlanReader, Step, open_plan
from infinipipe.runtime.device import DTYPE_NAME, choose_device_kind

WEIGHTS = "model"
"""The folder of a run's weights in its output folder."""

RUNNABLE = (OpKind.FORWARD, OpKind.BACKWARD)
"""The kinds of op that the executor has a handler for; stated here without importing it, because
transformers takes seconds to import."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What `infinipipe run` was asked for."""

    plan: Path
    data: Path | None
    """None: where the plan was compiled from."""
    model: Path | None
    """A Hugging Face directory to read weights from; None draws them from `seed`."""
    device: str
    """`auto`, `cpu` or `cuda`."""
    num_steps: int | None
    """None: all of the plan's."""
    lr: float
    seed: int
    output: Path


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """Options that were checked, and what they came to."""

    options: RunOptions
    num_ranks: int
    data: Path
    tokenizer: str
    """As `infinipipe.dataset.open_dataset` takes it."""
    device_kind: str
    """`cpu` or `cuda`."""
    num_steps: int


def prepare(options: RunOptions) -> PreparedRun:
    """Check everything that can be checked before a worker starts.

    Raises:
        InfinipipeError: plan, dataset, model, output and machine do not fit together.
    """
    if not math.isfinite(options.lr) or options.lr < 0:
        raise InputError(f"--lr {options.lr}: a finite number from 0 up is needed")
    with open_plan(options.plan) as plan:
        header = plan.header
        num_ranks = header.layout.num_ranks
        run = PreparedRun(
            options=options,
            num_ranks=num_ranks,
            data=_find_data(options, header.dataset),
            tokenizer=_find_tokenizer(options, header.dataset),
            device_kind=choose_device_kind(options.device, num_ranks),
            num_steps=_num_steps(options, header),
        )
        _check_output(options.output)
        _check_model(options, header)
        _check_dtype(options, header)
        _check_steps(plan, run.num_steps)
    return run


def _find_data(options: RunOptions, stated: DatasetInfo) -> Path:
    """Return where the dataset is: as asked, where it was then, or as seen from the plan."""
    if stated.tokenizer == LENGTHS:
        raise InputError(
            f"{options.plan}: was compiled from lengths alone, so it can be inspected but not run; "
            "compile a dataset with text or input_ids"
        )
    path = options.data
    if path is None:
        recorded = Path(stated.path)
        beside_plan = options.plan.parent / recorded
        moved = beside_plan.exists() and not recorded.exists()
        path = beside_plan if moved else recorded
    check_same_dataset(path, stated)
    return path


def _find_tokenizer(options: RunOptions, stated: DatasetInfo) -> str:
    """Return where the plan's tokenizer is: where it was then, or in the model's folder."""
    if stated.tokenizer in (IDS, BYTES):
        return BYTES
    moved = options.model is not None and not Path(stated.tokenizer).is_dir()
    tokenizer = str(options.model) if moved else stated.tokenizer
    if tokenizer_sha256(tokenizer) != stated.tokenizer_sha256:
        raise PlanFileError(
            f"{tokenizer}: its tokenizer.json is not the one that the plan was compiled with; "
            "compile it again"
        )
    return tokenizer


def _num_steps(options: RunOptions, header: Header) -> int:
    if options.num_steps is None:
        return header.num_steps
    if options.num_steps > header.num_steps:
        raise InputError(
            f"{options.plan}: has {header.num_steps} steps; --steps can be at most that, "
            "or compile with more --steps"
        )
    return options.num_steps


def _check_output(output: Path) -> None:
    weights = output / WEIGHTS
    if weights.exists():
        raise InputError(f"{weights}: is there already; choose another directory with --output")
    existing = output
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(
            f"{output}: cannot be made, {existing} is no writable directory; "
            "choose another with --output"
        )


def _check_model(options: RunOptions, header: Header) -> None:
    if options.model is None:
        return
    # Only this needs transformers, which takes seconds to import.
    from infinipipe.runtime.checkpoint import check_checkpoint

    check_checkpoint(header.model, options.model)


def _check_dtype(options: RunOptions, header: Header) -> None:
    if header.dtype != DTYPE_NAME:
        raise InputError(
            f"{options.plan}: its times and bytes are for {header.dtype}, but training is in "
            f"{DTYPE_NAME}; compile with a profile that was measured here"
        )


def _check_steps(plan: PlanReader, num_steps: int) -> None:
    """Read, and so verify, every step that will run."""
    plan.check_all()
    for index in range(num_steps):
        _check_runnable(plan.step(index))


def _check_runnable(step: Step) -> None:
    for replica in step.replicas:
        for stage_index, program in enumerate(replica.programs):
            for op in program:
                if op.kind not in RUNNABLE:
                    raise PlanFileError(
                        f"step {step.index}, stage {stage_index}: op {op.kind.value} can be "
                        "planned but not run; compile with --policy epp"
                    )
