"""Moves activations down the pipeline and their gradients up it, in the order the plan implies.

Each stage has two channels in: from the stage before (activations) and from the stage
after (gradients). A receive is posted one ahead of the op that needs it; a send is
asynchronous, but waits until the one before it on its channel has left. So a stage
holds at most one arriving and one leaving tensor a channel, whose sizes the plan fixes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from infinipipe.runtime.ranks import Channel, Neighbours

Shape = tuple[int, ...]


class Transport(Protocol):
    """One stage's end of its channels."""

    def begin(self, channel: Channel, shapes: Iterable[Shape], dtype: torch.dtype) -> None:
        """Say what this step will receive on a channel, in order."""

    def receive(self, channel: Channel) -> Tensor:
        """Return the next tensor of a channel, waiting for it."""

    def send(self, channel: Channel, tensor: Tensor) -> None:
        """Send a tensor that is not changed any more."""

    def finish(self) -> None:
        """Wait until everything sent has left."""


class _Transfer(NamedTuple):
    """A tensor on its way, which has to stay alive until then."""

    tensor: Tensor
    work: dist.Work


class _Incoming(NamedTuple):
    """What is still to be received on a channel."""

    shapes: deque[Shape]
    dtype: torch.dtype


class DistributedTransport:
    """Point-to-point transfers of torch.distributed, one process group a direction.

    Args:
        neighbours: the ranks at the other ends.
        groups: the process group of each channel.
        device: where tensors are received.
    """

    def __init__(
        self,
        neighbours: Neighbours,
        groups: Mapping[Channel, dist.ProcessGroup],
        device: torch.device,
    ) -> None:
        self._sources = {
            Channel.DOWNSTREAM: neighbours.before,
            Channel.UPSTREAM: neighbours.after,
        }
        self._targets = {
            Channel.DOWNSTREAM: neighbours.after,
            Channel.UPSTREAM: neighbours.before,
        }
        self._groups = groups
        self._device = device
        self._incoming: dict[Channel, _Incoming] = {}
        self._posted: dict[Channel, _Transfer] = {}
        self._leaving: dict[Channel, _Transfer] = {}

    def begin(self, channel: Channel, shapes: Iterable[Shape], dtype: torch.dtype) -> None:
        """See `Transport`."""
        self._incoming[channel] = _Incoming(deque(shapes), dtype)
        self._post(channel)

    def receive(self, channel: Channel) -> Tensor:
        """See `Transport`."""
        arriving = self._posted.pop(channel)
        arriving.work.wait()
        # The next one may arrive while the op that needs this one runs.
        self._post(channel)
        return arriving.tensor

    def send(self, channel: Channel, tensor: Tensor) -> None:
        """See `Transport`."""
        target = self._targets[channel]
        assert target is not None, f"there is no stage to send to on {channel}"
        self._wait_for_leaving(channel)
        work = dist.isend(tensor, target, group=self._groups[channel])
        assert work is not None
        self._leaving[channel] = _Transfer(tensor, work)

    def finish(self) -> None:
        """See `Transport`."""
        for channel in Channel:
            self._wait_for_leaving(channel)
        assert not self._posted, "the step ended before everything it expects had arrived"

    def _post(self, channel: Channel) -> None:
        incoming = self._incoming[channel]
        if not incoming.shapes:
            return
        source = self._sources[channel]
        # torch.distributed would take None for "from any rank".
        assert source is not None, f"there is no stage to receive from on {channel}"
        shape = incoming.shapes.popleft()
        tensor = torch.empty(shape, dtype=incoming.dtype, device=self._device)
        work = dist.irecv(tensor, source, group=self._groups[channel])
        assert work is not None
        self._posted[channel] = _Transfer(tensor, work)

    def _wait_for_leaving(self, channel: Channel) -> None:
        leaving = self._leaving.pop(channel, None)
        if leaving is not None:
            leaving.work.wait()
