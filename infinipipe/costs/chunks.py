"""What chunks cost on every stage: seconds of their ops, and bytes.

The runtime does not cut B into I and W. Where a profile prices them: I does all that B does for
activations, recompute, attention and K and V included, and leaves for W the inputs of a layer's
products and the gradients of their outputs. The head's weight has its gradient since F, so the
last stage's W is of layers only; the embedding has nothing but a W.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from infinipipe.aliases import Bools, Floats, Ints
from infinipipe.costs.times import curve_seconds, layer_seconds, line_values
from infinipipe.ir import Chunk, Sequence, Stage
from infinipipe.profiles import ELEMENT_BYTES, LayerTime, Line, Profile


@dataclass(frozen=True)
class ChunkSizes:
    """What the cost of each of C chunks depends on; arrays of shape (C,)."""

    tokens: Ints
    pairs: Ints
    """Pairs of tokens of which one attends to the other."""
    slices: Ints
    """How many slices the chunk holds, whole sequences included."""
    context: Ints
    """Start of the split sequence's slice, 0 without one."""
    continued: Ints
    """Tokens of that slice, 0 where it has no context."""
    whole: Bools
    """Whether the chunk holds any whole sequence."""
    split: Ints
    """The step's sequence that the chunk holds a slice of, -1 for none."""
    split_tokens: Ints
    """Tokens of that sequence, all slices; 0 for none."""

    @cached_property
    def slice_ends(self) -> tuple[Ints, Ints]:
        """The chunks with each split sequence's first slice, and those with its last."""
        by_sequence = np.lexsort((self.context, self.split))
        # Chunks without a slice of a split sequence come first in that order.
        is_split = self.split[by_sequence] >= 0
        by_sequence = by_sequence[is_split]
        starts = self.context[by_sequence]
        firsts = np.flatnonzero(starts == 0)
        # Each split sequence ends where the next one begins.
        ends = np.append(firsts[1:], len(by_sequence))
        # Without any split sequence there is no last slice either.
        lasts = ends[: len(firsts)] - 1
        return by_sequence[firsts], by_sequence[lasts]


def chunk_sizes(chunks: SequenceOf[Chunk], sequences: SequenceOf[Sequence]) -> ChunkSizes:
    """Collect the sizes of chunks."""
    slices = list(chain.from_iterable(chunk.slices for chunk in chunks))
    sequence = _ints([slice_.sequence for slice_ in slices])
    start = _ints([slice_.start for slice_ in slices])
    length = _ints([slice_.length for slice_ in slices])
    whole_length = _ints([sequences[slice_.sequence].length for slice_ in slices])
    num_slices = _ints([len(chunk.slices) for chunk in chunks])
    ends = np.cumsum(num_slices)
    pairs = length * start + length * (length + 1) // 2

    num_chunks = len(chunks)
    context = np.zeros(num_chunks, dtype=np.int64)
    continued = np.zeros(num_chunks, dtype=np.int64)
    split = np.full(num_chunks, -1, dtype=np.int64)
    split_tokens = np.zeros(num_chunks, dtype=np.int64)
    # At most one slice of a chunk is a part of its sequence.
    parts = np.flatnonzero(length != whole_length)
    holders = np.searchsorted(ends, parts, side="right")
    split[holders] = sequence[parts]
    split_tokens[holders] = whole_length[parts]
    context[holders] = start[parts]
    continued[holders] = np.where(start[parts] > 0, length[parts], 0)
    num_parts = np.bincount(holders, minlength=num_chunks)
    return ChunkSizes(
        tokens=_sums(length, ends),
        pairs=_sums(pairs, ends),
        slices=num_slices,
        context=context,
        continued=continued,
        whole=num_slices > num_parts,
        split=split,
        split_tokens=split_tokens,
    )


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _sums(values: Ints, ends: Ints) -> Ints:
    """Return the sums of runs of values, given where each run ends and the next one begins."""
    so_far = np.append(0, np.cumsum(values))
    return np.diff(so_far[ends], prepend=0)


