"""What chunks cost on every stage: seconds of their ops, and bytes (design, section 5).

The runtime does not cut B into I and W. Where a profile prices them: I does all that B does for
activations, recompute, attention and K and V included, and leaves for W the inputs of a layer's
products and the gradients of their outputs. The head's weight has its gradient since F, so the
last stage's W is of layers only; the embedding has nothing but a W.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from infinipipe.aliases import Bools, Floats, Ints
from infinipipe.costs.times import curve_seconds, layer_seconds, line_values
from infinipipe.ir import Chunk, Sequence, Stage
from infinipipe.profiles.profile import LayerTime, Profile


@dataclass(frozen=True)
class ChunkSizes:
    """What the cost of each of C chunks depends on; arrays of shape (C,)."""

    tokens: Ints
    pairs: Ints
    slices: Ints
    context: Ints
    """Start of the split sequence's slice, 0 without one."""
    continued: Ints
    """Tokens of that slice, 0 where it has no context."""
    whole: Bools
    """Whether the chunk holds any whole sequence."""
    split: Ints
    """The step's sequence that the chunk holds a slice of, -1 for none."""
    split_tokens: Ints
    """Tokens of that whole sequence, 0 for none."""

    @cached_property
    def slice_ends(self) -> tuple[Ints, Ints]:
        """The chunks with each split sequence's first slice, and those with its last."""
        by_sequence = np.lexsort((self.context, self.split))
        by_sequence = by_sequence[self.split[by_sequence] >= 0]
        firsts = np.flatnonzero(self.context[by_sequence] == 0)
        lasts = np.append(firsts[1:], len(by_sequence)) - 1
        # Without any split sequence there is no last one either.
        return by_sequence[firsts], by_sequence[lasts[: len(firsts)]]


def chunk_sizes(chunks: SequenceOf[Chunk], sequences: SequenceOf[Sequence]) -> ChunkSizes:
    """Collect the sizes of chunks."""
    split = [chunk.split_slice(sequences) for chunk in chunks]
    starts = [s.start if s else 0 for s in split]
    continued = [s.length if s and s.start else 0 for s in split]
    num_whole = [len(c.slices) - (s is not None) for c, s in zip(chunks, split, strict=True)]
    split_sequences = [s.sequence if s else -1 for s in split]
    split_tokens = [sequences[s.sequence].length if s else 0 for s in split]
    return ChunkSizes(
        tokens=np.array([c.num_tokens for c in chunks], dtype=np.int64),
        pairs=np.array([c.num_pairs for c in chunks], dtype=np.int64),
        slices=np.array([len(c.slices) for c in chunks], dtype=np.int64),
        context=np.array(starts, dtype=np.int64),
        continued=np.array(continued, dtype=np.int64),
        whole=np.array(num_whole, dtype=np.int64) > 0,
        split=np.array(split_sequences, dtype=np.int64),
        split_tokens=np.array(split_tokens, dtype=np.int64),
    )


@dataclass(frozen=True)
class CostedChunks:
    """Seconds and bytes of C chunks on P stages.

    Arrays are (P, C), or (C,) where all stages agree.
    """

    sizes: ChunkSizes
    forward_s: Floats
    backward_s: Floats
    """Without recompute."""
    recompute_s: Floats
    """(C,) added to B for each recomputed layer."""
    transfer_s: Floats
    """(C,) one activation (or its gradient) between neighbours."""
    activation_bytes: Floats
    """Kept from F to B, with no recompute."""
    freed_per_layer_bytes: Floats
    """(C,) not kept for each recomputed layer."""
    boundary_bytes: Floats
    """(C,) one transfer: what travels between stages, and the input that every layer keeps."""
    forward_transient_bytes: Floats
    """Needed in F above what it keeps."""
    recompute_transient_bytes: Floats
    """The same besides where all layers are recomputed: a layer that keeps nothing peaks above what
    it keeps. With any layer that is not recomputed, its activations are more than that."""
    backward_transient_bytes: Floats
    """Needed in B."""

    @property
    def work_s(self) -> Floats:
        """(P,) seconds of F and B without recompute."""
        return np.asarray((self.forward_s + self.backward_s).sum(axis=1))


