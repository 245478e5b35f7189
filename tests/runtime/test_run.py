"""Whole runs over gloo: equal results on any number of stages, failures that end at once."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from infinipipe.dataset import open_dataset
from infinipipe.errors import InfinipipeError
from infinipipe.ir import Header, Model, Step, open_plan
from infinipipe.planner import CompileOptions, compile_plan
from infinipipe.profiles.analytic import analytic_profile
from infinipipe.runtime.gradients import MAX_GRAD_NORM
from infinipipe.runtime.prepare import RunOptions, prepare
from tests.processes import children, finish, run_infinipipe, run_python, start_python, wait_until
from tests.runtime.replay import (
    CPU,
    MemoryDataset,
    make_plain_adamw,
    oracle,
    small_model,
    whole_model,
)
from tests.runtime.stage_memory import measure_bytes

LENGTHS = (20, 900, 31, 45, 60, 2500, 18, 75, 400, 33, 90, 12)
LR = 0.01


def write_dataset(folder: Path) -> Path:
    generator = np.random.default_rng(5)
    path = folder / "dataset.jsonl"
    rows = [generator.integers(0, 64, n).tolist() for n in LENGTHS]
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path


def compile_small(folder: Path, model: Model, stages: int, memory: int, **options: object) -> Path:
    plan = folder / f"plan-{stages}-{memory}.msgpack"
    dataset = open_dataset(write_dataset(folder), "bytes", model.vocabulary_size)
    profile = msgspec.structs.replace(analytic_profile(model, "a800-80g"), dtype="float32")
    layout = {"num_stages": stages, "sequence_parallel": 1, "num_replicas": 1}
    others = {"memory_limit_bytes": (memory,), "batch_size": 6, "num_steps": 2}
    compile_plan(dataset, profile, CompileOptions(**{**layout, **others, **options}), plan)
    return plan


def run(plan: Path, output: Path, *arguments: object) -> list[dict[str, object]]:
    done = run_infinipipe(
        "run", plan, "--output", output, "--lr", LR, "--seed", 3, "--device", "cpu", *arguments
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def weights(output: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted((output / "model").glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value - expected).norm() / expected.norm())


def plan_steps(plan: Path) -> tuple[Header, list[Step]]:
    with open_plan(plan) as reader:
        return reader.header, list(reader)


class FileDataset(MemoryDataset):
    def __init__(self, path: Path) -> None:
        super().__init__(LENGTHS)
        for example, line in zip(self.examples, path.read_text().splitlines(), strict=True):
            example.input_ids[:] = example.labels[:] = json.loads(line)["input_ids"]


def train_oracle(
    plan: Path, dataset: MemoryDataset
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Train the unsplit model one sequence at a time; return loss and norm by step, and weights."""
    header, steps = plan_steps(plan)
    whole = whole_model(header.model, seed=3)
    optimizer = make_plain_adamw(whole, LR)
    history = []
    for step in steps:
        whole.zero_grad()
        result = oracle(header, step, dataset, whole=whole)
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        history.append((result.loss, float(norm)))
    return history, {name: parameter.detach() for name, parameter in whole.named_parameters()}


