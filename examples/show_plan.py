"""Show a plan as a table: how each step was cut and what it costs.

    infinipipe inspect plan.msgpack | python examples/show_plan.py
"""

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

MIB = 2**20


def plan_table(plan: dict[str, Any]) -> Table:
    """Return one row a step."""
    limits = "/".join(f"{limit / MIB:.0f}" for limit in plan["header"]["memory_limit_bytes"])
    table = Table(title=f"The plan (limit of each stage: {limits} MiB)", title_justify="left")
    for name in ("step", "sequences", "tokens", "longest", "chunks", "split", "packed", "recompute", "bubble", "MiB"):
        table.add_column(name, justify="right")
    for step in plan["steps"]:
        table.add_row(*step_row(step))
    return table


def step_row(step: dict[str, Any]) -> list[str]:
    """Return the cells of a step: chunks that hold a slice, and chunks of whole sequences side by side."""
    return [
        str(step["index"]),
        str(step["num_sequences"]),
        f"{step['num_tokens']:,}",
        f"{step['longest']:,}",
        str(step["num_chunks"]),
        str(step["num_split"] + step["num_hybrid"]),
        str(step["num_batched"] + step["num_hybrid"]),
        f"{step['recompute_fraction']:.1%}",
        f"{step['bubble_fraction']:.1%}",
        "/".join(f"{peak / MIB:.0f}" for peak in step["peak_bytes"]),
    ]


if __name__ == "__main__":
    Console().print(plan_table(json.load(sys.stdin)))
