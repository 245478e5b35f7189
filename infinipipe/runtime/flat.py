"""A stage's parameters and gradients as parts of two flat buffers, which ranks share by ranges."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from infinipipe.runtime.device import DTYPE

ALIGNMENT = 4
"""Elements that a shard is a multiple of. 16 bytes are what kernels load at once, so matrices and
shards begin where they could if they had memory of their own."""


class PartKind(enum.Enum):
    """What the parameters of a part have in common, in the order of the parts."""

    TIED = enum.auto()
    """The tied weight, where another stage holds a copy of it."""
    DECAYED = enum.auto()
    """Matrices: they decay."""
    PLAIN = enum.auto()
    """Norms' scales and biases, which to shrink would not regularise: they do not."""


@dataclass(frozen=True)
class Part:
    """A range of both buffers; two tensors of one dim and of the same size."""

    kind: PartKind
    parameters: Tensor
    gradients: Tensor

    def shard(self, index: int, count: int) -> Part:
        """Return one of `count` equal ranges; the part's size is a multiple of `count`."""
        size, rest = divmod(self.parameters.numel(), count)
        assert rest == 0, "the part is padded for another number of shards"
        own = slice(index * size, (index + 1) * size)
        return Part(self.kind, self.parameters[own], self.gradients[own])


@dataclass(frozen=True)
class FlatBuffers:
    """All of a stage's parameters, and all their gradients; each is a view of its place in them.

    Attributes:
        parameters: one dim.
        gradients: float32, as many.
        parts: together all of both; only those that hold a parameter. Each ends with zeros, so
            that it can be cut into equal shards.
    """

    parameters: Tensor
    gradients: Tensor
    parts: tuple[Part, ...]

    def shards(self, index: int, count: int) -> tuple[Part, ...]:
        """Return one of `count` shards of every part."""
        return tuple(part.shard(index, count) for part in self.parts)


def flatten(
    parameters: dict[str, nn.Parameter],
    tied_name: str | None,
    num_shards: int,
    device: torch.device,
) -> FlatBuffers:
    """Move parameters into a buffer on a device, and give them gradients of zeros in another.

    Args:
        parameters: by name. They remain the same objects and lose the memory they had.
        tied_name: that of the weight of which another stage holds a copy.
        num_shards: what the size of each part becomes a multiple of.
        device: where the buffers go.
    """
    members = _by_kind(parameters, tied_name)
    sizes = [_padded_size(group, num_shards) for group in members.values()]
    flat_parameters = torch.zeros(sum(sizes), dtype=DTYPE, device=device)
    # Float32 whatever the parameters are: a step adds up hundreds of chunks.
    flat_gradients = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
    views = zip(members, flat_parameters.split(sizes), flat_gradients.split(sizes), strict=True)
    parts = tuple(Part(*each) for each in views)
    for part in parts:
        _move_into(part, members[part.kind])
    return FlatBuffers(flat_parameters, flat_gradients, parts)


def _by_kind(
    parameters: dict[str, nn.Parameter], tied_name: str | None
) -> dict[PartKind, list[nn.Parameter]]:
    members: dict[PartKind, list[nn.Parameter]] = {kind: [] for kind in PartKind}
    for name, parameter in parameters.items():
        kind = PartKind.DECAYED if parameter.ndim >= 2 else PartKind.PLAIN
        members[PartKind.TIED if name == tied_name else kind].append(parameter)
    return {kind: group for kind, group in members.items() if group}


def _padded_size(group: list[nn.Parameter], num_shards: int) -> int:
    size = sum(parameter.numel() for parameter in group)
    unit = num_shards * ALIGNMENT
    return -(-size // unit) * unit


def _move_into(part: Part, group: list[nn.Parameter]) -> None:
    first = 0
    for parameter in group:
        own = slice(first, first + parameter.numel())
        first = own.stop
        place = part.parameters[own].view(parameter.shape)
        place.copy_(parameter.detach())
        # One after the other, so that what each had is free before the next is moved.
        parameter.data = place
        parameter.grad = part.gradients[own].view(parameter.shape)
