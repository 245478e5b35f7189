"""Layers to stages: equal time, embedding and head counted, within what memory can hold."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from infinipipe.aliases import Ints
from infinipipe.costs.cost import curve_seconds, layer_seconds, static_bytes
from infinipipe.errors import InfeasibleError
from infinipipe.ir import Stage
from infinipipe.profiles import Curve, Profile
from infinipipe.units import show_bytes

# Layers are balanced for chunks of so many tokens, where the head's and the layers' efficiency have settled.
_TYPICAL_TOKENS = 4096


def partition_layers(
    profile: Profile, num_stages: int, limits: SequenceOf[int], lengths: Ints
) -> tuple[Stage, ...]:
    """Return the stages whose slowest is fastest for sequences like these.

    Among equals the later stage gets the layer, because the earlier ones keep more chunks in flight.

    Raises:
        InfeasibleError: a stage cannot hold even one layer, or all stages together cannot hold the model.
    """
    num_layers = profile.model.num_layers
    layer, ends = _seconds_per_token(profile, num_stages, lengths)
    room = [_most_layers(profile, stage, num_stages, limit) for stage, limit in enumerate(limits)]
    counts = [1] * num_stages
    for _ in range(num_layers - num_stages):
        open_stages = [stage for stage in range(num_stages) if counts[stage] < room[stage]]
        if not open_stages:
            raise InfeasibleError(
                f"{num_layers} layers of {profile.model.name} do not fit into {num_stages} stages of "
                f"{show_bytes(min(limits))}: parameters, gradients and optimizer state leave room for {sum(room)}; "
                "raise --stages or --memory"
            )
        chosen = min(
            open_stages, key=lambda stage: ((counts[stage] + 1) * layer + ends[stage], -stage)
        )
        counts[chosen] += 1
    return make_stages(counts)


def make_stages(counts: SequenceOf[int]) -> tuple[Stage, ...]:
    """Return stages of so many layers each."""
    firsts = np.cumsum([0, *counts]).tolist()
    last = len(counts) - 1
    return tuple(
        Stage(first_layer=firsts[s], num_layers=n, embedding=s == 0, head=s == last)
        for s, n in enumerate(counts)
    )


def _seconds_per_token(
    profile: Profile, num_stages: int, lengths: Ints
) -> tuple[float, list[float]]:
    """Return the seconds of F and B of one layer, and of what each stage has besides layers."""
    times = profile.times
    tokens = np.array([_TYPICAL_TOKENS])
    # Float: the squares of many long sequences together would not fit into 64 bits.
    mean_pairs = float((lengths * (lengths + 1.0) / 2).sum() / max(1, lengths.sum()))
    mean_slices = float(len(lengths) / max(1, lengths.sum()))
    pairs, slices = (
        np.array([round(_TYPICAL_TOKENS * mean)]) for mean in (mean_pairs, mean_slices)
    )
    layer = sum(
        float(layer_seconds(t, tokens, pairs, slices)[0])
        for t in (times.layer_forward, times.layer_backward)
    )
    ends = [0.0] * num_stages
    ends[0] += _curve_at(times.embedding_forward) + _curve_at(times.embedding_backward)
    ends[-1] += _curve_at(times.head_forward) + _curve_at(times.head_backward)
    return layer, ends


def _curve_at(curve: Curve) -> float:
    return float(curve_seconds(curve, np.array([_TYPICAL_TOKENS]))[0])


def _most_layers(profile: Profile, stage: int, num_stages: int, limit: int) -> int:
    """Return how many layers' parameters, gradients and optimizer state a stage can hold."""
    one = make_stages([1] * num_stages)[stage]
    least = static_bytes(profile, one)
    if least > limit:
        raise InfeasibleError(
            f"stage {stage} needs {show_bytes(least)} for the parameters, gradients and optimizer state of one layer"
            f"{' and the embedding' * one.embedding}{' and the head' * one.head}, but its limit is "
            f"{show_bytes(limit)}; raise --memory"
        )
    per_layer = profile.bytes.static_per_parameter * profile.model.layer_parameters
    return 1 + int((limit - least) // per_layer)