def test_stages_and_memory_limits_do_not_change_the_training(tmp_path: Path) -> None:
    """The same loss, norm and weights on 1, 2 and 3 processes, split and recomputed or not."""
    model = small_model(vocab_size=256)
    outputs = {}
    for stages, memory in ((1, 10**9), (2, 10**9), (2, 3 * 10**6), (3, 2 * 10**6)):
        plan = compile_small(tmp_path, model, stages, memory)
        output = tmp_path / f"run-{stages}-{memory}"
        outputs[stages, memory] = run(plan, output), weights(output)
        if memory < 10**9:
            _, steps = plan_steps(plan)
            replicas = [replica for step in steps for replica in step.replicas]
            assert any(
                c.split_slice(s.sequences) for s in steps for r in s.replicas for c in r.chunks
            )
            assert any(count for r in replicas for row in r.recompute for count in row)
    history, trained = train_oracle(plan, FileDataset(tmp_path / "dataset.jsonl"))
    for metrics, saved in outputs.values():
        assert [m["loss"] for m in metrics] == pytest.approx(
            [loss for loss, _ in history], rel=1e-5
        )
        assert [m["grad_norm"] for m in metrics] == pytest.approx(
            [norm for _, norm in history], rel=1e-5
        )
        assert saved.keys() == trained.keys()
        for name, value in trained.items():
            assert relative_error(saved[name], value) < 1e-3, name


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(1, 2, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2)])
def test_peaks_are_predicted_where_ranks_share_sequences_and_optimizer(
    tmp_path: Path, layout: tuple[int, int, int]
) -> None:
    """On real ranks, with and without recompute: at most 5 % over, 2 % under."""
    model = small_model(hidden_size=64, intermediate_size=176, num_hidden_layers=4, vocab_size=256)
    num_stages, sequence_parallel, num_replicas = layout
    profile = msgspec.structs.replace(
        analytic_profile(model, "a800-80g"), bytes=measure_bytes(model, CPU), dtype="float32"
    )
    dataset = open_dataset(write_dataset(tmp_path), "bytes", model.vocabulary_size)
    memory = 10**9
    recomputed = []
    for number in range(2):
        plan = tmp_path / f"plan-{number}.msgpack"
        options = CompileOptions(
            num_stages=num_stages,
            sequence_parallel=sequence_parallel,
            num_replicas=num_replicas,
            memory_limit_bytes=(memory,),
            batch_size=6,
            num_steps=2,
        )
        compile_plan(dataset, profile, options, plan)
        _, steps = plan_steps(plan)
        recomputed.append(any(map(recomputes, steps)))
        for line in run(plan, tmp_path / f"run-{number}"):
            predicted = np.array(line["predicted_peak_bytes"])
            measured = np.array(line["peak_bytes"])
            assert (predicted <= 1.05 * measured).all(), (predicted, measured)
            assert (predicted >= 0.98 * measured).all(), (predicted, measured)
            # Next, with less than it takes to keep everything.
            memory = min(memory, int(0.8 * predicted.max()))
    assert recomputed == [False, True]


def recomputes(step: Step) -> bool:
    """Return whether any layer keeps less than everything."""
    counts = [row for replica in step.replicas for row in replica.recompute]
    counts += [row for replica in step.replicas for row in replica.keep_attention]
    return any(map(any, counts))


@pytest.mark.slow
def test_replicas_with_a_tied_head_under_torchrun(tmp_path: Path) -> None:
    """CASES C2, C3, E2, I1 to I3: two replicas of two stages, each with its own lengths."""
    model = small_model("qwen3", num_layers=2, tied=True, vocab_size=256)
    plan = compile_small(tmp_path, model, 2, 10**9, num_replicas=2)
    output = tmp_path / "run"
    arguments = ["run", plan, "--output", output, "--lr", LR, "--seed", 3, "--device", "cpu"]
    torchrun = [
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        4,
        "-m",
        "infinipipe",
        *arguments,
    ]
    done = run_python("-m", *torchrun)
    assert done.returncode == 0, done.stderr
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    history, trained = train_oracle(plan, FileDataset(tmp_path / "dataset.jsonl"))
    assert [m["loss"] for m in metrics] == pytest.approx([loss for loss, _ in history], rel=1e-5)
    assert [m["grad_norm"] for m in metrics] == pytest.approx(
        [norm for _, norm in history], rel=1e-5
    )
    saved = weights(output)
    assert saved.keys() == trained.keys()
    loaded = AutoModelForCausalLM.from_pretrained(output / "model").state_dict()
    for name, value in trained.items():
        assert relative_error(loaded[name], value) < 1e-3, name
    again = tmp_path / "again"
    first = run(
        compile_small(tmp_path, model, 1, 10**9), again, "--model", output / "model", "--steps", 1
    )
    other = run_infinipipe(
        "run",
        compile_small(tmp_path, small_model(vocab_size=256), 1, 10**9),
        "--model",
        output / "model",
    )
    assert len(first) == 1
    assert other.returncode == 1
    assert "is not the model that the plan was compiled for" in other.stderr