@dataclass(frozen=True)
class InputWeightCosts:
    """Seconds and bytes of C chunks on P stages where B is cut into I and W.

    Arrays are as those of `CostedChunks`.
    """

    input_s: Floats
    """Without recompute, which adds to I what it would add to B."""
    weight_s: Floats
    weight_input_bytes: Floats
    """(C,) from I to W for each layer, whether it was recomputed or not."""
    embedding_weight_input_bytes: Floats
    """From I to W besides: on the first stage the embedding's tokens and the gradient of its
    output."""
    input_transient_bytes: Floats
    """Needed in I."""
    weight_transient_bytes: Floats
    """Needed in W."""


class _Ends:
    """Which stages hold what, as columns of shape (P, 1) that multiply rows of chunks."""

    def __init__(self, stages: SequenceOf[Stage]) -> None:
        self.layers = np.array([[stage.num_layers] for stage in stages])
        self.first = np.array([[stage.embedding] for stage in stages])
        self.last = np.array([[stage.head] for stage in stages])


def price_chunks(
    profile: Profile, stages: SequenceOf[Stage], sizes: ChunkSizes, logits_tokens: int
) -> CostedChunks:
    """Price chunks on every stage."""
    times = profile.times
    tokens = sizes.tokens
    ends = _Ends(stages)

    forward_s = times.chunk_forward_s + ends.layers * _layer_seconds(times.layer_forward, sizes)
    forward_s = forward_s + ends.first * curve_seconds(times.embedding_forward, tokens)
    forward_s = forward_s + ends.last * curve_seconds(times.head_forward, tokens)
    backward_s = times.chunk_backward_s + ends.layers * _layer_seconds(times.layer_backward, sizes)
    backward_s = backward_s + ends.first * curve_seconds(times.embedding_backward, tokens)
    backward_s = backward_s + ends.last * curve_seconds(times.head_backward, tokens)

    boundary = _boundary_bytes(profile, tokens)
    layer = _layer_bytes(profile, sizes)
    forward_transient = _forward_transient_bytes(profile, ends, tokens, logits_tokens)
    return CostedChunks(
        sizes=sizes,
        forward_s=forward_s,
        backward_s=backward_s,
        recompute_s=_layer_seconds(times.layer_recompute, sizes),
        transfer_s=line_values(times.transfer_s, boundary),
        activation_bytes=ends.layers * layer + tokens * _bytes_besides_layers(profile, ends),
        freed_per_layer_bytes=layer - boundary,
        boundary_bytes=boundary,
        forward_transient_bytes=forward_transient,
        recompute_transient_bytes=_recompute_transient_bytes(
            profile, ends, tokens, forward_transient
        ),
        backward_transient_bytes=_backward_transient_bytes(profile, ends, sizes, layer),
    )


def price_input_weight(
    profile: Profile, stages: SequenceOf[Stage], sizes: ChunkSizes
) -> InputWeightCosts | None:
    """Price I and W of chunks on every stage; None if the profile does not."""
    times = profile.times
    per_token = profile.bytes.layer_split_per_token
    input_time = times.layer_input_backward
    weight_time = times.layer_weight_backward
    if input_time is None or weight_time is None or per_token is None:
        return None
    tokens = sizes.tokens
    ends = _Ends(stages)

    input_s = times.chunk_backward_s + ends.layers * _layer_seconds(input_time, sizes)
    input_s = input_s + ends.last * curve_seconds(times.head_backward, tokens)
    # Coming back to a chunk costs what coming to it does.
    weight_s = times.chunk_backward_s + ends.layers * _layer_seconds(weight_time, sizes)
    weight_s = weight_s + ends.first * curve_seconds(times.embedding_backward, tokens)

    left: Floats = np.multiply(tokens, per_token, dtype=np.float64)
    embedding_per_token = profile.bytes.activation_per_token + profile.bytes.embedding_per_token
    embedding_left: Floats = tokens * np.float64(embedding_per_token)
    embedding_peak = line_values(profile.bytes.embedding_backward_peak, tokens)
    # The embedding's gradient comes when what the layers left is gone.
    embedding_excess = ends.first * (embedding_peak - ends.layers * left)
    one_gradient = profile.bytes.layer_backward_peak.constant
    return InputWeightCosts(
        input_s=input_s,
        weight_s=weight_s,
        weight_input_bytes=left,
        embedding_weight_input_bytes=ends.first * embedding_left,
        input_transient_bytes=_layers_backward_transient_bytes(profile, ends, sizes),
        # One weight's gradient is there before it is added.
        weight_transient_bytes=np.maximum(one_gradient, embedding_excess),
    )