# The log-sum-exp of attention is in float32, whatever activations are in.
_LSE_BYTES = 4


class Recompute(NamedTuple):
    """How many layers of each chunk are recomputed in B; (chunks,), or (stages, chunks)."""

    keep_input: Ints
    """Those that keep only their input."""
    keep_attention: Ints
    """Those that keep attention's output besides: their recompute does without its kernel."""


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
    """(C,) added to B for each layer that keeps only its input."""
    attention_s: Floats
    """(C,) the part of that which a layer is spared that keeps attention's output: its kernel."""
    transfer_s: Floats
    """(edges, C) one activation down from stage e to the next one, or its gradient up: a row for
    each pair of neighbours, P - 1 of them."""
    activation_bytes: Floats
    """Kept from F to B, with no recompute."""
    freed_per_layer_bytes: Floats
    """(C,) not kept by each layer that keeps only its input."""
    attention_bytes: Floats
    """(C,) what a layer holds that keeps attention's output besides: it, and its log-sum-exp."""
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
        seconds = self.forward_s + self.backward_s
        return np.asarray(seconds.sum(axis=1))

    def recompute_seconds(self, recompute: Recompute) -> Floats:
        """Return what recompute adds to each B, in the shape of its counts."""
        in_whole = recompute.keep_input * self.recompute_s
        without_attention = recompute.keep_attention * (self.recompute_s - self.attention_s)
        seconds: Floats = in_whole + without_attention
        return seconds


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


class _StageColumns:
    """Which stages hold what, as columns of shape (P, 1).

    Times rows of shape (C,) they give what every stage needs for every chunk; what only the first
    or the last stage does, times its column, is 0 on the others.
    """

    def __init__(self, stages: SequenceOf[Stage]) -> None:
        layers = [stage.num_layers for stage in stages]
        first = [stage.embedding for stage in stages]
        last = [stage.head for stage in stages]
        self.layers = np.array(layers)[:, None]
        self.first = np.array(first)[:, None]
        self.last = np.array(last)[:, None]


def price_chunks(
    profile: Profile,
    stages: SequenceOf[Stage],
    edges: SequenceOf[Line],
    sizes: ChunkSizes,
    logits_tokens: int,
) -> CostedChunks:
    """Price chunks on every stage.

    Args:
        profile: as a rank sees it.
        stages: of the layout.
        edges: seconds per byte from each stage to the next.
        sizes: of the chunks.
        logits_tokens: at most so many tokens' logits are there at a time, on all ranks that share
            the chunk.
    """
    times = profile.times
    tokens = sizes.tokens
    columns = _StageColumns(stages)
    forward_s = _stage_seconds(
        columns,
        chunk_s=times.chunk_forward_s,
        layer_s=_layer_seconds(times.layer_forward, sizes),
        embedding_s=curve_seconds(times.embedding_forward, tokens),
        head_s=curve_seconds(times.head_forward, tokens),
    )
    backward_s = _stage_seconds(
        columns,
        chunk_s=times.chunk_backward_s,
        layer_s=_layer_seconds(times.layer_backward, sizes),
        embedding_s=curve_seconds(times.embedding_backward, tokens),
        head_s=curve_seconds(times.head_backward, tokens),
    )

    boundary = _boundary_bytes(profile, tokens)
    layer = _layer_bytes(profile, sizes)
    recompute_s = _layer_seconds(times.layer_recompute, sizes)
    # All but the curve is attention's: the curve has the layer's other parts, and exchanges.
    besides_attention_s = curve_seconds(times.layer_recompute.curve, tokens)
    besides_layers = tokens * _bytes_besides_layers(profile, columns)
    forward_transient = _forward_transient_bytes(profile, columns, tokens, logits_tokens)
    recompute_transient = _recompute_transient_bytes(profile, columns, tokens, forward_transient)
    return CostedChunks(
        sizes=sizes,
        forward_s=forward_s,
        backward_s=backward_s,
        recompute_s=recompute_s,
        attention_s=recompute_s - besides_attention_s,
        transfer_s=_transfer_seconds(edges, boundary),
        activation_bytes=columns.layers * layer + besides_layers,
        freed_per_layer_bytes=layer - boundary,
        attention_bytes=_attention_bytes(profile, tokens),
        boundary_bytes=boundary,
        forward_transient_bytes=forward_transient,
        recompute_transient_bytes=recompute_transient,
        backward_transient_bytes=_backward_transient_bytes(profile, columns, sizes, layer),
    )


