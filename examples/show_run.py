"""Show a run as a table: the loss, and time and memory as predicted and as measured.

python examples/show_run.py infinipipe-run/metrics.jsonl
"""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

MIB = 2**20
"""The unit of both figures of a cell, so that they can be compared."""


def run_table(steps: list[dict[str, Any]]) -> Table:
    """Return one row a step."""
    table = Table(title="The run: predicted -> measured", title_justify="left", box=None)
    for name in ("step", "loss", "grad norm", "tokens/s", "seconds"):
        table.add_column(name, justify="right")
    for stage in range(len(steps[0]["peak_bytes"])):
        table.add_column(f"stage {stage} MiB", justify="right")
    for step in steps:
        table.add_row(*step_row(step))
    return table


def step_row(step: dict[str, Any]) -> list[str]:
    """Return the cells of a step."""
    peaks = zip(step["predicted_peak_bytes"], step["peak_bytes"], strict=True)
    return [
        str(step["step"]),
        f"{step['loss']:.4f}",
        f"{step['grad_norm']:.3f}",
        f"{step['tokens_per_second']:,.0f}",
        f"{step['predicted_seconds']:.2f} -> {step['seconds']:.2f}",
        *(f"{predicted / MIB:.1f} -> {measured / MIB:.1f}" for predicted, measured in peaks),
    ]


def main(metrics: Path) -> None:
    """Print the table and how far the loss fell."""
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    first_loss = steps[0]["loss"]
    last_loss = steps[-1]["loss"]
    console = Console()
    console.print(run_table(steps))
    console.print(f"loss {first_loss:.4f} -> {last_loss:.4f} in {len(steps)} steps")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
