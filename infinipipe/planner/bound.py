"""A lower bound on the makespan of one step, valid for every chunking, order and recompute choice.

For each stage: all tokens at the rate of the most efficient chunk that memory allows, all attention pairs,
the recompute that its longest sequences force, and the least time before its first F and after its last B,
while a chunk is on the stages before it.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from infinipipe.ir import Sequence
from infinipipe.planner.problem import Floats, Ints, Pipeline
from infinipipe.profiles import LayerTime
from infinipipe.profiles.cost import curve_seconds, static_bytes

# Where the bound is exact, the simulator's sums may come out a few digits lower.
_ROUNDING = 1 - 1e-9


def makespan_bound(pipeline: Pipeline, sequences: SequenceOf[Sequence], num_replicas: int) -> float:
    """Return seconds that no schedule of these sequences on these stages can undercut."""
    lengths = np.array([s.length for s in sequences], dtype=np.int64)
    if not len(lengths):
        return 0.0
    works = [_stage_work(pipeline, stage, lengths) for stage in range(pipeline.num_stages)]
    fills = _fill_seconds(pipeline)
    # Replicas share the work, but no sequence is in two of them.
    least = max(
        max(float(work.sum()) / num_replicas, float(work.max())) + fill for work, fill in zip(works, fills, strict=True)
    )
    return least * _ROUNDING


def _stage_work(pipeline: Pipeline, stage: int, lengths: Ints) -> Floats:
    """Return the least seconds of F and B of each sequence on one stage."""
    times, num_layers = pipeline.profile.times, pipeline.stages[stage].num_layers
    layers = (times.layer_forward, times.layer_backward)
    pairs = lengths * (lengths + 1) / 2
    per_token = _least_rate(pipeline, stage, int(lengths.sum()))
    work = per_token * lengths + num_layers * pairs * sum(layer.s_per_pair for layer in layers)
    work += num_layers * sum(layer.s_per_slice for layer in layers)
    return np.asarray(work + _forced_recompute(pipeline, stage, lengths))


def _least_rate(pipeline: Pipeline, stage: int, num_tokens: int) -> float:
    """Return the least seconds per token of F and B of any chunk, attention apart.

    The time is straight between the sizes of the profile, so its rate is least at one of them or at the end.
    """
    times, place = pipeline.profile.times, pipeline.stages[stage]
    parts = [(place.num_layers, times.layer_forward.curve), (place.num_layers, times.layer_backward.curve)]
    if place.embedding:
        parts += [(1, times.embedding_forward), (1, times.embedding_backward)]
    if place.head:
        parts += [(1, times.head_forward), (1, times.head_backward)]
    most = max(1, min(num_tokens, _most_tokens(pipeline, stage)))
    knots = {most, *(tokens for _, curve in parts for tokens in curve.tokens if tokens < most)}
    sizes = np.array(sorted(knots), dtype=np.int64)
    seconds = times.chunk_forward_s + times.chunk_backward_s + sum(n * curve_seconds(c, sizes) for n, c in parts)
    return float(np.min(seconds / sizes))


def _most_tokens(pipeline: Pipeline, stage: int) -> int:
    """Return how many tokens a chunk can have at most: its B holds every layer's input and one layer whole."""
    sizes, place = pipeline.profile.bytes, pipeline.stages[stage]
    peak = sizes.layer_backward_peak
    room = pipeline.limits[stage] - static_bytes(pipeline.profile, place) - peak.constant
    inputs = (place.num_layers - 1) * sizes.activation_per_token
    per_token = inputs + sizes.layer_full_per_token + sizes.chunk_per_token + peak.rate
    return int(max(1.0, room / per_token))


def _forced_recompute(pipeline: Pipeline, stage: int, lengths: Ints) -> Floats:
    """Return the seconds of recompute that each sequence forces by itself.

    Between its last F and its first B, a stage keeps all of its tokens, in whatever chunks.
    """
    sizes, place, time = pipeline.profile.bytes, pipeline.stages[stage], pipeline.profile.times.layer_recompute
    full = sizes.layer_full_per_token + sizes.layer_kv_per_token
    ends = sizes.embedding_per_token * place.embedding + sizes.head_per_token * place.head
    needed = lengths * (place.num_layers * full + sizes.chunk_per_token + ends)
    excess = needed + static_bytes(pipeline.profile, place) - pipeline.limits[stage]
    layer_tokens = np.maximum(0.0, excess) / (full - sizes.activation_per_token)
    # Cheapest are the first tokens, whose attention is short, in all layers.
    prefix = layer_tokens / place.num_layers
    return np.asarray(
        layer_tokens * _least_curve_rate(time, int(lengths.sum()))
        + place.num_layers * time.s_per_pair * prefix * prefix / 2
    )


def _least_curve_rate(time: LayerTime, num_tokens: int) -> float:
    sizes = np.array(sorted({num_tokens, *(t for t in time.curve.tokens if t < num_tokens)}), dtype=np.int64)
    return float(np.min(curve_seconds(time.curve, sizes) / sizes))


def _fill_seconds(pipeline: Pipeline) -> list[float]:
    """Return for each stage the least time in which the first F reaches it and its last B gets back to stage 0."""
    times = pipeline.profile.times
    transfer = times.transfer_s.constant + times.transfer_s.rate * pipeline.profile.bytes.activation_per_token
    fills, total = [], 0.0
    for place in pipeline.stages:
        fills.append(total)
        seconds = times.chunk_forward_s + times.chunk_backward_s + 2 * transfer
        for layer in (times.layer_forward, times.layer_backward):
            # A slice has at least one pair, and no chunk is faster than the fastest size.
            seconds += place.num_layers * (min(layer.curve.seconds) + layer.s_per_pair + layer.s_per_slice)
        total += seconds
    return fills
