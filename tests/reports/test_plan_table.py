"""Tables for people say what the plan says."""

from __future__ import annotations

import io
import time
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console, RenderableType

from infinipipe.ir import open_plan, show_program
from infinipipe.reports.plan_table import plan_tables, step_tables
from tests.plans import make_header, make_model, make_step, write_plan

DATASET = make_header().dataset


def shown(tables: RenderableType) -> list[str]:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(tables)
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_plan_tables_have_a_row_per_stage_and_step(tmp_path: Path) -> None:
    header = make_header(num_stages=3, num_replicas=2, model=make_model(name="[red]tiny[/red]"))
    write_plan(tmp_path / "plan", header)
    with open_plan(tmp_path / "plan") as reader:
        lines = shown(plan_tables(reader, reader))
    assert lines[0] == "[red]tiny[/red] by by-hand: 2 steps, 2 replicas on an unknown device"
    assert lines[2] == "0 0-2 embedding 977 KiB 954 MiB"
    assert lines[4] == "2 6-7 head 977 KiB 954 MiB"
    assert lines[6] == "0 6 80 40 6 1 3 2 1 s 1.333 50.0% 25.0% 977 KiB"
    assert len(lines) == 8


def test_tables_of_huge_plans_show_the_first_of_all(tmp_path: Path) -> None:
    """Within seconds: a person reads the first, JSON has the rest."""
    header = make_header(
        num_stages=1, batch_size=30_000, num_steps=1, dataset=replace(DATASET, num_sequences=30_000)
    )
    step = make_step(header, lengths=[16] * 30_000)
    start = time.process_time()
    lines = shown(step_tables(header, step))
    assert time.process_time() - start < 5
    assert len(lines) < 700
    assert "and 29,800 more chunks" in lines
    assert lines[-1].endswith("59,600 more")
    write_plan(tmp_path / "plan", make_header(num_stages=1, num_steps=1001))
    with open_plan(tmp_path / "plan") as reader:
        assert shown(plan_tables(reader, reader))[-1] == "and 1 more steps"


def test_names_cannot_control_the_terminal(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan", make_header(model=make_model(name="a\u202eb")))
    with open_plan(tmp_path / "plan") as reader:
        assert shown(plan_tables(reader, reader))[0].startswith("a\\u202eb by by-hand")


def test_step_tables_show_chunks_and_programs() -> None:
    header = make_header(num_stages=2)
    step = make_step(header, lengths=(40, 1, 1, 1, 1, 1, 1, 1))
    lines = shown(step_tables(header, step))
    assert lines[2] == "0 6 0.5 s 0.125 s 0.5 s 977 KiB 954 MiB"
    short = ", ".join(f"{row} [0, 1) of 1" for row in range(1, 6))
    assert lines[7] == f"2 hybrid 15 2 3 0 [32, 40) of 40, {short} and 2 more"
    programs = step.replicas[0].programs
    assert lines[8:] == [show_program(stage, program) for stage, program in enumerate(programs)]