FAULTY = """
import sys
from infinipipe.cli import main
from infinipipe.runtime import model

if {rank} == int(__import__("os").environ["RANK"]):
    run_layers = model.StageModel.run_layers
    calls = []

    def fail(*arguments):
        calls.append(0)
        if len(calls) == 3:
            raise ValueError("injected fault")
        return run_layers(*arguments)

    model.StageModel.run_layers = fail
sys.argv[1:] = {arguments}
main()
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failing_op_ends_the_run_with_its_place_and_traceback(tmp_path: Path, rank: int) -> None:
    """CASES F1, F2: on either rank; the other one is waiting for it."""
    plan = compile_small(tmp_path, small_model(vocab_size=256), 2, 3 * 10**6)
    arguments = ["run", str(plan), "--output", str(tmp_path / "run"), "--device", "cpu"]
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY.format(rank=rank, arguments=arguments))
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    done = run_python("-m", *torchrun, script)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert errors[0].startswith(f"error: rank {rank}: stage {rank}, step 0, chunk ")
    assert f"op {rank}F" in errors[0]
    assert errors[0].endswith("ValueError: injected fault")
    assert 'raise ValueError("injected fault")' in done.stderr
    assert not (tmp_path / "run" / "model").exists()


def test_a_killed_worker_ends_the_run(tmp_path: Path) -> None:
    """CASES F2: kill -9 of one rank. Meanwhile, nothing listens but on the loopback interface."""
    plan = compile_small(tmp_path, small_model(vocab_size=256), 2, 3 * 10**6)
    command = ("-m", "infinipipe", "run", plan, "--output", tmp_path / "run", "--device", "cpu")
    with start_python(*command) as process:
        workers = _wait_for_workers(process.pid)
        assert _listening_elsewhere(workers) == []
        os.kill(workers[1], signal.SIGKILL)
        # At once, that is, and not after the half hour that gloo waits for a peer.
        _, errors = finish(process)
    assert process.returncode == 1
    assert [
        line for line in errors.splitlines() if line.startswith(("error:", "Traceback", "E", "W"))
    ] == [
        "error: rank 1 was killed by signal 9; if the machine ran out of memory, "
        "compile with a lower --memory or more --stages"
    ]
    assert not (tmp_path / "run" / "model").exists()
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def _wait_for_workers(parent: int) -> list[int]:
    """Return the two workers' process ids by rank, the order they start in, once they listen."""

    def look() -> list[int] | None:
        workers = [pid for pid in children(parent) if b"spawn_main" in _read(pid, "cmdline")]
        started = len(workers) == 2 and all(_listening(pid) for pid in workers)
        return workers if started else None

    return wait_until(look, "the workers listen")


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _listening(pid: int) -> list[str]:
    """Return the hexadecimal addresses of a process's listening TCP sockets."""
    try:
        sockets = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    except OSError:
        return []
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.append(fields[1].split(":")[0])
    return found


def _listening_elsewhere(pids: list[int]) -> list[str]:
    loopback = {"0100007F", "00000000000000000000000001000000"}
    return [address for pid in pids for address in _listening(pid) if address not in loopback]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_says_so_and_can_be_run_again(
    tmp_path: Path, how: signal.Signals
) -> None:
    plan = compile_small(tmp_path, small_model(vocab_size=256), 2, 3 * 10**6)
    command = ("-m", "infinipipe", "run", plan, "--output", tmp_path / "run", "--device", "cpu")
    with start_python(*command) as process:
        workers = _wait_for_workers(process.pid)
        if how == signal.SIGINT:
            os.killpg(process.pid, how)  # as a terminal does
        else:
            process.send_signal(how)
        _, errors = finish(process)
    assert process.returncode == (130 if how == signal.SIGINT else 1)
    assert "Traceback" not in errors
    assert ("error: stopped by SIGTERM" in errors) == (how == signal.SIGTERM)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    options = dataclasses.replace(OPTIONS, plan=plan, output=tmp_path / "run")
    assert prepare(options).num_ranks == 2


OPTIONS = RunOptions(
    plan=Path(),
    data=None,
    model=None,
    device="cpu",
    num_steps=None,
    lr=LR,
    seed=0,
    output=Path("infinipipe-run"),
)


