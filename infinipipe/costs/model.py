"""The cost model: the one door to what a profile says, for stages of a layout."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from functools import cached_property

import numpy as np

from infinipipe.aliases import Floats
from infinipipe.costs.chunks import (
    CostedChunks,
    InputWeightCosts,
    Recompute,
    chunk_sizes,
    price_chunks,
    price_input_weight,
)
from infinipipe.costs.memory import StageBytes, StageMemory, stage_memory
from infinipipe.costs.program import PackedProgram
from infinipipe.costs.rates import ChunkRates, make_rates
from infinipipe.costs.times import curve_seconds, layer_seconds
from infinipipe.costs.work import Work, average_work
from infinipipe.ir import Chunk, Layout, Model, OpKind, Sequence, Stage
from infinipipe.profiles import Curve, Profile

# Kernels index elements with 32 bits.
_MOST_ELEMENTS = 2**31 - 1
# Less than any kernel launch takes; without overhead, infinitely many chunks would be best.
_LEAST_OVERHEAD_S = 1e-9
# Gradients are added up in float32, whatever parameters and activations are in.
_GRADIENT_BYTES = 4


class CostModel:
    """What chunks, ops and programs cost on given stages.

    Args:
        profile: of the device and the model.
        layout: how the devices are used.
        stages: the layers of each of its stages.
        logits_tokens: the head computes logits for at most so many tokens at a time.
    """

    def __init__(
        self, profile: Profile, layout: Layout, stages: SequenceOf[Stage], logits_tokens: int
    ) -> None:
        assert layout.num_stages == len(stages), "the layout says how many stages there are"
        self.profile = profile
        self.layout = layout
        self.stages = tuple(stages)
        self.logits_tokens = logits_tokens

    def with_stages(self, stages: SequenceOf[Stage]) -> CostModel:
        """Return the costs of other stages of the same layout."""
        return CostModel(self.profile, self.layout, stages, self.logits_tokens)

    @property
    def model(self) -> Model:
        """The model's shape."""
        return self.profile.model

    # Chunks and programs

    def price(self, chunks: SequenceOf[Chunk], sequences: SequenceOf[Sequence]) -> CostedChunks:
        """Price chunks of a step's sequences on every stage."""
        sizes = chunk_sizes(chunks, sequences)
        return price_chunks(self.profile, self.stages, sizes, self.logits_tokens)

    def price_input_weight(self, costed: CostedChunks) -> InputWeightCosts | None:
        """Price I and W of the same chunks; None if the profile does not."""
        return price_input_weight(self.profile, self.stages, costed.sizes)

    def op_seconds(
        self, stage_index: int, costed: CostedChunks, program: PackedProgram, recompute: Recompute
    ) -> Floats:
        """Return (ops,) the seconds of each op of a stage's program.

        The profile must price all of them.
        """
        chunks = program.chunks
        recompute_s = costed.recompute_seconds(recompute)
        forward_s = costed.forward_s[stage_index]
        backward_s = costed.backward_s[stage_index] + recompute_s
        in_forward = forward_s[chunks]
        in_backward = backward_s[chunks]
        seconds: Floats = np.where(program.is_forward, in_forward, in_backward)
        if program.has_input_weight:
            parts = self.price_input_weight(costed)
            assert parts is not None, "I and W need their prices"
            inputs = program.is_kind(OpKind.BACKWARD_INPUT)
            weights = program.is_kind(OpKind.BACKWARD_WEIGHT)
            # I needs the activations first, so recompute is its part.
            input_s = parts.input_s[stage_index] + recompute_s
            weight_s = parts.weight_s[stage_index]
            seconds[inputs] = input_s[chunks[inputs]]
            seconds[weights] = weight_s[chunks[weights]]
        return seconds

    def memory(self, stage_index: int, costed: CostedChunks, program: PackedProgram) -> StageMemory:
        """Return the ledger of one stage's bytes over a program."""
        parts = self.price_input_weight(costed) if program.has_input_weight else None
        per = self.profile.bytes
        held = StageBytes(
            stage=self.stages[stage_index],
            static_bytes=self.static_bytes(stage_index),
            kv_per_token=per.layer_kv_per_token,
            kv_gradients_per_token=per.layer_kv_grad_per_token,
        )
        return stage_memory(held, stage_index, costed, program, parts)

    # Between steps

    def static_bytes(self, stage_index: int) -> int:
        """Return the bytes a stage holds between steps: parameters, gradients, optimizer state."""
        per_parameter = self.profile.bytes.static_per_parameter
        return per_parameter * self._parameters(stage_index)

    @property
    def static_bytes_per_layer(self) -> int:
        """What each layer of a stage adds to its static bytes."""
        return self.profile.bytes.static_per_parameter * self.model.layer_parameters

    def optimizer_s(self, stage_index: int) -> float:
        """Return the seconds of the optimizer's step on a stage."""
        line = self.profile.times.optimizer_s
        rising_s = line.rate * self._parameters(stage_index)
        return line.constant + rising_s

    def gradient_sync_s(self, stage_index: int) -> float:
        """Return the seconds in which the replicas of a stage add up their gradients.

        In a ring of D ranks each sends 2 (D - 1) / D of the buffer in 2 (D - 1) messages. What was
        measured among N ranks, those of the all-to-all, is taken to another number by that. A tied
        weight is priced like the others, though both ends of the pipeline add it up together.
        """
        ranks = self.layout.num_copies
        if ranks == 1:
            return 0.0
        num_bytes = _GRADIENT_BYTES * self._parameters(stage_index)
        times = self.profile.times
        measured_ranks = times.all_to_all_ranks
        if times.all_reduce_s is None or measured_ranks <= 1:
            # Only neighbours were measured: a ring of them.
            line = times.transfer_s
            message_s = line.constant + line.rate * num_bytes / ranks
            return 2 * (ranks - 1) * message_s
        line = times.all_reduce_s
        # Times as many messages, and times as large a part of the buffer, as were measured.
        messages = (ranks - 1) / (measured_ranks - 1)
        share = messages * measured_ranks / ranks
        return messages * line.constant + share * line.rate * num_bytes

    @property
    def end_of_step_s(self) -> float:
        """The seconds from the last op of a step to the next step: gradients and optimizer."""
        stages = range(len(self.stages))
        seconds = [self.gradient_sync_s(s) + self.optimizer_s(s) for s in stages]
        return max(seconds)

    def _parameters(self, stage_index: int) -> int:
        """Parameters that a stage holds; a tied head on a stage of its own is a copy."""
        stage = self.stages[stage_index]
        model = self.model
        parameters = stage.num_layers * model.layer_parameters
        if stage.embedding:
            parameters += model.embedding_parameters
        if stage.head:
            # The final norm.
            parameters += model.hidden_size
        if stage.head and not (model.tied and stage.embedding):
            parameters += model.embedding_parameters
        return parameters

    # What planning asks before there are chunks

    @cached_property
    def work(self) -> Work:
        """The work of an average stage."""
        return average_work(self.profile, self.layout.num_stages)

    @cached_property
    def chunk_overhead_s(self) -> float:
        """The seconds that one more chunk costs an average stage, attention and tokens apart."""
        times = self.profile.times
        share = self.model.num_layers / self.layout.num_stages
        overhead_s = times.chunk_forward_s + times.chunk_backward_s
        for layer in (times.layer_forward, times.layer_backward):
            layer_s = max(0.0, _seconds_at_zero(layer.curve))
            overhead_s += share * layer_s
        return max(overhead_s, _LEAST_OVERHEAD_S)

    @property
    def max_chunk_tokens(self) -> int:
        """How many tokens a chunk can have: its activations must be indexable with 32 bits."""
        model = self.model
        attention = model.num_heads * model.head_dim
        widest = max(model.hidden_size, attention, model.intermediate_size, 1)
        return _MOST_ELEMENTS // widest

    def boundary_bytes(self, tokens: int) -> int:
        """Return the bytes of one transfer of a chunk of so many tokens."""
        return tokens * self.profile.bytes.activation_per_token

    def slot_bytes(self, stage_index: int, tokens: Floats) -> Floats:
        """Return the bytes of K and V on a stage of split sequences of so many tokens."""
        num_layers = self.stages[stage_index].num_layers
        per_token = self.profile.bytes.layer_kv_per_token
        return np.asarray(tokens * num_layers * per_token)

    def slot_gradient_bytes(self, stage_index: int, tokens: Floats) -> Floats:
        """Return the bytes of their gradients."""
        num_layers = self.stages[stage_index].num_layers
        per_token = self.profile.bytes.layer_kv_grad_per_token
        return np.asarray(tokens * num_layers * per_token)

    def rates(self, limits: SequenceOf[int], lengths: Floats) -> ChunkRates:
        """Return the least that chunks of each size need, for the bound: the relaxation of what
        `price` and `memory` say exactly.

        Args:
            limits: bytes of each stage.
            lengths: (sequences,) tokens of each sequence of the batch, longest first.
        """
        room = [limit - self.static_bytes(stage) for stage, limit in enumerate(limits)]
        return make_rates(self.profile, self.stages, room, lengths)

    def layer_s(self, tokens: int, pairs: int, slices: int) -> float:
        """Return the seconds of F and B of one layer for a chunk of whole sequences."""
        times = self.profile.times
        # One chunk.
        sizes = [np.array([count]) for count in (tokens, pairs, slices)]
        forward_s = layer_seconds(times.layer_forward, *sizes)
        backward_s = layer_seconds(times.layer_backward, *sizes)
        return float(forward_s[0]) + float(backward_s[0])

    def ends_s(self, tokens: int) -> tuple[float, float]:
        """Return the seconds of F and B of the embedding, and of the head, for a chunk."""
        times = self.profile.times
        embedding = _curve_at(times.embedding_forward, tokens)
        embedding += _curve_at(times.embedding_backward, tokens)
        head = _curve_at(times.head_forward, tokens)
        head += _curve_at(times.head_backward, tokens)
        return embedding, head


def max_sequence_tokens(model: Model) -> int:
    """Return how many tokens a sequence can have: its K and V must be indexable with 32 bits."""
    return _MOST_ELEMENTS // max(model.kv_size, 1)


def _curve_at(curve: Curve, tokens: int) -> float:
    seconds = curve_seconds(curve, np.array([tokens]))
    return float(seconds[0])


def _seconds_at_zero(curve: Curve) -> float:
    """Return the seconds at zero tokens of the line through a curve's first and last size.

    It is what is left when tokens are paid by their mean slope, as in `Work`.
    """
    first = curve.tokens[0]
    last = curve.tokens[-1]
    first_s = curve.seconds[0]
    last_s = curve.seconds[-1]
    rise = last_s - first_s
    run = last - first
    return first_s - first * rise / run
