"""The end of a step over gloo: gradients summed, sharded, measured and clipped; weights updated."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from infinipipe.ir import Layout, Model, Stage
from infinipipe.runtime import collectives, gradients
from infinipipe.runtime.gradients import MAX_GRAD_NORM, Gradients, sum_of_squares
from infinipipe.runtime.launch import worker_environment
from infinipipe.runtime.memory import CpuMemory
from infinipipe.runtime.model import EMBEDDING, HEAD, StageModel
from infinipipe.runtime.optimizer import Optimizer
from infinipipe.runtime.ranks import Groups, Ranks
from tests.processes import finish_all
from tests.runtime.replay import CPU, make_plain_adamw, small_model, whole_model
from tests.runtime.test_flat import ODD

WORLD = 4
LR = 0.01
SCALES = (1.0, 1e-4, 3.0)
"""Of each step's gradients: the first and the last are clipped, the one between is not."""


class Case(msgspec.Struct, frozen=True):
    layout: Layout
    tied: bool = False
    native: bool = False
    """Exchange as on GPUs, by the backend's own reduce-scatter and all-gather."""


CASES = (
    Case(Layout(num_stages=1)),
    Case(Layout(num_stages=1, num_replicas=2), tied=True),
    Case(Layout(num_stages=1, num_replicas=3)),
    Case(Layout(num_stages=1, num_replicas=2, sequence_parallel=2)),
    Case(Layout(num_stages=1, num_replicas=3), native=True),
    Case(Layout(num_stages=2), tied=True),
    Case(Layout(num_stages=2, num_replicas=2)),
    Case(Layout(num_stages=2, num_replicas=2), tied=True),
    Case(Layout(num_stages=2, sequence_parallel=2), tied=True, native=True),
    Case(Layout(num_stages=4), tied=True),
)


def model_of(case: Case) -> Model:
    """A model none of whose parts 3 or 4 ranks can share evenly."""
    return small_model(tied=case.tied, **(ODD | {"num_layers": 4}))


def stage_of(layout: Layout, index: int) -> Stage:
    num_layers = 4 // layout.num_stages
    return Stage(
        first_layer=index * num_layers,
        num_layers=num_layers,
        embedding=index == 0,
        head=index == layout.num_stages - 1,
    )


def own_gradients(case: Case, rank: int, step: int) -> dict[str, Tensor]:
    """Return what B would have left on a rank: by global name, other numbers on every rank."""
    ranks = Ranks(case.layout, rank)
    stage = StageModel(model_of(case), stage_of(case.layout, ranks.stage_index), CPU)
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        name: torch.randn(parameter.shape, generator=generator) * SCALES[step]
        for name, parameter in stage.global_parameters().items()
    }


def own_loss(rank: int, step: int) -> float:
    return 0.1 * rank + step


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """Run all cases by one start of processes; return what each of a case's ranks has found."""
    folder = tmp_path_factory.mktemp("gradients")
    context = mp.start_processes(
        _worker, args=(str(folder),), nprocs=WORLD, join=False, daemon=True, start_method="spawn"
    )
    finish_all(context)
    found = []
    for index, case in enumerate(CASES):
        files = [folder / f"{index}-{rank}" for rank in range(case.layout.num_ranks)]
        found.append([torch.load(file) for file in files])
    return found


def _worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    worker_environment(rank)
    is_gloo = collectives._copies_buffers
    for index, case in enumerate(CASES):
        if rank < case.layout.num_ranks:
            collectives._copies_buffers = (lambda group: False) if case.native else is_gloo
            store = FileStore(f"{folder}/store-{index}", case.layout.num_ranks)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=case.layout.num_ranks
            )
            torch.save(_train(case, rank), f"{folder}/{index}-{rank}")
            dist.destroy_process_group()


def _train(case: Case, rank: int) -> dict[str, Any]:
    """Take three steps as a worker does, and count the bytes alive."""
    ranks = Ranks(case.layout, rank)
    stage = stage_of(case.layout, ranks.stage_index)
    model = StageModel(model_of(case), stage, CPU, num_shards=case.layout.num_copies)
    model.init_random(0)
    groups = Groups(ranks, tied=case.tied)
    step_gradients = Gradients(model.flat, ranks, groups)
    optimizer = Optimizer(model.flat, groups.copies, LR)
    static = [model.flat.parameters, model.flat.gradients, *optimizer.state_tensors()]
    given = [own_gradients(case, rank, step) for step in range(len(SCALES))]
    totals = []
    with CpuMemory(static) as memory:
        held = memory.current_bytes
        for step in range(len(SCALES)):
            for name, parameter in model.global_parameters().items():
                assert parameter.grad is not None
                # Added up, so that what a step has left behind would be seen in the next.
                parameter.grad.add_(given[step][name])
            step_gradients.sum_over_ranks()
            totals.append(step_gradients.totals(torch.tensor(own_loss(rank, step))))
            step_gradients.clip(totals[-1].grad_norm)
            optimizer.step()
            step_gradients.zero()
        assert not model.flat.gradients.any()
        peak = memory.peak_bytes
    return {
        "losses": [total.loss for total in totals],
        "norms": [total.grad_norm for total in totals],
        "weights": {n: p.detach().clone() for n, p in model.global_parameters().items()},
        "static_bytes": held,
        "more_bytes": peak - held,
        "buffer": model.flat.parameters.clone(),
    }