def refused(options: RunOptions, message: str, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    with pytest.raises(InfinipipeError, match=message) as caught:
        prepare(options)
    assert "\n" not in str(caught.value)
    assert sorted(folder.rglob("*")) == before


@pytest.fixture
def options(tmp_path: Path) -> RunOptions:
    plan = compile_small(tmp_path, small_model(vocab_size=256), 1, 10**9)
    options = dataclasses.replace(OPTIONS, plan=plan, output=tmp_path / "run")
    assert prepare(options).num_steps == 2
    return options


def test_what_does_not_fit_the_plan_is_refused_before_anything_is_written(
    tmp_path: Path, options: RunOptions
) -> None:
    """CASES J5."""
    replace = dataclasses.replace
    refused(replace(options, num_steps=3), "has 2 steps; --steps", tmp_path)
    refused(replace(options, lr=float("nan")), "--lr nan", tmp_path)
    refused(replace(options, data=tmp_path / "nowhere"), "No such file", tmp_path)
    refused(replace(options, data=Path("/dev/zero")), "is not a file", tmp_path)
    refused(
        replace(options, output=tmp_path / "dataset.jsonl" / "x"),
        "is no writable directory",
        tmp_path,
    )
    refused(
        replace(options, output=tmp_path / "dataset.jsonl"), "is no writable directory", tmp_path
    )
    (tmp_path / "run" / "model").mkdir(parents=True)
    refused(options, "is there already; choose another directory with --output", tmp_path)
    options = replace(options, output=tmp_path / "other")
    dataset = tmp_path / "dataset.jsonl"
    dataset.write_text(dataset.read_text().replace("[", "[1, ", 1))
    refused(options, "is not the dataset that the plan was compiled from", tmp_path)
    for profile, text, message in (
        (
            analytic_profile(small_model(vocab_size=256), "a800-80g"),
            dataset.read_text(),
            "its times and bytes are for",
        ),
        (None, '{"length": 30}\n' * 12, "compiled from lengths alone"),
    ):
        dataset.write_text(text)
        profile = profile or msgspec.structs.replace(
            analytic_profile(small_model(vocab_size=256), "a800-80g"), dtype="float32"
        )
        opened = open_dataset(dataset, "bytes", 256)
        compile_plan(
            opened, profile, CompileOptions(num_devices=1, batch_size=6, num_steps=2), options.plan
        )
        refused(options, message, tmp_path)


def test_checkpoints_that_are_not_the_plans_model_are_refused(
    tmp_path: Path, options: RunOptions
) -> None:
    directory = tmp_path / "checkpoint"
    model = small_model(vocab_size=256)
    whole = whole_model(model)
    whole.save_pretrained(directory)
    options = dataclasses.replace(options, model=directory)
    assert prepare(options).options.model == directory
    weights = load_file(directory / "model.safetensors")
    name = "model.layers.3.mlp.up_proj.weight"

    def saved(**changes: object) -> None:
        merged = {
            n: t
            for n, t in (weights | {name: changes.get("weight", weights[name])}).items()
            if t is not None
        }
        save_file(merged, directory / "model.safetensors", metadata={"format": "pt"})

    saved(weight=None)
    refused(options, f"no weight named {name}", tmp_path)
    saved(weight=weights[name].t().contiguous())
    refused(options, rf"weight {name} has shape \(32, 48\) in the checkpoint, \(48, 32\)", tmp_path)
    saved(weight=weights[name].to(torch.int8))
    refused(options, f"weight {name} is I8; only F32, BF16, F16 can be trained", tmp_path)
    saved(weight=weights[name].to(torch.bfloat16))
    assert prepare(options).options.model == directory
    (directory / "model.safetensors").write_bytes(b"nonsense")
    refused(options, "model.safetensors: cannot be read", tmp_path)
    for index in ("[]", '{"weight_map": null}', '{"weight_map": {"a": 3}}', "{"):
        (directory / "model.safetensors.index.json").write_text(index)
        refused(options, "not an index of weights", tmp_path)
    for config, message in (
        (
            small_model(vocab_size=256, hidden_size=64).config,
            "hidden_size differ .hidden_size is 64, the plan says 32",
        ),
        ('{"model_type": "llama", "hidden_act": 5}', "transformers cannot use its config"),
        ("[1]", "transformers cannot use its config"),
        ("{", "no readable config.json"),
    ):
        (directory / "config.json").write_text(config)
        refused(options, message, tmp_path)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """CASES J5: the same text, other tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"<s>": 0, "a": 1}, unk_token="<s>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "dataset.jsonl").write_text('{"text": "a b a"}\n{"text": "a a a a"}\n')
    model = msgspec.structs.replace(small_model(vocab_size=256), tokenizer=str(tmp_path))
    profile = msgspec.structs.replace(analytic_profile(model, "a800-80g"), dtype="float32")
    opened = open_dataset(tmp_path / "dataset.jsonl", model.tokenizer, 256)
    compile_plan(opened, profile, CompileOptions(num_devices=1), tmp_path / "plan.msgpack")
    options = dataclasses.replace(OPTIONS, plan=tmp_path / "plan.msgpack", output=tmp_path / "run")
    assert prepare(options).tokenizer == str(tmp_path)
    Tokenizer(WordLevel({"<s>": 0, "b": 1}, unk_token="<s>")).save(str(tmp_path / "tokenizer.json"))
    refused(options, "tokenizer.json is not the one that the plan was compiled with", tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    refused(options, "tokenizer.json: No such file", tmp_path)
