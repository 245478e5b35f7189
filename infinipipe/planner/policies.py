"""Policies: ways to plan one replica's part of a step. `POLICIES` names them all."""

from __future__ import annotations

from collections.abc import Callable

from infinipipe.planner.checkpointing import Shortage
from infinipipe.planner.epp import plan_epp
from infinipipe.planner.problem import Problem
from infinipipe.planner.schedule import Schedule

Policy = Callable[[Problem], Schedule | Shortage]
"""Plans a problem with at least one member; a shortage names the stage that came closest to its limit."""

POLICIES: dict[str, Policy] = {
    "epp": plan_epp,
}
DEFAULT_POLICY = "epp"
