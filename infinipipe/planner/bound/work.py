"""The bound by work: what sequences force by themselves, and the round trip to a stage.

The makespan is at least the work of any stage, and the time that the smallest chunk takes to get
there and back. The work is F and B of all tokens at the best rate of any chunk, all attention
pairs, and the recompute without which some sequence would not fit on the stage even alone.
"""

from __future__ import annotations

import numpy as np

from infinipipe.aliases import Bools, Floats
from infinipipe.costs import ChunkRates


def smallest_round_trip_seconds(rates: ChunkRates) -> Floats:
    """Return (stages,) the seconds of a chunk of one token down to the stage and back up."""
    both_transfers = rates.transfer * 2
    passed = rates.work + both_transfers
    round_trips = passed.cumulative() - rates.work - both_transfers
    one_token = np.ones(1)
    return round_trips.whole_seconds(one_token)[:, 0]


def can_be_split(rates: ChunkRates, lengths: Floats) -> Bools:
    """Return (lengths,) whether every stage can hold such a sequence split.

    Its opening B (of the last slice, first in time) brings the gradients of all its K and V. When
    that B is at its first layer, it holds this layer whole, and all slices before still keep the
    inputs of all layers.
    """
    sizes = rates.bytes
    beside_layers = sizes.beside_layers
    inputs = rates.num_layers * sizes.input
    last = sizes.full + beside_layers + sizes.backward_transient
    before = inputs + beside_layers
    # Straight in the tokens of the last slice, so least for the smallest or for the largest one.
    others = lengths - 1
    with_smallest = last + before * others
    with_largest = last * others + before
    slices = np.minimum(with_smallest, with_largest)

    slots = rates.num_layers * sizes.slot * lengths
    needed = slices + slots
    fits = needed <= rates.backward_room
    return np.asarray(fits.all(axis=0))


def whole_recompute_layer_tokens(rates: ChunkRates, lengths: Floats) -> Floats:
    """Return (stages, lengths) the tokens times layers that a whole sequence must recompute.

    Its B holds all that F kept, besides what it needs itself. Each token of each layer that is
    recomputed frees its activations, and its K and V.
    """
    sizes = rates.bytes
    held = _kept_bytes(rates) + sizes.backward_transient
    beyond_room = held * lengths - rates.backward_room
    lacking = np.maximum(0.0, beyond_room)
    freed = sizes.freed + sizes.kv
    return lacking / freed


def forced_recompute_seconds(rates: ChunkRates, lengths: Floats, can_split: Bools) -> Floats:
    """Return (stages,) the least seconds of recompute that sequences force, each by itself."""
    recompute = rates.recompute
    num_layers = rates.num_layers
    if_split = _split_recompute_layer_tokens(rates, lengths)
    split = np.where(can_split, if_split, np.inf)
    whole = whole_recompute_layer_tokens(rates, lengths)
    either = np.minimum(split, whole)
    layer_tokens = np.minimum(either, num_layers * lengths)

    # Cheapest are the first tokens, whose attention is short, in all layers.
    prefix = layer_tokens / num_layers
    pairs = num_layers * recompute.per_pair * prefix * prefix / 2
    seconds = recompute.least_per_token() * layer_tokens + pairs
    return np.asarray(seconds.sum(axis=1))


def _split_recompute_layer_tokens(rates: ChunkRates, lengths: Floats) -> Floats:
    """Return (stages, lengths) the tokens times layers that a split sequence must recompute.

    When its opening B begins, all slices are kept, and one layer's gradients of K and V are there.
    When that B is at its first layer, all slices but the last one are kept, and the gradients of
    all layers. The first of these times asks for more the larger the last slice is, the second
    mostly for less: then it is least where they meet.

    The first does so if a token's transient bytes of B are not below 0, which is assumed. On the
    last stage what the head kept is taken off them: little but the gradient that it hands over in
    analytic profiles, a few tensors as wide as the model in measured ones. B of a layer needs more,
    as it holds such tensors and those of its MLP, which are wider.
    """
    sizes = rates.bytes
    kept = _kept_bytes(rates) * lengths
    beyond_room = kept - rates.backward_room
    kv_gradients = sizes.kv_gradients * lengths
    all_kv_gradients = rates.num_layers * kv_gradients
    layers_done = (rates.num_layers - 1) * sizes.full

    smallest = np.ones_like(lengths)
    largest = np.maximum(1, lengths - 1)
    where_they_meet = np.clip(kv_gradients / sizes.full, 1, largest)
    lacking = np.full(beyond_room.shape, np.inf)
    for last in (smallest, where_they_meet):
        transient = sizes.backward_transient * last
        begin = kv_gradients
        first_layer = all_kv_gradients - layers_done * last
        gradients = np.maximum(begin, first_layer)
        with_last = beyond_room + transient + gradients
        lacking = np.minimum(lacking, with_last)
    lacking = np.maximum(0.0, lacking)
    return np.asarray(lacking / sizes.freed)


def _kept_bytes(rates: ChunkRates) -> Floats:
    """Return (stages, 1) the bytes per token from F to B without recompute, K and V included."""
    sizes = rates.bytes
    layers = rates.num_layers * sizes.full_with_kv
    return layers + sizes.beside_layers
