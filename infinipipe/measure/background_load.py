"""Processes for the other devices of a machine that is measured.

In a run on CPUs every core has its rank, and they share caches and memory bandwidth: a layer of
large chunks takes a tenth longer than on a machine that does nothing else. So the others work
while one core is measured. Then all measure the links between them, for which there must be
processes anyway.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import ProcessContext, ProcessException, start_processes

from infinipipe.errors import RunError
from infinipipe.ir import Model
from infinipipe.measure.bench import Bench
from infinipipe.measure.links import NO_LINKS, measure_links
from infinipipe.measure.machine import describe_device
from infinipipe.measure.survey import OutOfMemory
from infinipipe.profiles import Links
from infinipipe.runtime.memory import track_memory

# What the others work on. Large chunks are what suffers from neighbours, so it is one; but only
# between chunks do they see that it is time to rest, so it is not larger.
_CHUNK_ELEMENTS = 2**18
"""Of a layer's input: 2,048 tokens of a small model, 64 of a large one."""
# No fewer for a huge model, whose layer keeps a core busy anyway; no more for a tiny one, whose
# rounds would get long.
_LEAST_TOKENS = 64
_MOST_TOKENS = 2048
_NUM_SLICES = 4
"""It is a pack, which is what short sequences make."""
_LOAD_BYTES = 2 * 8
"""Per parameter: weights and gradients of a layer in float32, and as much again to run it."""
_POLL_S = 0.2
"""Between looks at each other: short for a person, long for a core that is measured."""


@dataclass(frozen=True)
class _Shared:
    """What the processes and the one that started them have in common."""

    ready: Any
    """A semaphore, released by each process when it works."""
    rest: Path
    """A file: once it is there, stop working and measure the links.

    No lock, which a killed process could hold.
    """
    links: Any
    """A queue for the result."""
    parent: int
    """The process that started them; without it they end."""


class BackgroundLoad:
    """The processes; none on a machine with one device."""

    def __init__(self, context: ProcessContext | None, shared: _Shared) -> None:
        self._context = context
        self._shared = shared

    def wait_until_busy(self) -> None:
        """Return when all processes work.

        Raises:
            RunError: one of them has failed.
        """
        if self._context is None:
            return
        for _ in self._context.processes:
            while not self._shared.ready.acquire(timeout=_POLL_S):
                self._check(0)

    def measure_links(self) -> Links:
        """Stop the work and measure transfers between the ranks.

        Raises:
            RunError: one of the processes has failed.
        """
        if self._context is None:
            return NO_LINKS
        self._shared.rest.touch()
        while self._shared.links.empty():
            self._check(_POLL_S)
        links: Links = self._shared.links.get()
        return links

    def _check(self, timeout_s: float) -> None:
        """Wait for the processes to end, and raise if one has failed."""
        assert self._context is not None
        try:
            self._context.join(timeout=timeout_s)
        except ProcessException as error:
            last_line = str(error).strip().splitlines()[-1]
            raise RunError(
                "a process that works beside the measurement, or measures links, ended early "
                f"({last_line}); free some memory, or profile on fewer cores with taskset"
            ) from None


@contextmanager
def start_background_load(
    model: Model, device_type: str, num_ranks: int
) -> Iterator[BackgroundLoad]:
    """Start a process for each of the machine's devices, or the first so many.

    All end with the block.

    Args:
        model: a layer of it is what the others work on.
        device_type: `cpu` or `cuda`; only cores of a CPU slow each other down, so GPUs wait.
        num_ranks: how many; the first rests until the links are measured, as its device is the
            one that is measured.

    Raises:
        RunError: they cannot be started.
    """
    spawn = get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="infinipipe-") as scratch:
        folder = Path(scratch)
        shared = _Shared(spawn.Semaphore(0), folder / "rest", spawn.SimpleQueue(), os.getpid())
        if num_ranks == 1:
            yield BackgroundLoad(None, shared)
            return
        context = _start(model, device_type, num_ranks, folder / "store", shared)
        try:
            yield BackgroundLoad(context, shared)
        finally:
            for process in context.processes:
                process.kill()
                process.join()


def _start(
    model: Model, device_type: str, num_ranks: int, store: Path, shared: _Shared
) -> ProcessContext:
    # Ctrl-C reaches every process of the terminal; this one ends the others, which inherit that
    # they ignore it.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        context: ProcessContext = start_processes(
            _serve,
            args=(model, device_type, num_ranks, store, shared),
            nprocs=num_ranks,
            join=False,
            daemon=True,
            start_method="spawn",
        )
        return context
    except OSError as error:
        raise RunError(
            f"cannot start {num_ranks} processes: {error.strerror}; allow more, or use taskset"
        ) from None
    finally:
        signal.signal(signal.SIGINT, handler)


def _serve(
    rank: int, model: Model, device_type: str, num_ranks: int, store: Path, shared: _Shared
) -> None:
    """Run one process."""
    torch.set_num_threads(1)
    is_ready = False
    if rank > 0 and device_type == "cpu":
        with suppress(OutOfMemory):
            is_ready = _work(model, shared)
    if not is_ready:
        shared.ready.release()
    while not shared.rest.exists():
        _end_with_parent(shared)
        time.sleep(_POLL_S)
    links = measure_links(rank, device_type, num_ranks, store)
    if rank == 0:
        shared.links.put(links)


def _work(model: Model, shared: _Shared) -> bool:
    """Run a layer over and over until it is time to rest.

    Returns whether there was memory for it, and so whether it was said to be ready.
    """
    device = torch.device("cpu")
    if _LOAD_BYTES * model.layer_parameters > describe_device(device).memory_bytes:
        return False
    tokens = min(_MOST_TOKENS, _CHUNK_ELEMENTS // model.hidden_size)
    tokens = max(_LEAST_TOKENS, tokens)
    slices = ((0, tokens // _NUM_SLICES),) * _NUM_SLICES
    bench = Bench(model, device, ends=False)
    with track_memory(device, ()):
        bench.warm_up()
        shared.ready.release()
        while not shared.rest.exists():
            _end_with_parent(shared)
            with suppress(OutOfMemory):
                bench.time_layer(slices)
    return True


def _end_with_parent(shared: _Shared) -> None:
    if os.getppid() != shared.parent:
        os._exit(1)
