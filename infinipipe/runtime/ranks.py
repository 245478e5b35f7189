"""Ranks: their numbers, their neighbours, and the process groups that they talk in."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from infinipipe.ir import Direction, Layout

AXES = ("dp", "pp", "sp")
"""Names of the axes of a layout, outermost first, as torchtitan has them; see `Ranks`."""
COPIES = "copies"
"""Name of the axis of all ranks that hold the same weights: `dp` and `sp` as one."""


class Channel(enum.Enum):
    """The two directions of transfer between stages."""

    DOWNSTREAM = Direction.DOWN
    """Activations, to the next stage."""
    UPSTREAM = Direction.UP
    """Gradients, to the stage before."""


@dataclass(frozen=True)
class Neighbours:
    """The ranks that a rank exchanges boundaries with; None at the pipeline's ends."""

    before: int | None
    """Of the stage before."""
    after: int | None
    """Of the next stage."""


@dataclass(frozen=True)
class Ranks:
    """One rank among those of a layout: plain arithmetic, without any process group.

    We say "axis" for what a mesh has and "dim" for what a tensor has. The axes, outermost first:

        dp   replicas           ranks with the same weights and other sequences
        pp   stages             ranks with other layers
        sp   sequence parallel  ranks with the same weights that share every sequence

    So `rank = (replica * num_stages + stage_index) * sequence_parallel + sequence_index`: the ranks
    that exchange most stand next to each other, and so on one machine.
    """

    layout: Layout
    rank: int

    @property
    def axis_sizes(self) -> tuple[int, int, int]:
        """Sizes of `AXES`."""
        layout = self.layout
        return layout.num_replicas, layout.num_stages, layout.sequence_parallel

    @property
    def replica(self) -> int:
        """Index of the replica."""
        return self.rank // (self.layout.num_stages * self.layout.sequence_parallel)

    @property
    def stage_index(self) -> int:
        """Index of the stage."""
        return self.rank // self.layout.sequence_parallel % self.layout.num_stages

    @property
    def sequence_index(self) -> int:
        """Index among the ranks that share the stage's sequences."""
        return self.rank % self.layout.sequence_parallel

    @property
    def neighbours(self) -> Neighbours:
        """The ranks that hold the stages beside this one, in the same replica."""
        distance = self.layout.sequence_parallel
        is_first = self.stage_index == 0
        is_last = self.stage_index == self.layout.num_stages - 1
        return Neighbours(
            before=None if is_first else self.rank - distance,
            after=None if is_last else self.rank + distance,
        )

    @property
    def is_end(self) -> bool:
        """Whether the stage is the first or the last: these hold the copies of a tied weight."""
        return self.stage_index in (0, self.layout.num_stages - 1)

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes what there is once in a run: metrics, progress, the index."""
        return self.rank == 0

    @property
    def saves_weights(self) -> bool:
        """Whether this rank saves the weights of its stage: one of those that hold them does."""
        return self.replica == 0 and self.sequence_index == 0

    def ranks_of_stage(self, stage_index: int) -> list[int]:
        """Return the ranks that hold a stage, ascending."""
        everyone = [Ranks(self.layout, rank) for rank in range(self.layout.num_ranks)]
        return [ranks.rank for ranks in everyone if ranks.stage_index == stage_index]


class Groups:
    """The process groups of a run; torch.distributed is initialised with a rank for each of them.

    Making one is a collective call, so every rank makes all of them, in the same order.

    Args:
        ranks: this process.
        device_kind: `cpu` or `cuda`.
        tied: whether embedding and head share their weight.

    Attributes:
        channels: the groups of transfers between stages.
        copies: the ranks that hold this stage, whose gradients add up; None if there is no other.
        tied: the ranks that hold a copy of the tied weight; None where this rank has none, or where
            one stage holds both embedding and head.
    """

    def __init__(self, ranks: Ranks, device_kind: str, *, tied: bool) -> None:
        self.channels = channel_groups()
        self.copies: ProcessGroup | None = None
        if ranks.layout.num_copies > 1:
            self.copies = _stage_mesh(ranks, device_kind).get_group(COPIES)
        self.tied: ProcessGroup | None = None
        if tied and ranks.layout.num_stages > 1:
            # Ranks in between make it as well: a group needs every rank of the run.
            group = _ends_group(ranks)
            self.tied = group if ranks.is_end else None


def channel_groups() -> dict[Channel, ProcessGroup]:
    """Make the groups of transfers between stages: one of all ranks for each direction.

    Two groups, so that a receive that waits in one direction holds up nothing in the other.
    """
    return {channel: _new_group() for channel in Channel}


def _stage_mesh(ranks: Ranks, device_kind: str) -> DeviceMesh:
    """Return all ranks by their stage, and along the other axes, as one, the copies of it."""
    by_axes = torch.arange(ranks.layout.num_ranks).reshape(ranks.axis_sizes)
    stage_axis = AXES.index("pp")
    by_stage = by_axes.movedim(stage_axis, 0).flatten(1)
    return DeviceMesh(device_kind, by_stage, mesh_dim_names=("pp", COPIES))


def _ends_group(ranks: Ranks) -> ProcessGroup:
    last = ranks.layout.num_stages - 1
    return _new_group(sorted(ranks.ranks_of_stage(0) + ranks.ranks_of_stage(last)))


def _new_group(members: list[int] | None = None) -> ProcessGroup:
    group: ProcessGroup = dist.new_group(members)
    return group
