"""Starts a run: its own workers on this machine, or this process as a worker under torchrun."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    SignalException,
    start_processes,
)

from infinipipe.errors import InfinipipeError, InputError, RunError
from infinipipe.runtime.device import backend
from infinipipe.runtime.prepare import PreparedRun, RunOptions, prepare
from infinipipe.runtime.ranks import TIMEOUT

LOST_PEER_WAIT_S = 5.0
"""How long a rank that only lost its peer lets others report first. The rank that failed itself
needs far less for that; more would hold up the report where all ranks lost one."""
CLOSE_TIMEOUT_S = 5
"""How long workers have to end by themselves once the run is over, before they are killed."""


def run_plan(options: RunOptions) -> None:
    """Train as the plan says; returns when all steps are done and the weights are saved.

    Raises:
        InfinipipeError: plan, dataset, model and machine do not fit together, and nothing was
            written; or a worker failed, and a note holds its traceback.
    """
    run = prepare(options)
    if dist.is_torchelastic_launched():
        _join_torchrun(run)
    else:
        _start_workers(run)


def _join_torchrun(run: PreparedRun) -> None:
    world = int(os.environ["WORLD_SIZE"])
    if world != run.num_ranks:
        raise InputError(
            f"the plan is for {run.num_ranks} ranks, torchrun started {world}; "
            "set --nnodes and --nproc-per-node to match"
        )
    try:
        dist.init_process_group(backend(run.device_kind), timeout=TIMEOUT)
        _train(run)
    except Exception as error:
        failure = _describe(error, int(os.environ["RANK"]))
        _give_way(error)
        raise failure from None
    dist.destroy_process_group()


def _start_workers(run: PreparedRun) -> None:
    for name in ("torch.distributed.elastic.multiprocessing", "torch.multiprocessing"):
        # They would log the failure of a worker at length; `_collect` says it in one line.
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    with tempfile.TemporaryDirectory(prefix="infinipipe-") as scratch:
        arguments = {rank: (run, rank, Path(scratch)) for rank in range(run.num_ranks)}
        no_variables: dict[int, dict[str, str]] = {rank: {} for rank in range(run.num_ranks)}
        context = start_processes(
            name="infinipipe",
            entrypoint=_worker,
            args=arguments,
            envs=no_variables,
            logs_specs=DefaultLogsSpecs(),
            start_method="spawn",
        )
        try:
            result = context.wait()
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise RunError(f"stopped by {signal.Signals(error.sigval).name}") from None
        finally:
            context.close(timeout=CLOSE_TIMEOUT_S)
        if result is not None and result.failures:
            rank, failure = min(result.failures.items())
            raise _collect(rank, failure.exitcode, Path(scratch))


def worker_environment(rank: int) -> None:
    """Prepare a worker process of this machine: ranks talk over the loopback interface alone."""
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ.update(
        LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME=loopback, NCCL_SOCKET_IFNAME=loopback
    )


def _worker(run: PreparedRun, rank: int, scratch: Path) -> None:
    """Run one worker process. Ranks meet through a file, so that no port is opened for it."""
    worker_environment(rank)
    # Ctrl-C reaches all; the process that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        store = FileStore(str(scratch / "store"), run.num_ranks)
        dist.init_process_group(
            backend(run.device_kind),
            store=store,
            rank=rank,
            world_size=run.num_ranks,
            timeout=TIMEOUT,
        )
        _train(run)
        dist.destroy_process_group()
    except Exception as error:
        (scratch / f"failure-{rank}").write_bytes(pickle.dumps(_describe(error, rank)))
        _give_way(error)
        sys.stderr.flush()
        # An orderly end would wait for ranks that wait for this one.
        os._exit(1)


def _train(run: PreparedRun) -> None:
    # By workers only: transformers takes seconds to import, and who starts them needs it not.
    from infinipipe.runtime.worker import train

    train(run)


def _describe(error: Exception, rank: int) -> InfinipipeError:
    """Return what to tell of a worker's failure.

    What no user caused takes its traceback along as a note.
    """
    if isinstance(error, InfinipipeError) and not isinstance(error, RunError):
        return error
    has_place = isinstance(error, RunError)
    message = str(error) if has_place else f"{type(error).__name__}: {error}"
    failure = RunError(f"rank {rank}: {message}".replace("\n", " "))
    failure.add_note("".join(traceback.format_exception(error)))
    return failure


def _give_way(error: Exception) -> None:
    """Wait a little if another rank is gone, so that its own failure is the one reported."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, dist.DistError) or "gloo" in str(error):
        time.sleep(LOST_PEER_WAIT_S)


def _collect(rank: int, exit_code: int, scratch: Path) -> InfinipipeError:
    """Return what a worker has left of its failure, or at least how it ended."""
    report = scratch / f"failure-{rank}"
    if report.exists():
        failure = pickle.loads(report.read_bytes())
        assert isinstance(failure, InfinipipeError)
        return failure
    if exit_code < 0:
        end = f"was killed by signal {-exit_code}"
    else:
        end = f"ended with exit code {exit_code}"
    return RunError(
        f"rank {rank} {end}; if the machine ran out of memory, "
        "compile with a lower --memory or more --stages"
    )
