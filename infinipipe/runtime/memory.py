"""The bytes of tensors alive on a device, and their peak."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class CpuMemory(TorchDispatchMode):
    """Counts the storages of all tensors made while it is active, and of those given to it.

    What a kernel allocates inside itself and frees before it returns is not seen.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current_bytes = 0
        self.peak_bytes = 0
        self._live: dict[int, weakref.ref[Any]] = {}
        for tensor in tensors:
            self._see(tensor)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing here is compiled, and the guard against it would cost more than the count.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and count what it returns."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._see(result)
        elif isinstance(result, (tuple, list)):
            for tensor in result:
                if isinstance(tensor, Tensor):
                    self._see(tensor)
        return result

    def reset_peak(self) -> None:
        """Start a new peak from what is alive."""
        self.peak_bytes = self.current_bytes

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        num_bytes = storage.nbytes()

        def dead(_: Any) -> None:
            self.current_bytes -= num_bytes
            del self._live[key]

        self._live[key] = weakref.ref(storage, dead)
        self.current_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)


class CudaMemory:
    """The same figures from CUDA's caching allocator."""

    @property
    def current_bytes(self) -> int:
        """Bytes of live tensors."""
        return torch.cuda.memory_allocated()

    @property
    def peak_bytes(self) -> int:
        """The most since `reset_peak`."""
        return torch.cuda.max_memory_allocated()

    def reset_peak(self) -> None:
        """Start a new peak from what is alive."""
        torch.cuda.reset_peak_memory_stats()


@contextmanager
def track_memory(
    device: torch.device, tensors: Iterable[Tensor]
) -> Iterator[CpuMemory | CudaMemory]:
    """Count bytes within the block; `tensors` are alive already."""
    if device.type == "cuda":
        yield CudaMemory()
        return
    with CpuMemory(tensors) as memory:
        yield memory
