"""Plans of every policy stay what they are; `golden.py` checks many more of them, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planner.golden import INPUTS, POLICIES, Input, plan_digests, plan_name, read_golden

# Small and quick, and of each kind: measured and analytic, one stage and several, with replicas.
FEW = (INPUTS[0], INPUTS[2], INPUTS[14], INPUTS[17])


@pytest.mark.parametrize("given", FEW, ids=lambda given: given.name)
def test_plans_are_as_they_were(
    given: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    golden = read_golden()
    expected = {policy: golden[plan_name(given, policy)].rounded for policy in POLICIES}
    actual = {policy: plan_digests(given, policy).rounded for policy in POLICIES}
    assert actual == expected


def test_every_plan_has_a_digest() -> None:
    assert list(read_golden()) == [plan_name(g, policy) for g in INPUTS for policy in POLICIES]
