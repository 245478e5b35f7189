"""The timeline drawn from a plan alone is the one it was planned by."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from infinipipe.dataset import open_dataset
from infinipipe.errors import PlanFileError
from infinipipe.ir import Header, Step, open_plan, verify_plan
from infinipipe.planner.compile import compile_plan
from infinipipe.planner.options import CompileOptions
from infinipipe.planner.redraw import step_spans
from infinipipe.profiles import read_model
from infinipipe.profiles.analytic import analytic_profile
from tests.plans import make_header, make_step

LENGTHS = (30_000, 400, 9_000, 1, 2_500, 700, 12_000, 90)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> tuple[Header, Step]:
    """Two replicas of four stages, with little enough memory that some layers are recomputed."""
    folder = tmp_path_factory.mktemp("redraw")
    (folder / "lengths.jsonl").write_text("".join(json.dumps({"length": n}) + "\n" for n in LENGTHS))
    profile = analytic_profile(read_model("llama-7b"), "a800-80g")
    options = CompileOptions(num_stages=4, num_replicas=2, memory_limit_bytes=(40 * 2**30,), batch_size=len(LENGTHS))
    dataset = open_dataset(folder / "lengths.jsonl", "bytes", profile.model.vocabulary_size)
    compile_plan(dataset, profile, options, folder / "plan.msgpack")
    with open_plan(Path(folder / "plan.msgpack")) as reader:
        verify_plan(reader)
        return reader.header, reader.step(0)


def test_times_and_peaks_are_those_of_the_plan(plan: tuple[Header, Step]) -> None:
    header, step = plan
    spans = step_spans(header, step)
    assert max(span.end_s for span in spans) == pytest.approx(step.makespan_s, rel=1e-12)
    assert sum(count for r in step.replicas for counts in r.recompute for count in counts) > 0
    for number, replica in enumerate(step.replicas):
        for stage, predicted in enumerate(replica.predicted):
            mine = [span for span in spans if (span.replica, span.stage) == (number, stage)]
            assert tuple(span.op for span in mine) == replica.programs[stage]
            assert sum(span.end_s - span.start_s for span in mine) == pytest.approx(predicted.busy_s, rel=1e-12)
            assert sum(span.recompute_s for span in mine) == pytest.approx(predicted.recompute_s, rel=1e-12)
            assert max(span.during_bytes for span in mine) == predicted.peak_bytes
            assert all(a.end_s <= b.start_s for a, b in pairwise(mine))
            assert all(span.after_bytes <= span.during_bytes for span in mine)


def test_replicas_without_work_have_no_spans(plan: tuple[Header, Step]) -> None:
    header, step = plan
    empty = msgspec.structs.replace(step.replicas[1], chunks=(), recompute=((),) * 4, programs=((),) * 4)
    spans = step_spans(header, msgspec.structs.replace(step, replicas=(step.replicas[0], empty)))
    assert {span.replica for span in spans} == {0}


def test_ops_and_profiles_without_a_price_are_refused(plan: tuple[Header, Step]) -> None:
    header = make_header()
    with pytest.raises(PlanFileError, match=r"header: the profile cannot be used: .*missing required field"):
        step_spans(header, make_step(header))
    priced = msgspec.structs.replace(plan[0], stages=make_header().stages)
    with pytest.raises(PlanFileError, match="has ops I and W; the plan's profile prices F and B"):
        step_spans(priced, make_step(priced, split=True))
