"""The timeline drawn from a plan alone is the one it was planned by."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from infinipipe.costs import check_predictions, is_priced, step_spans
from infinipipe.dataset import open_dataset
from infinipipe.errors import PlanFileError, VerifyError
from infinipipe.ir import Header, OpKind, StagePrediction, Step, open_plan, verify_plan
from infinipipe.planner import CompileOptions, compile_plan
from infinipipe.profiles import Profile, pack_profile, read_model
from infinipipe.profiles.analytic import analytic_profile
from tests.plans import make_header, make_step, split_backwards

LENGTHS = (30_000, 400, 9_000, 1, 2_500, 700, 12_000, 90)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> tuple[Header, Step]:
    """Two replicas of four stages, with little enough memory that some layers are recomputed."""
    folder = tmp_path_factory.mktemp("redraw")
    (folder / "lengths.jsonl").write_text(
        "".join(json.dumps({"length": n}) + "\n" for n in LENGTHS)
    )
    profile = analytic_profile(read_model("llama-7b"), "a800-80g")
    options = CompileOptions(
        num_stages=4, num_replicas=2, memory_limit_bytes=(40 * 2**30,), batch_size=len(LENGTHS)
    )
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
            assert sum(span.end_s - span.start_s for span in mine) == pytest.approx(
                predicted.busy_s, rel=1e-12
            )
            assert sum(span.recompute_s for span in mine) == pytest.approx(
                predicted.recompute_s, rel=1e-12
            )
            assert max(span.during_bytes for span in mine) == predicted.peak_bytes
            assert all(a.end_s <= b.start_s for a, b in pairwise(mine))
            assert all(span.after_bytes <= span.during_bytes for span in mine)


def test_replicas_without_work_have_no_spans(plan: tuple[Header, Step]) -> None:
    header, step = plan
    empty = replace(step.replicas[1], chunks=(), recompute=((),) * 4, programs=((),) * 4)
    spans = step_spans(header, replace(step, replicas=(step.replicas[0], empty)))
    assert {span.replica for span in spans} == {0}


def split_step(header: Header, step: Step) -> Step:
    """Split every B of a step, and predict what its spans say."""
    replicas = [replace(r, programs=tuple(map(split_backwards, r.programs))) for r in step.replicas]
    spans = step_spans(header, replace(step, replicas=tuple(replicas)))
    for number, replica in enumerate(replicas):
        mine = [
            [s for s in spans if (s.replica, s.stage) == (number, stage)]
            for stage in range(len(header.stages))
        ]
        makespan_s = max(span.end_s for row in mine for span in row)
        busy = [sum(span.end_s - span.start_s for span in row) for row in mine]
        predicted = tuple(
            StagePrediction(
                busy_s=busy_s,
                recompute_s=sum(span.recompute_s for span in row),
                bubble_s=makespan_s - busy_s,
                peak_bytes=max(span.during_bytes for span in row),
            )
            for busy_s, row in zip(busy, mine, strict=True)
        )
        replicas[number] = replace(replica, predicted=predicted)
    makespan_s = max(span.end_s for span in spans)
    step_s = makespan_s + step.step_s - step.makespan_s
    return replace(
        step, replicas=tuple(replicas), makespan_s=makespan_s, step_s=step_s, bound_s=0.0
    )


def test_i_and_w_are_drawn_where_the_profile_prices_them(plan: tuple[Header, Step]) -> None:
    header, step = plan
    split = split_step(header, step)
    spans, whole = step_spans(header, split), step_spans(header, step)
    seconds = {(s.replica, s.stage, s.op.kind, s.op.chunk): s.end_s - s.start_s for s in spans}
    kinds = {span.op.kind for span in spans}
    assert kinds == {OpKind.FORWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT}
    for span in whole:
        if span.op.kind == OpKind.BACKWARD:
            parts = [seconds[span.replica, span.stage, kind, span.op.chunk] for kind in ("I", "W")]
            assert 1 < sum(parts) / (span.end_s - span.start_s) < 1.05
    # Recompute is all in I.
    assert {span.op.kind for span in spans if span.recompute_s} == {OpKind.BACKWARD_INPUT}
    assert [p.recompute_s for r in split.replicas for p in r.predicted] == pytest.approx(
        [p.recompute_s for r in step.replicas for p in r.predicted]
    )


def test_predictions_of_i_and_w_are_checked(plan: tuple[Header, Step]) -> None:
    header, step = plan
    split = split_step(header, step)
    assert is_priced(header, split)
    check_predictions(header, split)
    first, *others = split.replicas
    peak = first.predicted[2].peak_bytes
    predicted = (
        *first.predicted[:2],
        replace(first.predicted[2], peak_bytes=peak - 1),
        *first.predicted[3:],
    )
    lying = replace(split, replicas=(replace(first, predicted=predicted), *others))
    with pytest.raises(
        VerifyError,
        match=rf"stage 2: a predicted peak of {peak - 1} bytes; .* gives {peak}: .*>>2[FI]",
    ):
        check_predictions(header, lying)


def without_split_prices(header: Header) -> Header:
    profile = msgspec.msgpack.decode(header.profile, type=Profile)
    times = replace(profile.times, layer_input_backward=None, layer_weight_backward=None)
    return replace(header, profile=msgspec.Raw(pack_profile(replace(profile, times=times))))


def test_ops_and_profiles_without_a_price_are_refused(plan: tuple[Header, Step]) -> None:
    header = make_header()
    with pytest.raises(
        PlanFileError, match=r"header: the profile cannot be used: .*missing required field"
    ):
        step_spans(header, make_step(header))
    # Nothing can be said of I and W without a profile, either.
    assert is_priced(header, make_step(header))
    assert not is_priced(header, make_step(header, split=True))
    unpriced, split = without_split_prices(plan[0]), split_step(*plan)
    assert is_priced(unpriced, plan[1])
    assert not is_priced(unpriced, split)
    assert step_spans(unpriced, plan[1]) == step_spans(*plan)
    with pytest.raises(PlanFileError, match="has ops I and W; the plan's profile prices F and B"):
        step_spans(unpriced, split)
