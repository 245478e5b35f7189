"""The device of a worker: which kind, how its ranks talk, and the type of the numbers on it."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from infinipipe.errors import InputError
from infinipipe.ir import DType

DTYPE_NAME: DType = "float32"
DTYPE = torch.float32
"""Of parameters, activations and gradients; the loss and AdamW have no master copy besides them."""


def choose_device_kind(asked: str, num_ranks: int) -> str:
    """Return `cpu` or `cuda` for a run of so many ranks; `asked` may be `auto` too.

    Raises:
        InputError: there are no GPUs, or not one for every rank of this machine.
    """
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "cuda" and not available:
        raise InputError("no CUDA device is available here; use --device cpu")
    too_few = 0 < available < num_ranks
    if asked != "cpu" and too_few and not dist.is_torchelastic_launched():
        raise InputError(
            f"the plan needs {num_ranks} GPUs, this machine has {available}; "
            "start `infinipipe run` with torchrun on more machines, compile with fewer --stages, "
            "or use --device cpu"
        )
    return "cpu" if asked == "cpu" or not available else "cuda"


def backend(kind: str) -> str:
    """Return the backend of torch.distributed for `cpu` or `cuda`."""
    return "gloo" if kind == "cpu" else "nccl"


def open_device(kind: str) -> torch.device:
    """Make this process's device of a kind the current one; LOCAL_RANK chooses among GPUs."""
    if kind == "cpu":
        # A CPU device is one core, as the profile measured it.
        torch.set_num_threads(1)
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
