"""Moves activations down the pipeline and their gradients up it, in the order the plan implies.

Each stage has two channels in: from the stage before (activations) and from the stage
after (gradients). A receive is posted one ahead of the op that needs it; a send is
asynchronous, but waits until the one before it on its channel has left. So a stage
holds at most one arriving and one leaving tensor a channel, whose sizes the plan fixes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from infinipipe.runtime.ranks import Channel, ChannelGroups

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
    work: dist.Work | None
    """None for a tensor without elements, which neither end transfers."""

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()


class _Incoming(NamedTuple):
    """What is still to be received on a channel."""

    shapes: deque[Shape]
    dtype: torch.dtype


class _Way(NamedTuple):
    """One direction between two ranks of neighbouring stages."""

    group: ProcessGroup
    """Of these two, the one of the earlier stage first."""
    sender: int
    """Which of the two sends; the other receives."""

    @property
    def receiver(self) -> int:
        return 1 - self.sender


_SENDERS = {Channel.DOWNSTREAM: 0, Channel.UPSTREAM: 1}
"""The earlier stage of two sends activations, the later one gradients."""


class DistributedTransport:
    """Point-to-point transfers of torch.distributed, one process group an edge and direction.

    It connects with its neighbours when it is made, which all ranks of a run do at the same time.

    Args:
        before: the groups of what travels between the stage before and this one; None if this is
            the first stage.
        after: those of this one and the next stage.
        device: where tensors are received.
    """

    def __init__(
        self, before: ChannelGroups | None, after: ChannelGroups | None, device: torch.device
    ) -> None:
        self._sources: dict[Channel, _Way] = {}
        self._targets: dict[Channel, _Way] = {}
        if before is not None:
            self._sources[Channel.DOWNSTREAM] = _way(before, Channel.DOWNSTREAM)
            self._targets[Channel.UPSTREAM] = _way(before, Channel.UPSTREAM)
        if after is not None:
            self._sources[Channel.UPSTREAM] = _way(after, Channel.UPSTREAM)
            self._targets[Channel.DOWNSTREAM] = _way(after, Channel.DOWNSTREAM)
        self._device = device
        self._incoming: dict[Channel, _Incoming] = {}
        self._posted: dict[Channel, _Transfer] = {}
        self._leaving: dict[Channel, _Transfer] = {}
        # From the first edge of the pipeline to its last.
        for groups in (before, after):
            if groups is not None:
                _connect(groups, device)

    def begin(self, channel: Channel, shapes: Iterable[Shape], dtype: torch.dtype) -> None:
        """See `Transport`."""
        self._incoming[channel] = _Incoming(deque(shapes), dtype)
        self._post(channel)

    def receive(self, channel: Channel) -> Tensor:
        """See `Transport`."""
        arriving = self._posted.pop(channel)
        arriving.wait()
        # The next one may arrive while the op that needs this one runs.
        self._post(channel)
        return arriving.tensor

    def send(self, channel: Channel, tensor: Tensor) -> None:
        """See `Transport`."""
        assert channel in self._targets, f"there is no stage to send to on {channel}"
        way = self._targets[channel]
        self._wait_for_leaving(channel)
        work = None
        if tensor.numel():
            work = dist.isend(tensor, group=way.group, group_dst=way.receiver)
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
        assert channel in self._sources, f"there is no stage to receive from on {channel}"
        way = self._sources[channel]
        shape = incoming.shapes.popleft()
        tensor = torch.empty(shape, dtype=incoming.dtype, device=self._device)
        work = None
        if tensor.numel():
            work = dist.irecv(tensor, group=way.group, group_src=way.sender)
        self._posted[channel] = _Transfer(tensor, work)

    def _wait_for_leaving(self, channel: Channel) -> None:
        leaving = self._leaving.pop(channel, None)
        if leaving is not None:
            leaving.wait()


def _way(groups: ChannelGroups, channel: Channel) -> _Way:
    return _Way(groups[channel], _SENDERS[channel])


def _connect(groups: ChannelGroups, device: torch.device) -> None:
    """Send an element each way between two stages, one way after the other.

    NCCL connects two ranks at their first transfer, and holds up each until the other comes to the
    same one: two stages that post their receives first would wait for each other for ever.
    """
    for channel in Channel:
        way = _way(groups, channel)
        element = torch.zeros(1, device=device)
        if dist.get_rank(way.group) == way.sender:
            dist.send(element, group=way.group, group_dst=way.receiver)
        else:
            dist.recv(element, group=way.group, group_src=way.sender)
