"""The planner: from lengths to a schedule, in pure passes from value to value, without torch."""

from infinipipe.planner.compare import Cell, InfeasibleRow, Row, compare_grid
from infinipipe.planner.compile import compile_plan
from infinipipe.planner.options import CompileOptions
from infinipipe.planner.policies import POLICIES

__all__ = [
    "POLICIES",
    "Cell",
    "CompileOptions",
    "InfeasibleRow",
    "Row",
    "compare_grid",
    "compile_plan",
]
