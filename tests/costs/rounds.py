"""Costs with round numbers, so that what they come to can be checked by hand."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import msgspec

from infinipipe.costs import CostModel, PackedProgram
from infinipipe.ir import Chunk, Layout, Op, OpKind, Sequence, Slice, Stage
from infinipipe.profiles import Line, Profile, read_model
from infinipipe.profiles.analytic import analytic_profile

FIRST = Stage(first_layer=0, num_layers=2, embedding=True, head=False)
LAST = Stage(first_layer=2, num_layers=3, embedding=False, head=True)

SPLIT_SEQUENCE = (Sequence(0, 12, 11),)
SPLIT = (Chunk((Slice(0, 0, 8),)), Chunk((Slice(0, 8, 4),)))
"""Its two slices."""
HYBRID_SEQUENCES = (Sequence(0, 12, 11), Sequence(1, 3, 2))
HYBRID = (Chunk((Slice(0, 0, 8),)), Chunk((Slice(0, 8, 4), Slice(1, 0, 3))))
"""The same, and a whole sequence beside the second one."""
WHOLE_SEQUENCES = (Sequence(0, 8, 7), Sequence(1, 3, 2))
WHOLE = (Chunk((Slice(0, 0, 8),)), Chunk((Slice(1, 0, 3),)))
"""A chunk for each of two sequences."""


def round_profile() -> Profile:
    profile = analytic_profile(read_model("tiny"), "a800-80g")
    sizes = msgspec.structs.replace(
        profile.bytes,
        static_per_parameter=7,
        sharded_per_parameter=9,
        activation_per_token=10,
        layer_full_per_token=100.0,
        layer_kv_per_token=20,
        layer_kv_grad_per_token=40,
        chunk_per_token=1.0,
        embedding_per_token=2.0,
        head_per_token=3.0,
        layer_forward_peak=Line(constant=7.0, rate=5.0),
        recompute_forward_peak=Line(constant=0.0, rate=30.0),
        layer_backward_peak=Line(constant=9.0, rate=6.0),
        slice_backward_per_token=4.0,
        context_per_token=4.0,
        embedding_backward_peak=Line(constant=0.0, rate=1.0),
        head_forward_peak=Line(constant=11.0, rate=8.0),
        head_backward_peak=Line(constant=0.0, rate=2.0),
        logits_per_token=1000.0,
        layer_split_per_token=50.0,
    )
    return msgspec.structs.replace(profile, bytes=sizes)


def round_costs(
    stages: SequenceOf[Stage] = (FIRST, LAST),
    logits_tokens: int = 1024,
    profile: Profile | None = None,
    num_replicas: int = 1,
) -> CostModel:
    layout = Layout(num_stages=len(stages), num_replicas=num_replicas)
    return CostModel(profile or round_profile(), layout, stages, logits_tokens)


def packed(text: str) -> PackedProgram:
    """Return the program of ops such as F0, I0 and W0."""
    return PackedProgram.pack([Op(OpKind(word[0]), int(word[1:])) for word in text.split()])
