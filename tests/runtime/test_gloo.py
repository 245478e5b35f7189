"""The same exactness over real processes and gloo: loss and EVERY gradient."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C._distributed_c10d import FileStore

from infinipipe.ir import Header, Layout, Step
from infinipipe.runtime.data import StepData
from infinipipe.runtime.executor import Executor
from infinipipe.runtime.launch import worker_environment
from infinipipe.runtime.model import StageModel
from infinipipe.runtime.ranks import Groups, Ranks
from infinipipe.runtime.transport import DistributedTransport
from tests.processes import finish_all
from tests.runtime.cuts import CUTS, HYBRID, LAYERS, RECOMPUTE, slices
from tests.runtime.replay import (
    CPU,
    MemoryDataset,
    Result,
    assert_equal,
    hand_header,
    hand_step,
    oracle,
    small_model,
)

WORLD = 4


class Case(msgspec.Struct):
    """A plan of one step over sequences of the given lengths."""

    header: Header
    step: Step
    lengths: list[int]


def cases() -> dict[str, Case]:
    """One-token slices, hybrid chunks, all kinds of recompute, 1 to 4 stages, short-long-short."""
    found = {}
    for num_stages, cuts, recompute in (
        (1, 2, "mixed"),
        (2, 3, "none"),
        (3, 4, "all"),
        (4, 5, "mixed"),
        (2, 5, "all"),
    ):
        lengths = [7, 13, 698]
        chunks = [chunk for row, n in enumerate(lengths) for chunk in slices(row, CUTS[cuts][n])]
        found[f"{num_stages} stages, {cuts} slices, recompute {recompute}"] = (
            num_stages,
            lengths,
            chunks,
            recompute,
        )
    for num_stages, recompute in ((2, "none"), (3, "mixed"), (4, "all")):
        found[f"hybrid on {num_stages} stages"] = (num_stages, [11, 3, 6], HYBRID, recompute)
    found["short-long-short"] = (2, [3, 40, 5], [[(0, 0, 3)], [(1, 0, 40)], [(2, 0, 5)]], "none")
    found["long-short-long"] = (3, [40, 3, 29], [[(0, 0, 40)], [(1, 0, 3)], [(2, 0, 29)]], "mixed")
    found["fewer chunks than stages"] = (4, [9, 5], [[(0, 0, 9), (1, 0, 5)]], "none")
    return {name: _case(*parts) for name, parts in found.items()}


def _case(
    num_stages: int, lengths: list[int], chunks: list[list[tuple[int, int, int]]], recompute: str
) -> Case:
    header = hand_header(small_model(), LAYERS[num_stages])
    return Case(
        header, hand_step(header, MemoryDataset(lengths), [chunks], RECOMPUTE[recompute]), lengths
    )


def test_every_gradient_over_gloo(tmp_path: Path) -> None:
    """CASES E3, E4: four processes; a plan with fewer stages leaves the last ones idle."""
    everything = cases()
    (tmp_path / "cases").write_bytes(msgspec.msgpack.encode(list(everything.values())))
    context = mp.start_processes(
        _worker, args=(str(tmp_path),), nprocs=WORLD, join=False, daemon=True, start_method="spawn"
    )
    finish_all(context)
    for index, (name, case) in enumerate(everything.items()):
        parts = [
            torch.load(tmp_path / f"{index}-{rank}") for rank in range(len(case.header.stages))
        ]
        gradients = {weight: gradient for _, own in parts for weight, gradient in own.items()}
        result = Result(sum(loss for loss, _ in parts), gradients, [])
        try:
            assert_equal(result, oracle(case.header, case.step, MemoryDataset(case.lengths)))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def _worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    worker_environment(rank)
    dist.init_process_group(
        "gloo", store=FileStore(f"{folder}/store", WORLD), rank=rank, world_size=WORLD
    )
    groups = {
        stages: Groups(Ranks(Layout(num_stages=stages), rank), tied=False) for stages in LAYERS
    }
    everything = msgspec.msgpack.decode((Path(folder) / "cases").read_bytes(), type=list[Case])
    for index, case in enumerate(everything):
        if rank < len(case.header.stages):
            model = StageModel(case.header.model, case.header.stages[rank], CPU)
            model.init_random(0)
            own = groups[len(case.header.stages)]
            transport = DistributedTransport(own.before, own.after, CPU)
            executor = Executor(case.header, rank, model, transport)
            data = StepData(MemoryDataset(case.lengths), case.step, case.header.loss_norm)
            loss = float(executor.run(case.step, case.step.replicas[0], data))
            gradients = {name: p.grad for name, p in model.global_parameters().items()}
            torch.save((loss, gradients), Path(folder) / f"{index}-{rank}")
        dist.barrier()
    dist.destroy_process_group()
