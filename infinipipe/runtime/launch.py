"""Starts a run: its own workers on this machine, or this process as a worker under torchrun."""

from __future__ import annotations

import datetime
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

from infinipipe.errors import InfinipipeError, InputError, RunError
from infinipipe.runtime.trainer import RunOptions, train

# Long enough for a slow step, short enough that a lost peer that nobody reports is noticed.
TIMEOUT = datetime.timedelta(minutes=30)
LOST_PEER_WAIT_S = 5.0


def run_plan(options: RunOptions, num_ranks: int) -> None:
    """Train as the plan says; returns when all steps are done and the weights are saved.

    Args:
        options: checked by the caller: the plan, the data and the model belong together.
        num_ranks: stages times replicas of the plan.

    Raises:
        InfinipipeError: a worker failed; notes hold its traceback.
    """
    if "WORLD_SIZE" in os.environ:
        _join_torchrun(options, num_ranks)
    else:
        _start_workers(options, num_ranks)


def _join_torchrun(options: RunOptions, num_ranks: int) -> None:
    world = int(os.environ["WORLD_SIZE"])
    if world != num_ranks:
        raise InputError(
            f"the plan is for {num_ranks} ranks, torchrun started {world}; set --nproc-per-node and --nnodes to match"
        )
    dist.init_process_group(_backend(options.device), timeout=TIMEOUT)
    rank = dist.get_rank()
    try:
        train(options)
    except Exception as error:
        failure = _describe(error, rank)
        _give_way(error)
        raise failure from None
    dist.destroy_process_group()


def _start_workers(options: RunOptions, num_ranks: int) -> None:
    with tempfile.TemporaryDirectory(prefix="infinipipe-") as scratch:
        context = start_processes(
            name="infinipipe",
            entrypoint=_worker,
            args={rank: (options, rank, num_ranks, Path(scratch)) for rank in range(num_ranks)},
            envs={rank: _environment(rank) for rank in range(num_ranks)},
            logs_specs=DefaultLogsSpecs(),
            start_method="spawn",
        )
        try:
            result = context.wait()
        finally:
            context.close(timeout=5)
        if result is not None and result.failures:
            rank, failure = min(result.failures.items())
            raise _collect(rank, failure.exitcode, Path(scratch))


def _environment(rank: int) -> dict[str, str]:
    """Workers of one machine talk over the loopback interface alone."""
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    return {"LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}


def _backend(device: str) -> str:
    return "gloo" if device == "cpu" else "nccl"


def _worker(options: RunOptions, rank: int, num_ranks: int, scratch: Path) -> None:
    """Run one worker process. Ranks meet through a file, so that no port is opened for it."""
    try:
        store = dist.FileStore(str(scratch / "store"), num_ranks)
        dist.init_process_group(_backend(options.device), store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
        train(options)
        dist.destroy_process_group()
    except Exception as error:
        (scratch / f"failure-{rank}").write_bytes(pickle.dumps(_describe(error, rank)))
        _give_way(error)
        sys.stderr.flush()
        os._exit(1)  # an orderly end would wait for ranks that wait for this one


def _describe(error: Exception, rank: int) -> InfinipipeError:
    """Return what to tell of a worker's failure; the traceback of what no user caused goes along as a note."""
    if isinstance(error, InfinipipeError) and not isinstance(error, RunError):
        return error
    message = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
    failure = RunError(f"rank {rank}: {message}".replace("\n", " "))
    failure.add_note("".join(traceback.format_exception(error)))
    return failure


def _give_way(error: Exception) -> None:
    """Wait a little if the failure is only that another rank is gone, so that rank's own failure is the one reported."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, dist.DistError) or "gloo" in str(error):
        time.sleep(LOST_PEER_WAIT_S)


def _collect(rank: int, exit_code: int, scratch: Path) -> InfinipipeError:
    report = scratch / f"failure-{rank}"
    if report.exists():
        failure = pickle.loads(report.read_bytes())
        assert isinstance(failure, InfinipipeError)
        return failure
    how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
    return RunError(
        f"rank {rank} {how}; if the machine ran out of memory, compile with a lower --memory or more --stages"
    )
