"""Ranks: their numbers, their neighbours, and the process groups that they talk in."""

from __future__ import annotations

import datetime
import enum
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from infinipipe.aliases import Ints
from infinipipe.ir import Direction, Layout

TIMEOUT = datetime.timedelta(minutes=30)
"""Of a wait for another rank: long enough for a slow step, short enough that a lost peer that
nobody reports is noticed."""


class Channel(enum.Enum):
    """The two directions of transfer between stages."""

    DOWNSTREAM = Direction.DOWN
    """Activations, to the next stage."""
    UPSTREAM = Direction.UP
    """Gradients, to the stage before."""


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
    def mesh(self) -> Ints:
        """All ranks of the layout, (replicas, stages, ranks that share sequences)."""
        layout = self.layout
        axes = (layout.num_replicas, layout.num_stages, layout.sequence_parallel)
        return np.arange(layout.num_ranks).reshape(axes)

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
    def is_writer(self) -> bool:
        """Whether this rank writes what there is once in a run: metrics, progress, the index."""
        return self.rank == 0

    @property
    def saves_weights(self) -> bool:
        """Whether this rank saves the weights of its stage: one of those that hold them does."""
        return self.replica == 0 and self.sequence_index == 0


ChannelGroups = Mapping[Channel, ProcessGroup]
"""The groups of two ranks that exchange boundaries, one a direction: so a receive that waits holds
up nothing that goes the other way, or to another stage."""


class Groups:
    """The process groups of a run; torch.distributed is initialised with a rank for each of them.

    Making one is a collective call, so every rank makes all of them, in the same order.

    Args:
        ranks: this process.
        tied: whether embedding and head share their weight.

    Attributes:
        before: the channels to the rank that holds the stage before; None on the first stage.
        after: those to the rank that holds the next stage; None on the last stage.
        sequence: the ranks that share every sequence with this one; None if there is no other.
        copies: the ranks that hold this stage, whose gradients add up; None if there is no other.
        tied: the two ranks of the same replica and sequence index that hold the copies of the tied
            weight; None where this rank has none, or where one stage holds embedding and head.
    """

    def __init__(self, ranks: Ranks, *, tied: bool) -> None:
        mesh = ranks.mesh
        num_stages = ranks.layout.num_stages
        stage = ranks.stage_index
        edges = [_channel_groups(mesh[:, s : s + 2], ranks.rank) for s in range(num_stages - 1)]
        self.before = edges[stage - 1] if stage > 0 else None
        self.after = edges[stage] if stage < num_stages - 1 else None
        sharers = mesh.reshape(-1, ranks.layout.sequence_parallel)
        self.sequence = _own_group(sharers, ranks.rank)
        copies = mesh.swapaxes(0, 1).reshape(num_stages, -1)
        self.copies = _own_group(copies, ranks.rank)
        self.tied: ProcessGroup | None = None
        if tied and num_stages > 1:
            ends = mesh[:, [0, num_stages - 1]]
            self.tied = _own_group(_pairs(ends), ranks.rank)

    def connect(self, device: torch.device) -> None:
        """Let all groups of several ranks exchange once, in one order on every rank.

        NCCL connects a group at its first exchange, and waits for the device to do so; within a
        step that may be busy with a receive for which others have to exchange first.
        """
        for group in (self.sequence, self.copies, self.tied):
            if group is not None:
                dist.all_reduce(torch.zeros(1, device=device), group=group)


def _channel_groups(two_stages: Ints, rank: int) -> dict[Channel, ProcessGroup]:
    """Make the groups of an edge of all replicas; return those of a rank, none if it has no part.

    Args:
        two_stages: ranks, (replicas, 2, ranks that share sequences).
        rank: this process.
    """
    groups: dict[Channel, ProcessGroup] = {}
    for channel in Channel:
        group = _own_group(_pairs(two_stages), rank)
        if group is not None:
            groups[channel] = group
    return groups


def _pairs(two_stages: Ints) -> Ints:
    """Return (pairs, 2): which rank of one stage belongs to which of the other."""
    return two_stages.swapaxes(1, 2).reshape(-1, 2)


def _own_group(everyone: Ints, rank: int) -> ProcessGroup | None:
    """Make a group of each row of ranks, if that is more than one; return a rank's own."""
    own: ProcessGroup | None = None
    for row in everyone.tolist():
        if len(row) == 1:
            continue
        group: ProcessGroup = dist.new_group(row, timeout=TIMEOUT)
        if rank in row:
            own = group
    return own
