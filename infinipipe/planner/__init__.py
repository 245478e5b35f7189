"""The planner: from lengths to a schedule, in pure passes from value to value, without torch."""

from infinipipe.planner.compare import Cell, InfeasibleRow, Row, compare_grid
from infinipipe.planner.compile import compile_plan
from infinipipe.planner.layouts import LayoutSearch, Trial, choose_layout
from infinipipe.planner.options import CompileOptions
from infinipipe.planner.policies import POLICIES
from infinipipe.planner.systems import Contest, compare_systems

__all__ = [
    "POLICIES",
    "Cell",
    "CompileOptions",
    "Contest",
    "InfeasibleRow",
    "LayoutSearch",
    "Row",
    "Trial",
    "choose_layout",
    "compare_grid",
    "compare_systems",
    "compile_plan",
]
