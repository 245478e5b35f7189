"""Exports of a step's timeline, as the tools they are for read them."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from infinipipe.cli import run_command
from infinipipe.ir import Replica, open_plan
from infinipipe.reports.timeline import chrome_trace, schedule_csv
from tests.plans import make_header, make_spans, make_step, parse_op

HEADER = make_header(num_stages=3, num_replicas=2)
STEP = make_step(HEADER)
SPANS = make_spans(STEP)


@pytest.fixture(scope="module")
def trace() -> Any:
    document = chrome_trace(HEADER, STEP, SPANS)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    return document


def events(trace: Any, phase: str) -> list[Any]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_trace_has_a_named_track_per_stage(trace: Any) -> None:
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in events(trace, "M")
        if e["name"] == "thread_name"
    }
    assert names == {
        (replica, stage): f"stage {stage}: layers {layers}"
        for replica in range(2)
        for stage, layers in enumerate(("0 to 2", "3 to 5", "6 to 7"))
    }


def test_trace_shows_every_op_once_where_it_runs(trace: Any) -> None:
    ops = [e for e in events(trace, "X") if e["cat"] != "recompute"]
    shown = {(e["pid"], e["name"]): (e["ts"], e["dur"]) for e in ops}
    assert shown == {
        (s.replica, s.name): (s.start_s * 1e6, (s.end_s - s.start_s) * 1e6) for s in SPANS
    }
    assert len(ops) == sum(len(p) for r in STEP.replicas for p in r.programs)
    assert all(e["tid"] == parse_op(e["name"])[0] for e in ops)
    first = next(e for e in ops if e["name"] == "0F1" and e["pid"] == 0)
    assert first["args"] == {
        "chunk": "hybrid", "tokens": 15, "slices": [[4, 16, 24], [0, 0, 7]], "recomputed layers": 1,
        "recomputed without attention": 1,
    }  # fmt: skip


def test_recompute_lies_inside_its_backward(trace: Any) -> None:
    backwards = {
        (e["pid"], e["tid"], e["ts"]): e["dur"]
        for e in events(trace, "X")
        if e["cat"] == "backward"
    }
    recomputes = {
        (e["pid"], e["tid"], e["ts"]): e["dur"]
        for e in events(trace, "X")
        if e["cat"] == "recompute"
    }
    assert recomputes.keys() == backwards.keys()
    assert set(recomputes.values()) == {1e6}


def test_arrows_join_every_transfer(trace: Any) -> None:
    starts, ends = ({e["id"]: e for e in events(trace, phase)} for phase in "sf")
    assert starts.keys() == ends.keys()
    assert len(starts) == sum(2 * 2 * len(r.chunks) for r in STEP.replicas)
    assert {abs(starts[i]["tid"] - ends[i]["tid"]) for i in starts} == {1}
    assert all(
        ends[i]["ts"] >= starts[i]["ts"] and ends[i]["pid"] == starts[i]["pid"] for i in starts
    )
    spans = [
        (e["pid"], e["tid"], e["ts"], e["ts"] + e["dur"])
        for e in events(trace, "X")
        if e["cat"] != "recompute"
    ]
    for end in (*starts.values(), *ends.values()):
        assert any(
            (p, t) == (end["pid"], end["tid"]) and a <= end["ts"] < b for p, t, a, b in spans
        )


def test_counters_follow_the_bytes(trace: Any) -> None:
    counters = events(trace, "C")
    assert Counter(e["name"] for e in counters)["stage 0 bytes"] == 2 * sum(
        len(r.programs[0]) for r in STEP.replicas
    )
    first = [e for e in counters if (e["pid"], e["tid"]) == (0, 0)]
    assert [e["args"]["bytes"] for e in first[:4]] == [2000, 1000, 2001, 1001]
    assert max(e["args"]["bytes"] for e in first) == max(
        s.during_bytes for s in SPANS if (s.replica, s.stage) == (0, 0)
    )


def test_split_backwards_have_arrows_for_their_inputs_only() -> None:
    step = make_step(HEADER, split=True)
    trace = chrome_trace(HEADER, step, make_spans(step))
    categories = Counter(e["cat"] for e in events(trace, "X"))
    assert categories["backward input"] == categories["backward weight"] == categories["forward"]
    assert len(events(trace, "s")) == 2 * 2 * categories["forward"] / 3


def test_csv_rows_are_programs() -> None:
    rows = list(csv.reader(io.StringIO(schedule_csv(STEP.replicas[0]), newline="")))
    assert [[parse_op(cell) for cell in row] for row in rows] == [
        [(stage, op) for op in program] for stage, program in enumerate(STEP.replicas[0].programs)
    ]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_torch_loads_and_validates_the_csv(tmp_path: Path, num_stages: int, split: bool) -> None:
    """Its own loader, validator, communication pass and dry run, without split sequences."""
    header = make_header(num_stages)
    replica = make_step(header, lengths=(16, 9, 9, 12, 16, 3, 14), split=split).replicas[0]
    (tmp_path / "schedule.csv").write_text(schedule_csv(replica), newline="")
    check_with_torch(tmp_path / "schedule.csv", replica, split=split)


def test_torch_loads_the_csv_of_each_replica_of_a_compiled_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text(
        "".join(f'{{"length": {n}}}\n' for n in (900, 20, 31, 45, 2500, 60, 18, 75))
    )
    assert run_command(["profile", "--analytic", "a100-80g"]) == 0
    arguments = ["--stages", "2", "--replicas", "2", "--devices", "4", "--policy", "1f1b"]
    assert run_command(["compile", "data.jsonl", *arguments]) == 0
    with open_plan(tmp_path / "plan.msgpack") as reader:
        replicas = reader.step(0).replicas
    for number, replica in enumerate(replicas):
        assert (
            run_command(["inspect", "plan.msgpack", "--csv", "o.csv", "--replica", str(number)])
            == 0
        )
        check_with_torch(tmp_path / "o.csv", replica, split=False)


def check_with_torch(path: Path, replica: Replica, *, split: bool) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    num_stages = len(replica.programs)
    runtime = object.__new__(schedules._PipelineScheduleRuntime)
    runtime.pp_group_size = runtime._num_stages = num_stages
    runtime._n_microbatches = len(replica.chunks)
    runtime.pipeline_order, runtime._stages, runtime._defer_pp_recv = {}, [], False
    runtime._load_csv(str(path))
    assert runtime.stage_index_to_group_rank == {s: s for s in range(num_stages)}
    for stage, program in enumerate(replica.programs):
        assert [str(action) for action in runtime.pipeline_order[stage]] == [
            f"{stage}{op.kind}{op.chunk}" for op in program
        ]
    with_transfers = schedules._add_send_recv(
        runtime.pipeline_order, lambda stage: stage, num_stages
    )
    done = schedules._simulate_comms_compute(with_transfers, lambda stage: stage, num_stages)
    kinds = Counter(
        action.computation_type.value
        for row in done.values()
        for action in row
        if action is not None
    )
    num_chunks = len(replica.chunks)
    assert kinds["F"] == kinds["I" if split else "B"] == num_chunks * num_stages
    assert kinds["SEND_F"] == kinds["RECV_B"] == num_chunks * (num_stages - 1)
