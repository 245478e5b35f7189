"""Replays one stage's program of a step: a table from op kind to a short handler.

It has no policy and never reorders; what is sent and received follows from the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.functional import pad

from infinipipe.errors import InfinipipeError, RunError
from infinipipe.ir import TRAITS, Chunk, Header, Op, OpKind, Replica, Step, show_op
from infinipipe.runtime.attention import NO_EXCHANGE, Exchange, KVStore, kernel_for
from infinipipe.runtime.data import chunk_positions, chunk_segments
from infinipipe.runtime.model import StageModel
from infinipipe.runtime.ranks import Channel
from infinipipe.runtime.shards import shard_of
from infinipipe.runtime.transport import Shape, Transport


class ChunkData(Protocol):
    """Where the executor finds tokens and targets of what this rank has of a chunk, such as
    `runtime.data.StepData`.
    """

    def tokens(self, chunk: Chunk) -> Tensor:
        """Return (1, tokens) int64."""

    def targets(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return targets (tokens,) int64 and loss weights (tokens,) float32."""


@dataclass
class _Unfinished:
    """What a chunk leaves between F and B besides its activations."""

    received: Tensor | None
    """The stage's input, if it came from another stage and so its gradient goes back."""
    result: GradientEdge


@dataclass
class _StepState:
    """A step as far as it has been replayed."""

    step: Step
    replica: Replica
    data: ChunkData
    shards: tuple[Chunk, ...]
    """What this rank has of each chunk."""
    loss: Tensor
    store: KVStore = field(default_factory=KVStore)
    unfinished: dict[int, _Unfinished] = field(default_factory=dict)
    """By chunk."""


