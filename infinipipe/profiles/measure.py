"""Measures a model's parts on this machine, through the very code that will train it.

Memory is counted while time is taken, as it is in a run. Nothing of this belongs to the
planner: only the command line imports it.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy
import torch
import transformers
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from infinipipe import __version__
from infinipipe.errors import InputError
from infinipipe.ir import Model, Stage
from infinipipe.profiles.cost import logits_tokens
from infinipipe.profiles.fit import Point, fit_layer_time, fitted_seconds
from infinipipe.profiles.profile import (
    PROFILE_FORMAT_VERSION,
    Bytes,
    Curve,
    Device,
    Line,
    Profile,
    Sample,
    Times,
)
from infinipipe.profiles.transfer import measure_transfer
from infinipipe.runtime.attention import KVStore, Segment, Segments
from infinipipe.runtime.memory import CpuMemory, CudaMemory, track_memory
from infinipipe.runtime.model import StageModel
from infinipipe.runtime.trainer import MAX_GRAD_NORM, make_optimizer

Slices = tuple[tuple[int, int], ...]
Memory = CpuMemory | CudaMemory

KNOTS = (1, 16, 64, 256, 1024, 4096)
"""Chunk sizes measured as one whole sequence; the time's curve bends there."""
CONTEXTS: tuple[tuple[int, int], ...] = ((1024, 64), (4096, 64), (1024, 256), (8192, 256), (4096, 1024), (16384, 1024))
"""Slices of split sequences: context and length."""
PACKS: tuple[tuple[int, int], ...] = ((16, 4), (64, 16), (256, 16), (16, 64), (64, 64))
"""Packed whole sequences: how many tokens each, how many."""
MAX_POINT_S = 3.0
"""A chunk whose forward and backward would take longer is not measured."""
MIN_REPEATS, MAX_REPEATS, POINT_BUDGET_S = 3, 15, 0.6
MEMORY_TOKENS = (512, 1024)
MEMORY_CONTEXTS = (16384, 32768)
HOST_SHARE = 0.8
"""Of a machine's memory, what training may use; a CPU device has an equal part of it per core."""


def measure_profile(model: Model, *, device: str, progress: Callable[[int, int], None]) -> Profile:
    """Measure a model on this machine.

    Args:
        model: its shape; one decoder layer of it is built, and its embedding and head.
        device: `auto`, `cpu` or `cuda`.
        progress: called with the number of measurements done and to do.

    Raises:
        InputError: there is no such device, or a layer does not fit into its memory.
    """
    place = _choose_device(device)
    if place.type == "cpu":
        torch.set_num_threads(1)  # a CPU device is one core
    points: list[Slices] = [((0, tokens),) for tokens in KNOTS]
    points += [((start, length),) for start, length in CONTEXTS]
    points += [((0, length),) * count for length, count in PACKS]
    total, done = len(points) + 4, 0

    def advance() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    bench = _Bench(model, place)
    with track_memory(place, ()) as memory:
        bench.warm_up()
        layer = bench.layer_points(points, advance)
        ends = bench.end_curves()
        advance()
        chunk = bench.chunk_overheads()
        optimizer_s = bench.optimizer_line()
        advance()
        sizes = bench.bytes(memory)
        advance()
    transfer = measure_transfer(place.type) if _num_devices(place) > 1 else Line(constant=0.0, rate=0.0)
    advance()
    return _assemble(model, place, layer, ends, chunk, optimizer_s, sizes, transfer)


def measure_bytes(model: Model, device: torch.device) -> Bytes:
    """Measure only the bytes of a model; see `measure_profile`."""
    bench = _Bench(model, device)
    with track_memory(device, ()) as memory:
        bench.warm_up()
        return bench.bytes(memory)


def _assemble(
    model: Model,
    place: torch.device,
    layer: dict[str, list[Point]],
    ends: dict[str, Curve],
    chunk: tuple[float, float],
    optimizer_s: Line,
    sizes: Bytes,
    transfer: Line,
) -> Profile:
    sizes_measured = {p.tokens for p in layer["forward"] if len(p.slices) == 1 and p.slices[0][0] == 0}
    fits = {op: fit_layer_time(points, sorted(sizes_measured)) for op, points in layer.items()}
    ops: tuple[Literal["forward", "backward", "recompute"], ...] = ("forward", "backward", "recompute")
    return Profile(
        format_version=PROFILE_FORMAT_VERSION,
        infinipipe_version=__version__,
        source="measured",
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        software={
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "numpy": numpy.__version__,
        },
        device=_describe(place),
        model=model,
        dtype="float32",
        times=Times(
            layer_forward=fits["forward"],
            layer_backward=fits["backward"],
            layer_recompute=fits["recompute"],
            chunk_forward_s=chunk[0],
            chunk_backward_s=chunk[1],
            embedding_forward=ends["embedding_forward"],
            embedding_backward=ends["embedding_backward"],
            head_forward=ends["head_forward"],
            head_backward=ends["head_backward"],
            optimizer_s=optimizer_s,
            transfer_s=transfer,
        ),
        bytes=sizes,
        samples=tuple(
            Sample(op=op, slices=point.slices, seconds=point.seconds, fitted_s=float(fitted))
            for op in ops
            for point, fitted in zip(layer[op], fitted_seconds(fits[op], layer[op]), strict=True)
        ),
    )


