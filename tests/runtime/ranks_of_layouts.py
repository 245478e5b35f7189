"""Runs cases on real gloo ranks: one pool of processes, in which each case has its own group."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C._distributed_c10d import FileStore

from infinipipe.dataset import BYTES
from infinipipe.ir import Header, Step
from infinipipe.runtime.launch import worker_environment
from infinipipe.runtime.prepare import PreparedRun, RunOptions
from infinipipe.runtime.worker import Worker
from tests.processes import finish_all


class Case(msgspec.Struct):
    """A plan, to be trained from weights of seed 0."""

    folder: str
    """Has `dataset.jsonl`, and gets what the ranks leave."""
    header: Header
    steps: list[Step]

    # What a worker asks of a plan's file.
    sha256 = "00"

    def step(self, index: int) -> Step:
        """Return a step."""
        return self.steps[index]


def run_cases(cases: list[Case], scratch: Path, num_ranks: int, lr: float) -> None:
    """Run all cases one after the other; a case of fewer ranks leaves the last ones idle."""
    (scratch / "cases").write_bytes(msgspec.msgpack.encode(cases))
    # Ranks are forked from one process that has imported all this, which takes seconds.
    multiprocessing.set_forkserver_preload([__name__])
    context = mp.start_processes(
        _rank,
        args=(str(scratch), lr),
        nprocs=num_ranks,
        join=False,
        daemon=True,
        start_method="forkserver",
    )
    finish_all(context)


def _rank(rank: int, scratch: str, lr: float) -> None:
    torch.set_num_threads(1)
    worker_environment(rank)
    cases = msgspec.msgpack.decode((Path(scratch) / "cases").read_bytes(), type=list[Case])
    for index, case in enumerate(cases):
        num_ranks = case.header.layout.num_ranks
        if rank < num_ranks:
            store = FileStore(f"{scratch}/store-{index}", num_ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
            _run_case(rank, case, lr)
            dist.destroy_process_group()


def _run_case(rank: int, case: Case, lr: float) -> None:
    folder = Path(case.folder)
    worker = Worker(_prepared(case, lr), case)  # type: ignore[arg-type]
    loss = float(worker._replay(case.step(0)))
    parameters = worker._executor._model.global_parameters()
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    torch.save((loss, gradients), folder / f"gradients-{rank}")
    for gradient in gradients.values():
        gradient.zero_()
    worker.train()


def _prepared(case: Case, lr: float) -> PreparedRun:
    folder = Path(case.folder)
    data = folder / "dataset.jsonl"
    options = RunOptions(
        plan=Path(),
        data=data,
        model=None,
        device="cpu",
        num_steps=None,
        lr=lr,
        seed=0,
        output=folder / "run",
    )
    return PreparedRun(
        options=options,
        num_ranks=case.header.layout.num_ranks,
        data=data,
        tokenizer=BYTES,
        device_kind="cpu",
        num_steps=len(case.steps),
    )
