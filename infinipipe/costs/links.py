"""Which links the ranks of a layout exchange over, and what that takes.

Ranks are numbered along those that share sequences, then along stages, then along replicas, and
fill node after node. A profile has the links of one node, and where it knows them those between
two; what it says of exchanges among some ranks is taken here to other numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from infinipipe.aliases import Bools, Ints
from infinipipe.ir import Layout
from infinipipe.profiles import Line, Links, Times

_NOTHING = Line(constant=0.0, rate=0.0)


@dataclass(frozen=True)
class Group:
    """Ranks that exchange among each other."""

    num_ranks: int
    num_together: int
    """How many of them stand on a node, on the node where they are fewest."""

    @property
    def is_inside(self) -> bool:
        """Whether all stand on one node."""
        return self.num_together == self.num_ranks


def sequence_group(layout: Layout) -> Group:
    """Return the ranks that share sequences, of the stage where they are most scattered."""
    groups = _nodes(layout).reshape(-1, layout.sequence_parallel)
    return min(map(_group, groups), key=_num_together)


def copies_group(layout: Layout, stage_index: int) -> Group:
    """Return the ranks that hold a stage."""
    return _group(_nodes(layout)[:, stage_index])


def tied_pair(layout: Layout) -> Group:
    """Return a rank of the first and one of the last stage, which hold copies of a tied weight.

    Of all such pairs it is one on two nodes, if any is.
    """
    nodes = _nodes(layout)
    together = bool((nodes[:, 0] == nodes[:, -1]).all())
    return Group(num_ranks=2, num_together=2 if together else 1)


def _nodes(layout: Layout) -> Ints:
    """(replicas, stages, ranks that share sequences) the node that each rank is on."""
    axes = (layout.num_replicas, layout.num_stages, layout.sequence_parallel)
    ranks = np.arange(layout.num_ranks, dtype=np.int64).reshape(axes)
    return ranks // layout.devices_per_node


def _group(nodes: Ints) -> Group:
    _, counts = np.unique(nodes, return_counts=True)
    return Group(num_ranks=nodes.size, num_together=int(counts.min()))


def _num_together(group: Group) -> int:
    return group.num_together


def edges_inside(layout: Layout) -> Bools:
    """(stages - 1,) whether a stage and the next one stand on one node, in every replica."""
    nodes = _nodes(layout)
    inside = nodes[:, :-1] == nodes[:, 1:]
    return np.asarray(inside.all(axis=(0, 2)))


def edge_lines(times: Times, layout: Layout) -> tuple[Line, ...]:
    """Return what a transfer between each stage and the next takes, per byte."""
    inside = times.links.transfer_s
    between = _links_between(times).transfer_s
    return tuple(inside if is_inside else between for is_inside in edges_inside(layout))


def fastest_edge(times: Times, layout: Layout) -> Line:
    """Return a line that no edge of a layout is faster than."""
    lines = edge_lines(times, layout)
    # A single stage sends nothing.
    constant = min((line.constant for line in lines), default=0.0)
    rate = min((line.rate for line in lines), default=0.0)
    return Line(constant=constant, rate=rate)


def all_to_all_line(times: Times, group: Group) -> Line:
    """Return what an exchange of every rank with every other takes, per byte that each holds.

    All messages go at once, so what was measured among other ranks is as long but for the part of
    the bytes that leaves the rank; or the node, where it is the links between nodes that count.
    """
    if group.num_ranks == 1:
        return _NOTHING
    links = times.links
    num_kept = 1
    if not _is_as_inside(times, group):
        links = _links_between(times)
        num_kept = group.num_together
    line = links.all_to_all_s
    if links.num_ranks == 1:
        return line
    share = (group.num_ranks - num_kept) / group.num_ranks
    return Line(constant=line.constant, rate=line.rate * share / _share(links.num_ranks))


def reduce_scatter_line(times: Times, group: Group) -> Line:
    """Return what adding up takes of which each rank gets its part, per byte of the buffer."""
    return _ring_line(times, group, _reduce_scatter_of)


def all_gather_line(times: Times, group: Group) -> Line:
    """Return what handing out takes of which each rank has its part, per byte of the buffer."""
    return _ring_line(times, group, _all_gather_of)


def _ring_line(times: Times, group: Group, of_links: Callable[[Links], Line]) -> Line:
    """Return the line of an exchange in a ring, taken from the ranks that were measured to a group.

    In a ring of N ranks each sends (N - 1) / N of the buffer in N - 1 messages. Between nodes there
    are as many rings side by side as ranks on a node, each over a device's own adapter, but they
    are no faster than the links inside.
    """
    if group.num_ranks == 1:
        return _NOTHING
    inside = _ring_among(group.num_ranks, times.links, of_links)
    if _is_as_inside(times, group):
        return inside
    between = _ring_among(group.num_ranks, _links_between(times), of_links)
    side_by_side = between.rate / group.num_together
    return Line(constant=between.constant, rate=max(inside.rate, side_by_side))


def _ring_among(num_ranks: int, links: Links, of_links: Callable[[Links], Line]) -> Line:
    line = of_links(links)
    if links.num_ranks == 1:
        return line
    messages = (num_ranks - 1) / (links.num_ranks - 1)
    share = _share(num_ranks) / _share(links.num_ranks)
    return Line(constant=messages * line.constant, rate=share * line.rate)


def _share(num_ranks: int) -> float:
    """Return how much of a buffer leaves a rank that keeps its own part."""
    return (num_ranks - 1) / num_ranks


def _reduce_scatter_of(links: Links) -> Line:
    return links.reduce_scatter_s


def _all_gather_of(links: Links) -> Line:
    return links.all_gather_s


def _is_as_inside(times: Times, group: Group) -> bool:
    """Whether a group stands on one node, or exchanges as if it did."""
    return group.is_inside or times.links_between is None


def _links_between(times: Times) -> Links:
    """Return the links between nodes, those inside where these are not known."""
    return times.links_between or times.links
