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
from infinipipe.runtime.ranks import TIMEOUT, Channel, ChannelGroups, Groups, Ranks
from tests.processes import finish_all
from tests.runtime.replay import CPU


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
        place = ranks.replica, ranks.stage_index, ranks.sequence_index
        assert ranks.mesh[place] == ranks.rank


def test_every_stage_is_saved_once_and_one_rank_writes() -> None:
    layout = Layout(num_stages=3, sequence_parallel=2, num_replicas=2)
    assert [r.stage_index for r in everyone(layout) if r.saves_weights] == [0, 1, 2]
    assert [r.rank for r in everyone(layout) if r.is_writer] == [0]
    assert [layout.num_ranks // r.layout.num_copies for r in everyone(layout)] == [3] * 12


LAYOUTS = [
    Layout(num_stages=1),
    Layout(num_stages=4),
    Layout(num_stages=2, num_replicas=2),
    Layout(num_stages=2, sequence_parallel=2),
    Layout(num_stages=1, num_replicas=2, sequence_parallel=2),
]


def others(ranks: Ranks, *same: str) -> list[int]:
    """Return the ranks that are at the same place as this one along some axes."""
    return [
        other.rank
        for other in everyone(ranks.layout)
        if all(getattr(other, axis) == getattr(ranks, axis) for axis in same)
    ]


def pipeline(ranks: Ranks) -> list[int]:
    """Return the ranks of the same replica and sequence index, by stage."""
    return others(ranks, "replica", "sequence_index")


def test_groups_connect_in_the_same_order_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    exchanged: list[object] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: exchanged.append(group))
    groups = object.__new__(Groups)
    groups.sequence = "sequence"
    groups.copies = None
    groups.tied = "tied"
    groups.connect(CPU)
    assert exchanged == ["sequence", "tied"]


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
            store = FileStore(f"{folder}/store-{index}", layout.num_ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.num_ranks)
            _check_groups(Ranks(layout, rank))
            dist.destroy_process_group()


def _check_groups(ranks: Ranks) -> None:
    groups = Groups(ranks, tied=True)
    stages = pipeline(ranks)
    stage = ranks.stage_index
    _check_channels(groups.before, stages[stage - 1 : stage + 1] if stage else [])
    _check_channels(groups.after, stages[stage : stage + 2])
    sharers = others(ranks, "replica", "stage_index")
    copies = others(ranks, "stage_index")
    _check_group(groups.sequence, sharers)
    _check_group(groups.copies, copies)
    is_end = stage in (0, len(stages) - 1)
    _check_group(groups.tied, [stages[0], stages[-1]] if is_end and len(stages) > 1 else [])
    for group in (groups.sequence, groups.copies, groups.tied):
        if group is not None:
            total = torch.tensor(ranks.rank)
            dist.all_reduce(total, group=group)
            assert int(total) == sum(dist.get_process_group_ranks(group))


def _check_channels(groups: ChannelGroups | None, expected: list[int]) -> None:
    if len(expected) < 2:
        assert groups is None
        return
    assert groups is not None
    assert groups.keys() == set(Channel)
    for group in groups.values():
        _check_group(group, expected)
    # A group of its own each way, so that nothing waits behind what goes the other way.
    assert len(set(groups.values())) == len(Channel)


def _check_group(group: dist.ProcessGroup | None, expected: list[int]) -> None:
    if len(expected) < 2:
        assert group is None
        return
    assert group is not None
    assert dist.get_process_group_ranks(group) == expected
    assert group._get_backend(CPU).options._timeout == TIMEOUT
