"""Replays one stage's program of a step: a table from op kind to a short handler.

It has no policy and never reorders; what is sent and received follows from the program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from infinipipe.errors import InfinipipeError, RunError
from infinipipe.ir import Chunk, Header, Op, OpKind, Replica, Step
from infinipipe.ir.text import show_op
from infinipipe.runtime.attention.chunk_attention import KVStore
from infinipipe.runtime.data import chunk_positions, chunk_segments
from infinipipe.runtime.model import StageModel
from infinipipe.runtime.transport import Channel, Transport


class ChunkData(Protocol):
    """Where the executor finds a chunk's tokens and targets; see `infinipipe.runtime.data.StepData`."""

    def tokens(self, chunk: Chunk) -> Tensor:
        """Return (1, tokens) int64."""

    def targets(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return targets (tokens,) int64 and loss weights (tokens,) float32."""


@dataclass
class _Alive:
    """What a chunk leaves between F and B besides its saved activations."""

    received: Tensor | None
    """The stage's input, if it came from another stage and so its gradient goes back."""
    result: GradientEdge


class Executor:
    """One stage of one replica.

    Args:
        header: of the plan.
        stage: index of the stage.
        model: the stage's layers, with gradients allocated.
        transport: its channels.
    """

    def __init__(self, header: Header, stage: int, model: StageModel, transport: Transport) -> None:
        self._header, self._stage, self._model, self._transport = header, stage, model, transport
        self._layout = header.stages[stage]
        self._handlers: dict[OpKind, Callable[[int], None]] = {
            OpKind.FORWARD: self._forward,
            OpKind.BACKWARD: self._backward,
        }

    def run(self, step: Step, replica: Replica, data: ChunkData) -> Tensor:
        """Run the stage's program, adding to the model's gradients; return the step's loss on the last stage, else 0.

        Raises:
            RunError: an op failed; the message names stage, chunk and op, the cause is chained.
        """
        self._step, self._replica, self._data = step, replica, data
        self._store = KVStore()
        self._alive: dict[int, _Alive] = {}
        self._loss = torch.zeros((), device=self._model.device)
        program = replica.programs[self._stage]
        self._expect(program)
        for op in program:
            try:
                self._handlers[op.kind](op.chunk)
            except InfinipipeError:
                raise
            except Exception as error:
                place = f"stage {self._stage}, step {step.index}, chunk {op.chunk}, op {show_op(self._stage, op)}"
                raise RunError(f"{place}: {type(error).__name__}: {error}") from error
        self._transport.finish()
        assert not self._alive, "the program left chunks without backward"
        assert not len(self._store), "the program left K and V behind"
        return self._loss

    def _expect(self, program: tuple[Op, ...]) -> None:
        if not self._layout.embedding:
            forward = [op.chunk for op in program if op.kind == OpKind.FORWARD]
            self._transport.begin(Channel.DOWNSTREAM, map(self._shape, forward))
        if not self._layout.head:
            backward = [op.chunk for op in program if op.kind != OpKind.FORWARD]
            self._transport.begin(Channel.UPSTREAM, map(self._shape, backward))

    def _shape(self, chunk: int) -> tuple[int, ...]:
        return (1, self._replica.chunks[chunk].num_tokens, self._header.model.hidden_size)

    def _forward(self, index: int) -> None:
        chunk = self._replica.chunks[index]
        device = self._model.device
        received = None
        if self._layout.embedding:
            hidden = self._model.embed(self._data.tokens(chunk).to(device))
        else:
            hidden = received = self._transport.receive(Channel.DOWNSTREAM).requires_grad_()
        segments = chunk_segments(chunk, self._step, self._store)
        recompute = self._replica.recompute[self._stage][index]
        hidden = self._model.run_layers(
            hidden, chunk_positions(chunk).to(device), segments, recompute
        )
        assert tuple(hidden.shape) == self._shape(index), (
            f"the plan says {self._shape(index)}, the stage produced {tuple(hidden.shape)}"
        )
        if self._layout.head:
            targets, weights = (tensor.to(device) for tensor in self._data.targets(chunk))
            loss = self._model.loss(hidden, targets, weights, self._header.logits_tokens)
            self._loss += loss.detach()
            self._alive[index] = _Alive(received, get_gradient_edge(loss))
        else:
            # The graph does not need its output's values, so only the transfer holds them.
            self._alive[index] = _Alive(received, get_gradient_edge(hidden))
            self._transport.send(Channel.DOWNSTREAM, hidden.detach())

    def _backward(self, index: int) -> None:
        alive = self._alive.pop(index)
        if self._layout.head:
            gradient = torch.ones((), device=self._model.device)
        else:
            gradient = self._transport.receive(Channel.UPSTREAM)
        torch.autograd.backward((alive.result,), (gradient,))
        if alive.received is not None:
            assert alive.received.grad is not None
            self._transport.send(Channel.UPSTREAM, alive.received.grad)
        piece = self._replica.chunks[index].split_slice(self._step.sequences)
        if piece is not None and piece.start == 0:
            self._store.free(piece.sequence)
