"""The cost model: the one door to what a profile says, for stages of a layout."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from copy import copy
from dataclasses import replace
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
from infinipipe.costs.links import (
    all_gather_line,
    copies_group,
    edge_lines,
    fastest_edge,
    reduce_scatter_line,
    tied_pair,
)
from infinipipe.costs.memory import StageBytes, StageMemory, stage_memory
from infinipipe.costs.program import PackedProgram
from infinipipe.costs.rates import ChunkRates, make_rates
from infinipipe.costs.sharded import sharded_profile
from infinipipe.costs.times import curve_seconds, layer_seconds
from infinipipe.costs.work import Work, average_work
from infinipipe.ir import Chunk, Layout, Model, OpKind, Sequence, Stage
from infinipipe.profiles import ELEMENT_BYTES, Curve, Line, Profile

# Kernels index elements with 32 bits.
_MOST_ELEMENTS = 2**31 - 1
# Less than any kernel launch takes; without overhead, infinitely many chunks would be best.
_LEAST_OVERHEAD_S = 1e-9
# Gradients are added up in float32, whatever parameters and activations are in.
_GRADIENT_BYTES = 4
# What decays and what does not is exchanged apart; and so is a tied weight.
_PARTS = 2


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
        assert self.layout.num_stages == len(stages), "the layout says how many stages there are"
        # A copy keeps what is known of the layout already.
        other = copy(self)
        other.stages = tuple(stages)
        return other

    @property
    def model(self) -> Model:
        """The model's shape."""
        return self.profile.model

    @cached_property
    def rank_profile(self) -> Profile:
        """The profile as one rank sees it of those that share a stage's sequences."""
        return sharded_profile(self.profile, self.layout)

    @cached_property
    def _edges(self) -> tuple[Line, ...]:
        return edge_lines(self.profile.times, self.layout)

    # Chunks and programs

    def price(self, chunks: SequenceOf[Chunk], sequences: SequenceOf[Sequence]) -> CostedChunks:
        """Price chunks of a step's sequences on every stage."""
        sizes = chunk_sizes(chunks, sequences)
        # All ranks wait for the one that has most of a chunk's tokens.
        num_ranks = self.layout.sequence_parallel
        tokens = -(-sizes.tokens // num_ranks) * num_ranks
        return price_chunks(
            self.rank_profile,
            self.stages,
            self._edges,
            replace(sizes, tokens=tokens),
            self.logits_tokens * num_ranks,
        )

    def price_input_weight(self, costed: CostedChunks) -> InputWeightCosts | None:
        """Price I and W of the same chunks; None if the profile does not."""
        return price_input_weight(self.rank_profile, self.stages, costed.sizes)

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
        per = self.rank_profile.bytes
        held = StageBytes(
            stage=self.stages[stage_index],
            static_bytes=self.static_bytes(stage_index),
            kv_per_token=per.layer_kv_per_token,
            kv_gradients_per_token=per.layer_kv_grad_per_token,
        )
        return stage_memory(held, stage_index, costed, program, parts)

    # Between steps

    def static_bytes(self, stage_index: int) -> int:
        """Return the bytes a rank of a stage holds between steps.

        These are parameters, gradients and, of the optimizer's state, a part as large as that of
        each other rank that holds the stage.
        """
        num_parameters = self._parameters(stage_index)
        return math.ceil(self._static_per_parameter * num_parameters)

    @property
    def static_bytes_per_layer(self) -> int:
        """What each layer of a stage adds to its static bytes."""
        return math.ceil(self._static_per_parameter * self.model.layer_parameters)

    @property
    def _static_per_parameter(self) -> float:
        per = self.profile.bytes
        sharded = per.sharded_per_parameter / self.layout.num_copies
        return per.static_per_parameter + sharded

    def optimizer_s(self, stage_index: int) -> float:
        """Return the seconds of the optimizer's step on a stage.

        Each rank that holds the stage updates its part of the parameters.
        """
        line = self.profile.times.optimizer_s
        num_parameters = self._parameters(stage_index) / self.layout.num_copies
        rising_s = line.rate * num_parameters
        return line.constant + rising_s

    def gradient_sync_s(self, stage_index: int) -> float:
        """Return the seconds in which the ranks that hold a stage come to equal parameters again.

        Gradients are added up, of which each rank gets its part, and when it has updated its part
        of the parameters it hands them out. In between the copies of a tied weight add up theirs.
        """
        times = self.profile.times
        num_parameters = self._parameters(stage_index)
        gradient_bytes = _GRADIENT_BYTES * num_parameters
        parameter_bytes = ELEMENT_BYTES[self.profile.dtype] * num_parameters
        copies = copies_group(self.layout, stage_index)
        scatter = reduce_scatter_line(times, copies)
        gather = all_gather_line(times, copies)
        is_tied = self._has_tied_copy(stage_index)
        num_parts = _PARTS + 1 if is_tied else _PARTS
        seconds = num_parts * (scatter.constant + gather.constant)
        seconds += scatter.rate * gradient_bytes + gather.rate * parameter_bytes
        return seconds + self._tied_sync_s() if is_tied else seconds

    def _has_tied_copy(self, stage_index: int) -> bool:
        """Whether a stage holds a tied weight of which another holds a copy."""
        stage = self.stages[stage_index]
        return self.model.tied and stage.embedding != stage.head

    def _tied_sync_s(self) -> float:
        """Return the seconds in which two copies of a tied weight add up their gradients."""
        times = self.profile.times
        pair = tied_pair(self.layout)
        # Each rank of a stage does so for its part.
        num_parameters = self.model.embedding_parameters / self.layout.num_copies
        num_bytes = _GRADIENT_BYTES * num_parameters
        # To add up and to know the whole sum is to add up parts and to hand them out.
        seconds = _line_at(reduce_scatter_line(times, pair), num_bytes)
        return seconds + _line_at(all_gather_line(times, pair), num_bytes)

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
        return average_work(self.rank_profile, self.layout.num_stages)

    @cached_property
    def chunk_overhead_s(self) -> float:
        """The seconds that one more chunk costs an average stage, attention and tokens apart."""
        times = self.rank_profile.times
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
        num_ranks = self.layout.sequence_parallel
        attention = model.num_heads * model.head_dim
        # Of a rank, per token of the chunk: a part of each token, or of each token's heads.
        widest = max(model.hidden_size, attention, model.intermediate_size, 1)
        return num_ranks * _MOST_ELEMENTS // widest

    def boundary_bytes(self, tokens: int) -> int:
        """Return the bytes of one transfer of a chunk of so many tokens."""
        return math.ceil(tokens * self.rank_profile.bytes.activation_per_token)

    def slot_bytes(self, stage_index: int, tokens: Floats) -> Floats:
        """Return the bytes of K and V on a stage of split sequences of so many tokens."""
        num_layers = self.stages[stage_index].num_layers
        per_token = self.rank_profile.bytes.layer_kv_per_token
        return np.asarray(tokens * num_layers * per_token)

    def slot_gradient_bytes(self, stage_index: int, tokens: Floats) -> Floats:
        """Return the bytes of their gradients."""
        num_layers = self.stages[stage_index].num_layers
        per_token = self.rank_profile.bytes.layer_kv_grad_per_token
        return np.asarray(tokens * num_layers * per_token)

    def rates(self, limits: SequenceOf[int], lengths: Floats) -> ChunkRates:
        """Return the least that chunks of each size need, for the bound: the relaxation of what
        `price` and `memory` say exactly.

        Args:
            limits: bytes of each stage.
            lengths: (sequences,) tokens of each sequence of the batch, longest first.
        """
        room = [limit - self.static_bytes(stage) for stage, limit in enumerate(limits)]
        edge = fastest_edge(self.profile.times, self.layout)
        return make_rates(self.rank_profile, self.stages, edge, room, lengths)

    def layer_s(self, tokens: int, pairs: int, slices: int) -> float:
        """Return the seconds of F and B of one layer for a chunk of whole sequences."""
        times = self.rank_profile.times
        # One chunk.
        sizes = [np.array([count]) for count in (tokens, pairs, slices)]
        forward_s = layer_seconds(times.layer_forward, *sizes)
        backward_s = layer_seconds(times.layer_backward, *sizes)
        return float(forward_s[0]) + float(backward_s[0])

    def ends_s(self, tokens: int) -> tuple[float, float]:
        """Return the seconds of F and B of the embedding, and of the head, for a chunk."""
        times = self.rank_profile.times
        embedding = _curve_at(times.embedding_forward, tokens)
        embedding += _curve_at(times.embedding_backward, tokens)
        head = _curve_at(times.head_forward, tokens)
        head += _curve_at(times.head_backward, tokens)
        return embedding, head


def max_sequence_tokens(model: Model, num_ranks: int) -> int:
    """Return how many tokens a sequence can have that so many ranks share: the K and V that each of
    them has must be indexable with 32 bits."""
    kv_heads = max(1, model.num_kv_heads // num_ranks)
    return _MOST_ELEMENTS // (kv_heads * model.head_dim)


def _line_at(line: Line, count: float) -> float:
    return line.constant + line.rate * count


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
