"""Measures what moving bytes between a machine's devices takes, with the runtime's transport; see `crew`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from infinipipe.ir import Layout
from infinipipe.measure.fit import fit_line
from infinipipe.profiles.profile import Line
from infinipipe.runtime.launch import worker_environment
from infinipipe.runtime.ranks import Channel, Ranks, channel_groups
from infinipipe.runtime.transport import DistributedTransport

SIZES = (2**10, 2**14, 2**18, 2**20, 2**21)
"""Elements of float32."""
REPEATS = 9


class Links(msgspec.Struct, frozen=True):
    """What transfers take: a constant, and a rate per byte."""

    transfer_s: Line
    all_to_all_s: Line
    num_ranks: int


def measure_links(rank: int, device: str, num_ranks: int, store: Path) -> Links:
    """Measure one transfer between two ranks of this machine, and an exchange among all of them.

    Args:
        rank: this process; every rank calls this.
        device: `cpu` or `cuda`.
        num_ranks: at least 2.
        store: a file that is not there yet, where the ranks meet.
    """
    worker_environment(rank)
    place = torch.device("cpu") if device == "cpu" else torch.device("cuda", rank)
    if device == "cuda":
        torch.cuda.set_device(place)
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(
        backend, store=FileStore(str(store), num_ranks), rank=rank, world_size=num_ranks
    )
    channels = channel_groups()
    sizes = [4.0 * size for size in SIZES]
    exchange = fit_line(sizes, [_all_to_all(size, num_ranks, place) for size in SIZES])
    transfer = Line(constant=0.0, rate=0.0)
    if rank < 2:
        neighbours = Ranks(Layout(num_stages=2), rank).neighbours
        transport = DistributedTransport(neighbours, channels, place)
        transfer = fit_line(sizes, [_ping_pong(size, transport, rank, place) for size in SIZES])
    dist.barrier()
    dist.destroy_process_group()
    return Links(transfer_s=transfer, all_to_all_s=exchange, num_ranks=num_ranks)


def _ping_pong(size: int, transport: DistributedTransport, rank: int, place: torch.device) -> float:
    """Return the seconds of one way."""
    incoming, outgoing = (
        (Channel.UPSTREAM, Channel.DOWNSTREAM)
        if rank == 0
        else (Channel.DOWNSTREAM, Channel.UPSTREAM)
    )
    transport.begin(incoming, [(size,)] * REPEATS, torch.float32)
    payload = torch.zeros(size, device=place)

    def there_and_back() -> None:
        if rank == 0:
            transport.send(outgoing, payload)
        transport.receive(incoming)
        if rank == 1:
            transport.send(outgoing, payload)

    seconds = _median_seconds(there_and_back, place) / 2
    transport.finish()
    return seconds


def _all_to_all(size: int, num_ranks: int, place: torch.device) -> float:
    payload = torch.zeros(size // num_ranks * num_ranks, device=place)
    received = torch.empty_like(payload)
    return _median_seconds(lambda: dist.all_to_all_single(received, payload), place)


def _median_seconds(run: Callable[[], object], place: torch.device) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        if place.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
