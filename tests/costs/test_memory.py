"""The ledger of a stage's bytes, checked by hand, and against bounds that hold for any program."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinipipe.costs import Recompute, StageMemory
from infinipipe.costs.memory import LayerBytes, layers_transient_bytes
from infinipipe.ir import Chunk, OpKind, Slice
from infinipipe.planner.passes.order import windowed_order
from infinipipe.planner.passes.schedule import order_memories, price_chains
from tests.costs.rounds import (
    FIRST,
    LAST,
    SPLIT,
    SPLIT_SEQUENCE,
    WHOLE,
    WHOLE_SEQUENCES,
    packed,
    round_costs,
    round_profile,
)
from tests.planner.toys import (
    TOY_WINDOWS,
    ToyWindow,
    cut,
    drawn_recompute,
    in_whole,
    toy_leads,
    toy_problem,
)

ONE = WHOLE[:1], WHOLE_SEQUENCES[:1]
"""One sequence of eight tokens in one chunk."""


def test_memory_of_a_split_sequence_by_hand() -> None:
    costs = round_costs()
    memory = costs.memory(0, costs.price(SPLIT, SPLIT_SEQUENCE), packed("F0 F1 B1 B0"))
    recompute = np.array([1, 0])
    static = costs.static_bytes(0)
    slot, grads = 2 * 12 * 20, 2 * 8 * 40
    kept = (8 * 203 - 8 * 90, 4 * 203)
    assert (memory.after(in_whole(recompute)) - static).tolist() == [
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
        slot + grads + sum(kept) + 16 + 32 + 40 + 80 + 40 - 8 * 40,
        slot + grads + kept[0] + 9 + 48 + 40 + 80,
    ]
    assert (memory.during(in_whole(recompute)) - static).tolist() == during


def test_full_recompute_brings_one_layer_back_and_partial_does_not() -> None:
    costs = round_costs()
    memory = costs.memory(0, costs.price(*ONE), packed("F0 B0"))
    peaks = [memory.during(in_whole(np.array([count])))[1] for count in (0, 1, 2)]
    assert peaks[0] - peaks[1] == 8 * 110
    assert peaks[2] == peaks[1]


def test_forward_needs_more_while_it_runs_where_nothing_is_kept() -> None:
    costs = round_costs()
    memory = costs.memory(0, costs.price(*ONE), packed("F0 B0"))
    peaks = [memory.during(in_whole(np.array([count])))[0] for count in (0, 1, 2)]
    assert np.diff(peaks).tolist() == [-8 * 110, -8 * 110 + (8 * 30 - 47)]


@pytest.mark.parametrize("recompute", [0, 2, 3])
def test_what_i_leaves_stays_until_w(recompute: int) -> None:
    costs = round_costs()
    costed = costs.price(WHOLE, WHOLE_SEQUENCES)
    memory = costs.memory(1, costed, packed("F0 F1 I0 W0 I1 W1"))
    counts = np.array([recompute, 0])
    after, during = memory.after(in_whole(counts)), memory.during(in_whole(counts))
    kept = 8 * (3 * 120 - recompute * 110 + 4), 3 * (3 * 120 + 4)
    left = 3 * 8 * 50, 3 * 3 * 50
    static = costs.static_bytes(1)
    # Whether a layer was recomputed or not, its I leaves the same.
    assert (after - static).tolist() == [
        kept[0],
        sum(kept),
        left[0] + kept[1],
        kept[1],
        left[1],
        0,
    ]
    # From the last layer on, each swaps what it kept for what it leaves; in a layer that is
    # recomputed all is back.
    layers = [8 * (10 if layer < recompute else 120) for layer in range(3)]
    by_layer = [sum(layers[:layer]) + 8 * 120 + (2 - layer) * 8 * 50 for layer in range(3)]
    others = 8 * 4 + kept[1]
    # I0 waits for no gradient, and I1 waits for none on the last stage; F1's input has been taken.
    assert during[2] - static == max(by_layer) + others + 9 + 48 + 8 * (10 - 3)
    # One weight's gradient, and the gradient that I0 may still be sending.
    assert during[3] - static == left[0] + kept[1] + 9 + 80


def test_w_has_a_gradient_coming_and_one_leaving() -> None:
    """A stage between others: W neither takes what is posted nor sends."""
    costs = round_costs((FIRST, msgspec.structs.replace(LAST, head=False), LAST))
    costed = costs.price(WHOLE, WHOLE_SEQUENCES)
    memory = costs.memory(1, costed, packed("F0 F1 I0 W0 I1 W1"))
    held = 3 * 8 * 50 + 3 * (3 * 120 + 1)
    # F1's activation and I0's gradient leave, I1's comes.
    during = memory.during(in_whole(np.array([0, 0])))
    assert during[3] - costs.static_bytes(1) == held + 9 + 30 + 80 + 30


def test_the_embeddings_gradient_waits_for_w() -> None:
    costs = round_costs()
    memory = costs.memory(0, costs.price(*ONE), packed("F0 I0 W0"))
    assert (memory.after(in_whole(np.array([0]))) - costs.static_bytes(0)).tolist() == [
        8 * (2 * 120 + 3),
        2 * 8 * 50 + 8 * 12,
        0,
    ]


def test_k_and_v_go_with_the_first_slices_i() -> None:
    costs = round_costs()
    memory = costs.memory(0, costs.price(SPLIT, SPLIT_SEQUENCE), packed("F0 F1 I1 I0 W1 W0"))
    slot, grads, kept = 2 * 12 * 20, 2 * 8 * 40, (8 * 203, 4 * 203)
    left = 8 * (2 * 50 + 12), 4 * (2 * 50 + 12)
    assert (memory.after(in_whole(np.array([0, 0]))) - costs.static_bytes(0)).tolist() == [
        slot + kept[0],
        slot + sum(kept),
        slot + grads + kept[0] + left[1],
        sum(left),
        left[0],
        0,
    ]


def test_some_b_may_be_cut_and_others_not() -> None:
    costs = round_costs()
    costed = costs.price(WHOLE, WHOLE_SEQUENCES)
    counts = np.array([0, 0])
    both = costs.memory(1, costed, packed("F0 F1 B0 I1 W1"))
    whole = costs.memory(1, costed, packed("F0 F1 B0 B1"))
    # Until the first I, nothing differs.
    assert both.during(in_whole(counts))[:3].tolist() == whole.during(in_whole(counts))[:3].tolist()
    assert both.after(in_whole(counts))[:3].tolist() == whole.after(in_whole(counts))[:3].tolist()
    assert (both.after(in_whole(counts)) - costs.static_bytes(1))[3:].tolist() == [3 * 3 * 50, 0]


def test_layers_come_and_go_within_a_backward() -> None:
    """What a B or an I needs is the largest of what it needs when each layer runs."""
    counts = [(n, r, a) for n in (1, 3, 4) for r in range(n + 1) for a in range(n - r + 1)]
    whole, boundary, attention = 100.0, 10.0, 25.0
    for (num_layers, keep_input, keep_attention), gradients, left in product(
        counts, (0.0, 20.0, 70.0, 300.0), (0.0, 60.0)
    ):
        kept = [boundary] * keep_input + [boundary + attention] * keep_attention
        kept += [whole] * (num_layers - len(kept))
        by_layer = [
            sum(kept[:number]) + whole + (gradients + left) * (num_layers - number) - left
            for number in range(num_layers)
        ]
        expected = max(by_layer) - sum(kept) - num_layers * gradients
        layer = LayerBytes(whole, boundary, attention, gradients, left)
        recompute = Recompute(np.array(keep_input), np.array(keep_attention))
        found = layers_transient_bytes(num_layers, recompute, layer)
        assert found == expected


CASES = st.tuples(
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.integers(1, 12),
    st.booleans(),
    st.sampled_from(TOY_WINDOWS),
    st.integers(0, 2**32),
)


def toy_memories(
    lengths: list[int], counts: list[int], parts: int, even: bool, window: ToyWindow
) -> Iterator[tuple[int, StageMemory]]:
    """Yield every stage's static bytes and its ledger."""
    problem = toy_problem(lengths, counts)
    chunks, _, _ = cut(problem, parts, 1000, even)
    num_stages = len(counts)
    leads = toy_leads(chunks, num_stages, window, num_stages)
    memories = order_memories(problem, price_chains(problem, chunks), leads)
    for stage, memory in enumerate(memories):
        yield problem.pipeline.costs.static_bytes(stage), memory


