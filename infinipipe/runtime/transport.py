"""Moves activations down the pipeline and their gradients up it, in the order the plan implies.

Each stage has two channels in: from the stage before (activations) and from the stage
after (gradients). A receive is posted one ahead of the op that needs it; a send is
asynchronous, but waits until the one before it on its channel has left. So a stage
holds at most one arriving and one leaving tensor a channel, whose sizes the plan fixes.
"""

from __future__ import annotations

import enum
import queue
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

LOOPBACK_TIMEOUT_S = 60.0


class Channel(enum.Enum):
    """The two directions of transfer."""

    DOWNSTREAM = 0
    """Activations, from stage s to s + 1."""
    UPSTREAM = 1
    """Gradients, from stage s + 1 to s."""


class Transport(Protocol):
    """One stage's end of its channels."""

    def begin(self, channel: Channel, shapes: Iterable[tuple[int, ...]]) -> None:
        """Say what this step will receive on a channel, in order."""

    def receive(self, channel: Channel) -> Tensor:
        """Return the next tensor of a channel, waiting for it."""

    def send(self, channel: Channel, tensor: Tensor) -> None:
        """Send a tensor that is not changed any more."""

    def finish(self) -> None:
        """Wait until everything sent has left."""


class DistributedTransport:
    """Point-to-point transfers of torch.distributed, one process group a direction.

    Args:
        groups: the process groups of the downstream and the upstream channel.
        rank: this process; its neighbours in the pipeline are `rank - 1` and `rank + 1`.
    """

    def __init__(
        self, groups: Sequence[dist.ProcessGroup], rank: int, device: torch.device
    ) -> None:
        self._groups = groups
        self._sources = rank - 1, rank + 1
        self._targets = rank + 1, rank - 1
        self._device = device
        self._expected: dict[Channel, deque[tuple[int, ...]]] = {}
        self._posted: dict[Channel, tuple[Tensor, dist.Work]] = {}
        self._leaving: dict[Channel, tuple[Tensor, dist.Work]] = {}

    def begin(self, channel: Channel, shapes: Iterable[tuple[int, ...]]) -> None:
        """See `Transport`."""
        self._expected[channel] = deque(shapes)
        self._post(channel)

    def receive(self, channel: Channel) -> Tensor:
        """See `Transport`."""
        tensor, work = self._posted.pop(channel)
        work.wait()
        self._post(channel)
        return tensor

    def send(self, channel: Channel, tensor: Tensor) -> None:
        """See `Transport`."""
        self._wait_for_leaving(channel)
        work = dist.isend(tensor, self._targets[channel.value], group=self._groups[channel.value])
        assert work is not None
        self._leaving[channel] = tensor, work

    def finish(self) -> None:
        """See `Transport`."""
        for channel in Channel:
            self._wait_for_leaving(channel)
        assert not self._posted, "the step ended before everything it expects had arrived"

    def _post(self, channel: Channel) -> None:
        if self._expected[channel]:
            tensor = torch.empty(self._expected[channel].popleft(), device=self._device)
            work = dist.irecv(
                tensor, self._sources[channel.value], group=self._groups[channel.value]
            )
            assert work is not None
            self._posted[channel] = tensor, work

    def _wait_for_leaving(self, channel: Channel) -> None:
        if channel in self._leaving:
            _, work = self._leaving.pop(channel)
            work.wait()


class LoopbackTransport:
    """The same within one process whose stages are threads: tests and profiling use it."""

    def __init__(
        self, sources: Sequence[queue.Queue[Tensor]], targets: Sequence[queue.Queue[Tensor]]
    ) -> None:
        self._sources, self._targets = sources, targets
        self._expected: dict[Channel, deque[tuple[int, ...]]] = {}

    @staticmethod
    def connect(num_stages: int) -> list[LoopbackTransport]:
        """Return the transports of a pipeline's stages."""
        down: list[queue.Queue[Tensor]] = [queue.Queue() for _ in range(num_stages + 1)]
        up: list[queue.Queue[Tensor]] = [queue.Queue() for _ in range(num_stages + 1)]
        return [
            LoopbackTransport((down[s], up[s + 1]), (down[s + 1], up[s])) for s in range(num_stages)
        ]

    def begin(self, channel: Channel, shapes: Iterable[tuple[int, ...]]) -> None:
        """See `Transport`."""
        self._expected[channel] = deque(shapes)

    def receive(self, channel: Channel) -> Tensor:
        """See `Transport`."""
        tensor = self._sources[channel.value].get(timeout=LOOPBACK_TIMEOUT_S)
        expected = self._expected[channel].popleft()
        assert tuple(tensor.shape) == expected, (
            f"received {tuple(tensor.shape)}, the plan says {expected}"
        )
        return tensor

    def send(self, channel: Channel, tensor: Tensor) -> None:
        """See `Transport`."""
        self._targets[channel.value].put(tensor)

    def finish(self) -> None:
        """See `Transport`."""
        for channel, expected in self._expected.items():
            assert not expected, f"the step ended with {len(expected)} tensors to come on {channel}"
