"""Seconds and bytes of chunks from a profile with round numbers, checked by hand."""

import msgspec
import numpy as np
import pytest

from infinipipe.costs import ChunkSizes, PackedProgram, Recompute, curve_seconds, layer_seconds
from infinipipe.ir import Chunk, Op, OpKind, Slice
from infinipipe.profiles import logits_tokens
from tests.costs.rounds import (
    FIRST,
    HYBRID,
    HYBRID_SEQUENCES,
    LAST,
    SPLIT,
    WHOLE,
    WHOLE_SEQUENCES,
    round_costs,
    round_profile,
)
from tests.planner.toys import in_whole


def test_logits_pieces_shrink_with_the_vocabulary() -> None:
    assert [logits_tokens(v) for v in (256, 32000, 151936, 10**7)] == [1024, 1024, 441, 64]


def test_chunk_costs_by_hand() -> None:
    costs = round_costs(logits_tokens=4)
    costed = costs.price(HYBRID, HYBRID_SEQUENCES)
    sizes = costed.sizes
    assert sizes.tokens.tolist() == [8, 7]
    assert sizes.pairs.tolist() == [36, 42 + 6]
    assert (sizes.slices.tolist(), sizes.context.tolist()) == ([1, 2], [0, 8])
    assert (sizes.whole.tolist(), sizes.split.tolist()) == ([False, True], [0, 0])
    assert sizes.split_tokens.tolist() == [12, 12]
    assert sizes.continued.tolist() == [0, 4]
    times = costs.profile.times
    layer = times.layer_forward
    forward = layer_seconds(layer, sizes.tokens, sizes.pairs, sizes.slices)
    forward[1] += layer.s_per_context
    forward[1] += 8 * layer.s_per_context_token + 4 * layer.s_per_continued_token
    assert costed.forward_s[0] == pytest.approx(
        times.chunk_forward_s + 2 * forward + curve_seconds(times.embedding_forward, sizes.tokens)
    )
    assert costed.forward_s[1] == pytest.approx(
        times.chunk_forward_s + 3 * forward + curve_seconds(times.head_forward, sizes.tokens)
    )
    # A split-only chunk keeps no K and V of its own: they stay in the slot.
    assert costed.activation_bytes[0].tolist() == [8 * (2 * 100 + 1 + 2), 7 * (2 * 120 + 1 + 2)]
    assert costed.activation_bytes[1].tolist() == [8 * (3 * 100 + 1 + 3), 7 * (3 * 120 + 1 + 3)]
    assert costed.freed_per_layer_bytes.tolist() == [8 * 90, 7 * 110]
    assert costed.forward_transient_bytes[0].tolist() == [7 + 40, 7 + 35]
    assert costed.recompute_transient_bytes.tolist() == [[8 * 30 - 47, 7 * 30 - 42], [0, 0]]
    assert costed.forward_transient_bytes[1].tolist() == [11 + 64 + 4000, 11 + 56 + 4000]
    after_head = [8 * (10 - 3), 7 * (10 - 3)]
    assert costed.backward_transient_bytes[1].tolist() == [
        9 + 48 + after_head[0],
        28 + 32 + after_head[1],
    ]
    assert costed.boundary_bytes.tolist() == [80, 70]
    assert costed.work_s == pytest.approx((costed.forward_s + costed.backward_s).sum(axis=1))


def test_a_chunks_first_and_last_slices() -> None:
    """Of two split sequences whose slices are mixed, and a whole one."""
    split = np.array([1, 0, -1, 1, 0, 1])
    context = np.array([5, 0, 0, 0, 3, 9])
    zeros = np.zeros(6, dtype=np.int64)
    sizes = ChunkSizes(
        tokens=zeros,
        pairs=zeros,
        slices=zeros,
        context=context,
        continued=zeros,
        whole=split < 0,
        split=split,
        split_tokens=zeros,
    )
    firsts, lasts = sizes.slice_ends
    assert (firsts.tolist(), lasts.tolist()) == ([1, 3], [4, 5])
    costs = round_costs()
    for chunks, sequences in ((WHOLE, WHOLE_SEQUENCES), ((), ())):
        ends = costs.price(chunks, sequences).sizes.slice_ends
        assert [each.tolist() for each in ends] == [[], []]
    ends = costs.price(SPLIT, HYBRID_SEQUENCES[:1]).sizes.slice_ends
    assert [each.tolist() for each in ends] == [[0], [1]]


