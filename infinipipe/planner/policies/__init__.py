"""Policies: ways to plan one replica's part of a step. `POLICIES` names them all."""

from __future__ import annotations

from collections.abc import Callable

from infinipipe.planner.passes.schedule import Result
from infinipipe.planner.policies.baselines import (
    plan_1f1b,
    plan_chunkflow,
    plan_deepspeed,
    plan_gpipe,
    plan_seq1f1b,
    plan_terapipe,
)
from infinipipe.planner.policies.epp import plan_epp
from infinipipe.planner.policies.paper import plan_paper
from infinipipe.planner.problem import Problem

__all__ = ["DEFAULT_POLICY", "ONE_STAGE", "POLICIES", "Policy"]

Policy = Callable[[Problem], Result]
"""Plans a problem with at least one member; a shortage names the stage that came closest to its
limit. All but `epp` also take an incumbent, and return it where they find nothing better."""

POLICIES: dict[str, Policy] = {
    "epp": plan_epp,
    "paper": plan_paper,
    "gpipe": plan_gpipe,
    "1f1b": plan_1f1b,
    "terapipe": plan_terapipe,
    "seq1f1b": plan_seq1f1b,
    "chunkflow": plan_chunkflow,
    "deepspeed": plan_deepspeed,
}
ONE_STAGE = frozenset({"deepspeed"})
"""Policies that plan layouts of one stage only."""
DEFAULT_POLICY = "epp"
