"""Measuring a small model on this machine: all is there, nothing assumed, nothing half-written."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from infinipipe.cli import run_command
from infinipipe.errors import InputError, RunError
from infinipipe.measure import background_load, machine
from infinipipe.measure.background_load import start_background_load
from infinipipe.measure.bench import Bench
from infinipipe.measure.links import NO_LINKS
from infinipipe.measure.machine import choose_device, limit_memory, memory_errors
from infinipipe.measure.survey import Effort, OutOfMemory
from infinipipe.profiles import Line, Links, Profile, read_profile
from tests.runtime.replay import CPU, small_model

NUM_RANKS = 3
"""Processes besides the one that measures, whatever this machine has."""
MINUTE_S = 60
"""What is measured here takes milliseconds; busy machines may need a hundred times as long."""
TINY_EFFORT = Effort(num_points=18, num_held_out=4, min_repeats=2, seconds=2.0, most_seconds=0.3)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Return the profile of a small model by the command line."""
    folder = tmp_path_factory.mktemp("profile")
    config = small_model().config
    (folder / "config.json").write_text(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("infinipipe.measure.measure.QUICK", TINY_EFFORT)
        patch.setattr("infinipipe.measure.measure.count_devices", lambda place: NUM_RANKS)
        assert run_command(["profile", str(folder), "--quick", "--device", "cpu"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "profile.json"]
    return read_profile(folder / "profile.json")


def test_a_profile_says_where_and_of_what_it_is(measured: Profile) -> None:
    assert (measured.source, measured.device.kind, measured.dtype) == ("measured", "cpu", "float32")
    assert measured.device.memory_bytes > 2**20
    assert measured.device.capability.count(" ") >= 1
    assert {"python", "torch", "transformers", "numpy", "system"} <= set(measured.software)
    assert measured.created.endswith("+00:00")
    assert json.loads(measured.model.config)["num_hidden_layers"] == measured.model.num_layers


def lines(links: Links) -> tuple[Line, ...]:
    return links.transfer_s, links.all_to_all_s, links.reduce_scatter_s, links.all_gather_s


def test_every_time_was_measured(measured: Profile) -> None:
    times = measured.times
    for layer in (times.layer_forward, times.layer_backward, times.layer_recompute):
        assert layer.curve.seconds[-1] > 0
    for curve in (
        times.embedding_forward,
        times.embedding_backward,
        times.head_forward,
        times.head_backward,
    ):
        assert len(curve.tokens) >= 2
        assert min(curve.seconds) > 0
    assert 0 < times.chunk_forward_s < MINUTE_S
    assert 0 < times.chunk_backward_s < MINUTE_S
    assert times.optimizer_s.constant + times.optimizer_s.rate * 1e5 > 0
    # There is one node here to measure.
    assert times.links_between is None
    assert times.links.num_ranks == NUM_RANKS
    for line in lines(times.links):
        assert 0 < line.constant + line.rate * 1e6 < MINUTE_S


def test_samples_are_raw_and_some_held_out(measured: Profile) -> None:
    assert {(a.op, a.held_out) for a in measured.accuracy} == {
        (op, held_out) for op in ("forward", "backward", "recomputed") for held_out in (False, True)
    }
    assert sum(a.num_samples for a in measured.accuracy) == len(measured.samples)
    for sample in measured.samples:
        assert sample.num_repeats >= TINY_EFFORT.min_repeats
        assert sample.seconds > 0
        assert sample.fitted_s > 0
        assert sample.spread_s >= 0


def test_bytes_are_those_of_the_model(measured: Profile) -> None:
    model, sizes = measured.model, measured.bytes
    # In float32 parameter and gradient, and two moments.
    assert (sizes.static_per_parameter, sizes.sharded_per_parameter) == (8, 8)
    assert sizes.layer_kv_per_token == 2 * 4 * model.kv_size
    assert sizes.layer_kv_grad_per_token == 2 * 4 * model.kv_size
    assert sizes.activation_per_token == 4 * model.hidden_size
    assert sizes.logits_per_token == 4 * model.vocabulary_size
    assert sizes.layer_full_per_token > 4 * (model.hidden_size * 4 + model.intermediate_size * 3)


def test_interrupted_profiling_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = 0
    time_layer = Bench.time_layer

    def interrupt(bench: Bench, slices: tuple[tuple[int, int], ...]) -> object:
        nonlocal runs
        runs += 1
        if runs == 20:
            raise KeyboardInterrupt
        return time_layer(bench, slices)

    monkeypatch.setattr(Bench, "time_layer", interrupt)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(small_model().config)
    (tmp_path / "profile.json").write_text("the one before")
    assert run_command(["profile", "config.json", "--quick", "--device", "cpu"]) == 130
    assert runs == 20
    assert multiprocessing.active_children() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "profile.json"]
    assert (tmp_path / "profile.json").read_text() == "the one before"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] "
            "DefaultCPUAllocator: can't allocate memory: you tried"
        ),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_every_way_to_run_out_of_memory_is_known(error: Exception) -> None:
    with pytest.raises(OutOfMemory), memory_errors():
        raise error


def test_other_errors_are_not_taken_for_it() -> None:
    with pytest.raises(RuntimeError, match="shape"), memory_errors():
        raise RuntimeError("shape mismatch")


def test_the_allocator_really_says_so() -> None:
    with pytest.raises(OutOfMemory), memory_errors():
        torch.empty(2**60, dtype=torch.uint8)


