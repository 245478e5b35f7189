"""What a run is asked for, and whether plan, dataset, model and machine fit together."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from infinipipe.dataset import BYTES, IDS, LENGTHS, check_same_dataset, tokenizer_sha256
from infinipipe.errors import InputError, PlanFileError
from infinipipe.ir import Header, OpKind, Step
from infinipipe.ir.file.store import PlanReader, open_plan

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
    tokenizer: str
    """As `infinipipe.dataset.open_dataset` takes it."""
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
    if not math.isfinite(options.lr) or options.lr < 0:
        raise InputError(f"--lr {options.lr}: a finite number from 0 up is needed")
    with open_plan(options.plan) as plan:
        header = plan.header
        num_ranks = len(header.stages) * header.num_replicas
        run = Run(
            plan=options.plan,
            num_ranks=num_ranks,
            data=_find_data(options, header),
            tokenizer=_find_tokenizer(options, header),
            model=options.model,
            device=_choose_device(options.device, num_ranks),
            num_steps=_num_steps(options, header),
            lr=options.lr,
            seed=options.seed,
            output=options.output,
        )
        _check_output(run.output)
        if run.model is not None:
            # Only this needs transformers, which takes seconds to import.
            from infinipipe.runtime.model import check_checkpoint

            check_checkpoint(header.model, run.model)
        if header.dtype != "float32":
            raise InputError(
                f"{options.plan}: its times and bytes are for {header.dtype}, but training is in float32; "
                "compile with a profile that was measured here"
            )
        _check_steps(plan, run.num_steps)
    return run


def _find_data(options: RunOptions, header: Header) -> Path:
    if header.dataset.tokenizer == LENGTHS:
        raise InputError(
            f"{options.plan}: was compiled from lengths alone, so it can be inspected but not run; "
            "compile a dataset with text or input_ids"
        )
    recorded = Path(header.dataset.path)
    beside = options.plan.parent / recorded
    path = options.data or (beside if beside.exists() and not recorded.exists() else recorded)
    check_same_dataset(path, header.dataset)
    return path


def _find_tokenizer(options: RunOptions, header: Header) -> str:
    """Return where the tokenizer is that the plan was compiled with: where it was then, or in the model's folder."""
    info = header.dataset
    if info.tokenizer in (IDS, BYTES):
        return BYTES
    moved = options.model is not None and not Path(info.tokenizer).is_dir()
    tokenizer = str(options.model) if moved else info.tokenizer
    if tokenizer_sha256(tokenizer) != info.tokenizer_sha256:
        raise PlanFileError(
            f"{tokenizer}: its tokenizer.json is not the one that the plan was compiled with; compile it again"
        )
    return tokenizer


def _check_output(output: Path) -> None:
    if (output / WEIGHTS).exists():
        raise InputError(
            f"{output / WEIGHTS}: is there already; choose another directory with --output"
        )
    existing = output
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(
            f"{output}: cannot be made, {existing} is no writable directory; choose another with --output"
        )


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
    if asked != "cpu" and 0 < available < num_ranks and not dist.is_torchelastic_launched():
        raise InputError(
            f"the plan needs {num_ranks} GPUs, this machine has {available}; start `infinipipe run` with torchrun on "
            "more machines, compile with fewer --stages, or use --device cpu"
        )
    return "cpu" if asked == "cpu" or not available else "cuda"


def _check_steps(plan: PlanReader, num_steps: int) -> None:
    """Read, and so verify, every step that will run."""
    plan.check_all()
    for index in range(num_steps):
        _check_runnable(plan.step(index))


def _check_runnable(step: Step) -> None:
    for replica in step.replicas:
        for stage, program in enumerate(replica.programs):
            for op in program:
                if op.kind not in RUNNABLE:
                    raise PlanFileError(
                        f"step {step.index}, stage {stage}: op {op.kind.value} can be planned but not run; "
                        "compile with --policy epp"
                    )
