"""The bound by work: what sequences force by themselves, and the trip to a stage and back.

The makespan is at least the work of any stage, and the time that the smallest chunk takes to get
there and back. The work is F and B of all tokens at the best rate of any chunk, all attention
pairs, and the recompute without which some sequence would not fit on the stage even alone.
"""

from __future__ import annotations

import numpy as np

from infinipipe.aliases import Bools, Floats
from infinipipe.costs.rates import ChunkRates


def smallest_trip_seconds(rates: ChunkRates) -> Floats:
    """Return (stages,) the seconds of a chunk of one token to the stage and back from it."""
    both_transfers = rates.transfer * 2
    stages_passed = rates.work + both_transfers
    trips = stages_passed.cumulative() - rates.work - both_transfers
    one_token = np.ones(1)
    return trips.whole_seconds(one_token)[:, 0]


def can_be_split(rates: ChunkRates, lengths: Floats) -> Bools:
    """Return (lengths,) whether every stage can hold such a sequence split.

    The B of its last slice brings the gradients of all its K and V. When that B is at its first
    layer, it holds this layer whole, and all slices before still keep the inputs of all layers.
    """
    sizes = rates.bytes
    last = (sizes.full + sizes.beside_layers + sizes.backward_transient)[:, None]
    before = (rates.num_layers * sizes.input + sizes.beside_layers)[:, None]
    # Straight in the tokens of the last slice, so least for the smallest or for the largest one.
    with_smallest = last + before * (lengths - 1)
    with_largest = last * (lengths - 1) + before
    slices = np.minimum(with_smallest, with_largest)
    slots = (rates.num_layers * (sizes.kv + sizes.kv_gradients))[:, None] * lengths
    fits = slices + slots <= rates.backward_room[:, None]
    return np.asarray(fits.all(axis=0))


def whole_recompute_tokens(rates: ChunkRates, lengths: Floats) -> Floats:
    """Return (stages, lengths) the tokens of layers that a whole sequence must recompute.

    Its B holds all that F kept, besides what it needs itself. A token of a layer that is
    recomputed frees its activations, and its K and V.
    """
    sizes = rates.bytes
    layers = rates.num_layers * (sizes.full + sizes.kv)
    held = (layers + sizes.beside_layers + sizes.backward_transient)[:, None] * lengths
    lacking = np.maximum(0.0, held - rates.backward_room[:, None])
    return np.asarray(lacking / (sizes.freed + sizes.kv))


def forced_recompute_seconds(rates: ChunkRates, lengths: Floats, can_split: Bools) -> Floats:
    """Return (stages,) the least seconds of recompute that sequences force, each by itself."""
    layers = rates.num_layers[:, None]
    split = np.where(can_split, _split_recompute_tokens(rates, lengths), np.inf)
    whole = whole_recompute_tokens(rates, lengths)
    tokens = np.minimum(np.minimum(split, whole), layers * lengths)
    # Cheapest are the first tokens, whose attention is short, in all layers.
    prefix = tokens / layers
    rate = rates.recompute.least_per_token()
    pairs = layers * rates.recompute.per_pair * prefix * prefix / 2
    return np.asarray((rate * tokens + pairs).sum(axis=1))


def _split_recompute_tokens(rates: ChunkRates, lengths: Floats) -> Floats:
    """Return (stages, lengths) the same as `whole_recompute_tokens`, of a sequence that is split.

    When the B of a last slice begins, all slices are kept, and one layer's gradients of K and V
    are there. When it is at its first layer, all slices but this one are kept, and the gradients
    of all layers. The first of these times asks for more the larger the last slice is, the second
    mostly for less: then it is least where they meet.
    """
    sizes = rates.bytes
    layers = rates.num_layers[:, None]
    kept = (rates.num_layers * (sizes.full + sizes.kv) + sizes.beside_layers)[:, None] * lengths
    beyond_room = kept - rates.backward_room[:, None]
    kv_gradients = sizes.kv_gradients * lengths

    smallest = np.ones_like(lengths)
    where_they_meet = np.clip(kv_gradients / sizes.full, 1, np.maximum(1, lengths - 1))
    lacking = np.full(kept.shape, np.inf)
    for last in (smallest, where_they_meet):
        transient = sizes.backward_transient[:, None] * last
        begin = kv_gradients
        first_layer = layers * kv_gradients - (layers - 1) * sizes.full * last
        needed = beyond_room + transient + np.maximum(begin, first_layer)
        lacking = np.minimum(lacking, needed)
    return np.asarray(np.maximum(0.0, lacking) / sizes.freed)