def test_a_chunk_that_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the sizes below it are measured all the same, of the layer and of the ends."""
    bench = Bench(small_model(), CPU)
    noise = bench.noise

    def short(tokens: int) -> torch.Tensor:
        if tokens > 100:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return noise(tokens)

    monkeypatch.setattr(bench, "noise", short)
    assert bench.time_layer(((0, 64),))["forward"] > 0
    with pytest.raises(OutOfMemory):
        bench.time_layer(((0, 128),))
    curves = bench.end_curves([1, 64, 256], 2)
    assert {curve.tokens for curve in curves.values()} == {(1, 64)}
    with pytest.raises(OutOfMemory):
        bench.end_curves([64, 256], 2)  # one size has no slope


def test_a_model_that_does_not_fit_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from infinipipe.measure.measure import measure_profile

    def fail(*_: object) -> None:
        raise OutOfMemory

    monkeypatch.setattr("infinipipe.measure.measure.Bench", fail)
    with pytest.raises(
        InputError, match=r"does not fit into the memory of this device; .*--analytic DEVICE"
    ):
        measure_profile(small_model(), device="cpu", quick=True, progress=lambda done, total: None)


def test_memory_that_is_not_there_is_refused_while_probing() -> None:
    """Linux would grant it and kill the process when it is used."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    free = int((Path("/proc/meminfo").read_text().split("MemAvailable:")[1]).split()[0]) * 1024
    with limit_memory(CPU):
        with pytest.raises(OutOfMemory), memory_errors():
            torch.empty(free, dtype=torch.uint8)
        assert torch.ones(1000).sum() == 1000
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_time_that_others_take_of_the_core_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(small_model(), CPU)
    run_layer = bench.run_layer

    def wait(*inputs: Any) -> torch.Tensor:
        time.sleep(0.5)
        return run_layer(*inputs)

    monkeypatch.setattr(bench, "run_layer", wait)
    assert 0 < bench.time_layer(((0, 64),))["forward"] < 0.4


def test_a_machine_with_one_device_has_no_others_and_no_links() -> None:
    with start_background_load(small_model(), "cpu", 1) as others:
        others.wait_until_busy()
        assert others.measure_links() == NO_LINKS
    assert NO_LINKS.num_ranks == 1
    for line in lines(NO_LINKS):
        assert (line.constant, line.rate) == (0.0, 0.0)


def test_larger_buffers_take_longer_to_exchange() -> None:
    found = []
    # On a busy machine noise may hide it for once.
    while len(found) < 3 and not any(found):
        with start_background_load(small_model(), "cpu", 2) as others:
            links = others.measure_links()
        assert links.num_ranks == 2
        found = [*found, all(line.rate > 0 for line in lines(links))]
    assert found[-1]


class Shared:
    """What a process of the background load sees: it may rest after a while."""

    def __init__(self, passes: int, parent: int) -> None:
        self.ready = self.rest = self
        self.passes, self.parent, self.released = passes, parent, 0

    def release(self) -> None:
        self.released += 1

    def exists(self) -> bool:
        assert self.released == 1, "it says that it works before it does"
        self.passes -= 1
        return self.passes < 0


def test_the_other_cores_run_layers_until_they_may_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[object] = []
    time_layer = Bench.time_layer

    def count(bench: Bench, slices: tuple[tuple[int, int], ...]) -> object:
        runs.append(slices)
        if len(runs) == 6:
            raise OutOfMemory  # no reason to end
        return time_layer(bench, slices)

    monkeypatch.setattr(Bench, "time_layer", count)
    assert background_load._work(small_model(), Shared(5, os.getppid()))  # type: ignore[arg-type]
    assert runs[4:] == [((0, 512),) * 4] * 5


def test_what_files_left_in_a_containers_cache_is_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {
        "memory.max": "1000000",
        "memory.current": "900000",
        "memory.stat": "anon 5\ninactive_file 300000\nactive_file 200000\n",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "_CONTAINER", tmp_path)
    assert machine._free_memory() == 600_000


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_of_the_background_load_that_dies_ends_the_measurement(rank: int) -> None:
    with start_background_load(small_model(), "cpu", 2) as others:
        others.wait_until_busy()
        assert others._context is not None
        others._context.processes[rank].kill()
        with pytest.raises(
            RunError,
            match=r"a process .* ended early .*; free some memory, or profile on fewer cores",
        ):
            others.measure_links()


def test_a_layer_too_large_to_have_twice_is_not_run_by_others() -> None:
    large = msgspec.structs.replace(small_model(), layer_parameters=10**12)
    assert not background_load._work(large, Shared(0, os.getppid()))  # type: ignore[arg-type]


def drop(curve: dict[str, list[float]], count: int) -> None:
    curve["tokens"], curve["seconds"] = curve["tokens"][:count], curve["seconds"][:count]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p["times"].pop("layer_backward"), "missing required field `layer_backward`"),
        (lambda p: drop(p["times"]["layer_forward"]["curve"], 1), "at least two ascending sizes"),
        (lambda p: p["times"]["head_forward"]["tokens"].reverse(), "at least two ascending sizes"),
        (lambda p: p["times"]["head_forward"]["seconds"].pop(), "as many seconds"),
        (lambda p: p.update(surprise=1), "unknown field `surprise`"),
    ],
)
def test_a_profile_with_missing_points_is_one_clear_error(
    measured: Profile, tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    document = msgspec.to_builtins(measured)
    document = json.loads(json.dumps(document))
    change(document)
    (tmp_path / "profile.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=words) as caught:
        read_profile(tmp_path / "profile.json")
    assert "infinipipe profile" in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none() -> None:
    assert choose_device("auto") == CPU
    with pytest.raises(InputError, match="--device cpu, or --analytic DEVICE"):
        choose_device("cuda")
