"""Exchanges of a buffer that ranks share by ranges, in place and without a copy of it.

The buffer is cut into as many equal ranges as the group has ranks; each rank owns the range of its
place in the group.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# Torch 2.13 has renamed both, and warns of their old names.
if hasattr(dist, "reduce_scatter_single"):
    _reduce_scatter = dist.reduce_scatter_single
    _all_gather = dist.all_gather_single
else:
    _reduce_scatter = dist.reduce_scatter_tensor
    _all_gather = dist.all_gather_into_tensor


def place_in(group: ProcessGroup | None) -> tuple[int, int]:
    """Return a rank's place in its group and the group's size; None is a group of it alone."""
    if group is None:
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def reduce_scatter(buffer: Tensor, group: ProcessGroup) -> None:
    """Add up the buffers of all ranks of a group; each rank has the sum in its own range.

    What it finds in the other ranges afterwards means nothing.
    """
    place, size = place_in(group)
    ranges = buffer.chunk(size)
    if _copies_buffers(group):
        for owner, part in enumerate(ranges):
            dist.reduce(part, group=group, group_dst=owner)
    else:
        _reduce_scatter(ranges[place], buffer, group=group)


def all_gather(buffer: Tensor, group: ProcessGroup) -> None:
    """Give every rank of a group the own ranges of all others."""
    place, size = place_in(group)
    ranges = buffer.chunk(size)
    if _copies_buffers(group):
        for owner, part in enumerate(ranges):
            dist.broadcast(part, group=group, group_src=owner)
    else:
        _all_gather(buffer, ranges[place], group=group)


def _copies_buffers(group: ProcessGroup) -> bool:
    """Whether the backend's own exchange holds a copy of the whole buffer, as gloo's do.

    Gloo's reduce-scatter is an all-reduce of that copy: range by range takes half its time.
    """
    return bool(dist.get_backend(group) == "gloo")
