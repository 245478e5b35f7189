"""Measures what moving bytes between a machine's devices takes, with real processes and the runtime's transport."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import start_processes

from infinipipe.profiles.fit import fit_line
from infinipipe.profiles.profile import Line
from infinipipe.runtime.launch import worker_environment
from infinipipe.runtime.transport import Channel, DistributedTransport

SIZES = (2**10, 2**14, 2**18, 2**20, 2**21)
"""Elements of float32."""
REPEATS = 9


class Links(msgspec.Struct, frozen=True):
    """What transfers take: a constant, and a rate per byte."""

    transfer_s: Line
    all_to_all_s: Line
    num_ranks: int


def measure_links(device: str, num_ranks: int) -> Links:
    """Measure one transfer between two ranks of this machine, and an exchange among all of them."""
    if num_ranks == 1:
        nothing = Line(constant=0.0, rate=0.0)
        return Links(transfer_s=nothing, all_to_all_s=nothing, num_ranks=1)
    with tempfile.TemporaryDirectory(prefix="infinipipe-") as scratch:
        start_processes(_measure, args=(device, num_ranks, scratch), nprocs=num_ranks, start_method="spawn")
        return msgspec.json.decode((Path(scratch) / "links").read_bytes(), type=Links)


def _measure(rank: int, device: str, num_ranks: int, scratch: str) -> None:
    worker_environment(rank)
    torch.set_num_threads(1)
    place = torch.device("cpu") if device == "cpu" else torch.device("cuda", rank)
    if device == "cuda":
        torch.cuda.set_device(place)
    store = FileStore(f"{scratch}/store", num_ranks)
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
    channels = dist.new_group(), dist.new_group()
    sizes = [4.0 * size for size in SIZES]
    exchange = fit_line(sizes, [_all_to_all(size, num_ranks, place) for size in SIZES])
    if rank < 2:
        transport = DistributedTransport(channels, rank, place)
        transfer = fit_line(sizes, [_ping_pong(size, transport, rank, place) for size in SIZES])
        if rank == 0:
            links = Links(transfer_s=transfer, all_to_all_s=exchange, num_ranks=num_ranks)
            (Path(scratch) / "links").write_bytes(msgspec.json.encode(links))
    dist.barrier()
    dist.destroy_process_group()


def _ping_pong(size: int, transport: DistributedTransport, rank: int, place: torch.device) -> float:
    """Return the seconds of one way."""
    incoming, outgoing = (Channel.UPSTREAM, Channel.DOWNSTREAM) if rank == 0 else (Channel.DOWNSTREAM, Channel.UPSTREAM)
    transport.begin(incoming, [(size,)] * REPEATS)
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
