"""What a run is asked for, and whether plan, dataset, model and machine fit together."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from infinipipe.dataset import BYTES, Dataset, check_same_dataset, open_dataset
from infinipipe.errors import InputError, PlanFileError
from infinipipe.ir import Header, OpKind, Step
from infinipipe.ir.store import PlanReader, open_plan
from infinipipe.ir.verify import verify_header, verify_step

METRICS = "metrics.jsonl"
WEIGHTS = "model"
"""What a run leaves in its output directory."""

RUNNABLE = (OpKind.FORWARD, OpKind.BACKWARD)


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
class Run:
    """The same, checked and complete."""

    plan: Path
    num_ranks: int
    data: Path
    model: Path | None
    device: str
    """`cpu` or `cuda`."""
    num_steps: int
    lr: float
    seed: int
    output: Path


def prepare(options: RunOptions) -> Run:
    """Check everything that can be checked before a worker starts.

    Raises:
        InfinipipeError: plan, dataset, model, output and machine do not fit together.
    """
    with open_plan(options.plan) as plan:
        header = plan.header
        verify_header(header)
        num_ranks = len(header.stages) * header.num_replicas
        run = Run(
            plan=options.plan,
            num_ranks=num_ranks,
            data=_find_data(options, header),
            model=options.model,
            device=_choose_device(options.device, num_ranks),
            num_steps=_num_steps(options, header),
            lr=options.lr,
            seed=options.seed,
            output=options.output,
        )
        if (run.output / METRICS).exists() or (run.output / WEIGHTS).exists():
            raise InputError(f"{run.output}: holds a run already; remove it or choose another directory with --output")
        if run.output.exists() and not run.output.is_dir():
            raise InputError(f"{run.output}: is not a directory; choose another with --output")
        if run.model is not None:
            # Only this needs transformers, which takes seconds to import.
            from infinipipe.runtime.model import check_config

            check_config(header.model, run.model)
        _verify_steps(plan, run.num_steps)
    return run


def open_plan_dataset(header: Header, path: Path) -> Dataset:
    """Open the dataset a plan was compiled from, as it was read then.

    Raises:
        InfinipipeError: it is another dataset, or cannot be read.
    """
    info = header.dataset
    tokenizer = BYTES if info.tokenizer == "ids" else info.tokenizer
    check_same_dataset(path, info)
    return open_dataset(path, tokenizer, header.model.vocabulary_size, header.max_length)


def _find_data(options: RunOptions, header: Header) -> Path:
    if header.dataset.tokenizer == "lengths":
        raise InputError(
            f"{options.plan}: was compiled from lengths alone, so it can be inspected but not run; "
            "compile a dataset with text or input_ids"
        )
    recorded = Path(header.dataset.path)
    beside = options.plan.parent / recorded
    path = options.data or (beside if beside.exists() and not recorded.exists() else recorded)
    check_same_dataset(path, header.dataset)
    return path


def _num_steps(options: RunOptions, header: Header) -> int:
    if options.num_steps is not None and options.num_steps > header.num_steps:
        raise InputError(
            f"{options.plan}: has {header.num_steps} steps; --steps can be at most that, or compile with more --steps"
        )
    return header.num_steps if options.num_steps is None else options.num_steps


def _choose_device(asked: str, num_ranks: int) -> str:
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "cuda" and not available:
        raise InputError("no CUDA device is available here; use --device cpu")
    if asked != "cpu" and 0 < available < num_ranks and "WORLD_SIZE" not in os.environ:
        raise InputError(
            f"the plan needs {num_ranks} GPUs, this machine has {available}; start `infinipipe run` with torchrun on "
            "more machines, compile with fewer --stages, or use --device cpu"
        )
    return "cpu" if asked == "cpu" or not available else "cuda"


def _verify_steps(plan: PlanReader, num_steps: int) -> None:
    plan.check_all()
    for index in range(num_steps):
        step = plan.step(index)
        verify_step(plan.header, step)
        _check_runnable(step)


def _check_runnable(step: Step) -> None:
    for replica in step.replicas:
        for stage, program in enumerate(replica.programs):
            for op in program:
                if op.kind not in RUNNABLE:
                    raise PlanFileError(
                        f"step {step.index}, stage {stage}: op {op.kind.value} can be planned but not run; "
                        "compile with --policy epp"
                    )