def attention_bytes_per_token(profile: Profile) -> int:
    """Return what attention of a layer gives for a token: its output, and a log-sum-exp a head."""
    model = profile.model
    output = model.num_heads * model.head_dim * ELEMENT_BYTES[profile.dtype]
    return output + model.num_heads * _LSE_BYTES


def price_input_weight(
    profile: Profile, stages: SequenceOf[Stage], sizes: ChunkSizes
) -> InputWeightCosts | None:
    """Price I and W of chunks on every stage; None if the profile does not."""
    times = profile.times
    per = profile.bytes
    input_time = times.layer_input_backward
    weight_time = times.layer_weight_backward
    left_per_token = per.layer_split_per_token
    if input_time is None or weight_time is None or left_per_token is None:
        return None
    tokens = sizes.tokens
    columns = _StageColumns(stages)
    input_s = _stage_seconds(
        columns,
        chunk_s=times.chunk_backward_s,
        layer_s=_layer_seconds(input_time, sizes),
        head_s=curve_seconds(times.head_backward, tokens),
    )
    weight_s = _stage_seconds(
        columns,
        # Coming back to a chunk costs what coming to it does.
        chunk_s=times.chunk_backward_s,
        layer_s=_layer_seconds(weight_time, sizes),
        embedding_s=curve_seconds(times.embedding_backward, tokens),
    )

    left: Floats = np.multiply(tokens, left_per_token, dtype=np.float64)
    embedding_per_token = per.activation_per_token + per.embedding_per_token
    embedding_left: Floats = tokens * np.float64(embedding_per_token)
    embedding_peak = line_values(per.embedding_backward_peak, tokens)
    # The embedding's gradient comes when what the layers left is gone.
    layers_left = columns.layers * left
    above_layers = columns.first * (embedding_peak - layers_left)
    one_gradient = per.layer_backward_peak.constant
    return InputWeightCosts(
        input_s=input_s,
        weight_s=weight_s,
        weight_input_bytes=left,
        embedding_weight_input_bytes=columns.first * embedding_left,
        input_transient_bytes=_layers_backward_transient_bytes(profile, columns, sizes),
        # One weight's gradient is there before it is added.
        weight_transient_bytes=np.maximum(one_gradient, above_layers),
    )


def _stage_seconds(
    columns: _StageColumns,
    *,
    chunk_s: float,
    layer_s: Floats,
    embedding_s: Floats | float = 0.0,
    head_s: Floats | float = 0.0,
) -> Floats:
    """(P, C) seconds of one op of each chunk, from those of its parts."""
    seconds = chunk_s + columns.layers * layer_s
    seconds = seconds + columns.first * embedding_s
    seconds = seconds + columns.last * head_s
    return np.asarray(seconds)


def _layer_seconds(time: LayerTime, sizes: ChunkSizes) -> Floats:
    return layer_seconds(
        time,
        tokens=sizes.tokens,
        pairs=sizes.pairs,
        slices=sizes.slices,
        context=sizes.context,
        continued=sizes.continued,
    )


def _boundary_bytes(profile: Profile, tokens: Ints) -> Floats:
    per_token = profile.bytes.activation_per_token
    return np.multiply(tokens, per_token, dtype=np.float64)


def _attention_bytes(profile: Profile, tokens: Ints) -> Floats:
    per_token = attention_bytes_per_token(profile)
    return np.multiply(tokens, per_token, dtype=np.float64)


