"""Where ranks stand, whom they talk to, and that all of them make the same groups."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C._distributed_c10d import FileStore

from infinipipe.ir import Layout
from infinipipe.runtime.launch import worker_environment
from infinipipe.runtime.ranks import Channel, Groups, Neighbours, Ranks
from tests.processes import finish_all


def everyone(layout: Layout) -> list[Ranks]:
    return [Ranks(layout, rank) for rank in range(layout.num_ranks)]


def test_ranks_count_stages_then_replicas() -> None:
    found = [(r.replica, r.stage_index) for r in everyone(Layout(num_stages=3, num_replicas=2))]
    assert found == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


def test_ranks_that_share_sequences_are_next_to_each_other() -> None:
    layout = Layout(num_stages=2, sequence_parallel=3, num_replicas=2)
    for ranks in everyone(layout):
        rank = (ranks.replica * 2 + ranks.stage_index) * 3 + ranks.sequence_index
        assert rank == ranks.rank
    assert Ranks(layout, 4).neighbours == Neighbours(before=1, after=None)
    assert Ranks(layout, 7).neighbours == Neighbours(before=None, after=10)


@pytest.mark.parametrize("sequence_parallel", [1, 2])
@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_neighbours_are_each_others(
    num_stages: int, num_replicas: int, sequence_parallel: int
) -> None:
    layout = Layout(
        num_stages=num_stages, num_replicas=num_replicas, sequence_parallel=sequence_parallel
    )
    for ranks in everyone(layout):
        before, after = ranks.neighbours.before, ranks.neighbours.after
        assert (before is None) == (ranks.stage_index == 0)
        assert (after is None) == (ranks.stage_index == num_stages - 1)
        if after is not None:
            other = Ranks(layout, after)
            assert other.neighbours.before == ranks.rank
            assert other.stage_index == ranks.stage_index + 1
            assert other.replica == ranks.replica
            assert other.sequence_index == ranks.sequence_index


def test_every_stage_is_saved_once_and_one_rank_writes() -> None:
    layout = Layout(num_stages=3, sequence_parallel=2, num_replicas=2)
    assert [r.stage_index for r in everyone(layout) if r.saves_weights] == [0, 1, 2]
    assert [r.rank for r in everyone(layout) if r.is_writer] == [0]
    assert [layout.num_ranks // r.layout.num_copies for r in everyone(layout)] == [3] * 12
    stages = [Ranks(layout, 0).ranks_of_stage(stage) for stage in range(3)]
    assert stages == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]


LAYOUTS = [
    Layout(num_stages=1),
    Layout(num_stages=2),
    Layout(num_stages=2, num_replicas=2),
    Layout(num_stages=1, num_replicas=2, sequence_parallel=2),
]
"""The last has sequence parallelism, which no plan has so far."""


def test_groups_over_gloo(tmp_path: Path) -> None:
    """Four processes; a layout with fewer ranks leaves the last ones idle."""
    context = mp.start_processes(
        _worker, args=(str(tmp_path),), nprocs=4, join=False, daemon=True, start_method="spawn"
    )
    finish_all(context)


def _worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    worker_environment(rank)
    for index, layout in enumerate(LAYOUTS):
        if rank < layout.num_ranks:
            _check_groups(rank, layout, f"{folder}/store-{index}")


def _check_groups(rank: int, layout: Layout, store_path: str) -> None:
    world = layout.num_ranks
    store = FileStore(store_path, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    ranks = Ranks(layout, rank)
    groups = Groups(ranks, "cpu", tied=True)
    last = layout.num_stages - 1
    ends = sorted(ranks.ranks_of_stage(0) + ranks.ranks_of_stage(last)) if last else None
    same_stage = ranks.ranks_of_stage(ranks.stage_index)
    assert _members(groups.tied) == ends
    assert _members(groups.copies) == (same_stage if len(same_stage) > 1 else None)
    assert groups.channels.keys() == set(Channel)
    for channel_group in groups.channels.values():
        assert _members(channel_group) == list(range(world))
    if groups.copies is not None:
        total = torch.tensor(rank)
        dist.all_reduce(total, group=groups.copies)
        assert int(total) == sum(same_stage)
    dist.destroy_process_group()


def _members(group: dist.ProcessGroup | None) -> list[int] | None:
    return None if group is None else dist.get_process_group_ranks(group)
