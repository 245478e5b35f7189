"""Processes for the other devices of a machine that is measured.

In a run on CPUs every core has its rank, and they share caches and memory bandwidth: a layer of large chunks takes a
tenth longer than on a machine that does nothing else. So the others work while one core is measured. Then all
measure the links between them, for which there must be processes anyway.
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
from infinipipe.measure.links import Links, measure_links
from infinipipe.measure.machine import describe_device
from infinipipe.measure.survey import OutOfMemory
from infinipipe.profiles.profile import Line
from infinipipe.runtime.memory import track_memory

NO_LINKS = Links(
    transfer_s=Line(constant=0.0, rate=0.0), all_to_all_s=Line(constant=0.0, rate=0.0), num_ranks=1
)  # there is nobody to exchange with
_CHUNK_ELEMENTS = 2**18
"""Of a layer's input, in what the others work on: 2,048 tokens of a small model, 64 of a large one."""
_NUM_SLICES = 4
_POLL_S = 0.2


@dataclass(frozen=True)
class _Shared:
    """What the processes and the one that started them have in common."""

    ready: Any
    """A semaphore, released by each process when it works."""
    rest: Path
    """A file: once it is there, stop working and measure the links. No lock that a killed process could hold."""
    links: Any
    """A queue for the result."""
    parent: int
    """The process that started them; without it they end."""


class Crew:
    """The processes; none on a machine with one device."""

    def __init__(self, context: ProcessContext | None, shared: _Shared) -> None:
        self._context, self._shared = context, shared

    def wait_until_busy(self) -> None:
        """Return when all processes work."""
        if self._context is None:
            return
        for _ in self._context.processes:
            while not self._shared.ready.acquire(timeout=_POLL_S):
                self._check(0)

    def measure_links(self) -> Links:
        """Stop the work and measure one transfer between two ranks, and an exchange among all."""
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
            raise RunError(
                "a process that works beside the measurement, or measures links, ended early "
                f"({str(error).strip().splitlines()[-1]}); free some memory, or profile on fewer cores with taskset"
            ) from None


@contextmanager
def start_crew(model: Model, device: str, num_ranks: int) -> Iterator[Crew]:
    """Start a process for each of the machine's devices, or of the first so many; all end with the block.

    Args:
        model: a layer of it is what the others work on.
        device: `cpu` or `cuda`; only cores of a CPU slow each other down, so GPUs wait.
        num_ranks: how many; the first rests until the links are measured, as its device is the one that is measured.
    """
    spawn = get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="infinipipe-") as scratch:
        shared = _Shared(
            spawn.Semaphore(0), Path(scratch) / "rest", spawn.SimpleQueue(), os.getpid()
        )
        if num_ranks == 1:
            yield Crew(None, shared)
            return
        # Ctrl-C reaches every process of the terminal; this one ends the others, which inherit that they ignore it.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            context = start_processes(
                _serve,
                args=(model, device, num_ranks, Path(scratch) / "store", shared),
                nprocs=num_ranks,
                join=False,
                daemon=True,
                start_method="spawn",
            )
        except OSError as error:
            raise RunError(
                f"cannot start {num_ranks} processes: {error.strerror}; allow more, or use taskset"
            ) from None
        finally:
            signal.signal(signal.SIGINT, handler)
        try:
            yield Crew(context, shared)
        finally:
            for process in context.processes:
                process.kill()
                process.join()


def _serve(
    rank: int, model: Model, device: str, num_ranks: int, store: Path, shared: _Shared
) -> None:
    """Run one process."""
    torch.set_num_threads(1)
    released = False
    if rank and device == "cpu":
        with suppress(OutOfMemory):
            released = _work(model, shared)
    if not released:
        shared.ready.release()
    while not shared.rest.exists():
        _end_with_parent(shared)
        time.sleep(_POLL_S)
    links = measure_links(rank, device, num_ranks, store)
    if rank == 0:
        shared.links.put(links)


def _work(model: Model, shared: _Shared) -> bool:
    """Run a layer over and over until it is time to rest; return whether there was memory for it."""
    place = torch.device("cpu")
    if 2 * 8 * model.layer_parameters > describe_device(place).memory_bytes:
        return False
    tokens = max(64, min(2048, _CHUNK_ELEMENTS // model.hidden_size))
    bench = Bench(model, place, ends=False)
    with track_memory(place, ()):
        bench.warm_up()
        shared.ready.release()
        while not shared.rest.exists():
            _end_with_parent(shared)
            with suppress(OutOfMemory):
                bench.time_layer(((0, tokens // _NUM_SLICES),) * _NUM_SLICES)
    return True


def _end_with_parent(shared: _Shared) -> None:
    if os.getppid() != shared.parent:
        os._exit(1)
