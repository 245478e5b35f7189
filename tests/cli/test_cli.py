"""The command line: exit codes, one clear line for everything a user can get wrong, and nothing left behind."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from infinipipe.cli import entry as cli
from infinipipe.cli import run_command
from tests.processes import run_infinipipe

ROOT = Path(__file__).parents[2]
TEXT = "def f(x):\n    return x + 1\n"
LENGTHS = (20, 900, 31, 45, 60, 2500, 18, 75, 400, 33, 90, 12)

Call = Callable[..., tuple[int, str, str]]


def write_dataset(path: Path, *lines: object) -> Path:
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working folder with a dataset and a profile."""
    monkeypatch.chdir(tmp_path)
    write_dataset(
        tmp_path / "dataset.jsonl", *({"text": (TEXT * (n // len(TEXT) + 1))[:n]} for n in LENGTHS)
    )
    assert run_command(["profile", "--analytic", "a100-80g"]) == 0
    return tmp_path


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    """Run a command in this process; return its exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run_command([str(a) for a in arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return run


@pytest.fixture
def plan(folder: Path, call: Call) -> Path:
    """Return a plan of the folder's dataset."""
    code, out, _ = call("compile", "dataset.jsonl", "--stages", 2, "--batch-size", 4)
    assert (code, out) == (0, "")
    return folder / "plan.msgpack"


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def assert_refused(call: Call, folder: Path, arguments: str, *words: str) -> None:
    """Check for exit code 1, one line on stderr with all words in it, and no file made, changed or removed."""
    before = snapshot(folder)
    code, out, err = call(*arguments.split())
    assert code == 1, err
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err
    assert snapshot(folder) == before


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
            "compile dataset.jsonl --stages 2 --memory 1GiB,4MiB",
            ["stage 1", "4.00 MiB", "--memory"],
        ),
        (
            "compile dataset.jsonl --stages 2 --memory 1GiB,1GiB,1GiB",
            ["--memory", "3 limits for 2 stages"],
        ),
        ("compile dataset.jsonl --stages 9", ["--stages 9", "8 layers"]),
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
        ("profile nomodel -o .", [".", "directory", "--output"]),
        (
            "profile profile.json --analytic a100-80g -o profile.json",
            ["overwrite an input", "--output"],
        ),
        ("profile nomodel", ["nomodel", "tiny"]),
        ("profile --analytic abacus", ["abacus", "a800-80g"]),
        (
            "profile --analytic a100-80g -o nowhere/profile.json",
            ["nowhere/profile.json", "--output"],
        ),
    ],
)
def test_planning_refuses(folder: Path, call: Call, arguments: str, words: list[str]) -> None:
    (folder / "linked.jsonl").symlink_to("dataset.jsonl")
    (folder / "plan.partial").write_text("")
    assert_refused(call, folder, arguments, *words)


def test_an_empty_name_is_no_output(folder: Path, call: Call, plan: Path) -> None:
    before = snapshot(folder)
    commands = (
        ["profile", "-o", ""],
        ["compile", "dataset.jsonl", "-o", ""],
        ["inspect", plan, "--csv", ""],
    )
    for command in commands:
        code, out, err = call(*command)
        assert (code, out) == (1, "")
        assert err.startswith("error: .: is a directory; choose another file with --")
    assert snapshot(folder) == before


def test_a_dataset_whose_name_is_not_utf_8_is_refused_by_name(folder: Path, call: Call) -> None:
    name = os.fsdecode(b"caf\xe9.jsonl")
    (folder / "dataset.jsonl").rename(folder / name)
    code, out, err = call("compile", name)
    assert (code, out) == (1, "")
    assert err == (
        "error: header: dataset.path 'caf\\udce9.jsonl' has a character that no plan can hold; choose another name\n"
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("inspect nowhere.msgpack", ["nowhere.msgpack", "infinipipe compile"]),
        ("inspect dataset.jsonl", ["dataset.jsonl", "not a plan"]),
        ("inspect cut.msgpack", ["cut.msgpack", "damaged"]),
        ("inspect plan.msgpack --trace nowhere/o.json", ["nowhere/o.json", "another file"]),
        ("inspect plan.msgpack --step 3", ["no step 3", "--step"]),
        ("inspect plan.msgpack --html o.html --step 3", ["no step 3", "--step"]),
        (
            "inspect plan.msgpack --csv o.csv --replica 1",
            ["no replica 1", "choose 0 to 0 with --replica"],
        ),
        ("inspect plan.msgpack --csv plan.msgpack", ["overwrite an input", "--csv"]),
        ("inspect plan.msgpack --html ./plan.msgpack", ["overwrite an input", "--html"]),
        ("inspect plan.msgpack --trace .", ["directory", "--trace"]),
        ("verify cut.msgpack", ["cut.msgpack", "damaged"]),
        ("verify plan.msgpack --data other.jsonl", ["other.jsonl", "not the dataset", "--data"]),
        ("verify plan.msgpack --data nowhere.jsonl", ["nowhere.jsonl", "--data"]),
        ("run nowhere.msgpack", ["nowhere.msgpack", "infinipipe compile"]),
        ("run cut.msgpack", ["cut.msgpack", "damaged"]),
        ("run plan.msgpack --data other.jsonl", ["other.jsonl", "not the dataset", "--data"]),
        ("run plan.msgpack --data nowhere.jsonl", ["nowhere.jsonl", "--data"]),
        ("run plan.msgpack --steps 4", ["3 steps", "--steps"]),
        ("run plan.msgpack --model other", ["other", "model"]),
        ("run plan.msgpack --output dataset.jsonl", ["dataset.jsonl", "--output"]),
    ],
)
def test_plans_are_refused(
    folder: Path, call: Call, plan: Path, arguments: str, words: list[str]
) -> None:
    (folder / "cut.msgpack").write_bytes(plan.read_bytes()[:-9])
    write_dataset(folder / "other.jsonl", {"text": "another"})
    (folder / "other").mkdir()
    config = json.loads(json.loads((folder / "profile.json").read_text())["model"]["config"])
    (folder / "other" / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    assert_refused(call, folder, arguments, *words)


def test_a_dataset_changed_after_compile_is_refused(folder: Path, call: Call, plan: Path) -> None:
    with (folder / "dataset.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    assert_refused(call, folder, "run plan.msgpack", "dataset.jsonl", "compile it again")
    assert_refused(
        call,
        folder,
        "verify plan.msgpack --data dataset.jsonl",
        "dataset.jsonl",
        "compile it again",
    )


def test_lengths_can_be_planned_but_not_run(folder: Path, call: Call) -> None:
    write_dataset(folder / "lengths.jsonl", *({"length": 40 * n} for n in LENGTHS))
    assert call("compile", "lengths.jsonl", "--stages", 4)[0] == 0
    assert_refused(call, folder, "run plan.msgpack", "plan.msgpack", "lengths")


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "compile",
        "compile dataset.jsonl --memory 80XB",
        "compile dataset.jsonl --memory 0",
        "compile dataset.jsonl --memory 80GiB,",
        "compile dataset.jsonl --batch-size 0",
        "compile dataset.jsonl --loss-norm mean",
        "inspect",
        "inspect plan.msgpack --step 0 --all",
        "inspect plan.msgpack --table --html o.html",
        "inspect plan.msgpack --trace o --html o",
        "inspect plan.msgpack --step -1",
        "run plan.msgpack --device tpu",
        "train",
    ],
)
def test_wrong_usage_exits_2(folder: Path, call: Call, arguments: str) -> None:
    before = snapshot(folder)
    code, out, err = call(*arguments.split())
    assert (code, out) == (2, "")
    assert "Usage: infinipipe" in err
    assert snapshot(folder) == before


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("80GiB", (80 * 2**30,)),
        ("40GB", (40 * 10**9,)),
        ("1.5 gib", (3 * 2**29,)),
        ("512MiB,1GiB", (2**29, 2**30)),
        ("1000", (1000,)),
        ("3KB", (3000,)),
        ("1TiB", (2**40,)),
        ("7B", (7,)),
    ],
)
def test_memory_sizes(text: str, limits: tuple[int, ...]) -> None:
    assert cli.MemoryLimits().convert(text, None, None) == limits