def test_input_and_weight_costs_by_hand() -> None:
    costs = round_costs()
    costed = costs.price(HYBRID, HYBRID_SEQUENCES)
    sizes = costed.sizes
    parts = costs.price_input_weight(costed)
    assert parts is not None
    times = costs.profile.times
    inputs, weights = times.layer_input_backward, times.layer_weight_backward
    assert inputs is not None
    assert weights is not None
    one_i = layer_seconds(
        inputs, sizes.tokens, sizes.pairs, sizes.slices, sizes.context, sizes.continued
    )
    one_w = curve_seconds(weights.curve, sizes.tokens)
    # The embedding has only a W. The head has its weight's gradient since F, so only an I.
    assert parts.input_s[0] == pytest.approx(times.chunk_backward_s + 2 * one_i)
    assert parts.weight_s[0] == pytest.approx(
        times.chunk_backward_s + 2 * one_w + curve_seconds(times.embedding_backward, sizes.tokens)
    )
    assert parts.input_s[1] == pytest.approx(
        times.chunk_backward_s + 3 * one_i + curve_seconds(times.head_backward, sizes.tokens)
    )
    assert parts.weight_s[1] == pytest.approx(times.chunk_backward_s + 3 * one_w)
    assert parts.weight_input_bytes.tolist() == [8 * 50, 7 * 50]
    assert parts.embedding_weight_input_bytes.tolist() == [[8 * (10 + 2), 7 * (10 + 2)], [0, 0]]
    assert parts.input_transient_bytes.tolist() == [
        [9 + 48, 28 + 32],
        [9 + 48 + 8 * (10 - 3), 28 + 32 + 7 * (10 - 3)],
    ]
    assert parts.weight_transient_bytes.tolist() == [[9, 9], [9, 9]]


def test_seconds_of_every_kind_of_op() -> None:
    costs = round_costs(logits_tokens=4)
    costed = costs.price(WHOLE, WHOLE_SEQUENCES)
    parts = costs.price_input_weight(costed)
    assert parts is not None
    recompute = Recompute(keep_input=np.array([1, 2]), keep_attention=np.array([2, 1]))
    but_attention_s = costed.recompute_s - costed.attention_s
    recomputed = costed.recompute_s * [1, 2] + but_attention_s * [2, 1]
    by_kind = {
        OpKind.FORWARD: costed.forward_s[1],
        OpKind.BACKWARD: costed.backward_s[1] + recomputed,
        OpKind.BACKWARD_INPUT: parts.input_s[1] + recomputed,
        OpKind.BACKWARD_WEIGHT: parts.weight_s[1],
    }
    for kinds in ("FB", "FIW"):
        ops = [Op(OpKind(kind), chunk) for kind in kinds for chunk in (1, 0)]
        found = costs.op_seconds(1, costed, PackedProgram.pack(ops), recompute)
        assert found.tolist() == [by_kind[op.kind][op.chunk] for op in ops]
    # Both in one program: only some B are cut.
    ops = [Op(OpKind(text[0]), int(text[1])) for text in ("F0", "F1", "B1", "I0", "W0")]
    found = costs.op_seconds(1, costed, PackedProgram.pack(ops), recompute)
    assert found.tolist() == [by_kind[op.kind][op.chunk] for op in ops]


@pytest.mark.parametrize("lacking", ["layer_input_backward", "layer_split_per_token"])
def test_i_and_w_have_a_price_only_with_seconds_and_bytes(lacking: str) -> None:
    profile = round_profile()
    assert profile.prices_input_weight
    if lacking == "layer_split_per_token":
        sizes = msgspec.structs.replace(profile.bytes, layer_split_per_token=None)
        profile = msgspec.structs.replace(profile, bytes=sizes)
    else:
        times = msgspec.structs.replace(
            profile.times, layer_input_backward=None, layer_weight_backward=None
        )
        profile = msgspec.structs.replace(profile, times=times)
    assert not profile.prices_input_weight
    costs = round_costs((FIRST, LAST), profile=profile)
    costed = costs.price((Chunk((Slice(0, 0, 8),)),), WHOLE_SEQUENCES[:1])
    assert costs.price_input_weight(costed) is None
    # Nothing else needs those prices.
    ops = [Op(OpKind.FORWARD, 0), Op(OpKind.BACKWARD, 0)]
    program = PackedProgram.pack(ops)
    seconds = costs.op_seconds(0, costed, program, in_whole([0]))
    assert seconds.tolist() == [costed.forward_s[0, 0], costed.backward_s[0, 0]]
    split = [Op(OpKind.FORWARD, 0), Op(OpKind.BACKWARD_INPUT, 0), Op(OpKind.BACKWARD_WEIGHT, 0)]
    program = PackedProgram.pack(split)
    with pytest.raises(AssertionError, match="I and W need their prices"):
        costs.op_seconds(0, costed, program, in_whole([0]))
