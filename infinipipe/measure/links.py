"""Measures what moving bytes between a machine's devices takes, as the runtime moves them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.distributed import ProcessGroup

from infinipipe.ir import Layout
from infinipipe.measure.fit import fit_line
from infinipipe.profiles import Line, Links
from infinipipe.runtime.attention.exchange import exchange_in
from infinipipe.runtime.collectives import all_gather, reduce_scatter
from infinipipe.runtime.launch import worker_environment
from infinipipe.runtime.ranks import Channel, Groups, Ranks
from infinipipe.runtime.transport import DistributedTransport

_ELEMENT_BYTES = 4
"""Of float32."""
SIZES = (2**10, 2**14, 2**18, 2**20, 2**21)
"""Elements: from where the constant decides, 4 KiB, to where the rate does, 8 MiB."""
_HEAD_DIM = 64
"""Of what attention exchanges: small enough that every rank has a token of the smallest size."""
REPEATS = 9
"""Odd, so that the median is one of them; enough that a few slow ones do not matter."""

_NO_SECONDS = Line(constant=0.0, rate=0.0)


NO_LINKS = Links(
    transfer_s=_NO_SECONDS,
    all_to_all_s=_NO_SECONDS,
    reduce_scatter_s=_NO_SECONDS,
    all_gather_s=_NO_SECONDS,
    num_ranks=1,
)
"""Of a machine with one device: there is nobody to exchange with."""


def measure_links(rank: int, device_type: str, num_ranks: int, store: Path) -> Links:
    """Measure a transfer between two ranks of this machine, and exchanges among all of them.

    Only ranks 0 and 1 return the transfer.

    Args:
        rank: this process; every rank calls this.
        device_type: `cpu` or `cuda`.
        num_ranks: at least 2.
        store: a file that is not there yet, where the ranks meet.
    """
    worker_environment(rank)
    device = _connect(rank, device_type, num_ranks, store)
    groups = Groups(Ranks(Layout(num_stages=2), rank), tied=False)
    all_to_all_s = _fit(lambda size: _all_to_all_seconds(size, num_ranks, device))
    reduce_scatter_s = _fit(lambda size: _ring_seconds(reduce_scatter, size, num_ranks, device))
    all_gather_s = _fit(lambda size: _ring_seconds(all_gather, size, num_ranks, device))
    transfer_s = _NO_SECONDS
    if rank < 2:
        transport = DistributedTransport(groups.before, groups.after, device)
        transfer_s = _fit(lambda size: _one_way_seconds(size, transport, rank, device))
    dist.barrier()
    dist.destroy_process_group()
    return Links(
        transfer_s=transfer_s,
        all_to_all_s=all_to_all_s,
        reduce_scatter_s=reduce_scatter_s,
        all_gather_s=all_gather_s,
        num_ranks=num_ranks,
    )


def _connect(rank: int, device_type: str, num_ranks: int, store: Path) -> torch.device:
    """Join the other ranks and return this one's device."""
    device = torch.device("cpu") if device_type == "cpu" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        store=FileStore(str(store), num_ranks),
        rank=rank,
        world_size=num_ranks,
    )
    return device


def _fit(seconds: Callable[[int], float]) -> Line:
    """Return the line through the seconds of each of `SIZES`, per byte."""
    sizes = [float(_ELEMENT_BYTES * size) for size in SIZES]
    return fit_line(sizes, [seconds(size) for size in SIZES])


def _one_way_seconds(
    size: int, transport: DistributedTransport, rank: int, device: torch.device
) -> float:
    """Return the seconds of one way, by half of there and back: clocks of two ranks may differ."""
    incoming = Channel.UPSTREAM if rank == 0 else Channel.DOWNSTREAM
    outgoing = Channel.DOWNSTREAM if rank == 0 else Channel.UPSTREAM
    transport.begin(incoming, [(size,)] * REPEATS, torch.float32)
    payload = torch.zeros(size, device=device)

    def there_and_back() -> None:
        if rank == 0:
            transport.send(outgoing, payload)
        transport.receive(incoming)
        if rank == 1:
            transport.send(outgoing, payload)

    seconds = _median_seconds(there_and_back, device) / 2
    transport.finish()
    return seconds


def _all_to_all_seconds(size: int, num_ranks: int, device: torch.device) -> float:
    """Return the seconds of an exchange of attention, with the copy into the order it is sent."""
    shard_tokens = size // (num_ranks * _HEAD_DIM)
    shard = torch.zeros(shard_tokens, num_ranks, _HEAD_DIM, device=device)
    exchange = exchange_in(dist.group.WORLD)
    num_tokens = num_ranks * shard_tokens
    return _median_seconds(lambda: exchange.to_heads(shard, num_tokens), device)


def _ring_seconds(
    exchange: Callable[[Tensor, ProcessGroup], None],
    size: int,
    num_ranks: int,
    device: torch.device,
) -> float:
    """Return the seconds of an exchange in place, of which each rank owns a range."""
    # Of zeros, so that adding up again and again never overflows.
    buffer = _buffer(size, num_ranks, device)
    everyone = dist.group.WORLD
    assert everyone is not None, "the ranks have met"
    return _median_seconds(lambda: exchange(buffer, everyone), device)


def _buffer(size: int, num_ranks: int, device: torch.device) -> Tensor:
    """Return so many zeros, or a few less: each rank has an equal part of them."""
    divisible = size // num_ranks * num_ranks
    return torch.zeros(divisible, device=device)


def _median_seconds(run: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