class Executor:
    """One stage of one replica, or a rank's part of it.

    Args:
        header: of the plan.
        stage_index: which of the header's stages.
        model: the stage's layers, with gradients allocated.
        transport: its channels.
        exchange: with the ranks that share the stage's sequences.
    """

    def __init__(
        self,
        header: Header,
        stage_index: int,
        model: StageModel,
        transport: Transport,
        exchange: Exchange = NO_EXCHANGE,
    ) -> None:
        self._header = header
        self._stage_index = stage_index
        self._stage = header.stages[stage_index]
        self._model = model
        self._transport = transport
        self._exchange = exchange
        self._kernel = kernel_for(model.device)

    def run(self, step: Step, replica: Replica, data: ChunkData) -> Tensor:
        """Run the stage's program of a step, adding to the model's gradients.

        Returns:
            The part of the step's loss of this rank's tokens on the last stage, 0 on the others.

        Raises:
            RunError: an op failed; the message names stage, chunk and op, the cause is chained.
        """
        loss = torch.zeros((), device=self._model.device)
        shards = tuple(self._shard(chunk) for chunk in replica.chunks)
        state = _StepState(step, replica, data, shards, loss)
        program = replica.programs[self._stage_index]
        self._begin_transfers(program, shards)
        for op in program:
            with self._failures_named(step, op):
                HANDLERS[op.kind](self, state, op.chunk)
        self._transport.finish()
        assert not state.unfinished, "the program left chunks without backward"
        assert not len(state.store), "the program left K and V behind"
        return state.loss

    @contextmanager
    def _failures_named(self, step: Step, op: Op) -> Iterator[None]:
        """Turn what no user caused into an error that says which op failed."""
        try:
            yield
        except InfinipipeError:
            # It says by itself what the user can do.
            raise
        except Exception as error:
            op_text = show_op(self._stage_index, op)
            where = f"stage {self._stage_index}, step {step.index}, chunk {op.chunk}, op {op_text}"
            raise RunError(f"{where}: {type(error).__name__}: {error}") from error

    def _shard(self, chunk: Chunk) -> Chunk:
        return shard_of(chunk, self._exchange.num_ranks, self._exchange.index)

    def _begin_transfers(self, program: tuple[Op, ...], shards: tuple[Chunk, ...]) -> None:
        """Say what will arrive: the input of an op comes the way that its result goes."""
        for channel in Channel:
            if not self._receives(channel):
                continue
            ops = [op for op in program if TRAITS[op.kind].travels == channel.value]
            shapes = [self._boundary_shape(shards[op.chunk]) for op in ops]
            self._transport.begin(channel, shapes, self._model.dtype)

    def _receives(self, channel: Channel) -> bool:
        """Whether another stage sends to this one; the ends embed tokens and compute the loss."""
        if channel is Channel.DOWNSTREAM:
            return not self._stage.embedding
        return not self._stage.head

    def _boundary_shape(self, shard: Chunk) -> Shape:
        return (1, shard.num_tokens, self._header.model.hidden_size)

    def _forward(self, state: _StepState, index: int) -> None:
        shard = state.shards[index]
        received = None
        if self._stage.embedding:
            tokens = state.data.tokens(shard)
            hidden = self._model.embed(tokens.to(self._model.device))
        else:
            received = self._transport.receive(Channel.DOWNSTREAM).requires_grad_()
            hidden = received
        hidden = self._run_layers(state, index, hidden)
        if self._stage.head:
            result = self._add_loss(state, shard, hidden)
        else:
            result = get_gradient_edge(hidden)
            # The graph does not need its output's values, so only the transfer holds them.
            self._transport.send(Channel.DOWNSTREAM, hidden.detach())
        state.unfinished[index] = _Unfinished(received, result)

    def _run_layers(self, state: _StepState, index: int, hidden: Tensor) -> Tensor:
        chunk = state.replica.chunks[index]
        shard = state.shards[index]
        positions = chunk_positions(shard).to(self._model.device)
        segments = chunk_segments(chunk, state.step, state.store, self._kernel, self._exchange)
        recompute = state.replica.recompute[self._stage_index][index]
        keep_attention = state.replica.keep_attention[self._stage_index][index]
        if shard.num_tokens == 0:
            # Layers of transformers cannot run on no token at all. They get one here that goes
            # nowhere, as this rank takes part in attention all the same.
            hidden = pad(hidden, (0, 0, 0, 1))
            positions = pad(positions, (0, 1))
        hidden = self._model.run_layers(hidden, positions, segments, recompute, keep_attention)
        if shard.num_tokens == 0:
            hidden = hidden[:, :0]
        planned = self._boundary_shape(shard)
        actual = tuple(hidden.shape)
        assert actual == planned, f"the plan says {planned}, the stage produced {actual}"
        return hidden

    def _add_loss(self, state: _StepState, shard: Chunk, hidden: Tensor) -> GradientEdge:
        targets, token_weights = state.data.targets(shard)
        loss = self._model.loss(
            hidden,
            targets.to(self._model.device),
            token_weights.to(self._model.device),
            self._header.logits_tokens,
        )
        state.loss += loss.detach()
        return get_gradient_edge(loss)

    def _backward(self, state: _StepState, index: int) -> None:
        chunk = state.replica.chunks[index]
        unfinished = state.unfinished.pop(index)
        if self._stage.head:
            # The step's loss is the plain sum of its chunks' losses.
            gradient = torch.ones((), device=self._model.device)
        else:
            gradient = self._transport.receive(Channel.UPSTREAM)
        # From the edge and not from the output, whose values are gone.
        torch.autograd.backward((unfinished.result,), (gradient,))
        if unfinished.received is not None:
            assert unfinished.received.grad is not None
            self._transport.send(Channel.UPSTREAM, unfinished.received.grad)
        split_slice = chunk.split_slice(state.step.sequences)
        # The first slice's backward is a split sequence's last.
        if split_slice is not None and split_slice.start == 0:
            state.store.free(split_slice.sequence)


HANDLERS: dict[OpKind, Callable[[Executor, _StepState, int], None]] = {
    OpKind.FORWARD: Executor._forward,
    OpKind.BACKWARD: Executor._backward,
}
"""What runs an op of each kind, given the op's chunk; `prepare.RUNNABLE` names the same kinds."""
