"""A sketch: would a stage boundary between attention and MLP be worth it?

    # After `python benchmarks/layouts.py measure -o layouts.jsonl`.
    python benchmarks/half_layers.py layouts.jsonl

A layer is one unit today. With attention and MLP as units of their own, stages balance better. What
that could gain at most is estimated for every layout that was searched: its step times the largest
stage with half layers over the largest with whole ones, as if all of a step shrank with its
busiest stage and memory had no say. Of layouts that a bound excluded, the step is taken to exceed
the bound as those that were planned did, in the middle. The best of these estimates is held against
the best step of today.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Run as a script, only its own folder is on the path.
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.layouts import DEVICE, make_dataset, read
from benchmarks.planner import BATCHES
from benchmarks.tables import table
from infinipipe.aliases import Ints
from infinipipe.costs import CostModel
from infinipipe.ir import Layout, Model
from infinipipe.planner.passes.partition import make_stages
from infinipipe.profiles import logits_tokens, read_model
from infinipipe.profiles.analytic import analytic_profile

TOKENS = 4096
"""Of the chunk by which stages are weighed, as the partition does."""
_HALVINGS = 40
"""Of the interval in which the largest stage is looked for: far below a second's last digits."""

Row = dict[str, Any]


def report(rows: list[Row]) -> Iterator[str]:
    """Yield a table with what half layers could gain in each case."""
    lines = [_line(row) for row in rows if _is_wanted(row)]
    names = ("case", "devices", "best today", "best with half layers", "gain at most")
    yield from table(names, lines)


def _is_wanted(row: Row) -> bool:
    case = row["case"]
    is_best = case["kind"] == "family" and case["name"] == "best"
    return is_best and row["trials"][0]["step_s"] is not None


def _line(row: Row) -> tuple[str, ...]:
    case = row["case"]
    today = row["trials"][0]
    estimates = {trial["name"]: seconds for trial, seconds in _estimates(row)}
    best = min(estimates, key=lambda name: (estimates[name], name))
    gain = today["step_s"] / estimates[best] - 1
    label = f"{case['model']}, {case['memory_gib']} GiB, {case['data']}"
    return (label, str(case["devices"]), today["name"], best, f"{gain:.1%}")


def _estimates(row: Row) -> Iterator[tuple[Row, float]]:
    """Yield every layout that may fit with its step if stages were balanced by half layers."""
    case = row["case"]
    profile = analytic_profile(read_model(case["model"]), DEVICE)
    with tempfile.TemporaryDirectory() as folder:
        dataset = make_dataset(Path(folder), profile, case, BATCHES[case["data"]])
    lengths = dataset.rows.lengths
    logits = logits_tokens(profile.model.vocabulary_size)
    planned = [trial for trial in row["trials"] if trial["step_s"] is not None]
    over_bound = statistics.median(trial["step_s"] / trial["bound_s"] for trial in planned)
    for trial in row["trials"]:
        if trial["reason"] is not None:
            continue
        num_stages, shared, replicas = (int(part) for part in trial["name"].split(" x "))
        layout = Layout(
            num_stages=num_stages,
            sequence_parallel=shared,
            num_replicas=replicas,
            devices_per_node=profile.device.num_devices,
        )
        counts = [1] * num_stages
        costs = CostModel(profile, layout, make_stages(counts), logits)
        seconds = trial["step_s"] or over_bound * trial["at_least_s"]
        yield trial, seconds * _shrinks(costs, lengths)


def _shrinks(costs: CostModel, lengths: Ints) -> float:
    """Return the largest stage with half layers over the largest with whole ones."""
    attention_s, mlp_s = _halves(costs, lengths)
    ends = costs.ends_s(TOKENS)
    num_layers = costs.model.num_layers
    num_stages = costs.layout.num_stages
    whole = _largest([attention_s + mlp_s] * num_layers, ends, num_stages)
    half = _largest([attention_s, mlp_s] * num_layers, ends, num_stages)
    return half / whole


def _halves(costs: CostModel, lengths: Ints) -> tuple[float, float]:
    """Return the seconds of F and B of attention and of the MLP of a layer, for a typical chunk."""
    pairs = float((lengths * (lengths + 1.0) / 2).sum() / lengths.sum())
    slices = max(1, round(TOKENS * len(lengths) / lengths.sum()))
    whole_s = costs.layer_s(TOKENS, round(TOKENS * pairs), slices)
    products_s = costs.layer_s(TOKENS, 0, 0)
    mlp_s = products_s * _mlp_share(costs.model)
    return whole_s - mlp_s, mlp_s


def _mlp_share(model: Model) -> float:
    """Return the MLP's part of a layer's products with weights."""
    return 3 * model.hidden_size * model.intermediate_size / model.layer_parameters


def _largest(units: list[float], ends: tuple[float, float], num_stages: int) -> float:
    """Return the largest stage when units in their order are cut into stages as evenly as can be.

    Embedding and head stay with the first and the last unit.
    """
    weights = list(units)
    weights[0] += ends[0]
    weights[-1] += ends[1]
    least = max(weights)
    most = sum(weights)
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        if _stages_needed(weights, middle) <= num_stages:
            most = middle
        else:
            least = middle
    return most


def _stages_needed(weights: list[float], limit: float) -> int:
    """Return into how many stages of at most so much the weights can be put."""
    count = 1
    held = 0.0
    for weight in weights:
        if held + weight > limit:
            count += 1
            held = 0.0
        held += weight
    return count


if __name__ == "__main__":
    print("\n".join(report(read(Path(sys.argv[1])))))
