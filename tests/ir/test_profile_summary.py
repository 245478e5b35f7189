"""What is read of the profile in a plan's header."""

from __future__ import annotations

import msgspec
import pytest

from infinipipe.ir import profile_origin, profile_subject
from infinipipe.profiles import pack_profile, read_model
from infinipipe.profiles.analytic import analytic_profile
from tests.plans import make_header


def test_a_profile_says_what_it_is_of_and_where_it_comes_from() -> None:
    profile = analytic_profile(read_model("tiny"), "a100-80g")
    header = make_header(profile=msgspec.Raw(pack_profile(profile)))
    subject = profile_subject(header)
    assert (subject.model, subject.dtype) == (profile.model, profile.dtype)
    origin = profile_origin(header)
    assert (origin.device.name, origin.source) == ("a100-80g", "analytic")
    assert origin.is_analytic


def test_a_profile_made_by_hand_has_a_subject_alone() -> None:
    header = make_header()
    assert profile_subject(header).model == header.model
    with pytest.raises(msgspec.ValidationError, match="device"):
        profile_origin(header)