@dataclass(frozen=True)
class _Count:
    """Bytes of one forward and backward."""

    kept: int
    forward_peak: int
    backward_peak: int


class _Bench:
    """One decoder layer with embedding and head, and what it takes to run them."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self.model, self.device = model, device
        single = _one_layer(model)
        stage = Stage(first_layer=0, num_layers=1, embedding=True, head=True)
        self.stage = StageModel(single, stage, device)
        self.stage.init_random(0)
        self.layer = self.stage.layers[0]

    def warm_up(self) -> None:
        """Run everything once, so that first calls do not count."""
        for slices in (((0, 64),), ((64, 64),)):
            self._time_layer(slices, 2)

    def layer_points(self, points: Sequence[Slices], advance: Callable[[], None]) -> dict[str, list[Point]]:
        """Time the layer's forward, backward and recompute on each chunk that does not take too long."""
        result: dict[str, list[Point]] = {"forward": [], "backward": [], "recompute": []}
        slowest = 0.0
        for slices in points:
            if slowest < MAX_POINT_S:
                first = self._time_layer(slices, 1)
                once = sum(first.values())
                slowest = max(slowest, once if len(slices) == 1 and slices[0][0] == 0 else 0.0)
                repeats = min(MAX_REPEATS, max(MIN_REPEATS, int(POINT_BUDGET_S / max(once, 1e-6))))
                for op, seconds in self._time_layer(slices, repeats).items():
                    result[op].append(Point(slices=slices, seconds=seconds))
            advance()
        return result

    def _time_layer(self, slices: Slices, repeats: int) -> dict[str, float]:
        """Return median seconds of forward, backward, and of what recompute adds to backward."""
        hidden, rotary, gradient = self._inputs(slices)
        times: dict[str, list[float]] = {"forward": [], "backward": [], "again": []}
        for _ in range(repeats):
            for recompute in (False, True):
                segments = self._segments(slices)
                started = self._now()
                if recompute:
                    out = checkpoint(
                        self.layer,
                        hidden,
                        use_reentrant=False,
                        preserve_rng_state=False,
                        position_embeddings=rotary,
                        segments=segments,
                    )
                else:
                    out = self.layer(hidden, position_embeddings=rotary, segments=segments)
                middle = self._now()
                torch.autograd.backward(out, gradient)
                ended = self._now()
                hidden.grad = None
                if recompute:
                    times["again"].append(ended - middle)
                else:
                    times["forward"].append(middle - started)
                    times["backward"].append(ended - middle)
        medians = {op: statistics.median(values) for op, values in times.items()}
        recompute_s = max(medians["again"] - medians["backward"], 0.5 * medians["forward"])
        return {"forward": medians["forward"], "backward": medians["backward"], "recompute": recompute_s}

    def end_curves(self) -> dict[str, Curve]:
        """Time the embedding and the head with its loss over the chunk sizes."""
        curves: dict[str, list[float]] = {}
        for tokens in KNOTS:
            ids = torch.zeros(1, tokens, dtype=torch.int64, device=self.device)
            weights = torch.full((tokens,), 1.0 / tokens, device=self.device)
            hidden, _, gradient = self._inputs(((0, tokens),))

            def embed(ids: Tensor = ids) -> Tensor:
                return self.stage.embed(ids)

            def head(hidden: Tensor = hidden, ids: Tensor = ids, weights: Tensor = weights) -> Tensor:
                return self.stage.loss(hidden, ids[0], weights, logits_tokens(self.model.vocabulary_size))

            one = torch.ones((), device=self.device)
            for name, forward, grad in (("embedding", embed, gradient), ("head", head, one)):
                seconds = [self._forward_backward(forward, grad) for _ in range(MIN_REPEATS + 2)]
                for op, values in zip(("forward", "backward"), zip(*seconds, strict=True), strict=True):
                    curves.setdefault(f"{name}_{op}", []).append(statistics.median(values))
        return {name: Curve(tokens=KNOTS, seconds=tuple(values)) for name, values in curves.items()}

    def _forward_backward(self, forward: Callable[[], Tensor], gradient: Tensor) -> tuple[float, float]:
        started = self._now()
        out = forward()
        middle = self._now()
        torch.autograd.backward(out, gradient)
        return middle - started, self._now() - middle

    def chunk_overheads(self) -> tuple[float, float]:
        """Time what every chunk costs on a stage besides its layers: positions, rotary tables, bookkeeping."""
        tokens = KNOTS[len(KNOTS) // 2]
        times = []
        for _ in range(MAX_REPEATS):
            started = self._now()
            self._rotary(((0, tokens),))
            times.append(self._now() - started)
        forward = statistics.median(times)
        return forward, forward / 2

    def optimizer_line(self) -> Line:
        """Time the end of a step: norm, clipping, update and zeroing, per parameter."""
        parameters = self.stage.global_parameters()
        optimizer = make_optimizer(parameters, lr=0.0)
        times = []
        for _ in range(MAX_REPEATS):
            started = self._now()
            torch.nn.utils.clip_grad_norm_(parameters.values(), MAX_GRAD_NORM)
            optimizer.step()
            for parameter in parameters.values():
                assert parameter.grad is not None
                parameter.grad.zero_()
            times.append(self._now() - started)
        return Line(constant=0.0, rate=statistics.median(times) / sum(p.numel() for p in parameters.values()))

    def bytes(self, memory: Memory) -> Bytes:
        """Count what a chunk keeps and needs for a moment, at two sizes, and take the lines through them."""
        width, kv = self.model.hidden_size * 4, 2 * self.model.kv_size * 4
        small, large = MEMORY_TOKENS
        whole = [self._count_layer(memory, ((0, n),)) for n in MEMORY_TOKENS]
        split = [self._count_layer(memory, ((n, n),)) for n in MEMORY_TOKENS]
        # Contexts so long that attention is where the layer peaks.
        near, far = (self._count_layer(memory, ((context, small),)) for context in MEMORY_CONTEXTS)
        embedding = [self._count(memory, self._embedding(n), self._gradient(n)) for n in MEMORY_TOKENS]
        head = [self._count(memory, self._head(n), torch.ones((), device=self.device)) for n in MEMORY_TOKENS]
        logits = self.model.vocabulary_size * 4
        piece = logits_tokens(self.model.vocabulary_size)
        head_peaks = [h.forward_peak - min(n, piece) * logits for h, n in zip(head, MEMORY_TOKENS, strict=True)]
        context = (far.backward_peak - near.backward_peak) / (MEMORY_CONTEXTS[1] - MEMORY_CONTEXTS[0])
        # A whole sequence and a slice need different things for a moment; take the larger.
        pairs = list(zip(whole, split, strict=True))
        return Bytes(
            static_per_parameter=self._static_bytes() // sum(p.numel() for p in self.stage.parameters()),
            activation_per_token=width,
            layer_full_per_token=(whole[1].kept - whole[0].kept) / (large - small) + width - kv,
            layer_kv_per_token=kv,
            layer_kv_grad_per_token=2 * self.model.kv_size * 4,
            chunk_per_token=self._rotary_bytes(memory, large) / large,
            embedding_per_token=embedding[1].kept / large,
            head_per_token=head[1].kept / large,
            layer_forward_peak=_line([max(w.forward_peak, s.forward_peak) for w, s in pairs]),
            layer_backward_peak=_line([count.backward_peak for count in whole]),
            slice_backward_per_token=(near.backward_peak - context * MEMORY_CONTEXTS[0]) / small,
            context_per_token=context,
            embedding_backward_peak=_line([count.backward_peak for count in embedding]),
            head_forward_peak=_line(head_peaks),
            head_backward_peak=_line([count.backward_peak for count in head]),
            logits_per_token=logits,
        )

    def _count_layer(self, memory: Memory, slices: Slices) -> _Count:
        hidden, rotary, gradient = self._inputs(slices)
        segments = self._segments(slices)
        return self._count(memory, lambda: self.layer(hidden, position_embeddings=rotary, segments=segments), gradient)

    def _count(self, memory: Memory, forward: Callable[[], Tensor], gradient: Tensor) -> _Count:
        gc.collect()
        before = memory.current_bytes
        memory.reset_peak()
        edge = get_gradient_edge(forward())
        kept = memory.current_bytes - before
        forward_peak = memory.peak_bytes - before - kept
        memory.reset_peak()
        torch.autograd.backward((edge,), (gradient,))
        return _Count(kept=kept, forward_peak=forward_peak, backward_peak=memory.peak_bytes - before - kept)

    def _rotary_bytes(self, memory: Memory, tokens: int) -> int:
        gc.collect()
        before = memory.current_bytes
        rotary = self._rotary(((0, tokens),))
        num_bytes = memory.current_bytes - before
        del rotary
        return num_bytes

    def _static_bytes(self) -> int:
        parameters = self.stage.global_parameters()
        optimizer = make_optimizer(parameters, lr=0.0)
        state = [t for p in parameters.values() for t in optimizer.state[p].values() if t.ndim]
        tensors = [*parameters.values(), *(p.grad for p in parameters.values() if p.grad is not None), *state]
        return sum(t.untyped_storage().nbytes() for t in tensors)

    def _embedding(self, tokens: int) -> Callable[[], Tensor]:
        return lambda: self.stage.embed(torch.zeros(1, tokens, dtype=torch.int64, device=self.device))

    def _head(self, tokens: int) -> Callable[[], Tensor]:
        """Return the head's forward on the output of a layer, which nothing else holds on to."""
        targets = torch.zeros(tokens, dtype=torch.int64, device=self.device)
        weights = torch.full((tokens,), 1.0 / tokens, device=self.device)
        source = self._gradient(tokens).requires_grad_()
        piece = logits_tokens(self.model.vocabulary_size)
        return lambda: self.stage.loss(source * 1.0, targets, weights, piece)

    def _inputs(self, slices: Slices) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        """Return a chunk's layer input, its rotary tables and a gradient of its output."""
        tokens = sum(length for _, length in slices)
        return self._gradient(tokens).requires_grad_(), self._rotary(slices), self._gradient(tokens)

    def _gradient(self, tokens: int) -> Tensor:
        return torch.randn(1, tokens, self.model.hidden_size, device=self.device)

    def _rotary(self, slices: Slices) -> tuple[Tensor, Tensor]:
        positions = torch.cat([torch.arange(start, start + length) for start, length in slices])[None].to(self.device)
        rotary: tuple[Tensor, Tensor] = self.stage.whole.model.rotary_emb(torch.empty(0, device=self.device), positions)
        return rotary

    def _segments(self, slices: Slices) -> Segments:
        """Return a segment table; a slice with context finds its K and V written and their gradients allocated."""
        store, table, first = KVStore(), [], 0
        for index, (start, length) in enumerate(slices):
            table.append(Segment(first=first, length=length, sequence=index, start=start, total=start + length))
            first += length
            if start:
                shape = (1, self.model.num_kv_heads, start, self.model.head_dim)
                context = Segment(first=0, length=start, sequence=index, start=0, total=start + length)
                key = torch.randn(shape, device=self.device)
                slot = store.write(context, self.layer.self_attn.layer_idx, key, key)
                assert slot.gradients
        return Segments(table=tuple(table), store=store)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _line(values: Sequence[float]) -> Line:
    """Return the line through measurements at `MEMORY_TOKENS`, with no negative part."""
    (small, large), (low, high) = MEMORY_TOKENS, values
    rate = max(0.0, (high - low) / (large - small))
    return Line(constant=max(0.0, high - rate * large), rate=rate)


def _one_layer(model: Model) -> Model:
    config = json.loads(model.config) | {"num_hidden_layers": 1}
    config.pop("layer_types", None)
    return msgspec.structs.replace(model, num_layers=1, config=json.dumps(config))


def _choose_device(device: str) -> torch.device:
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise InputError(
            "no CUDA device is available here; use --device cpu, or --analytic DEVICE for one that is elsewhere"
        )
    return torch.device("cuda" if available and device != "cpu" else "cpu")


def _num_devices(device: torch.device) -> int:
    return torch.cuda.device_count() if device.type == "cuda" else len(os.sched_getaffinity(0))


def _describe(device: torch.device) -> Device:
    num_devices = _num_devices(device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory = int(HOST_SHARE * properties.total_memory)
        return Device(name=properties.name, kind="cuda", memory_bytes=memory, num_devices=num_devices)
    memory = int(HOST_SHARE * _host_memory() / num_devices)
    return Device(name=_cpu_name(), kind="cpu", memory_bytes=memory, num_devices=num_devices)


def _host_memory() -> int:
    """Return the machine's memory, or the container's limit where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(total, int(text)) if text.isdigit() else total


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0] if names else platform.machine()
