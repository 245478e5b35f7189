"""Ranks that share sequences: which tokens each has, and exactness of what they exchange."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from infinipipe.ir import Chunk, Slice
from infinipipe.runtime.shards import shard_of, shard_sizes
from tests.runtime.cuts import LAYERS, MENU
from tests.runtime.replay import (
    MemoryDataset,
    assert_equal,
    hand_header,
    hand_step,
    oracle,
    replay,
    small_model,
)

pytestmark = pytest.mark.slow

Pieces = list[list[tuple[int, int, int]]]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 5))
def test_shards_are_the_chunk_in_order_and_as_even_as_can_be(
    lengths: list[int], num_ranks: int
) -> None:
    chunk = Chunk(tuple(Slice(row, 10 * row, n) for row, n in enumerate(lengths)))
    shards = [shard_of(chunk, num_ranks, index) for index in range(num_ranks)]
    assert [shard.num_tokens for shard in shards] == shard_sizes(chunk.num_tokens, num_ranks)
    sizes = [shard.num_tokens for shard in shards]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    together = [tokens_of(shard) for shard in shards]
    assert list(itertools.chain(*together)) == tokens_of(chunk)


def tokens_of(chunk: Chunk) -> list[tuple[int, int]]:
    return [
        (part.sequence, token) for part in chunk.slices for token in range(part.start, part.stop)
    ]


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[int], Pieces]:
    """Draw sequences and their chunks: some split, at most one part of a sequence in a chunk."""
    # Without a token that has a target and a choice of keys, queries have no gradient to compare.
    lengths = [draw(st.integers(3, 9)), *draw(st.lists(st.integers(1, 9), max_size=3))]
    chunks: Pieces = []
    whole = []
    for sequence, length in enumerate(lengths):
        bounds = draw(st.sets(st.integers(1, length - 1), max_size=3)) if length > 1 else set()
        if not bounds:
            whole.append((sequence, 0, length))
            continue
        cuts = [0, *sorted(bounds), length]
        chunks += [[(sequence, start, stop - start)] for start, stop in itertools.pairwise(cuts)]
    for part in whole:
        # Beside others, or alone.
        joined = bool(chunks) and draw(st.booleans())
        if joined:
            chunk = draw(st.sampled_from(chunks))
            chunk.insert(draw(st.integers(0, len(chunk))), part)
        else:
            chunks.append([part])
    return lengths, chunks


# Failures are not shrunk: a rank that fails leaves the others waiting, again in each try.
@settings(max_examples=15, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    table=tables(),
    heads=st.sampled_from([(2, 1), (2, 2), (2, 12), (3, 1), (3, 3), (4, 1), (4, 2), (4, 12)]),
    num_stages=st.sampled_from([1, 2]),
    menu=st.sampled_from(sorted(MENU)),
)
def test_ranks_that_share_any_chunks_equal_the_unsplit_model(
    table: tuple[list[int], Pieces],
    heads: tuple[int, int],
    num_stages: int,
    menu: str,
) -> None:
    """Shards without tokens, ranks that have the same key-value head, slices in any place."""
    num_ranks, kv_heads = heads
    lengths, chunks = table
    model = small_model(num_attention_heads=12, num_key_value_heads=kv_heads, hidden_size=48)
    header = hand_header(model, LAYERS[num_stages], sequence_parallel=num_ranks)
    dataset = MemoryDataset(lengths)
    step = hand_step(header, dataset, [chunks], *MENU[menu])
    assert_equal(replay(header, step, dataset), oracle(header, step, dataset))