def test_compile_reports_the_data_and_how_it_was_cut(folder: Path, call: Call) -> None:
    code, out, err = call(
        "compile", "dataset.jsonl", "--stages", 2, "--max-length", 1000, "--batch-size", 6
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


def test_inspect_prints_json(call: Call, plan: Path) -> None:
    code, out, err = call("inspect", plan)
    document = json.loads(out)
    assert (code, err, document["header"]["num_steps"], len(document["steps"])) == (0, "", 3, 3)
    code, out, _ = call("inspect", plan, "--step", 2)
    assert (code, json.loads(out)["index"]) == (0, 2)
    code, out, _ = call("inspect", plan, "--all")
    header, *steps = map(json.loads, out.splitlines())
    assert (code, header["num_steps"], [s["index"] for s in steps]) == (0, 3, [0, 1, 2])
    code, out, _ = call("inspect", plan, "--schema")
    assert "$defs" in json.loads(out)


def test_inspect_shows_and_writes_views(folder: Path, call: Call, plan: Path) -> None:
    assert "3 steps" in call("inspect", plan, "--table")[1]
    assert "step 1, replica 0" in call("inspect", plan, "--table", "--step", 1)[1]
    code, out, _ = call(
        "inspect", plan, "--html", "o.html", "--trace", "o.json", "--csv", "o.csv", "--step", 1
    )
    assert (code, out) == (0, "")
    assert json.loads((folder / "o.json").read_text())["traceEvents"]
    rows = (folder / "o.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["0F0", "1F0"]
    page = (folder / "o.html").read_text()
    assert "<html" in page[:200]
    assert '"steps":[{"index":1,' in page
    assert '{"index":0,' not in page
    assert call("inspect", plan, "--html", "all.html")[0] == 0
    assert all(f'{{"index":{k},"makespan"' in (folder / "all.html").read_text() for k in range(3))
    assert not list(folder.glob("*.tmp"))


def test_a_failed_view_keeps_the_file_that_was_there(
    folder: Path, call: Call, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "o.csv").write_text("mine")

    def full(path: Path, *_: object, **__: object) -> None:
        with path.open("w") as file:
            file.write("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    code, _, err = call("inspect", plan, "--csv", "o.csv")
    assert (code, err) == (
        1,
        "error: o.csv: No space left on device; choose another file with --csv\n",
    )
    assert (folder / "o.csv").read_text() == "mine"
    assert not list(folder.glob("*.tmp"))


def test_verify_says_what_it_checked(call: Call, plan: Path) -> None:
    code, out, err = call("verify", plan, "--data", "dataset.jsonl")
    assert (code, err) == (0, f"{plan}: the plan is valid\n")
    assert "checked: 3 steps, 12 sequences, " in out
    assert "which are those of dataset.jsonl" in out


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


def test_compile_says_how_long_it_planned_and_which_search_won(folder: Path, call: Call) -> None:
    code, _, err = call("compile", "dataset.jsonl", "--stages", 2, "--policy", "1f1b")
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

    monkeypatch.setattr("infinipipe.planner.compile.compile_plan", interrupt)
    code, out, err = call("compile", "dataset.jsonl")
    assert (code, out) == (130, "")
    assert err.strip() == "plan.msgpack: interrupted; the same command with --resume goes on"
    assert not (folder / "plan.msgpack").exists()


def test_a_closed_pipe_is_no_traceback(plan: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    process = run_infinipipe("inspect", plan, "--all", stdout=write)
    os.close(write)
    assert (process.returncode, process.stderr) == (1, "")


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_the_docs_is_current() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    assert page == load_script(ROOT / "docs" / "make_cli.py").document(), "run `make docs`"


def test_the_main_job_needs_no_option(tmp_path: Path) -> None:
    write_dataset(
        tmp_path / "dataset.jsonl", *({"text": (TEXT * (n // len(TEXT) + 1))[:n]} for n in LENGTHS)
    )
    for arguments in (["profile"], ["compile", "dataset.jsonl"], ["run", "plan.msgpack"]):
        process = run_infinipipe(*arguments, cwd=tmp_path)
        assert (process.returncode, process.stdout) == (0, ""), process.stderr
    (metrics,) = map(
        json.loads, (tmp_path / "infinipipe-run" / "metrics.jsonl").read_text().splitlines()
    )
    names = (
        "step loss grad_norm lr num_tokens num_targets seconds predicted_seconds tokens_per_second"
    )
    assert set(metrics) == {*names.split(), "peak_bytes", "predicted_peak_bytes"}
    assert metrics["num_tokens"] == sum(LENGTHS)
    assert metrics["num_targets"] == sum(LENGTHS) - len(LENGTHS)
    assert 5.4 < metrics["loss"] < 5.7  # random weights know nothing: ln 256 = 5.55
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "dataset.jsonl",
        "infinipipe-run",
        "plan.msgpack",
        "profile.json",
    ]
