"""The device that is measured: which one, what it is called, what fits into it."""

from __future__ import annotations

import os
import platform
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
import torch
import transformers

from infinipipe.errors import InputError
from infinipipe.measure.survey import OutOfMemory
from infinipipe.profiles import Device

HOST_SHARE = 0.8
"""Of a device's memory, what training may use; a core has an equal part of its machine's.

The rest is for the system, the interpreter and the allocator's gaps.
"""

_CONTAINER = Path("/sys/fs/cgroup")
"""Where a container reads its own limits, of cgroup version 2."""
_OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "bad_alloc")
"""Words of the RuntimeErrors by which torch says so on a CPU."""


def choose_device(name: str) -> torch.device:
    """Return the device for `auto`, `cpu` or `cuda`.

    Raises:
        InputError: there is none.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise InputError(
            "no CUDA device is available here; use --device cpu, or --analytic DEVICE for one "
            "that is elsewhere"
        )
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def describe_device(device: torch.device) -> Device:
    """Return what a profile says of the device."""
    if device.type == "cuda":
        return _describe_gpu(device)
    num_cores = count_devices(device)
    return Device(
        name=_cpu_name(),
        kind="cpu",
        memory_bytes=int(HOST_SHARE * _host_memory() / num_cores),
        num_devices=num_cores,
        capability=f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    )


def _describe_gpu(device: torch.device) -> Device:
    properties = torch.cuda.get_device_properties(device)
    return Device(
        name=properties.name,
        kind="cuda",
        memory_bytes=int(HOST_SHARE * properties.total_memory),
        num_devices=count_devices(device),
        capability=f"sm_{properties.major}{properties.minor}",
    )


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        match = re.search(r"^model name.*?:(.*)$", info.read_text(), re.MULTILINE)
        if match is not None:
            return match[1].strip()
    return platform.machine()


def describe_software(device: torch.device) -> dict[str, str]:
    """Return the versions of what times depend on."""
    versions = {
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "numpy": numpy.__version__,
    }
    if device.type == "cuda":
        versions["cuda"] = str(torch.version.cuda)
    return versions


def count_devices(device: torch.device) -> int:
    """Return how many devices of this kind the machine has; those of a CPU are its cores."""
    if device.type == "cuda":
        return torch.cuda.device_count()
    return len(os.sched_getaffinity(0))


@contextmanager
def limit_memory(device: torch.device) -> Iterator[None]:
    """Let a CPU's allocations fail where memory ends.

    Linux grants more, and then kills the process that uses it.
    """
    status = Path("/proc/self/status")
    if device.type != "cpu" or not status.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = _read_kibibytes(status, "VmSize") + int(HOST_SHARE * _free_memory())
    limits = [limit for limit in (wanted, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn torch's ways to say that memory is short into `OutOfMemory`."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        pass
    except RuntimeError as error:
        # The CPU's allocator has no exception of its own.
        if not any(words in str(error) for words in _OUT_OF_MEMORY):
            raise
    else:
        return
    # Only here is the error gone, and with it the frames that hold on to tensors.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    raise OutOfMemory


def _host_memory() -> int:
    """Return the machine's memory, or the container's limit where that is lower, in bytes."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _container_bytes("memory.max")
    return total if limit is None else min(total, limit)


def _free_memory() -> int:
    """Return the bytes that nobody uses of what `_host_memory` says."""
    free = _read_kibibytes(Path("/proc/meminfo"), "MemAvailable")
    limit = _container_bytes("memory.max")
    used = _container_bytes("memory.current")
    if limit is None or used is None:
        return free
    # What files left in the cache goes when it is needed.
    unused = limit - used + _container_cache_bytes()
    return max(0, min(free, unused))


def _container_bytes(name: str) -> int | None:
    """Return a figure of the container, None if there is none."""
    path = _CONTAINER / name
    text = path.read_text().strip() if path.exists() else ""
    # "max" where nothing is limited.
    return int(text) if text.isdigit() else None


def _container_cache_bytes() -> int:
    path = _CONTAINER / "memory.stat"
    if not path.exists():
        return 0
    sizes = re.findall(r"^(?:in)?active_file (\d+)$", path.read_text(), re.MULTILINE)
    return sum(int(size) for size in sizes)


def _read_kibibytes(path: Path, name: str) -> int:
    """Return the bytes of a line such as `VmSize: 1024 kB`."""
    match = re.search(rf"^{name}:\s+(\d+) kB", path.read_text(), re.MULTILINE)
    assert match is not None, f"{path} has no {name}"
    return 1024 * int(match[1])
