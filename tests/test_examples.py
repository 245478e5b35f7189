"""The examples do what they say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.processes import run_python

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_example(name: str, *arguments: object) -> str:
    done = run_python("-W", "error", EXAMPLES / name, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_dataset_of_the_standard_library(tmp_path: Path) -> None:
    out = run_example("stdlib_dataset.py", tmp_path / "new" / "dataset.jsonl")
    lines = (tmp_path / "new" / "dataset.jsonl").read_bytes().split(b"\n")
    assert lines.pop() == b""
    texts = [json.loads(line)["text"] for line in lines]
    assert f"{len(texts)} documents" in out
    assert all(texts)
    assert len(texts) > 500
    assert Path(json.__file__).read_text() in texts
    assert Path(sys.modules["pytest"].__file__ or "").read_text() not in texts
    lengths = sorted(map(len, texts))
    assert lengths[-1] > 20 * lengths[len(lengths) // 2]


def test_run_as_a_table(tmp_path: Path) -> None:
    step = {
        "step": 0,
        "loss": 5.5,
        "grad_norm": 2.0,
        "tokens_per_second": 1234.5,
        "seconds": 2.0,
        "predicted_seconds": 1.5,
        "peak_bytes": [2**20, 3 * 2**20],
        "predicted_peak_bytes": [2**20, 2**21],
    }
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps(step) + "\n" + json.dumps(step | {"step": 1, "loss": 4.25}) + "\n"
    )
    out = run_example("show_run.py", tmp_path / "metrics.jsonl")
    assert "loss 5.5000 -> 4.2500 in 2 steps" in out
    for cell in ("1,23", "1.50 -> 2.00", "1.0 -> 1.0", "2.0 -> 3.0"):
        assert cell in out
