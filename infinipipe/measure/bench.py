"""A model's parts on a device, and what it takes to run and to time each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from infinipipe.ir import Model, Stage
from infinipipe.measure.fit import Slices, fit_line
from infinipipe.measure.machine import memory_errors
from infinipipe.measure.survey import OutOfMemory, Seconds
from infinipipe.profiles.models import logits_tokens
from infinipipe.profiles.profile import Curve, Line
from infinipipe.runtime.attention import KVStore, Segment, Segments, Slot, kernel_for
from infinipipe.runtime.model import StageModel
from infinipipe.runtime.optimizer import make_optimizer

_CHUNK_TOKENS = 256
_OPTIMIZER_PARAMETERS = 2**22
"""The optimizer is timed on as many small layers as have so many."""


class Bench:
    """One decoder layer, with embedding and head unless it goes without `ends`.

    Times of a CPU are those of this thread, which does all the work: what other programs take of the core does not
    count.

    Raises:
        OutOfMemory: they do not fit into the device.
    """

    def __init__(self, model: Model, device: torch.device, *, ends: bool = True) -> None:
        self.model, self.device = model, device
        self.stage = self._make_stage(1, ends=ends)
        self.layer = self.stage.layers[0]
        self.piece = logits_tokens(model.vocabulary_size)

    def _make_stage(self, num_layers: int, *, ends: bool) -> StageModel:
        with memory_errors():
            place = Stage(first_layer=0, num_layers=num_layers, embedding=ends, head=ends)
            stage = StageModel(_with_layers(self.model, num_layers), place, self.device)
            stage.init_random(0)
            return stage

    def warm_up(self) -> None:
        """Run a layer a few times, so that first calls do not count."""
        for slices in (((0, 64),), ((64, 64),)) * 2:
            self.time_layer(slices)

    def time_layer(self, slices: Slices) -> Seconds:
        """Run a layer's forward and backward, then again with recompute, and return their seconds.

        Raises:
            OutOfMemory: the chunk does not fit into the device.
        """
        with memory_errors():
            hidden, rotary, gradient = self.inputs(slices)
            forward, backward = self._forward_backward(
                lambda: self.run_layer(hidden, rotary, self.segments(slices)), gradient
            )
            recomputed = self._forward_backward(
                lambda: self.checkpoint_layer(hidden, rotary, self.segments(slices)), gradient
            )
            return {"forward": forward, "backward": backward, "recomputed": sum(recomputed)}

    def run_layer(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], segments: Segments
    ) -> Tensor:
        """Run the layer's forward."""
        output: Tensor = self.layer(hidden, position_embeddings=rotary, segments=segments)
        return output

    def checkpoint_layer(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], segments: Segments
    ) -> Tensor:
        """Run the layer's forward without keeping its activations."""
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
        """Time forward and backward of embedding and head over chunk sizes, up to what fits into memory.

        Raises:
            OutOfMemory: not even two sizes fit.
        """
        times: dict[str, dict[int, list[float]]] = {}
        for _ in range(repeats):
            for tokens in sizes:
                try:
                    for op, seconds in self._time_ends(tokens).items():
                        times.setdefault(op, {}).setdefault(tokens, []).append(seconds)
                except OutOfMemory:
                    break
        if any(len(found) < 2 for found in times.values()) or not times:
            raise OutOfMemory
        return {
            op: Curve(
                tokens=tuple(found),
                seconds=tuple(float(np.median(values)) for values in found.values()),
            )
            for op, found in times.items()
        }

    def _time_ends(self, tokens: int) -> dict[str, float]:
        with memory_errors():
            embedding = self._forward_backward(self.embedding(tokens), self.noise(tokens))
            head = self._forward_backward(self.head(tokens), torch.ones((), device=self.device))
        names = ("embedding_forward", "embedding_backward", "head_forward", "head_backward")
        return dict(zip(names, (*embedding, *head), strict=True))

    def embedding(self, tokens: int) -> Callable[[], Tensor]:
        """Return the embedding's forward."""
        ids = torch.randint(self.model.vocabulary_size, (1, tokens), device=self.device)
        return lambda: self.stage.embed(ids)

    def head(self, tokens: int) -> Callable[[], Tensor]:
        """Return the head's forward on the output of a layer, which nothing else holds on to."""
        targets = torch.randint(self.model.vocabulary_size, (tokens,), device=self.device)
        weights = torch.full((tokens,), 1.0 / tokens, device=self.device)
        source = self.noise(tokens).requires_grad_()
        return lambda: self.stage.loss(source * 1.0, targets, weights, self.piece)

    def chunk_overheads(self, repeats: int) -> tuple[float, float]:
        """Time what every chunk costs a stage besides its layers: positions, rotary tables, bookkeeping."""
        slices, forward, backward = ((0, _CHUNK_TOKENS),), [], []
        source = self.noise(1).requires_grad_()
        for _ in range(repeats):
            started = self._now()
            self.segments(slices), self.rotary(slices)
            edge = get_gradient_edge(source * 1.0)
            middle = self._now()
            torch.autograd.backward((edge,), (torch.ones_like(source),))
            forward.append(middle - started)
            backward.append(self._now() - middle)
        return float(np.median(forward)), float(np.median(backward))

    def optimizer_line(self, repeats: int) -> Line:
        """Time the end of a step: norm, clipping, update and zeroing, for all tensors and for the first half.

        Raises:
            OutOfMemory: parameters and optimizer state do not fit into the device.
        """
        num_layers = max(1, min(8, _OPTIMIZER_PARAMETERS // self.model.layer_parameters))
        parameters = list(self._make_stage(num_layers, ends=False).global_parameters().values())
        groups = parameters[: len(parameters) // 2], parameters
        sizes = [sum(p.numel() for p in group) for group in groups]
        with memory_errors():
            steps = [self._optimizer_step(group) for group in groups]
            seconds = [[step() for step in steps] for _ in range(repeats)]
        return fit_line(sizes, np.median(seconds, axis=0).tolist())

    def _optimizer_step(self, parameters: list[nn.Parameter]) -> Callable[[], float]:
        optimizer = make_optimizer({str(index): p for index, p in enumerate(parameters)}, lr=0.0)
        gradients = [p.grad for p in parameters if p.grad is not None]

        def step() -> float:
            started = self._now()
            norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
            float(torch.stack(norms).square().sum())
            for gradient in gradients:
                gradient.mul_(0.5)
            optimizer.step()
            for gradient in gradients:
                gradient.zero_()
            return self._now() - started

        return step

    def inputs(self, slices: Slices) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        """Return a chunk's layer input, its rotary tables and a gradient of its output."""
        tokens = sum(length for _, length in slices)
        return self.noise(tokens).requires_grad_(), self.rotary(slices), self.noise(tokens)

    def noise(self, tokens: int) -> Tensor:
        """Return (1, tokens, hidden size)."""
        return torch.randn(1, tokens, self.model.hidden_size, device=self.device)

    def rotary(self, slices: Slices) -> tuple[Tensor, Tensor]:
        """Return the rotary tables of a chunk."""
        positions = torch.cat([torch.arange(start, start + length) for start, length in slices])[
            None
        ].to(self.device)
        rotary: tuple[Tensor, Tensor] = self.stage.whole.model.rotary_emb(
            torch.empty(0, device=self.device), positions
        )
        return rotary

    def segments(self, slices: Slices) -> Segments:
        """Return a segment table; a slice with context finds its K and V written and their gradients allocated."""
        store, table, first = KVStore(), [], 0
        for index, (start, length) in enumerate(slices):
            table.append(
                Segment(
                    first=first, length=length, sequence=index, start=start, total=start + length
                )
            )
            first += length
            if start:
                assert self.write_context(store, index, start, start + length).gradients
        return Segments(table=tuple(table), store=store, kernel=kernel_for(self.device))

    def write_context(self, store: KVStore, sequence: int, start: int, total: int) -> Slot:
        """Make a sequence's slot and write K and V up to `start`."""
        key = torch.randn(
            1, self.model.num_kv_heads, start, self.model.head_dim, device=self.device
        )
        context = Segment(first=0, length=start, sequence=sequence, start=0, total=total)
        return store.write(context, self.layer.self_attn.layer_idx, key, key)

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
    config = json.loads(model.config) | {"num_hidden_layers": num_layers}
    config.pop("layer_types", None)
    return msgspec.structs.replace(model, num_layers=num_layers, config=json.dumps(config))
