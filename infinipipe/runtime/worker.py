"""One worker: builds its stage, replays the plan step by step, and writes metrics and weights."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from infinipipe.dataset import RowReader
from infinipipe.errors import InputError, PlanFileError, RunError
from infinipipe.ir import Chunk, Stage, Step
from infinipipe.ir.file.store import PlanReader, open_plan
from infinipipe.runtime.checkpoint.hf_save import save_weights
from infinipipe.runtime.data import StepData
from infinipipe.runtime.executor import Executor
from infinipipe.runtime.memory import CpuMemory, CudaMemory, track_memory
from infinipipe.runtime.model import EMBEDDING, HEAD, StageModel
from infinipipe.runtime.prepare import METRICS, WEIGHTS, Run
from infinipipe.runtime.transport import DistributedTransport

BETAS = (0.9, 0.95)
EPSILON = 1e-8
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class Place:
    """Where a worker stands: ranks go stage by stage within a replica, replica by replica."""

    rank: int
    num_stages: int
    num_replicas: int

    @property
    def stage(self) -> int:
        """Index of the pipeline stage."""
        return self.rank % self.num_stages

    @property
    def replica(self) -> int:
        """Index of the replica."""
        return self.rank // self.num_stages

    def ranks_of_stage(self, stage: int) -> list[int]:
        """Return the ranks that hold a stage, one per replica."""
        return [r * self.num_stages + stage for r in range(self.num_replicas)]


class Groups:
    """The process groups of a run; every rank makes all of them, in the same order."""

    def __init__(self, place: Place, tied: bool) -> None:
        self.channels = dist.new_group(), dist.new_group()
        self.replicas: dist.ProcessGroup | None = None
        self.tied: dist.ProcessGroup | None = None
        if place.num_replicas > 1:
            stages = [dist.new_group(place.ranks_of_stage(s)) for s in range(place.num_stages)]
            self.replicas = stages[place.stage]
        if tied and place.num_stages > 1:
            ends = (0, place.num_stages - 1)
            group = dist.new_group(
                sorted(rank for stage in ends for rank in place.ranks_of_stage(stage))
            )
            self.tied = group if place.stage in ends else None


def train(run: Run) -> None:
    """Replay the plan on this rank; torch.distributed is initialised and has one rank per stage and replica.

    Raises:
        InfinipipeError: the ranks do not agree, a weight cannot be read, or an op failed.
    """
    with open_plan(run.plan) as plan:
        Worker(run, plan).train()


class Worker:
    """One rank's share of a run."""

    def __init__(self, run: Run, plan: PlanReader) -> None:
        self.options, self.plan, self.header = run, plan, plan.header
        self.place = Place(dist.get_rank(), len(self.header.stages), self.header.num_replicas)
        self.device = _device(run.device)
        self._agree_on_plan()
        self.layout: Stage = self.header.stages[self.place.stage]
        self.rows = self._open_rows() if self.layout.embedding or self.layout.head else None
        self.groups = Groups(self.place, self.header.model.tied)
        self.model = StageModel(self.header.model, self.layout, self.device)
        if run.model is None:
            self.model.init_random(run.seed)
        else:
            self.model.load(run.model)
        self.parameters = self.model.global_parameters()
        self.optimizer = make_optimizer(self.parameters, run.lr)
        transport = DistributedTransport(self.groups.channels, self.place.rank, self.device)
        self.executor = Executor(self.header, self.place.stage, self.model, transport)

    def train(self) -> None:
        """Train for the asked number of steps and save the weights."""
        dist.barrier()  # nothing is written before every rank has its weights and its data
        with (
            track_memory(self.device, self._static_tensors()) as memory,
            self._progress() as report,
        ):
            for index in range(self.options.num_steps):
                report(self._step(self.plan.step(index), memory))
        stage = self.place.stage if self.place.replica == 0 else None
        save_weights(self.options.output / WEIGHTS, self.header, stage, self.parameters)

    def _step(self, step: Step, memory: CpuMemory | CudaMemory) -> dict[str, object]:
        memory.reset_peak()
        started = time.perf_counter()
        loss, grad_norm = self._reduce(self._gradients(step))
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise RunError(
                f"step {step.index}: the loss is {loss} and the gradient norm {grad_norm}; lower --lr"
            )
        if step.denominator:
            self._update(grad_norm)
        for parameter in self.parameters.values():
            assert parameter.grad is not None
            parameter.grad.zero_()
        seconds, peaks = self._gather(time.perf_counter() - started, memory.peak_bytes)
        return {
            "step": step.index,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": self.options.lr,
            "num_tokens": step.num_tokens,
            "num_targets": step.num_targets,
            "seconds": seconds,
            "predicted_seconds": step.step_s,
            "tokens_per_second": step.num_tokens / seconds,
            "peak_bytes": peaks,
            "predicted_peak_bytes": predicted_peaks(step),
        }

    def _gradients(self, step: Step) -> Tensor:
        replica = step.replicas[self.place.replica]
        data = StepData(self.rows, step, self.header.loss_norm) if self.rows else _NoData()
        loss = self.executor.run(step, replica, data)
        if self.groups.tied is not None:
            # Sums over both copies and all replicas at once; the two copies then take the same update.
            name = EMBEDDING if self.layout.embedding else HEAD
            dist.all_reduce(self.parameters[name].grad, group=self.groups.tied)
        if self.groups.replicas is not None:
            for name, parameter in self.parameters.items():
                if self.groups.tied is None or name not in (EMBEDDING, HEAD):
                    dist.all_reduce(parameter.grad, group=self.groups.replicas)
        return loss

    def _reduce(self, loss: Tensor) -> tuple[float, float]:
        """Return the global loss and gradient norm; a tied weight counts once."""
        grads = [
            p.grad
            for name, p in self.parameters.items()
            if not (self.groups.tied is not None and name == HEAD)
        ]
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in grads if g is not None]
        square = torch.stack(norms).square().sum()
        # Every replica holds the same gradients by now, but only its own chunks' loss.
        both = torch.stack([loss.double(), square / self.header.num_replicas])
        dist.all_reduce(both)
        return float(both[0]), math.sqrt(float(both[1]))

    def _update(self, grad_norm: float) -> None:
        scale = min(1.0, MAX_GRAD_NORM / (grad_norm + 1e-6))
        if scale < 1.0:
            for parameter in self.parameters.values():
                assert parameter.grad is not None
                parameter.grad.mul_(scale)
        self.optimizer.step()

    def _open_rows(self) -> RowReader:
        run = self.options
        return RowReader(
            run.data, run.tokenizer, self.header.model.vocabulary_size, self.header.max_length
        )

    def _gather(self, seconds: float, peak_bytes: int) -> tuple[float, list[int]]:
        """Return the slowest rank's seconds, and each stage's peak over the replicas."""
        figures = torch.zeros(1 + self.place.num_stages, dtype=torch.float64, device=self.device)
        figures[0], figures[1 + self.place.stage] = seconds, peak_bytes
        dist.all_reduce(figures, op=dist.ReduceOp.MAX)
        return float(figures[0]), [int(value) for value in figures[1:]]

    def _static_tensors(self) -> list[Tensor]:
        """Everything alive between steps, for the memory count."""
        tensors: list[Tensor] = []
        for parameter in self.parameters.values():
            assert parameter.grad is not None
            tensors += [parameter, parameter.grad, *self.optimizer.state[parameter].values()]
        return tensors

    def _agree_on_plan(self) -> None:
        digest = torch.frombuffer(bytearray.fromhex(self.plan.sha256), dtype=torch.uint8).to(
            self.device
        )
        digests = [torch.empty_like(digest) for _ in range(dist.get_world_size())]
        dist.all_gather(digests, digest)
        for rank, other in enumerate(digests):
            if not torch.equal(other, digests[0]):
                raise PlanFileError(
                    f"rank {rank} has another plan than rank 0; give every rank the same file"
                )

    @contextmanager
    def _progress(self) -> Iterator[Callable[[dict[str, object]], None]]:
        """Yield what records a step: metrics.jsonl and a progress bar on rank 0, nothing elsewhere."""
        if self.place.rank != 0:
            yield lambda _: None
            return
        try:
            self.options.output.mkdir(parents=True, exist_ok=True)
            file = (self.options.output / METRICS).open("w")
        except OSError as error:
            raise InputError(
                f"{self.options.output}: {error.strerror}; choose another with --output"
            ) from None
        bar = Progress(
            TextColumn("train"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[loss]}"),
            console=Console(stderr=True),
        )
        with file, bar:
            task = bar.add_task("", total=self.options.num_steps, loss="")

            def record(metrics: dict[str, object]) -> None:
                file.write(json.dumps(metrics) + "\n")
                file.flush()
                if not metrics["num_targets"]:
                    bar.console.print(
                        f"warning: step {metrics['step']} has no target at all; its update is skipped"
                    )
                bar.update(task, advance=1, loss=f"loss {metrics['loss']:.4f}")

            yield record


class _NoData:
    """The data of a stage that neither embeds nor has a loss."""

    def tokens(self, chunk: Chunk) -> Tensor:
        raise AssertionError("only the first stage reads tokens")

    def targets(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        raise AssertionError("only the last stage reads targets")


def make_optimizer(parameters: dict[str, nn.Parameter], lr: float) -> torch.optim.AdamW:
    """Return AdamW with its state allocated; weight decay is for matrices, as their global names tell on any stage."""
    decayed = [p for p in parameters.values() if p.ndim >= 2]
    others = [p for p in parameters.values() if p.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": WEIGHT_DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=lr, betas=BETAS, eps=EPSILON, fused=True
    )
    for parameter in parameters.values():
        # Allocated now, so that the first step needs the memory that all others need.
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def predicted_peaks(step: Step) -> list[int]:
    """Return each stage's predicted peak over the replicas."""
    return [
        max(r.predicted[s].peak_bytes for r in step.replicas)
        for s in range(len(step.replicas[0].predicted))
    ]


def _device(kind: str) -> torch.device:
    if kind == "cpu":
        torch.set_num_threads(1)  # a CPU device is one core, as the profile measured it
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
