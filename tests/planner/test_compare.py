"""The comparison's rows."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from infinipipe.dataset import BYTES, open_dataset
from infinipipe.errors import InputError
from infinipipe.planner import CompileOptions, InfeasibleRow, Row
from infinipipe.planner.compare import compare_policies
from infinipipe.planner.compile import draw_batches
from tests.planner.toys import ROOMY, roomy_limits, toy_costs, toy_profile

FIELDS = [
    *("policy", "feasible", "step_seconds", "bound_seconds", "ratio_to_bound", "bubble_fraction"),
    *("recompute_fraction", "peak_bytes", "num_chunks", "plan_seconds"),
]


def rows(
    folder: Path, lengths: list[int], policies: tuple[str, ...], limits: tuple[int, ...]
) -> list[Row | InfeasibleRow]:
    path = folder / "dataset.jsonl"
    path.write_text("".join(json.dumps({"length": length}) + "\n" for length in lengths))
    dataset, profile = open_dataset(path, BYTES, 256), toy_profile(6)
    options = CompileOptions(num_stages=2, batch_size=4, memory_limit_bytes=limits)
    calls: list[tuple[int, int]] = []
    request = options.resolve(profile, len(dataset))
    found = compare_policies(
        dataset,
        profile,
        request,
        draw_batches(dataset, request),
        policies,
        lambda *call: calls.append(call),
    )
    assert calls == sorted(calls)
    assert calls[-1] == (2 * len(policies), 2 * len(policies))
    return found


def test_rows_have_the_promised_fields_and_add_up(tmp_path: Path) -> None:
    found = rows(tmp_path, [90, 3, 14, 15, 92, 65, 35, 8], ("epp", "1f1b"), (ROOMY,))
    assert [row.policy for row in found] == ["epp", "1f1b"]
    for row in found:
        assert isinstance(row, Row)
        assert list(msgspec.to_builtins(row)) == FIELDS
        assert row.ratio_to_bound == pytest.approx(row.step_seconds / row.bound_seconds)
        assert row.ratio_to_bound >= 1
        assert 0 < row.bubble_fraction < 1
        assert row.recompute_fraction == 0
        assert len(row.peak_bytes) == 2
    assert found[0].step_seconds <= found[1].step_seconds  # type: ignore[union-attr]


def test_a_policy_without_a_plan_says_why(tmp_path: Path) -> None:
    limits = roomy_limits(toy_costs(toy_profile(6), [3, 3]), 1_250_000)
    found = rows(tmp_path, [300, 3, 14, 15, 92, 65, 35, 8], ("gpipe", "epp"), limits)
    assert isinstance(found[0], InfeasibleRow)
    assert isinstance(found[1], Row)
    document = msgspec.to_builtins(found[0])
    assert document["feasible"] is False
    assert "does not fit: stage" in document["reason"]


def test_unknown_policies_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="--policies best: no such policy; there are epp, paper, gpipe"
    ):
        rows(tmp_path, [5], ("epp", "best"), (ROOMY,))
