"""Plans as plain data."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgpack
import msgspec

from infinipipe.ir import Step, open_plan
from infinipipe.reports.plan_view import (
    PlanView,
    StepView,
    header_document,
    plan_document,
    plan_schema,
    step_document,
    step_summary,
)
from tests.plans import make_header, make_step, parse_program, write_plan


def test_plan_document_is_plain_and_complete(tmp_path: Path) -> None:
    steps = write_plan(tmp_path / "plan", make_header(num_stages=2, num_replicas=2, num_steps=3))
    with open_plan(tmp_path / "plan") as reader:
        document = plan_document(reader, reader)
        assert json.loads(json.dumps(document, allow_nan=False)) == document
        assert document["sha256"] == reader.sha256
    header = document["header"]
    assert set(header) == set(reader.header.__struct_fields__)
    assert header["profile"]["source"] == "analytic"
    assert header["model"]["config"] == '{"model_type":"llama"}'
    assert isinstance(msgspec.convert(document, PlanView), PlanView)
    assert document["totals"]["num_tokens"] == sum(s.num_tokens for s in steps)
    assert [s["index"] for s in document["steps"]] == [0, 1, 2]


def test_step_summary_counts() -> None:
    summary = step_summary(make_step(make_header(num_stages=2, num_replicas=2)))
    expected = {
        "num_sequences": 6,
        "num_tokens": 80,
        "num_targets": 74,
        "longest_tokens": 40,
        "num_chunks": 6,
        "num_slices": 9,
    }
    expected |= {"num_batched": 1, "num_split": 3, "num_hybrid": 2}
    assert {name: getattr(summary, name) for name in expected} == expected
    assert summary.ratio_to_bound == 1.0 / 0.75
    assert summary.bubble_fraction == 0.5
    assert summary.recompute_fraction == 0.25
    assert summary.peak_bytes == (10**6, 10**6)


def test_a_bound_of_zero_has_no_ratio() -> None:
    step = msgspec.structs.replace(make_step(make_header()), bound_s=0.0)
    assert step_summary(step).ratio_to_bound is None


def test_step_document_shows_boundaries_and_positions() -> None:
    header = make_header(num_stages=3)
    step = make_step(header, lengths=(5, 40, 4))
    document = step_document(header, step)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert isinstance(msgspec.convert(document, StepView), StepView)
    chunks = document["replicas"][0]["chunks"]
    assert [c["kind"] for c in chunks] == ["split", "split", "hybrid", "batched"]
    assert all(c["isolated"] is True for c in chunks)
    assert chunks[2]["cu_seqlens"] == [0, 8, 13]
    assert chunks[2]["slices"] == [
        {"sequence": 1, "row": 1, "positions": [32, 40]},
        {"sequence": 0, "row": 0, "positions": [0, 5]},
    ]
    assert chunks[2]["num_pairs"] == 8 * 32 + 36 + 15
    assert (
        [c["num_tokens"] for c in chunks]
        == [c["cu_seqlens"][-1] for c in chunks]
        == [16, 16, 13, 4]
    )
    replica = step.replicas[0]
    assert chunks[3]["recompute"] == [counts[3] for counts in replica.recompute]
    assert chunks[3]["keep_attention"] == [counts[3] for counts in replica.keep_attention]
    assert document["replicas"][0]["chains"] == [[0, 1, 2], [3]]
    programs = document["replicas"][0]["programs"]
    assert (
        tuple(parse_program(s, text) for s, text in enumerate(programs))
        == step.replicas[0].programs
    )
    assert document["sequences"][1] == {"row": 1, "length": 40, "num_targets": 39}


def test_profiles_with_more_than_json_knows_are_shown() -> None:
    profile = msgpack.packb({"blob": b"\x00\xff", "inf": float("inf")})
    document = header_document(make_header(profile=msgspec.Raw(profile)))
    assert json.dumps(document["profile"], allow_nan=False) == '{"blob": "AP8=", "inf": null}'


def test_schema_defines_all_it_refers_to() -> None:
    schema = plan_schema()
    text = json.dumps(schema)
    references = set(re.findall(r'"#/\$defs/(\w+)"', text))
    assert (
        {"PlanView", "StepView", "HeaderView", "Chunk", "Slice", "Op"}
        <= references
        <= set(schema["$defs"])
    )
    assert {"Header", "Step", "Index"} <= set(schema["$defs"])
    step = schema["$defs"]["Step"]
    assert step["additionalProperties"] is False
    assert sorted(step["required"]) == sorted(Step.__struct_fields__)