@pytest.fixture(scope="module", params=range(len(CASES)), ids=lambda index: str(CASES[index]))
def one(request: pytest.FixtureRequest, results: list[list[dict[str, Any]]]) -> Iterator[Any]:
    """Each case with what its ranks have found."""
    return CASES[request.param], results[request.param]


def test_weights_after_three_steps_are_those_of_plain_adamw(one: Any) -> None:
    """One process with the whole model and the sums of all gradients; torch's own clipping."""
    case, found = one
    whole = whole_model(model_of(case))
    weights = dict(whole.named_parameters())
    adamw = make_plain_adamw(whole, LR)
    for step in range(len(SCALES)):
        whole.zero_grad()
        for rank in range(case.layout.num_ranks):
            for name, gradient in own_gradients(case, rank, step).items():
                weight = weights[EMBEDDING if case.tied and name == HEAD else name]
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
        squares = [weight.grad.double().square().sum() for weight in weights.values()]
        norm = math.sqrt(sum(squares))
        losses = [own_loss(rank, step) for rank in range(case.layout.num_ranks)]
        for own in found:
            assert own["norms"][step] == pytest.approx(norm, rel=1e-6)
            assert own["losses"][step] == pytest.approx(sum(losses), rel=1e-6)
        clipped = torch.nn.utils.clip_grad_norm_(whole.parameters(), MAX_GRAD_NORM)
        assert (float(clipped) > MAX_GRAD_NORM) == (step != 1)
        adamw.step()
    seen = set()
    for own in found:
        for name, actual in own["weights"].items():
            expected = weights[EMBEDDING if case.tied and name == HEAD else name].detach()
            seen.add(name)
            error = float((actual - expected).norm() / expected.norm())
            assert error < 1e-6, name
    assert seen >= weights.keys()


def test_copies_are_the_same_to_the_bit(one: Any) -> None:
    """Of a stage, over all its ranks; and of a tied weight, at both ends."""
    case, found = one
    first_of_stage: dict[int, Tensor] = {}
    tied = []
    for rank, own in enumerate(found):
        index = Ranks(case.layout, rank).stage_index
        assert torch.equal(own["buffer"], first_of_stage.setdefault(index, own["buffer"]))
        tied += [weight for name, weight in own["weights"].items() if name in (EMBEDDING, HEAD)]
    if case.tied:
        assert len(tied) >= min(2, case.layout.num_stages)
        assert all(torch.equal(weight, tied[0]) for weight in tied)


def test_bytes_alive_are_those_of_the_formula(one: Any) -> None:
    """Parameter and gradient whole, two moments shared; no part is copied to be exchanged."""
    case, found = one
    copies = case.layout.num_copies
    for rank, own in enumerate(found):
        sizes: dict[str, int] = {}
        for name, weight in own["weights"].items():
            part = "matrices" if weight.ndim == 2 else "others"
            at_both_ends = case.tied and case.layout.num_stages > 1 and name in (EMBEDDING, HEAD)
            part = "tied" if at_both_ends else part
            sizes[part] = sizes.get(part, 0) + weight.numel()
        unit = 4 * copies
        padded = [math.ceil(size / unit) * unit for size in sizes.values()]
        # And a count of steps for each part, four bytes.
        expected = sum(padded) * 8 + sum(padded) // copies * 8 + 4 * len(padded)
        assert own["static_bytes"] == expected, f"rank {rank}"
        largest_shard = 4 * max(padded) // copies
        if not case.native:
            # The loss and a norm for each part, and what they are added up in.
            assert own["more_bytes"] < 256 < largest_shard


def test_squares_add_up_in_float64_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 loses all ones beside the first; so does a block that is left out."""
    monkeypatch.setattr(gradients, "_BLOCK", 1000)
    values = torch.ones(4_001)
    values[0] = 2.0**13
    actual = float(sum_of_squares([values, torch.full((3,), 0.5)]))
    assert actual == pytest.approx(2.0**26 + 4_000.75, rel=1e-14)


def test_no_copy_as_large_as_a_head_is_made_to_measure_it() -> None:
    tensor = torch.ones(5 * gradients._BLOCK)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        assert float(sum_of_squares([tensor])) == 5 * gradients._BLOCK
    allocated = [event.self_cpu_memory_usage for event in profiler.events()]
    # A block in float64, and a little.
    assert 0 < max(allocated) <= 8 * gradients._BLOCK + 1024
