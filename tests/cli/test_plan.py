"""`compile` and `compare`: what they refuse before they plan, and what they say afterwards."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.cli.conftest import TWO_STAGES
from tests.command_line import Call, assert_refused, write_dataset


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], ["bad.jsonl", "empty"]),
        ([{"text": "ok"}, '{"text": "no'], ["bad.jsonl:2:", "JSON"]),
        ([{"text": "ok"}, {"text": ""}], ["bad.jsonl:2:", "text is empty"]),
        ([{"text": "ok"}, ""], ["bad.jsonl:2:", "empty"]),
        ([{"text": "ok"}, {"tokens": [1]}], ["bad.jsonl:2:", "input_ids, text and length"]),
        ([{"input_ids": [1, 256]}], ["bad.jsonl:1:", "256", "vocabulary"]),
        ([{"input_ids": []}], ["bad.jsonl:1:", "input_ids is empty"]),
        ([{"length": 0}], ["bad.jsonl:1:", "length 0"]),
    ],
)
def test_compile_refuses_bad_lines(
    folder: Path, call: Call, lines: list[object], words: list[str]
) -> None:
    write_dataset(folder / "bad.jsonl", *lines)
    assert_refused(call, folder, "compile bad.jsonl", *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("compile nowhere.jsonl", ["nowhere.jsonl", "No such file"]),
        ("compile .", [".", "directory"]),
        (
            "compile dataset.jsonl -p nowhere.json",
            ["nowhere.json", "infinipipe profile", "--profile"],
        ),
        ("compile dataset.jsonl -p dataset.jsonl", ["not a profile", "infinipipe profile"]),
        ("compile dataset.jsonl --memory 1MiB", ["stage 0 needs", "1.00 MiB", "--memory"]),
        (
            "compile dataset.jsonl --stages 2 --devices 2 --memory 1GiB,4MiB",
            ["stage 1", "4.00 MiB", "--memory"],
        ),
        (
            "compile dataset.jsonl --stages 2 --memory 1GiB,1GiB,1GiB",
            ["--memory", "3 limits for 2 stages"],
        ),
        ("compile dataset.jsonl --stages 9", ["--stages 9", "8 layers"]),
        (
            "compile dataset.jsonl --devices 6 --stages 4",
            ["--devices 6", "--stages 4", "multiples of 4"],
        ),
        ("compile dataset.jsonl --sequence-parallel 3", ["--sequence-parallel 3", "heads"]),
        (
            "compile dataset.jsonl --policy deepspeed --stages 2",
            ["--policy deepspeed", "one stage", "--stages 1"],
        ),
        (
            "compare dataset.jsonl --devices 4 --stages 2,4",
            ["--stages 2,4", "--devices", "give one"],
        ),
        ("compare dataset.jsonl --devices 11 --replicas 1", ["--devices 11", "no layout"]),
        ("compile dataset.jsonl --devices 1000000000", ["--devices 1000000000", "at most"]),
        ("compile dataset.jsonl --policy best", ["--policy best", "epp"]),
        ("compile dataset.jsonl -o nowhere/plan.msgpack", ["nowhere/plan.msgpack", "--output"]),
        # Found before the work begins: here there is nothing to work with.
        ("compile nowhere.jsonl -o .", [".", "directory", "--output"]),
        ("compile nowhere.jsonl -o /", ["/", "directory", "--output"]),
        ("compile nowhere.jsonl -o /dev/null", ["/dev/null", "not a regular file", "--output"]),
        (
            "compile nowhere.jsonl -p dataset.jsonl -o dataset.jsonl",
            ["dataset.jsonl", "overwrite", "--output"],
        ),
        (
            "compile dataset.jsonl -o dataset.jsonl",
            ["dataset.jsonl", "overwrite an input", "--output"],
        ),
        (
            "compile dataset.jsonl -o linked.jsonl",
            ["linked.jsonl", "overwrite an input", "--output"],
        ),
        ("compile plan.partial -o plan", ["plan", "overwrite an input", "--output"]),
        (
            "compile dataset.jsonl -o profile.json",
            ["profile.json", "overwrite an input", "--output"],
        ),
    ],
)
def test_planning_refuses(folder: Path, call: Call, arguments: str, words: list[str]) -> None:
    (folder / "linked.jsonl").symlink_to("dataset.jsonl")
    (folder / "plan.partial").write_text("")
    assert_refused(call, folder, arguments, *words)


def test_a_dataset_whose_name_is_not_utf_8_is_refused_by_name(folder: Path, call: Call) -> None:
    name = os.fsdecode(b"caf\xe9.jsonl")
    (folder / "dataset.jsonl").rename(folder / name)
    code, out, err = call("compile", name)
    assert (code, out) == (1, "")
    assert err == (
        "error: header: dataset.path 'caf\\udce9.jsonl' has a character that no plan can hold; "
        "choose another name\n"
    )
    assert not (folder / "plan.msgpack").exists()


def test_compile_without_profile_says_how_to_make_one(folder: Path, call: Call) -> None:
    (folder / "profile.json").unlink()
    assert_refused(call, folder, "compile dataset.jsonl", "profile.json", "infinipipe profile")


def test_bytes_need_a_vocabulary_of_256(folder: Path, call: Call) -> None:
    profile = json.loads((folder / "profile.json").read_text())
    config = json.loads(profile["model"]["config"]) | {"vocab_size": 100}
    (folder / "config.json").write_text(json.dumps(config))
    assert call("profile", "config.json", "--analytic", "a100-80g")[0] == 0
    assert_refused(
        call, folder, "compile dataset.jsonl", "dataset.jsonl:1:", "vocabulary has only 100"
    )


def test_a_failed_compile_keeps_the_plan_that_was_there(
    folder: Path, call: Call, plan: Path
) -> None:
    assert_refused(call, folder, "compile dataset.jsonl --memory 1MiB", "stage 0 needs")


def test_compile_reports_the_data_and_how_it_was_cut(folder: Path, call: Call) -> None:
    code, out, err = call(
        "compile", "dataset.jsonl", *TWO_STAGES, "--max-length", 1000, "--batch-size", 6
    )
    assert (code, out) == (0, "")
    for line in (
        "12 sequences, 2,684 tokens in 2 steps",
        "min 12, median 52, p99 989, max 1,000 tokens",
        "1 sequences to --max-length 1,000, which drops 1,500 tokens (35.9%) of the dataset",
    ):
        assert line in err
    for word in ("split", "packed", "recomputed", "times the lower bound", "stage 1", "peak"):
        assert word in err


def test_compile_shows_the_layouts_that_it_tried(folder: Path, call: Call) -> None:
    code, out, err = call("compile", "dataset.jsonl", "--devices", 4, "--policy", "1f1b")
    assert (code, out) == (0, "")
    lines = err.splitlines()
    assert lines[0].startswith("layouts of 4 devices, on a sample of 1 step")
    assert "stages x sequence parallel x replicas" in lines[1]
    rows = [line.split() for line in lines if re.match(r" *\d+ x \d+ x \d+ ", line)]
    layouts = [(int(row[0]), int(row[2]), int(row[4])) for row in rows]
    assert len(layouts) == 6
    assert all(stages * shared * replicas == 4 for stages, shared, replicas in layouts)
    assert rows[0][-1] == "fastest"
    assert all(row[-1] == "slower" for row in rows[1:])
    # The plan has the first one.
    header = json.loads(call("inspect", "plan.msgpack")[1])["header"]
    found = (len(header["stages"]), header["sequence_parallel"], header["num_replicas"])
    assert found == layouts[0]
    assert call("verify", "plan.msgpack")[0] == 0


def test_a_layout_that_is_given_is_not_searched(folder: Path, call: Call) -> None:
    layout = ("--stages", 2, "--sequence-parallel", 2, "--replicas", 1)
    code, _, err = call("compile", "dataset.jsonl", *layout, "--devices-per-node", 2)
    assert code == 0
    assert "layouts of" not in err
    header = json.loads(call("inspect", "plan.msgpack")[1])["header"]
    assert (len(header["stages"]), header["sequence_parallel"]) == (2, 2)
    assert header["devices_per_node"] == 2
    assert call("verify", "plan.msgpack", "--data", "dataset.jsonl")[0] == 0


def test_compile_warns_of_links_that_nobody_measured(folder: Path, call: Call) -> None:
    profile = json.loads((folder / "profile.json").read_text())
    profile["times"]["links"]["num_ranks"] = 1
    (folder / "alone.json").write_text(json.dumps(profile))
    command = ("compile", "dataset.jsonl", *TWO_STAGES, "--policy", "1f1b")
    assert (
        "warning: the profile was measured on one device" in call(*command, "-p", "alone.json")[2]
    )
    assert "warning" not in call(*command)[2]


def test_compile_says_the_seconds_of_whole_steps(folder: Path, call: Call) -> None:
    _, _, err = call("compile", "dataset.jsonl", *TWO_STAGES, "--policy", "1f1b")
    totals = json.loads(call("inspect", "plan.msgpack")[1])["totals"]
    assert totals["step_s"] > 1.01 * totals["makespan_s"]
    assert f"{totals['step_s'] / totals['num_steps']:.4g} s a step" in err


def test_compare_of_policies_heeds_nodes(folder: Path, call: Call) -> None:
    command = ("compare", "dataset.jsonl", "--stages", 8, "--policies", "1f1b", "--steps", 1)
    inside, between = (
        json.loads(call(*command, "--devices-per-node", count, "--json")[1])[0]["step_seconds"]
        for count in (8, 1)
    )
    assert between > inside


def test_no_layout_that_fits_is_one_line(folder: Path, call: Call) -> None:
    assert_refused(
        call,
        folder,
        "compile dataset.jsonl --devices 4 --memory 20KiB",
        "no layout of 4 devices fits; the closest,",
        "stage 0 needs",
        "--memory",
    )


def test_compile_says_how_long_it_planned_and_which_search_won(folder: Path, call: Call) -> None:
    code, _, err = call("compile", "dataset.jsonl", *TWO_STAGES, "--policy", "1f1b")
    assert code == 0
    assert re.search(r"planned +in [\d.]+ s; by 1f1b \d+", err)
    _, out, _ = call("inspect", "plan.msgpack")
    assert all(
        winner.startswith("1f1b: ")
        for step in json.loads(out)["steps"]
        for winner in step["winners"]
    )
    _, out, _ = call("inspect", "plan.msgpack", "--step", 0)
    assert json.loads(out)["replicas"][0]["search"]["winner"].startswith("1f1b: ")


def test_an_interrupt_is_no_traceback(
    folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("infinipipe.planner.compile_plan", interrupt)
    code, out, err = call("compile", "dataset.jsonl", *TWO_STAGES)
    assert (code, out) == (130, "")
    assert err.strip() == "plan.msgpack: interrupted; the same command with --resume goes on"
    assert not (folder / "plan.msgpack").exists()


FIELDS = {
    "policy",
    "feasible",
    "step_seconds",
    "bound_seconds",
    "ratio_to_bound",
    "bubble_fraction",
    "recompute_fraction",
    "peak_bytes",
    "num_chunks",
    "plan_seconds",
}


def test_compare_prints_a_row_per_policy_of_a_grid(folder: Path, call: Call) -> None:
    arguments = (
        "dataset.jsonl",
        "--stages",
        "2,3",
        "--memory",
        "1GiB,20KiB",
        "--batch-size",
        6,
        "--steps",
        1,
    )
    code, out, _ = call("compare", *arguments, "--policies", "paper,epp,1f1b", "--json")
    rows = json.loads(out)
    assert code == 0
    assert [(r["stages"], r["memory_limit_bytes"][0], r["policy"]) for r in rows] == [
        (stages, memory, policy)
        for stages in (2, 3)
        for memory in (2**30, 20 * 2**10)
        for policy in ("paper", "epp", "1f1b")
    ]
    for row in rows:
        assert row["feasible"] == (row["memory_limit_bytes"][0] == 2**30)
        if row["feasible"]:
            assert row.keys() >= FIELDS
            assert row["ratio_to_bound"] == pytest.approx(
                row["step_seconds"] / row["bound_seconds"]
            )
            assert len(row["peak_bytes"]) == row["stages"]
        else:
            assert "--memory" in row["reason"]
    best = {
        stages: min(r["step_seconds"] for r in rows if r["feasible"] and r["stages"] == stages)
        for stages in (2, 3)
    }
    for row in rows:
        if row["feasible"] and row["policy"] == "epp":
            assert row["step_seconds"] == best[row["stages"]]
    code, out, _ = call("compare", *arguments, "--policies", "epp,gpipe")
    assert code == 0
    assert next(line for line in out.splitlines() if " stages of " in line).startswith(
        "2 stages of 1.00 GiB"
    )
    assert sum(line.split()[:2] == ["gpipe", "infeasible"] for line in out.splitlines()) == 2


def test_compare_refuses_an_unknown_policy(folder: Path, call: Call) -> None:
    assert_refused(
        call, folder, "compare dataset.jsonl --policies epp,best", "--policies best", "epp, paper"
    )


def test_compare_takes_policies_with_spaces(folder: Path, call: Call) -> None:
    code, out, _ = call(
        "compare", "dataset.jsonl", "--steps", 1, "--policies", "gpipe, 1f1b", "--json"
    )
    assert code == 0
    assert [row["policy"] for row in json.loads(out)] == ["gpipe", "1f1b"]


def test_compare_refuses_a_part_of_its_grid_before_it_plans_any(
    folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(*_: object) -> None:
        raise AssertionError("planned")

    monkeypatch.setattr("infinipipe.planner.compare.compare_policies", plan)
    assert_refused(call, folder, "compare dataset.jsonl --stages 2,64", "--stages 64", "has only")


LAYOUT_FIELDS = {
    *("devices", "memory_limit_bytes", "policy", "layout", "stages", "sequence_parallel"),
    *("replicas", "feasible", "best", "step_seconds", "at_least_seconds", "ratio_to_pure_work"),
    *("peak_bytes", "reason"),
}


def test_compare_shows_every_system_on_its_best_layout(folder: Path, call: Call) -> None:
    arguments = ("dataset.jsonl", "--devices", "2,4", "--batch-size", 6, "--steps", 1)
    systems = ("--policies", "1f1b,deepspeed,flexsp,megatron")
    code, out, _ = call("compare", *arguments, *systems, "--json")
    assert code == 0
    rows = json.loads(out)
    assert all(row.keys() == LAYOUT_FIELDS for row in rows)
    bests = [(row["devices"], row["policy"]) for row in rows if row["best"]]
    names = ["1f1b", "deepspeed", "flexsp", "megatron"]
    assert bests == [(devices, name) for devices in (2, 4) for name in names]
    for row in rows:
        if row["stages"] is not None:
            product = row["stages"] * row["sequence_parallel"] * row["replicas"]
            assert product == row["devices"]
        if row["best"]:
            assert row["step_seconds"] == row["at_least_seconds"]
            assert row["ratio_to_pure_work"] > 1
    code, out, _ = call("compare", *arguments, *systems)
    assert code == 0
    assert "4 devices of 77.0 GiB, layouts of 1f1b" in out
    assert out.count("every system on its best layout") == 2
    assert "1 x mixed" in out
