"""One worker: builds its stage, replays the plan step by step, and leaves metrics and weights."""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist
from torch import Tensor

from infinipipe.dataset import RowReader
from infinipipe.errors import PlanFileError, RunError
from infinipipe.ir import Chunk, PlanReader, Step, open_plan
from infinipipe.run_record import StepRecord
from infinipipe.runtime.attention import exchange_in
from infinipipe.runtime.checkpoint import load_weights, save_weights
from infinipipe.runtime.data import StepData
from infinipipe.runtime.device import open_device
from infinipipe.runtime.executor import ChunkData, Executor
from infinipipe.runtime.gradients import Gradients
from infinipipe.runtime.memory import CpuMemory, CudaMemory, track_memory
from infinipipe.runtime.model import StageModel
from infinipipe.runtime.optimizer import Optimizer
from infinipipe.runtime.prepare import WEIGHTS, PreparedRun
from infinipipe.runtime.ranks import Groups, Ranks
from infinipipe.runtime.recorder import record_steps
from infinipipe.runtime.transport import DistributedTransport


def train(run: PreparedRun) -> None:
    """Replay the plan on this rank; torch.distributed is initialised and has the plan's ranks.

    Raises:
        InfinipipeError: the ranks do not agree, a weight cannot be read, or an op failed.
    """
    with open_plan(run.options.plan) as plan:
        Worker(run, plan).train()


class Worker:
    """One rank's share of a run."""

    def __init__(self, run: PreparedRun, plan: PlanReader) -> None:
        self._run = run
        self._plan = plan
        self._header = plan.header
        self._ranks = Ranks(self._header.layout, dist.get_rank())
        self._stage = self._header.stages[self._ranks.stage_index]
        self._device = open_device(run.device_kind)
        self._agree_on_plan()
        self._rows = self._open_rows()
        groups = Groups(self._ranks, tied=self._header.model.tied)
        groups.connect(self._device)
        model = self._build_model()
        self._parameters = model.global_parameters()
        self._flat = model.flat
        self._gradients = Gradients(model.flat, self._ranks, groups)
        self._optimizer = Optimizer(model.flat, groups.copies, run.options.lr)
        transport = DistributedTransport(groups.before, groups.after, self._device)
        exchange = exchange_in(groups.sequence)
        self._executor = Executor(self._header, self._ranks.stage_index, model, transport, exchange)

    def train(self) -> None:
        """Train for the asked number of steps and save the weights."""
        output = self._run.options.output
        num_steps = self._run.num_steps
        # Nothing is written before every rank has its weights and its data.
        dist.barrier()
        with (
            track_memory(self._device, self._static_tensors()) as memory,
            record_steps(output, num_steps, is_writer=self._ranks.is_writer) as record,
        ):
            for index in range(num_steps):
                record(self._train_step(self._plan.step(index), memory))
        save_weights(output / WEIGHTS, self._header, self._ranks, self._parameters)

    def _train_step(self, step: Step, memory: CpuMemory | CudaMemory) -> StepRecord:
        memory.reset_peak()
        started = time.perf_counter()
        own_loss = self._replay(step)
        self._gradients.sum_over_ranks()
        loss, grad_norm = self._gradients.totals(own_loss)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise RunError(
                f"step {step.index}: the loss is {loss} and the gradient norm {grad_norm}; "
                "lower --lr"
            )
        # Without any target all gradients are 0, but weight decay and momentum would still act.
        if step.denominator:
            self._gradients.clip(grad_norm)
            self._optimizer.step()
        self._gradients.zero()
        own_seconds = time.perf_counter() - started
        seconds, peaks = self._slowest_and_peaks(own_seconds, memory.peak_bytes)
        return StepRecord(
            step=step.index,
            loss=loss,
            grad_norm=grad_norm,
            lr=self._run.options.lr,
            num_tokens=step.num_tokens,
            num_targets=step.num_targets,
            seconds=seconds,
            predicted_seconds=step.step_s,
            tokens_per_second=step.num_tokens / seconds,
            peak_bytes=peaks,
            predicted_peak_bytes=predicted_peaks(step),
        )

    def _replay(self, step: Step) -> Tensor:
        """Add this stage's gradients of a step to the model's; return this rank's loss."""
        replica = step.replicas[self._ranks.replica]
        data: ChunkData = _NoData()
        if self._rows is not None:
            data = StepData(self._rows, step, self._header.loss_norm)
        return self._executor.run(step, replica, data)

    def _open_rows(self) -> RowReader | None:
        """Open the dataset where the stage embeds tokens or compares with targets."""
        if not (self._stage.embedding or self._stage.head):
            return None
        return RowReader(
            self._run.data,
            self._run.tokenizer,
            self._header.model.vocabulary_size,
            self._header.max_length,
        )

    def _build_model(self) -> StageModel:
        num_shards = self._ranks.layout.num_copies
        model = StageModel(self._header.model, self._stage, self._device, num_shards=num_shards)
        if self._run.options.model is None:
            model.init_random(self._run.options.seed)
        else:
            load_weights(model, self._run.options.model)
        return model

    def _slowest_and_peaks(self, seconds: float, peak_bytes: int) -> tuple[float, tuple[int, ...]]:
        """Return the slowest rank's seconds, and each stage's peak over the ranks that hold it."""
        num_stages = len(self._header.stages)
        slowest = torch.tensor([seconds], dtype=torch.float64)
        peaks = torch.zeros(num_stages, dtype=torch.float64)
        peaks[self._ranks.stage_index] = peak_bytes
        figures = torch.cat([slowest, peaks]).to(self._device)
        dist.all_reduce(figures, op=dist.ReduceOp.MAX)
        slowest_s, *peaks_bytes = figures.tolist()
        return slowest_s, tuple(int(peak) for peak in peaks_bytes)

    def _static_tensors(self) -> list[Tensor]:
        """Everything alive between steps, for the memory count."""
        buffers = [self._flat.parameters, self._flat.gradients]
        return buffers + self._optimizer.state_tensors()

    def _agree_on_plan(self) -> None:
        """Refuse to train where a rank has opened another plan than the others."""
        digest_bytes = bytearray.fromhex(self._plan.sha256)
        digest = torch.frombuffer(digest_bytes, dtype=torch.uint8).to(self._device)
        digests = [torch.empty_like(digest) for _ in range(dist.get_world_size())]
        dist.all_gather(digests, digest)
        for rank, other in enumerate(digests):
            if not torch.equal(other, digests[0]):
                raise PlanFileError(
                    f"rank {rank} has another plan than rank 0; give every rank the same file"
                )


class _NoData:
    """The data of a stage that neither embeds nor has a loss."""

    def tokens(self, chunk: Chunk) -> Tensor:
        raise AssertionError("only the first stage reads tokens")

    def targets(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        raise AssertionError("only the last stage reads targets")


def predicted_peaks(step: Step) -> tuple[int, ...]:
    """Return each stage's predicted peak bytes over the replicas."""
    peaks: list[int] = []
    for stage_index in range(len(step.replicas[0].predicted)):
        predictions = [replica.predicted[stage_index] for replica in step.replicas]
        peaks.append(max(prediction.peak_bytes for prediction in predictions))
    return tuple(peaks)
