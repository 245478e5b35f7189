"""Every kind of corruption of a plan made by hand is refused by a message that names the place."""

from __future__ import annotations

import re

import pytest

from infinipipe.errors import VerifyError
from infinipipe.ir import verify_step
from tests.mutations import MUTATIONS, mutants
from tests.plans import make_header, make_step


def test_there_are_enough_kinds() -> None:
    assert len(MUTATIONS) >= 25


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("num_stages", "num_replicas"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("name", MUTATIONS)
def test_corruption_is_refused(name: str, num_stages: int, num_replicas: int, split: bool) -> None:
    header = make_header(num_stages, num_replicas, num_steps=3)
    step = make_step(header, 1, lengths=(7, 40, 5, 3, 24, 2), split=split)
    for mutant, pattern in mutants(name, header, step):
        with pytest.raises(VerifyError) as caught:
            verify_step(header, mutant)
        assert re.match(pattern, str(caught.value)), str(caught.value)
        assert "\n" not in str(caught.value)