def some_recompute(memory: StageMemory, generator: np.random.Generator) -> list[Recompute]:
    """Return recompute of all kinds: none, all layers, and what chance wants."""
    num_chunks = len(memory.activation_bytes)
    drawn = [drawn_recompute(generator, memory.num_layers, num_chunks) for _ in range(6)]
    all_or_none = memory.num_layers * generator.integers(0, 2, (2, num_chunks))
    none = np.zeros(num_chunks, dtype=np.int64)
    counts = [none, none + memory.num_layers, *all_or_none]
    return [*drawn, *map(in_whole, counts), Recompute(none, all_or_none[0])]


@given(CASES)
def test_the_least_is_never_above_during_and_after_neither(
    case: tuple[list[int], list[int], int, bool, ToyWindow, int],
) -> None:
    *shape, seed = case
    generator = np.random.default_rng(seed)
    for static, memory in toy_memories(*shape):
        least = memory.least()
        for recompute in some_recompute(memory, generator):
            during, after = memory.during(recompute), memory.after(recompute)
            # Sums of large floats in another order may differ in their last digits.
            assert np.all(least <= during * (1 + 1e-12))
            assert np.all(after <= during * (1 + 1e-12))
            # All that came has gone in the end, and never was there less.
            assert after[-1] == pytest.approx(static, rel=1e-12)
            assert np.all(static <= after * (1 + 1e-12))


