"""A damaged plan is one line and exit 1 on the command line too."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from infinipipe.cli import run_command
from tests.plans import make_header, write_plan


@pytest.mark.parametrize(
    "command", [["inspect"], ["inspect", "--all"], ["inspect", "--step", "1"], ["verify"]]
)
def test_damaged_plans_fail_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    path = tmp_path / "plan.msgpack"
    # Profiles price no I and W, so that `verify` has no predictions to check in these made by hand.
    write_plan(path, make_header(num_stages=2, num_steps=2), split=True)
    data = path.read_bytes()
    assert run_command([*command, str(path)]) == 0
    capsys.readouterr()
    draw = random.Random(0)
    for trial in range(60):
        at = draw.randrange(len(data) - 600, len(data)) if trial % 2 else draw.randrange(300)
        damaged = (
            data[:at]
            if trial % 3 == 0
            else data[:at] + bytes([data[at] ^ draw.randrange(1, 256)]) + data[at + 1 :]
        )
        path.write_bytes(damaged)
        assert run_command([*command, str(path)]) == 1
        errors = capsys.readouterr().err
        assert errors.startswith(f"error: {path}: ")
        assert len(errors.splitlines()) == 1
