"""The bound by work: what sequences force by themselves, and the round trip to a stage.

The makespan is at least the work of any stage, and the time that the smallest chunk takes to get
there and back. The work is F and B of all tokens at the best rate of any chunk, all attention
pairs, and the recompute without which some sequence would not fit on the stage even alone.
"""

from __future__ import annotations

import numpy as np

from infinipipe.aliases import Bools, Floats
from infinipipe.costs import ChunkRates
from infinipipe.costs.rates import TINY


def smallest_round_trip_seconds(rates: ChunkRates) -> Floats:
    """Return (stages,) the seconds of a chunk of one token down to the stage and back up."""
    both_transfers = rates.transfer * 2
    passed = rates.work + both_transfers
    round_trips = passed.cumulative() - rates.work - both_transfers
    one_token = np.ones(1)
    return round_trips.whole_seconds(one_token)[:, 0]


def can_be_split(rates: ChunkRates, lengths: Floats) -> Bools:
    """Return (lengths,) whether every stage can hold such a sequence split.

    Its opening B (of the last slice, first in time) brings the gradients of the K and V before that
    slice. When that B is at its first layer, it holds this layer whole, and all slices before still
    keep the inputs of all layers.
    """
    sizes = rates.bytes
    beside_layers = sizes.beside_layers
    inputs = rates.num_layers * sizes.input
    last = sizes.full + beside_layers + sizes.backward_transient
    before = inputs + beside_layers + rates.num_layers * sizes.kv_gradients
    # Straight in the tokens of the last slice, so least for the smallest or for the largest one.
    others = lengths - 1
    with_smallest = last + before * others
    with_largest = last * others + before
    slices = np.minimum(with_smallest, with_largest)

    slots = rates.num_layers * sizes.kv * lengths
    needed = slices + slots
    fits = needed <= rates.backward_room
    return np.asarray(fits.all(axis=0))


def whole_lacking_bytes(rates: ChunkRates, lengths: Floats) -> Floats:
    """Return (stages, lengths) the bytes that recompute of a whole sequence must free.

    Its B holds all that F kept, besides what it needs itself.
    """
    held = _kept_bytes(rates) + rates.bytes.backward_transient
    beyond_room = held * lengths - rates.backward_room
    return np.maximum(0.0, beyond_room)


def forced_recompute_seconds(rates: ChunkRates, lengths: Floats, can_split: Bools) -> Floats:
    """Return (stages,) the least seconds of recompute that sequences force, each by itself."""
    sizes = rates.bytes
    split_lacking = _split_lacking_bytes(rates, lengths)
    split = _least_seconds(rates, lengths, split_lacking, sizes.freed)
    # K and V of a whole one are not in a slot, so they are freed as well.
    whole_lacking = whole_lacking_bytes(rates, lengths)
    whole = _least_seconds(rates, lengths, whole_lacking, sizes.freed + sizes.kv)
    either = np.where(can_split, np.minimum(split, whole), whole)
    return np.asarray(either.sum(axis=1))


def _least_seconds(rates: ChunkRates, lengths: Floats, lacking: Floats, freed: float) -> Floats:
    """Return (stages, lengths) the least seconds of recompute that frees so many bytes.

    A token of a layer that is recomputed frees `freed`, or without attention less by attention's
    output. In whole it pays for its pairs besides; cheapest are the first tokens, whose attention
    is short, in all layers. So those pay with which the next one's pairs cost as much as freeing
    the bytes of its attention's output with other tokens; as few, or as many, as must.
    """
    recompute = rates.recompute
    num_layers = rates.num_layers
    layer_tokens = num_layers * lengths
    lacking = np.minimum(lacking, layer_tokens * freed)
    per_token = recompute.least_per_token()
    attention = rates.bytes.attention
    freed_but_attention = max(TINY, freed - attention)

    seconds_per_byte = per_token / freed_but_attention
    pays_up_to = attention * seconds_per_byte / np.maximum(recompute.per_pair, TINY)
    at_least = (lacking - layer_tokens * freed_but_attention) / attention
    at_most = lacking / freed
    in_whole = np.maximum(num_layers * pays_up_to, np.maximum(0.0, at_least))
    in_whole = np.minimum(in_whole, at_most)
    but_attention = (lacking - in_whole * freed) / freed_but_attention

    prefix = in_whole / num_layers
    pairs = num_layers * recompute.per_pair * prefix * prefix / 2
    return np.asarray(per_token * (in_whole + but_attention) + pairs)


def _split_lacking_bytes(rates: ChunkRates, lengths: Floats) -> Floats:
    """Return (stages, lengths) the bytes that recompute of a split sequence must free.

    When its opening B begins, all slices are kept, and one layer's gradients of the K and V before
    the last slice are there. When that B is at its first layer, all slices but the last one are
    kept, and the gradients of all layers. Both are straight in the tokens of the last slice, so the
    more of both is least for the smallest one, for the largest, or where they meet.
    """
    sizes = rates.bytes
    kept = _kept_bytes(rates) * lengths
    beyond_room = kept - rates.backward_room
    layers_done = (rates.num_layers - 1) * sizes.full

    smallest = np.ones_like(lengths)
    largest = np.maximum(1, lengths - 1)
    share = sizes.kv_gradients / (sizes.full + sizes.kv_gradients)
    where_they_meet = np.clip(share * lengths, 1, largest)
    lacking = np.full(beyond_room.shape, np.inf)
    for last in (smallest, where_they_meet, largest):
        transient = sizes.backward_transient * last
        kv_gradients = sizes.kv_gradients * (lengths - last)
        first_layer = rates.num_layers * kv_gradients - layers_done * last
        gradients = np.maximum(kv_gradients, first_layer)
        with_last = beyond_room + transient + gradients
        lacking = np.minimum(lacking, with_last)
    return np.asarray(np.maximum(0.0, lacking))


def _kept_bytes(rates: ChunkRates) -> Floats:
    """Return (stages, 1) the bytes per token from F to B without recompute, K and V included."""
    sizes = rates.bytes
    layers = rates.num_layers * sizes.full_with_kv
    return layers + sizes.beside_layers
