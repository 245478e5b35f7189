"""docs/plan-format.md says what the code does, and its example runs."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import msgpack
import msgspec
import pytest

from infinipipe.ir import FORMAT_VERSION, Header, Replica, Search, Step, show_program
from infinipipe.ir.file.encoding import TRAILER_BYTES, Index, Totals
from infinipipe.ir.plan import DatasetInfo, Model, Stage
from tests.plans import make_header, make_model, write_plan
from tests.processes import run_python

TEXT = (Path(__file__).parents[2] / "docs" / "plan-format.md").read_text()
EXAMPLE = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0]


def test_the_example_is_short_and_reads_a_plan(tmp_path: Path) -> None:
    steps = write_plan(tmp_path / "plan.msgpack", make_header(num_stages=3))
    assert len(EXAMPLE.splitlines()) <= 15
    assert set(re.findall(r"import (\w+)", EXAMPLE)) == {"msgpack"}
    done = run_python("-c", EXAMPLE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "3 stages, 2 steps, by-hand"
    assert lines[2] == f"1 {show_program(1, steps[0].replicas[0].programs[1])}"
    assert "[(16, 24, 24), (0, 7, 7)]" in lines


@pytest.mark.parametrize(
    "struct", [Header, Step, Replica, Search, Index, Totals, Model, Stage, DatasetInfo]
)
def test_every_field_is_documented(struct: type[Header]) -> None:
    missing = [name for name in struct.__struct_fields__ if f"`{name}`" not in TEXT]
    assert not missing


def test_digests_can_be_computed_without_us(tmp_path: Path) -> None:
    costs = {
        "s_per_pair": 2.6e-07,
        "tokens": [1, 200, 70_000],
        "model": make_model(),
        "dtype": "float32",
    }
    profile = msgspec.msgpack.encode(costs)
    header = make_header(
        profile=msgspec.Raw(profile), profile_sha256=hashlib.sha256(profile).hexdigest()
    )
    write_plan(tmp_path / "plan", header)
    with (tmp_path / "plan").open("rb") as file:
        found = next(iter(msgpack.Unpacker(file)))
    assert found["profile"]["s_per_pair"] == 2.6e-07
    assert found["profile_sha256"] == hashlib.sha256(msgpack.packb(found["profile"])).hexdigest()
    assert found["model_sha256"] == hashlib.sha256(found["model"]["config"].encode()).hexdigest()


def test_a_step_is_found_with_three_reads(tmp_path: Path) -> None:
    steps = write_plan(tmp_path / "plan")
    data = (tmp_path / "plan").read_bytes()
    assert f"format version {FORMAT_VERSION}" in TEXT
    assert f"last {TRAILER_BYTES} bytes" in TEXT
    offset = int.from_bytes(data[-16:-8])
    index = msgpack.unpackb(data[offset:-26])
    first, second = (int.from_bytes(index["offsets"][8 * k : 8 * k + 8]) for k in (1, 2))
    assert msgpack.unpackb(data[first:second])["denominator"] == steps[0].denominator