@given(CASES)
def test_a_chunks_count_matters_from_its_f_to_its_b_and_nowhere_else(
    case: tuple[list[int], list[int], int, bool, ToyWindow, int],
) -> None:
    *shape, seed = case
    generator = np.random.default_rng(seed)
    for _, memory in toy_memories(*shape):
        num_chunks = len(memory.activation_bytes)
        before = drawn_recompute(generator, memory.num_layers, num_chunks)
        others = drawn_recompute(generator, memory.num_layers, num_chunks)
        chunk = int(generator.integers(num_chunks))
        is_changed = np.arange(num_chunks) == chunk
        changed = Recompute(
            keep_input=np.where(is_changed, others.keep_input, before.keep_input),
            keep_attention=np.where(is_changed, others.keep_attention, before.keep_attention),
        )
        first, last = memory.program.forward_places[chunk], memory.program.backward_places[chunk]
        delta = memory.after(changed) - memory.after(before)
        more_input = changed.keep_input[chunk] - before.keep_input[chunk]
        more_attention = changed.keep_attention[chunk] - before.keep_attention[chunk]
        freed = memory.freed_per_layer_bytes[chunk] * (more_input + more_attention)
        freed -= memory.attention_bytes[chunk] * more_attention
        assert delta[:first] == pytest.approx(0, abs=1e-3)
        assert delta[first:last] == pytest.approx(-freed, abs=1e-3)
        assert delta[last:] == pytest.approx(0, abs=1e-3)
        apart = np.abs(memory.during(changed) - memory.during(before)) > 1e-3
        assert not apart[:first].any()
        assert not apart[last + 1 :].any()


def test_what_i_leaves_may_be_more_than_what_its_chunk_had_before() -> None:
    profile = round_profile()
    sizes = msgspec.structs.replace(profile.bytes, layer_split_per_token=5000.0)
    costs = round_costs(profile=msgspec.structs.replace(profile, bytes=sizes))
    chunk = Chunk((Slice(0, 0, 8),))
    costed = costs.price((chunk,), WHOLE_SEQUENCES[:1])
    for stage in (0, 1):
        memory = costs.memory(stage, costed, packed("F0 I0 W0"))
        for count in range(costs.stages[stage].num_layers + 1):
            recompute = np.array([count])
            during, after = memory.during(in_whole(recompute)), memory.after(in_whole(recompute))
            assert np.all(after <= during)
            inputs = memory.program.is_kind(OpKind.BACKWARD_INPUT)
            assert after[inputs] >= costs.static_bytes(stage) + 5000 * 8


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=8),
    st.integers(1, 10),
    st.sampled_from([0, 1]),
    st.integers(0, 2**32),
)
def test_what_is_missing_and_transient_is_what_the_ledger_says(
    lengths: list[int], parts: int, stage: int, seed: int
) -> None:
    """The programs of the solvers are written with these two."""
    problem = toy_problem(lengths, [3, 3])
    chains = price_chains(problem, cut(problem, parts)[0])
    order = windowed_order(chains.chunks, 2, "adaptive", 2)
    memory = order_memories(problem, chains, order)[stage]
    recompute = drawn_recompute(np.random.default_rng(seed), 3, chains.num_chunks)
    limit = 1e6
    freed = memory.freed_per_layer_bytes * (recompute.keep_input + recompute.keep_attention)
    freed = freed - memory.attention_bytes * recompute.keep_attention
    signs = memory.program.activation_signs
    freed_in_flight = np.cumsum(signs * freed[memory.program.chunks])
    # B still holds what its own chunk kept.
    own = np.where(memory.program.is_backward, freed[memory.program.chunks], 0.0)
    expected = memory.during(recompute) - limit + freed_in_flight + own
    actual = memory.missing_bytes(limit) + memory.transient(recompute)
    assert actual == pytest.approx(expected, abs=1e-3)
