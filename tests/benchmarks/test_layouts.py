"""The benchmark of layouts: what its tables say of rows, and what half layers could balance."""

from __future__ import annotations

from typing import Any

from benchmarks import half_layers, layouts


def row(kind: str, name: str, devices: int, step_s: float | None) -> dict[str, Any]:
    case = layouts._case(kind, "llama-7b", 80, "wikipedia", devices, 98304, name)
    reason = None if step_s else "too large"
    trial = {"name": "1 x 4 x 4", "step_s": step_s, "at_least_s": step_s, "reason": reason}
    return {"case": case, "pure_s": 1.0, "trials": [trial], "cpu_s": 70.0}


def families(best: float, others: float | None) -> list[dict[str, Any]]:
    names = {"best": best, "pipeline only": others, "one pipeline": None}
    return [row("family", name, 16, step_s) for name, step_s in names.items()]


def test_targets_are_held_against_what_was_measured() -> None:
    reached = list(layouts.targets(families(1.1, 1.2)))
    assert [cells[3] for cells in reached[:2]] == ["ok", "ok"]
    missed = list(layouts.targets(families(1.2, 1.21)))
    assert [cells[3] for cells in missed[:2]] == ["MISSED", "MISSED"]
    sample = {"search": 1.0, "chosen": 1.05, "all steps": 1.0}
    rows = families(1.1, 1.2) + [row("sample", name, 16, s) for name, s in sample.items()]
    assert [cells[3] for cells in list(layouts.targets(rows))[-2:]] == ["MISSED", "MISSED"]


def test_reports_leave_out_what_is_measured_in_part() -> None:
    rows = families(1.1, 1.2)
    rows.append(row("family", "best", 32, 1.0))
    text = "\n".join(layouts.report(rows))
    assert "| 16 | 1.100 (1x4x4) | 1.200 (1x4x4) | - | 1.091 |" in text
    assert "| 32 |" not in text


def test_halves_balance_what_whole_layers_cannot() -> None:
    # Three layers of 2 + 1 on two stages: whole layers make 6, halves 5.
    assert round(half_layers._largest([3.0] * 3, (0.0, 0.0), 2), 6) == 6.0
    assert round(half_layers._largest([2.0, 1.0] * 3, (0.0, 0.0), 2), 6) == 5.0
    # The head stays with the last one.
    assert round(half_layers._largest([1.0] * 4, (0.0, 2.0), 2), 6) == 3.0