def _layer_seconds(time: LayerTime, sizes: ChunkSizes) -> Floats:
    return layer_seconds(
        time, sizes.tokens, sizes.pairs, sizes.slices, sizes.context, sizes.continued
    )


def _boundary_bytes(profile: Profile, tokens: Ints) -> Floats:
    return np.multiply(tokens, profile.bytes.activation_per_token, dtype=np.float64)


def _layer_bytes(profile: Profile, sizes: ChunkSizes) -> Floats:
    """(C,) bytes that a layer keeps which is not recomputed."""
    tokens = sizes.tokens
    # The runtime keeps K and V of all the chunk's tokens if any of its sequences is whole; those of
    # a split one are in its slot.
    own_kv = np.where(sizes.whole, tokens * profile.bytes.layer_kv_per_token, 0)
    return np.asarray(tokens * profile.bytes.layer_full_per_token + own_kv)


def _bytes_besides_layers(profile: Profile, ends: _Ends) -> Floats:
    """(P, 1) bytes per token that a stage keeps of a chunk besides those of its layers."""
    sizes = profile.bytes
    embedding = ends.first * sizes.embedding_per_token
    head = ends.last * sizes.head_per_token
    return np.asarray(sizes.chunk_per_token + embedding + head)


def _forward_transient_bytes(
    profile: Profile, ends: _Ends, tokens: Ints, logits_tokens: int
) -> Floats:
    sizes = profile.bytes
    logits = np.minimum(tokens, logits_tokens) * sizes.logits_per_token
    layer = line_values(sizes.layer_forward_peak, tokens)
    head = line_values(sizes.head_forward_peak, tokens) + logits
    return np.maximum(layer, ends.last * head)


def _recompute_transient_bytes(
    profile: Profile, ends: _Ends, tokens: Ints, forward_transient: Floats
) -> Floats:
    dropped = line_values(profile.bytes.recompute_forward_peak, tokens)
    # What the head keeps is not there yet when the layers run.
    head = ends.last * tokens * profile.bytes.head_per_token
    return np.maximum(0.0, dropped - forward_transient - head)


def _backward_transient_bytes(
    profile: Profile, ends: _Ends, sizes: ChunkSizes, layer: Floats
) -> Floats:
    embedding = line_values(profile.bytes.embedding_backward_peak, sizes.tokens)
    # The embedding's backward runs when the layers' activations are gone, so only what it needs
    # above them counts.
    above_layers = ends.first * (embedding - ends.layers * layer)
    layers = _layers_backward_transient_bytes(profile, ends, sizes)
    return np.maximum(layers, above_layers)


def _layers_backward_transient_bytes(profile: Profile, ends: _Ends, sizes: ChunkSizes) -> Floats:
    """(P, C) bytes that the backward of head and layers needs."""
    per = profile.bytes
    tokens = sizes.tokens
    # The gradients of the context's K and V come and go within attention, which is not where a
    # layer peaks otherwise.
    in_attention = per.slice_backward_per_token * tokens + per.context_per_token * sizes.context
    in_attention = np.where(sizes.context > 0, in_attention, 0.0)
    layer = np.maximum(line_values(per.layer_backward_peak, tokens), in_attention)
    # What the head kept is gone when the layers run backward, but for the gradient that it hands
    # them.
    after_head = ends.last * (tokens * per.activation_per_token - tokens * per.head_per_token)
    head = ends.last * line_values(per.head_backward_peak, tokens)
    return np.asarray(np.maximum(layer + after_head, head))
