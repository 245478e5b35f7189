"""What is said of layouts: links that a profile knows nothing of."""

from __future__ import annotations

import msgspec

from infinipipe.ir import Layout
from infinipipe.profiles import read_model
from infinipipe.profiles.analytic import analytic_profile
from infinipipe.reports.layouts import link_warning

PROFILE = analytic_profile(read_model("tiny"), "a800-80g")
change = msgspec.structs.replace


def test_links_that_a_profile_does_not_know_are_warned_of() -> None:
    alone = change(
        PROFILE, times=change(PROFILE.times, links=change(PROFILE.times.links, num_ranks=1))
    )
    inside = change(PROFILE, times=change(PROFILE.times, links_between=None))
    one = Layout(num_stages=1, devices_per_node=8)
    eight = Layout(num_stages=8, devices_per_node=8)
    sixteen = Layout(num_stages=8, num_replicas=2, devices_per_node=8)
    for layout in (one, eight, sixteen):
        assert link_warning(PROFILE, layout) is None
    assert link_warning(alone, one) is None
    assert "measured on one device" in str(link_warning(alone, eight))
    assert link_warning(inside, eight) is None
    assert "inside a node only" in str(link_warning(inside, sixteen))
