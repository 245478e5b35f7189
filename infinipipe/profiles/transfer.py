"""Measures what a transfer between neighbouring stages takes, with real processes and the runtime's own transport."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import start_processes

from infinipipe.profiles.profile import Line
from infinipipe.runtime.launch import worker_environment
from infinipipe.runtime.transport import Channel, DistributedTransport

SIZES = (2**10, 2**14, 2**18, 2**20, 2**21)
"""Elements of float32."""
REPEATS = 9


def measure_transfer(device: str) -> Line:
    """Return the seconds of one transfer between two ranks on this machine: a constant, and per byte."""
    with tempfile.TemporaryDirectory(prefix="infinipipe-") as scratch:
        start_processes(_ping_pong, args=(device, scratch), nprocs=2, start_method="spawn")
        seconds = np.load(Path(scratch) / "seconds.npy")
    sizes = np.array(SIZES) * 4.0
    rate = max(0.0, float((seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])))
    return Line(constant=float(max(0.0, seconds[0] - rate * sizes[0])), rate=rate)


def _ping_pong(rank: int, device: str, scratch: str) -> None:
    worker_environment(rank)
    torch.set_num_threads(1)
    place = torch.device("cpu") if device == "cpu" else torch.device("cuda", rank)
    store = FileStore(f"{scratch}/store", 2)
    dist.init_process_group("gloo" if device == "cpu" else "nccl", store=store, rank=rank, world_size=2)
    transport = DistributedTransport((dist.new_group(), dist.new_group()), rank, place)
    incoming, outgoing = (Channel.UPSTREAM, Channel.DOWNSTREAM) if rank == 0 else (Channel.DOWNSTREAM, Channel.UPSTREAM)
    medians = []
    for size in SIZES:
        transport.begin(incoming, [(size,)] * REPEATS)
        payload, times = torch.zeros(size, device=place), []
        for _ in range(REPEATS):
            started = time.perf_counter()
            if rank == 0:
                transport.send(outgoing, payload)
            transport.receive(incoming)
            if rank == 1:
                transport.send(outgoing, payload)
            times.append((time.perf_counter() - started) / 2)
        transport.finish()
        medians.append(statistics.median(times))
    if rank == 0:
        np.save(Path(scratch) / "seconds.npy", medians)
    dist.barrier()
    dist.destroy_process_group()