def _transfer_seconds(edges: SequenceOf[Line], boundary: Floats) -> Floats:
    """(edges, C) seconds of one transfer between each two neighbours."""
    seconds = [line_values(edge, boundary) for edge in edges]
    # A single stage has no edge.
    return np.array(seconds, dtype=np.float64).reshape(len(edges), len(boundary))


def _layer_bytes(profile: Profile, sizes: ChunkSizes) -> Floats:
    """(C,) bytes that a layer keeps which is not recomputed."""
    tokens = sizes.tokens
    # The runtime keeps K and V of all the chunk's tokens if any of its sequences is whole; those of
    # a split one are in its slot.
    kv = tokens * profile.bytes.layer_kv_per_token
    own_kv = np.where(sizes.whole, kv, 0)
    besides_kv = tokens * profile.bytes.layer_full_per_token
    return np.asarray(besides_kv + own_kv)


def _bytes_besides_layers(profile: Profile, columns: _StageColumns) -> Floats:
    """(P, 1) bytes per token that a stage keeps of a chunk besides those of its layers."""
    per = profile.bytes
    embedding = columns.first * per.embedding_per_token
    head = columns.last * per.head_per_token
    per_token = per.chunk_per_token + embedding + head
    return np.asarray(per_token)


def _forward_transient_bytes(
    profile: Profile, columns: _StageColumns, tokens: Ints, logits_tokens: int
) -> Floats:
    """(P, C) bytes that F needs above what it keeps: in a layer or in the head."""
    per = profile.bytes
    tokens_at_once = np.minimum(tokens, logits_tokens)
    logits = tokens_at_once * per.logits_per_token
    layer = line_values(per.layer_forward_peak, tokens)
    head = line_values(per.head_forward_peak, tokens) + logits
    head = columns.last * head
    return np.maximum(layer, head)


def _recompute_transient_bytes(
    profile: Profile, columns: _StageColumns, tokens: Ints, forward_transient: Floats
) -> Floats:
    """(P, C) bytes that F needs above `forward_transient` where all layers are recomputed."""
    per = profile.bytes
    dropped = line_values(per.recompute_forward_peak, tokens)
    # What the head keeps is not there yet when the layers run.
    head = columns.last * tokens * per.head_per_token
    above = dropped - forward_transient - head
    return np.maximum(0.0, above)


def _backward_transient_bytes(
    profile: Profile, columns: _StageColumns, sizes: ChunkSizes, layer: Floats
) -> Floats:
    """(P, C) bytes that B needs above what the chunk kept, without recompute."""
    embedding = line_values(profile.bytes.embedding_backward_peak, sizes.tokens)
    # The embedding's backward runs when the layers' activations are gone, so only what it needs
    # above them counts.
    all_layers = columns.layers * layer
    above_layers = columns.first * (embedding - all_layers)
    in_layers = _layers_backward_transient_bytes(profile, columns, sizes)
    return np.maximum(in_layers, above_layers)


def _layers_backward_transient_bytes(
    profile: Profile, columns: _StageColumns, sizes: ChunkSizes
) -> Floats:
    """(P, C) bytes that the backward of head and layers needs."""
    per = profile.bytes
    tokens = sizes.tokens
    context = sizes.context
    # The gradients of the context's K and V come and go within attention, which is not where a
    # layer peaks otherwise.
    of_own_tokens = per.slice_backward_per_token * tokens
    of_context = per.context_per_token * context
    in_attention = np.where(context > 0, of_own_tokens + of_context, 0.0)
    otherwise = line_values(per.layer_backward_peak, tokens)
    layer = np.maximum(otherwise, in_attention)
    # What the head kept is gone when the layers run backward, but for the gradient that it hands
    # them.
    gradient = tokens * per.activation_per_token
    head_kept = tokens * per.head_per_token
    after_head = columns.last * (gradient - head_kept)
    in_layers = layer + after_head
    in_head = columns.last * line_values(per.head_backward_peak, tokens)
    most: Floats = np.maximum(in_layers, in_head)
    return most
