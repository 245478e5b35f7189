"""Which links a layout uses, and exchanges among other ranks than were measured."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinipipe.costs.links import (
    Group,
    all_gather_line,
    all_to_all_line,
    copies_group,
    edge_lines,
    edges_inside,
    fastest_edge,
    reduce_scatter_line,
    sequence_group,
    tied_pair,
)
from infinipipe.ir import Layout
from infinipipe.profiles import Line, Links, Times, read_model
from infinipipe.profiles.analytic import analytic_profile

ANALYTIC = analytic_profile(read_model("llama-7b"), "a800-80g").times


def links(transfer: Line, all_to_all: Line, ring: Line, num_ranks: int) -> Links:
    return Links(
        transfer_s=transfer,
        all_to_all_s=all_to_all,
        reduce_scatter_s=ring,
        all_gather_s=msgspec.structs.replace(ring, constant=2 * ring.constant),
        num_ranks=num_ranks,
    )


INSIDE = links(
    Line(constant=1.0, rate=0.5),
    Line(constant=3.0, rate=0.75),
    Line(constant=6.0, rate=1.5),
    num_ranks=4,
)
BETWEEN = links(
    Line(constant=2.0, rate=0.25),
    Line(constant=5.0, rate=15.0),
    Line(constant=30.0, rate=12.0),
    num_ranks=4,
)
TIMES: Times = msgspec.structs.replace(ANALYTIC, links=INSIDE, links_between=BETWEEN)
ONE_NODE_TIMES: Times = msgspec.structs.replace(TIMES, links_between=None)


@pytest.mark.parametrize(
    ("layout", "inside"),
    [
        # Nodes 0000 1111: of four stages of two ranks, two stand on each.
        (Layout(num_stages=4, sequence_parallel=2, devices_per_node=4), [True, False, True]),
        (Layout(num_stages=4, sequence_parallel=2), [True, True, True]),
        # Of two replicas of three stages the first is on node 0; of the other a stage is there too.
        (Layout(num_stages=3, num_replicas=2, devices_per_node=4), [False, True]),
        # The rank of the first stage that has the second half of a sequence is on node 1 already.
        (Layout(num_stages=2, sequence_parallel=2, devices_per_node=3), [False]),
        (Layout(num_stages=1, sequence_parallel=8, devices_per_node=2), []),
    ],
)
def test_an_edge_is_inside_a_node_if_it_is_so_for_every_rank(
    layout: Layout, inside: list[bool]
) -> None:
    assert edges_inside(layout).tolist() == inside
    lines = edge_lines(TIMES, layout)
    assert lines == tuple(INSIDE.transfer_s if i else BETWEEN.transfer_s for i in inside)
    unmeasured = edge_lines(ONE_NODE_TIMES, layout)
    assert unmeasured == (INSIDE.transfer_s,) * len(inside)


def test_no_edge_is_faster_than_the_fastest() -> None:
    mixed = Layout(num_stages=3, num_replicas=2, devices_per_node=4)
    # The one has the smaller constant, the other the smaller rate.
    assert fastest_edge(TIMES, mixed) == Line(constant=1.0, rate=0.25)
    across = Layout(num_stages=3, devices_per_node=1)
    assert fastest_edge(TIMES, across) == BETWEEN.transfer_s
    assert fastest_edge(TIMES, Layout(num_stages=1)) == Line(constant=0.0, rate=0.0)


def test_groups_of_ranks_by_hand() -> None:
    layout = Layout(num_stages=2, sequence_parallel=2, num_replicas=2, devices_per_node=4)
    assert sequence_group(layout) == Group(num_ranks=2, num_together=2)
    # A replica fills a node: of a stage's four copies two are on each.
    assert copies_group(layout, 0) == Group(num_ranks=4, num_together=2)
    assert copies_group(layout, 1) == Group(num_ranks=4, num_together=2)
    assert tied_pair(layout) == Group(num_ranks=2, num_together=2)
    odd = msgspec.structs.replace(layout, devices_per_node=3)
    # Nodes 000 111 22: ranks 2 and 3, the second stage's of the first replica, are apart.
    assert sequence_group(odd) == Group(num_ranks=2, num_together=1)
    assert not sequence_group(odd).is_inside
    assert copies_group(odd, 0) == Group(num_ranks=4, num_together=2)
    assert copies_group(odd, 1) == Group(num_ranks=4, num_together=1)
    assert tied_pair(odd) == Group(num_ranks=2, num_together=1)
    alone = Layout(num_stages=3, devices_per_node=1)
    assert sequence_group(alone) == copies_group(alone, 2) == Group(num_ranks=1, num_together=1)


def test_alone_there_is_nothing_to_exchange() -> None:
    alone = Group(num_ranks=1, num_together=1)
    nothing = Line(constant=0.0, rate=0.0)
    assert all_to_all_line(TIMES, alone) == nothing
    assert reduce_scatter_line(TIMES, alone) == nothing
    assert all_gather_line(TIMES, alone) == nothing


def test_what_was_measured_is_as_measured() -> None:
    four = Group(num_ranks=4, num_together=4)
    assert all_to_all_line(TIMES, four) == INSIDE.all_to_all_s
    assert reduce_scatter_line(TIMES, four) == INSIDE.reduce_scatter_s
    assert all_gather_line(TIMES, four) == INSIDE.all_gather_s
    # Each rank on a node of its own.
    apart = Group(num_ranks=4, num_together=1)
    assert all_to_all_line(TIMES, apart) == BETWEEN.all_to_all_s
    assert all_gather_line(TIMES, apart) == BETWEEN.all_gather_s
    assert all_to_all_line(ONE_NODE_TIMES, apart) == INSIDE.all_to_all_s
    assert all_gather_line(ONE_NODE_TIMES, apart) == INSIDE.all_gather_s


def test_exchanges_among_other_ranks_by_hand() -> None:
    """Four ranks send 3/4 of what they hold, at 1 s a byte inside and 20 s between nodes."""
    two = Group(num_ranks=2, num_together=2)
    assert all_to_all_line(TIMES, two) == Line(constant=3.0, rate=0.5)
    eight = Group(num_ranks=8, num_together=8)
    assert all_to_all_line(TIMES, eight) == Line(constant=3.0, rate=0.875)
    # Four of the eight are on the other node: half of the bytes go there.
    halves = Group(num_ranks=8, num_together=4)
    assert all_to_all_line(TIMES, halves) == Line(constant=5.0, rate=10.0)
    # Rings: 3 messages of 2 s, and 2 s a byte that is sent; between nodes 10 s, and 16 s.
    assert reduce_scatter_line(TIMES, two) == Line(constant=2.0, rate=1.0)
    assert reduce_scatter_line(TIMES, eight) == Line(constant=14.0, rate=1.75)
    assert all_gather_line(TIMES, eight) == Line(constant=28.0, rate=1.75)
    # Four rings side by side.
    assert reduce_scatter_line(TIMES, halves) == Line(constant=70.0, rate=14.0 / 4)
    # As many rings as to be faster than the links inside, through which all of it goes as well.
    many = Group(num_ranks=32, num_together=16)
    inside = reduce_scatter_line(TIMES, Group(num_ranks=32, num_together=32))
    assert reduce_scatter_line(TIMES, many).rate == inside.rate
    assert reduce_scatter_line(TIMES, many).constant == 310.0


def test_a_machine_with_one_device_measured_no_exchange() -> None:
    nothing = Line(constant=0.0, rate=0.0)
    alone = links(nothing, nothing, nothing, num_ranks=1)
    times = msgspec.structs.replace(TIMES, links=alone, links_between=None)
    eight = Group(num_ranks=8, num_together=2)
    assert all_to_all_line(times, eight) == nothing
    assert reduce_scatter_line(times, eight) == nothing


@given(
    num_ranks=st.integers(1, 64),
    more=st.integers(1, 64),
    num_bytes=st.floats(1.0, 1e10),
)
def test_more_ranks_never_exchange_the_same_buffer_faster(
    num_ranks: int, more: int, num_bytes: float
) -> None:
    for line_of in (all_to_all_line, reduce_scatter_line, all_gather_line):
        few, many = (
            line_of(ANALYTIC, Group(num_ranks=n, num_together=n))
            for n in (num_ranks, num_ranks + more)
        )
        assert few.constant <= many.constant
        assert few.rate <= many.rate
        apart = line_of(ANALYTIC, Group(num_ranks=num_ranks + more, num_together=1))
        seconds = [line.constant + line.rate * num_bytes for line in (many, apart)]
        assert seconds[0] <= seconds[1]
        assert np.isfinite(seconds).all()
