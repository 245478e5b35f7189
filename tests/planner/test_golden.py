"""Plans of every policy stay what they are; `golden.py` checks many more of them, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.planner.golden import GOLDEN, INPUTS, POLICIES, plan_digests

# Small and quick, and of each kind: measured and analytic, one stage and several, short of memory,
# with replicas.
FEW = (INPUTS[0], INPUTS[2], INPUTS[14], INPUTS[17])


@pytest.mark.parametrize("given", FEW, ids=lambda given: given.name)
def test_plans_are_as_they_were(given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = json.loads(GOLDEN.read_text())
    found = {policy: plan_digests(given, policy).rounded for policy in POLICIES}
    assert found == {policy: expected[f"{given.name}: {policy}"]["rounded"] for policy in POLICIES}
