"""Seconds and bytes from a profile with round numbers, checked by hand."""

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from infinipipe.costs.cost import (
    chunk_costs,
    chunk_loads,
    curve_seconds,
    layer_seconds,
    layers_excess_bytes,
    op_seconds,
    optimizer_seconds,
    replay_memory,
    split_costs,
    stage_parameters,
    static_bytes,
)
from infinipipe.ir import Chunk, Op, OpKind, Sequence, Slice, Stage
from infinipipe.profiles import Curve, LayerTime, Line, Profile, read_model
from infinipipe.profiles.analytic import analytic_profile
from infinipipe.profiles.logits import logits_tokens

FIRST = Stage(first_layer=0, num_layers=2, embedding=True, head=False)
LAST = Stage(first_layer=2, num_layers=3, embedding=False, head=True)
NO_CONTEXT = {"s_per_context": 0.0, "s_per_context_token": 0.0, "s_per_continued_token": 0.0}
ATTENTION_ONLY = LayerTime(
    curve=Curve(tokens=(1, 2), seconds=(0.0, 0.0)), s_per_pair=1.0, s_per_slice=0.0, **NO_CONTEXT
)


def round_profile() -> Profile:
    profile = analytic_profile(read_model("tiny"), "a800-80g")
    sizes = msgspec.structs.replace(
        profile.bytes,
        static_per_parameter=16,
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


def attention(*slices: tuple[int, int]) -> float:
    chunk = Chunk((*(Slice(i, start, length) for i, (start, length) in enumerate(slices)),))
    values: list[NDArray[np.int64]] = [
        np.array([chunk.num_tokens]),
        np.array([chunk.num_pairs]),
        np.array([len(slices)]),
    ]
    return float(layer_seconds(ATTENTION_ONLY, *values)[0])


def test_one_long_sequence_has_twice_the_attention_of_two_halves() -> None:
    assert attention((0, 1024)) == 524_800
    assert attention((0, 1024)) == pytest.approx(
        2 * (attention((0, 512)) + attention((0, 512))), rel=1e-3
    )


def test_four_equal_slices_cost_1_3_5_7() -> None:
    costs = [attention((start, 1024)) for start in range(0, 4096, 1024)]
    assert [cost / costs[0] for cost in costs] == pytest.approx([1, 3, 5, 7], rel=4e-3)
    assert sum(costs) == attention((0, 4096))


def test_a_pack_costs_the_sum_of_its_parts() -> None:
    assert attention((0, 512), (0, 512)) == 2 * attention((0, 512)) < attention((0, 1024))
    assert attention((5, 3), (0, 7), (0, 2)) == attention((5, 3)) + attention((0, 7)) + attention(
        (0, 2)
    )


def test_curve_is_flat_below_its_first_size_and_straight_beyond_its_last() -> None:
    curve = Curve(tokens=(10, 20, 40), seconds=(1.0, 2.0, 5.0))
    assert curve_seconds(curve, np.array([1, 10, 15, 30, 40, 60])).tolist() == [
        1.0,
        1.0,
        1.5,
        3.5,
        5.0,
        8.0,
    ]
    falling = Curve(tokens=(10, 20), seconds=(2.0, 1.0))
    assert curve_seconds(falling, np.array([30])).tolist() == [1.0]


def test_parameters_count_embedding_head_and_a_tied_copy_once() -> None:
    model = read_model("tiny")
    assert stage_parameters(model, FIRST) == 2 * model.layer_parameters + 256 * 128
    assert stage_parameters(model, LAST) == 3 * model.layer_parameters + 256 * 128 + 128
    whole = Stage(first_layer=0, num_layers=8, embedding=True, head=True)
    tied = msgspec.structs.replace(model, tied=True)
    assert stage_parameters(model, whole) - stage_parameters(tied, whole) == 256 * 128
    assert stage_parameters(tied, LAST) == stage_parameters(model, LAST)
    profile = round_profile()
    assert static_bytes(profile, FIRST) == 16 * stage_parameters(model, FIRST)
    line = profile.times.optimizer_s
    assert optimizer_seconds(profile, LAST) == line.constant + line.rate * stage_parameters(
        model, LAST
    )


def test_logits_pieces_shrink_with_the_vocabulary() -> None:
    assert [logits_tokens(v) for v in (256, 32000, 151936, 10**7)] == [1024, 1024, 441, 64]


def test_chunk_costs_by_hand() -> None:
    profile = round_profile()
    sequences = (Sequence(0, 12, 11), Sequence(1, 3, 2))
    chunks = (Chunk((Slice(0, 0, 8),)), Chunk((Slice(0, 8, 4), Slice(1, 0, 3))))
    loads = chunk_loads(chunks, sequences)
    assert loads.tokens.tolist() == [8, 7]
    assert loads.pairs.tolist() == [36, 42 + 6]
    assert (loads.slices.tolist(), loads.context.tolist()) == ([1, 2], [0, 8])
    assert (loads.whole.tolist(), loads.split.tolist()) == ([False, True], [0, 0])
    costs = chunk_costs(profile, (FIRST, LAST), loads, logits_tokens=4)
    times = profile.times
    assert loads.continued.tolist() == [0, 4]
    layer = times.layer_forward
    forward = layer_seconds(layer, loads.tokens, loads.pairs, loads.slices)
    forward[1] += (
        layer.s_per_context + 8 * layer.s_per_context_token + 4 * layer.s_per_continued_token
    )
    assert costs.forward_s[0] == pytest.approx(
        times.chunk_forward_s + 2 * forward + curve_seconds(times.embedding_forward, loads.tokens)
    )
    assert costs.forward_s[1] == pytest.approx(
        times.chunk_forward_s + 3 * forward + curve_seconds(times.head_forward, loads.tokens)
    )
    # A split-only chunk keeps no K and V of its own: they stay in the slot.
    assert costs.kept_bytes[0].tolist() == [8 * (2 * 100 + 1 + 2), 7 * (2 * 120 + 1 + 2)]
    assert costs.kept_bytes[1].tolist() == [8 * (3 * 100 + 1 + 3), 7 * (3 * 120 + 1 + 3)]
    assert costs.saved_bytes.tolist() == [8 * 90, 7 * 110]
    assert costs.forward_peak_bytes[0].tolist() == [7 + 40, 7 + 35]
    assert costs.recompute_excess_bytes.tolist() == [[8 * 30 - 47, 7 * 30 - 42], [0, 0]]
    assert costs.forward_peak_bytes[1].tolist() == [11 + 64 + 4000, 11 + 56 + 4000]
    assert costs.backward_peak_bytes[1].tolist() == [9 + 48 + 8 * (10 - 3), 28 + 32 + 7 * (10 - 3)]
    assert costs.activation_bytes.tolist() == [80, 70]


def program(text: str) -> list[Op]:
    return [Op(OpKind(word[0]), int(word[1:])) for word in text.split()]


def test_memory_of_a_split_sequence_by_hand() -> None:
    profile = round_profile()
    sequences = (Sequence(0, 12, 11),)
    loads = chunk_loads((Chunk((Slice(0, 0, 8),)), Chunk((Slice(0, 8, 4),))), sequences)
    costs = chunk_costs(profile, (FIRST, LAST), loads, logits_tokens=1024)
    trace = replay_memory(
        profile, (FIRST, LAST), 0, sequences, loads, costs, program("F0 F1 B1 B0"), (1, 0)
    )
    static = static_bytes(profile, FIRST)
    slot, grads = 2 * 12 * 20, 2 * 12 * 40
    kept = (8 * 203 - 8 * 90, 4 * 203)
    assert (trace.after - static).tolist() == [
        slot + kept[0],
        slot + sum(kept),
        slot + grads + kept[0],
        0,
    ]
    during = [
        slot + kept[0] + 47 + 40,  # and the first gradient's receive
        slot + sum(kept) + 27 + 40 + 80,  # and F0's send
        # F1's send, the next receive, B1's own gradient; when the second layer's K and V gradients
        # come, the first one's activations are there, so one layer's activations are not.
        slot + grads + sum(kept) + 16 + 32 + 40 + 80 + 40 - 400,
        slot + grads + kept[0] + 9 + 48 + 40 + 80,
    ]
    assert (trace.during - static).tolist() == during


def test_full_recompute_brings_one_layer_back_and_partial_does_not() -> None:
    profile = round_profile()
    sequences = (Sequence(0, 8, 7),)
    loads = chunk_loads((Chunk((Slice(0, 0, 8),)),), sequences)
    costs = chunk_costs(profile, (FIRST, LAST), loads, logits_tokens=1024)
    peaks = [
        replay_memory(
            profile, (FIRST, LAST), 0, sequences, loads, costs, program("F0 B0"), (r,)
        ).during[1]
        for r in (0, 1, 2)
    ]
    assert peaks[0] - peaks[1] == 8 * 110
    assert peaks[2] == peaks[1]


def test_forward_needs_more_for_a_moment_where_nothing_is_kept() -> None:
    profile = round_profile()
    sequences = (Sequence(0, 8, 7),)
    loads = chunk_loads((Chunk((Slice(0, 0, 8),)),), sequences)
    costs = chunk_costs(profile, (FIRST, LAST), loads, logits_tokens=1024)
    peaks = [
        replay_memory(
            profile, (FIRST, LAST), 0, sequences, loads, costs, program("F0 B0"), (r,)
        ).during[0]
        for r in (0, 1, 2)
    ]
    assert np.diff(peaks).tolist() == [-8 * 110, -8 * 110 + (8 * 30 - 47)]


def test_split_costs_by_hand() -> None:
    profile = round_profile()
    sequences = (Sequence(0, 12, 11), Sequence(1, 3, 2))
    loads = chunk_loads(
        (Chunk((Slice(0, 0, 8),)), Chunk((Slice(0, 8, 4), Slice(1, 0, 3)))), sequences
    )
    split = split_costs(profile, (FIRST, LAST), loads)
    assert split is not None
    times = profile.times
    inputs, weights = times.layer_input_backward, times.layer_weight_backward
    assert inputs is not None
    assert weights is not None
    one_i = layer_seconds(
        inputs, loads.tokens, loads.pairs, loads.slices, loads.context, loads.continued
    )
    one_w = curve_seconds(weights.curve, loads.tokens)
    # The embedding has only a W. The head has its weight's gradient since F, so only an I.
    assert split.input_s[0] == pytest.approx(times.chunk_backward_s + 2 * one_i)
    assert split.weight_s[0] == pytest.approx(
        times.chunk_backward_s + 2 * one_w + curve_seconds(times.embedding_backward, loads.tokens)
    )
    assert split.input_s[1] == pytest.approx(
        times.chunk_backward_s + 3 * one_i + curve_seconds(times.head_backward, loads.tokens)
    )
    assert split.weight_s[1] == pytest.approx(times.chunk_backward_s + 3 * one_w)
    assert split.left_bytes.tolist() == [8 * 50, 7 * 50]
    assert split.embedding_left_bytes.tolist() == [[8 * (10 + 2), 7 * (10 + 2)], [0, 0]]
    assert split.input_peak_bytes.tolist() == [
        [9 + 48, 28 + 32],
        [9 + 48 + 8 * (10 - 3), 28 + 32 + 7 * (10 - 3)],
    ]
    assert split.weight_peak_bytes.tolist() == [[9, 9], [9, 9]]


def test_seconds_of_every_kind_of_op() -> None:
    profile = round_profile()
    loads = chunk_loads(
        (Chunk((Slice(0, 0, 8),)), Chunk((Slice(1, 0, 3),))), (Sequence(0, 8, 7), Sequence(1, 3, 2))
    )
    costs, split = (
        chunk_costs(profile, (FIRST, LAST), loads, 4),
        split_costs(profile, (FIRST, LAST), loads),
    )
    assert split is not None
    recomputed = costs.recompute_s * [1, 2]
    whole = {
        OpKind.FORWARD: costs.forward_s[1].tolist(),
        OpKind.BACKWARD: (costs.backward_s[1] + recomputed).tolist(),
    }
    assert op_seconds(costs, None, 1, (1, 2)) == whole
    assert op_seconds(costs, split, 1, (1, 2)) == whole | {
        OpKind.BACKWARD_INPUT: (split.input_s[1] + recomputed).tolist(),
        OpKind.BACKWARD_WEIGHT: split.weight_s[1].tolist(),
    }


@pytest.mark.parametrize("lacking", ["layer_input_backward", "layer_split_per_token"])
def test_i_and_w_have_a_price_only_with_seconds_and_bytes(lacking: str) -> None:
    profile = round_profile()
    loads = chunk_loads((Chunk((Slice(0, 0, 8),)),), (Sequence(0, 8, 7),))
    assert profile.prices_split
    if lacking == "layer_split_per_token":
        sizes = msgspec.structs.replace(profile.bytes, layer_split_per_token=None)
        profile = msgspec.structs.replace(profile, bytes=sizes)
    else:
        times = msgspec.structs.replace(
            profile.times, layer_input_backward=None, layer_weight_backward=None
        )
        profile = msgspec.structs.replace(profile, times=times)
    assert not profile.prices_split
    assert split_costs(profile, (FIRST,), loads) is None


@pytest.mark.parametrize("recompute", [0, 2, 3])
def test_what_i_leaves_stays_until_w(recompute: int) -> None:
    profile = round_profile()
    sequences = (Sequence(0, 8, 7), Sequence(1, 3, 2))
    loads = chunk_loads((Chunk((Slice(0, 0, 8),)), Chunk((Slice(1, 0, 3),))), sequences)
    costs, split = (
        chunk_costs(profile, (FIRST, LAST), loads, 1024),
        split_costs(profile, (FIRST, LAST), loads),
    )
    ops = program("F0 F1 I0 W0 I1 W1")
    trace = replay_memory(
        profile, (FIRST, LAST), 1, sequences, loads, costs, ops, (recompute, 0), split
    )
    kept = 8 * (3 * 120 - recompute * 110 + 4), 3 * (3 * 120 + 4)
    left = 3 * 8 * 50, 3 * 3 * 50
    static = static_bytes(profile, LAST)
    # Whether a layer was recomputed or not, its I leaves the same.
    assert (trace.after - static).tolist() == [
        kept[0],
        sum(kept),
        left[0] + kept[1],
        kept[1],
        left[1],
        0,
    ]
    # From the last layer on, each swaps what it kept for what it leaves; in a layer that is recomputed all is back.
    layers = [8 * (10 if layer < recompute else 120) for layer in range(3)]
    moments = [sum(layers[:layer]) + 8 * 120 + (2 - layer) * 8 * 50 for layer in range(3)]
    others = 8 * 4 + kept[1]
    # I0 waits for no gradient, and I1 waits for none on the last stage; F1's input has been taken.
    assert trace.during[2] - static == max(moments) + others + 9 + 48 + 8 * (10 - 3)
    # One weight's gradient, and the gradient that I0 may still be sending.
    assert trace.during[3] - static == left[0] + kept[1] + 9 + 80


def test_w_has_a_gradient_coming_and_one_leaving() -> None:
    """A stage between others: W neither takes what is posted nor sends."""
    profile, stages = round_profile(), (FIRST, msgspec.structs.replace(LAST, head=False), LAST)
    sequences = (Sequence(0, 8, 7), Sequence(1, 3, 2))
    loads = chunk_loads((Chunk((Slice(0, 0, 8),)), Chunk((Slice(1, 0, 3),))), sequences)
    costs, split = chunk_costs(profile, stages, loads, 1024), split_costs(profile, stages, loads)
    ops = program("F0 F1 I0 W0 I1 W1")
    trace = replay_memory(profile, stages, 1, sequences, loads, costs, ops, (0, 0), split)
    held = 3 * 8 * 50 + 3 * (3 * 120 + 1)
    # F1's activation and I0's gradient leave, I1's comes.
    assert trace.during[3] - static_bytes(profile, stages[1]) == held + 9 + 30 + 80 + 30


def test_the_embeddings_gradient_waits_for_w() -> None:
    profile = round_profile()
    sequences = (Sequence(0, 8, 7),)
    loads = chunk_loads((Chunk((Slice(0, 0, 8),)),), sequences)
    costs, split = (
        chunk_costs(profile, (FIRST, LAST), loads, 1024),
        split_costs(profile, (FIRST, LAST), loads),
    )
    ops = program("F0 I0 W0")
    trace = replay_memory(profile, (FIRST, LAST), 0, sequences, loads, costs, ops, (0,), split)
    assert (trace.after - static_bytes(profile, FIRST)).tolist() == [
        8 * (2 * 120 + 3),
        2 * 8 * 50 + 8 * 12,
        0,
    ]


def test_k_and_v_go_with_the_first_slices_i() -> None:
    profile = round_profile()
    sequences = (Sequence(0, 12, 11),)
    loads = chunk_loads((Chunk((Slice(0, 0, 8),)), Chunk((Slice(0, 8, 4),))), sequences)
    costs, split = (
        chunk_costs(profile, (FIRST, LAST), loads, 1024),
        split_costs(profile, (FIRST, LAST), loads),
    )
    ops = program("F0 F1 I1 I0 W1 W0")
    trace = replay_memory(profile, (FIRST, LAST), 0, sequences, loads, costs, ops, (0, 0), split)
    slot, grads, kept = 2 * 12 * 20, 2 * 12 * 40, (8 * 203, 4 * 203)
    left = 8 * (2 * 50 + 12), 4 * (2 * 50 + 12)
    assert (trace.after - static_bytes(profile, FIRST)).tolist() == [
        slot + kept[0],
        slot + sum(kept),
        slot + grads + kept[0] + left[1],
        sum(left),
        left[0],
        0,
    ]


def test_layers_come_and_go_within_a_backward() -> None:
    """Layer by layer: what a B or an I needs is the largest of the moments when each layer runs."""
    for num_layers, recompute in [(4, 0), (4, 2), (4, 4), (3, 1), (1, 0), (1, 1)]:
        for full, activation, gradients in [
            (100.0, 10.0, 0.0),
            (100.0, 10.0, 70.0),
            (100.0, 10.0, 300.0),
        ]:
            for left in (0.0, 60.0):
                kept = [activation if layer < recompute else full for layer in range(num_layers)]
                moments = [
                    sum(kept[:layer]) + full + (gradients + left) * (num_layers - layer) - left
                    for layer in range(num_layers)
                ]
                expected = max(moments) - sum(kept) - num_layers * gradients
                found = layers_excess_bytes(
                    num_layers, recompute, full, activation, gradients, left
                )
                assert found == expected
