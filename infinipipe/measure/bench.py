"""A model's parts on a device, and what it takes to run and to time each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from infinipipe.ir import Model, Stage
from infinipipe.measure.fit import Slices, fit_line
from infinipipe.measure.machine import memory_errors
from infinipipe.measure.survey import OutOfMemory, Seconds
from infinipipe.profiles import Curve, Line, logits_tokens
from infinipipe.runtime.attention import KVStore, Segment, Segments, Slot, kernel_for
from infinipipe.runtime.flat import Part
from infinipipe.runtime.gradients import sum_of_squares
from infinipipe.runtime.model import StageModel
from infinipipe.runtime.optimizer import make_adamw

_CHUNK_TOKENS = 256
"""Of the chunk whose overhead is timed: small, as overhead is what does not grow with tokens."""
_WARM_UP = (((0, 64),), ((64, 64),)) * 2
"""Chunks that are run before anything is timed: without and with a context, each twice."""
_OPTIMIZER_PARAMETERS = 2**22
"""The optimizer is timed on as many layers of a small model as have so many."""
_MOST_OPTIMIZER_LAYERS = 8
"""Of a tiny model: to build more would take longer than to time them."""


class Bench:
    """One decoder layer, with embedding and head unless it goes without `ends`.

    Times of a CPU are those of this thread, which does all the work: what other programs take of
    the core does not count.

    Raises:
        OutOfMemory: they do not fit into the device.
    """

    def __init__(self, model: Model, device: torch.device, *, ends: bool = True) -> None:
        self.model = model
        self.device = device
        self.stage_model = self._make_stage_model(1, ends=ends)
        self.layer = self.stage_model.layers[0]
        self.block_tokens = logits_tokens(model.vocabulary_size)
        """Tokens whose logits exist at a time."""

    def _make_stage_model(self, num_layers: int, *, ends: bool, num_shards: int = 1) -> StageModel:
        stage = Stage(first_layer=0, num_layers=num_layers, embedding=ends, head=ends)
        model = _with_layers(self.model, num_layers)
        with memory_errors():
            stage_model = StageModel(model, stage, self.device, num_shards=num_shards)
            stage_model.init_random(0)
            return stage_model

    def warm_up(self) -> None:
        """Run a layer a few times, so that first calls do not count."""
        for slices in _WARM_UP:
            self.time_layer(slices)

    def time_layer(self, slices: Slices) -> Seconds:
        """Run a layer's forward and backward, then again with recompute, and return their seconds.

        Raises:
            OutOfMemory: the chunk does not fit into the device.
        """
        with memory_errors():
            hidden, rotary, gradient = self.inputs(slices)
            forward_s, backward_s = self._forward_backward(
                lambda: self.run_layer(hidden, rotary, self.segments(slices)), gradient
            )
            recomputed_s = self._forward_backward(
                lambda: self.run_layer_recomputed(hidden, rotary, self.segments(slices)), gradient
            )
            return {"forward": forward_s, "backward": backward_s, "recomputed": sum(recomputed_s)}

    def run_layer(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], segments: Segments
    ) -> Tensor:
        """Run the layer's forward on (1, tokens, hidden size)."""
        output: Tensor = self.layer(hidden, position_embeddings=rotary, segments=segments)
        return output

    def run_layer_recomputed(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], segments: Segments
    ) -> Tensor:
        """Run the layer's forward without keeping its activations, as the runtime does."""
        output: Tensor = checkpoint(
            self.layer,
            hidden,
            use_reentrant=False,
            preserve_rng_state=False,
            position_embeddings=rotary,
            segments=segments,
        )
        return output

    def end_curves(self, sizes: Sequence[int], repeats: int) -> dict[str, Curve]:
        """Time forward and backward of embedding and head over chunk sizes that fit into memory.

        Raises:
            OutOfMemory: not even two sizes fit.
        """
        times: dict[str, dict[int, list[float]]] = {}
        for _ in range(repeats):
            for tokens in sizes:
                try:
                    seconds_by_op = self._time_ends(tokens)
                except OutOfMemory:
                    # Nor do the larger ones fit.
                    break
                for op, seconds in seconds_by_op.items():
                    times.setdefault(op, {}).setdefault(tokens, []).append(seconds)
        if not times or any(len(measured) < 2 for measured in times.values()):
            raise OutOfMemory
        return {op: _median_curve(measured) for op, measured in times.items()}

    def _time_ends(self, tokens: int) -> dict[str, float]:
        with memory_errors():
            loss_gradient = torch.ones((), device=self.device)
            embedding = self._forward_backward(self.embedding(tokens), self.noise(tokens))
            head = self._forward_backward(self.head(tokens), loss_gradient)
        return {
            "embedding_forward": embedding[0],
            "embedding_backward": embedding[1],
            "head_forward": head[0],
            "head_backward": head[1],
        }

    def embedding(self, tokens: int) -> Callable[[], Tensor]:
        """Return the embedding's forward."""
        ids = torch.randint(self.model.vocabulary_size, (1, tokens), device=self.device)
        return lambda: self.stage_model.embed(ids)

    def head(self, tokens: int) -> Callable[[], Tensor]:
        """Return the head's forward on the output of a layer, which nothing else holds on to."""
        targets = torch.randint(self.model.vocabulary_size, (tokens,), device=self.device)
        weights = torch.full((tokens,), 1.0 / tokens, device=self.device)
        source = self.noise(tokens).requires_grad_()
        # The product makes a tensor that only the head knows, as a layer's output is.
        return lambda: self.stage_model.loss(source * 1.0, targets, weights, self.block_tokens)

    def chunk_overheads(self, repeats: int) -> tuple[float, float]:
        """Time what every chunk costs a stage besides its layers, in F and in B.

        That is positions, rotary tables and bookkeeping.
        """
        slices = ((0, _CHUNK_TOKENS),)
        forward_s = []
        backward_s = []
        source = self.noise(1).requires_grad_()
        for _ in range(repeats):
            started = self._now()
            self.segments(slices)
            self.rotary(slices)
            edge = get_gradient_edge(source * 1.0)
            middle = self._now()
            torch.autograd.backward((edge,), (torch.ones_like(source),))
            forward_s.append(middle - started)
            backward_s.append(self._now() - middle)
        return _median(forward_s), _median(backward_s)

    def optimizer_line(self, repeats: int) -> Line:
        """Time the end of a step, for a few layers and for the first of two shards of them.

        That is norm, clipping, update and zeroing, per parameter of the shard.

        Raises:
            OutOfMemory: parameters and optimizer state do not fit into the device.
        """
        wanted_layers = _OPTIMIZER_PARAMETERS // self.model.layer_parameters
        num_layers = max(1, min(_MOST_OPTIMIZER_LAYERS, wanted_layers))
        flat = self._make_stage_model(num_layers, ends=False, num_shards=2).flat
        cases = (flat.shards(0, 2), flat.shards(0, 1))
        sizes = [_num_elements(shards) for shards in cases]
        with memory_errors():
            steps = [self._optimizer_step(shards) for shards in cases]
            seconds = []
            for _ in range(repeats):
                seconds.append([step() for step in steps])
        return fit_line(sizes, np.median(seconds, axis=0).tolist())

    def _optimizer_step(self, shards: Sequence[Part]) -> Callable[[], float]:
        adamw = make_adamw(shards, lr=0.0)
        gradients = [shard.gradients for shard in shards]

        def step() -> float:
            started = self._now()
            # As a number, which waits for the device as clipping does.
            float(sum_of_squares(gradients))
            for gradient in gradients:
                gradient.mul_(0.5)
            adamw.step()
            for gradient in gradients:
                gradient.zero_()
            return self._now() - started

        return step

    def inputs(self, slices: Slices) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        """Return a chunk's layer input, its rotary tables and a gradient of its output."""
        tokens = sum(length for _, length in slices)
        hidden = self.noise(tokens).requires_grad_()
        return hidden, self.rotary(slices), self.noise(tokens)

    def noise(self, tokens: int) -> Tensor:
        """Return random numbers, shape (1, tokens, hidden size)."""
        return torch.randn(1, tokens, self.model.hidden_size, device=self.device)

    def rotary(self, slices: Slices) -> tuple[Tensor, Tensor]:
        """Return the rotary tables of a chunk."""
        ranges = [torch.arange(start, start + length) for start, length in slices]
        positions = torch.cat(ranges)[None]
        positions = positions.to(self.device)
        # The embedding takes only dtype and device from its first argument.
        like = torch.empty(0, device=self.device)
        decoder = self.stage_model.whole.model
        rotary: tuple[Tensor, Tensor] = decoder.rotary_emb(like, positions)
        return rotary

    def segments(self, slices: Slices) -> Segments:
        """Return a segment table.

        A slice with context finds its K and V written and their gradients allocated, and is not the
        last one, which has less to do.
        """
        store = KVStore()
        table = []
        first = 0
        for index, (start, length) in enumerate(slices):
            stop = start + length
            total = stop + 1 if start > 0 else stop
            segment = Segment(first=first, length=length, sequence=index, start=start, total=total)
            table.append(segment)
            first += length
            if start > 0:
                slot = self.write_context(store, index, start, total)
                slot.gradients = slot.no_gradients(stop)
        kernel = kernel_for(self.device)
        return Segments(table=tuple(table), store=store, kernel=kernel)

    def write_context(self, store: KVStore, sequence: int, start: int, total: int) -> Slot:
        """Make a sequence's slot and write K and V up to `start`."""
        heads = self.model.num_kv_heads
        like = torch.empty(self.model.head_dim, device=self.device)
        context = Segment(first=0, length=start, sequence=sequence, start=0, total=total)
        slot = store.open(context, self.layer.self_attn.layer_idx, heads, like)
        slot.key[:start] = torch.randn(start, heads, self.model.head_dim, device=self.device)
        slot.value[:start] = slot.key[:start]
        return slot

    def _forward_backward(
        self, forward: Callable[[], Tensor], gradient: Tensor
    ) -> tuple[float, float]:
        started = self._now()
        out = forward()
        middle = self._now()
        torch.autograd.backward(out, gradient)
        return middle - started, self._now() - middle

    def _now(self) -> float:
        if self.device.type == "cpu":
            return time.thread_time()
        torch.cuda.synchronize()
        return time.perf_counter()


def _with_layers(model: Model, num_layers: int) -> Model:
    config = json.loads(model.config)
    config["num_hidden_layers"] = num_layers
    # One entry for each layer of the whole model; all are full attention anyway.
    config.pop("layer_types", None)
    return msgspec.structs.replace(model, num_layers=num_layers, config=json.dumps(config))


def _median_curve(measured: dict[int, list[float]]) -> Curve:
    """Return the curve through the medians of the seconds of each size."""
    medians = [_median(seconds) for seconds in measured.values()]
    return Curve(tokens=tuple(measured), seconds=tuple(medians))


def _median(seconds: Sequence[float]) -> float:
    return float(np.median(seconds))


def _num_elements(shards: Sequence[Part]) -> int:
    return sum(shard.parameters.numel() for shard in shards)
