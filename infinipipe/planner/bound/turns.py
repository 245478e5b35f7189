"""The bound by turns: sequences so long that no two of them fit on a stage together.

A sequence is open on a stage from its first F to its closing B there: that of its first slice, last
in time, or the only one. Two of them take turns if the stage can hold neither while the other one's
closing B runs. Both need more the longer they are: if the two shortest of the longest k must take
turns, all k must.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from infinipipe.aliases import Bools, Floats, Ints
from infinipipe.costs import ChunkRates
from infinipipe.costs.rates import TINY
from infinipipe.planner.bound.work import whole_lacking_bytes

# A quotient that is a whole number but for rounding is not rounded up to the next one.
_ROUNDING = 1 - 1e-12


def turn_seconds(rates: ChunkRates, lengths: Floats, can_split: Bools, num_replicas: int) -> float:
    """Return the longest time in which sequences, the longest first, take turns on a stage."""
    needed = _open_bytes(rates, lengths, can_split)
    counts = _turn_counts(rates, needed)
    most = counts.max()
    spans = _open_seconds(rates, lengths[:most], can_split[:most])
    takes_turns = np.arange(most) < counts[:, None]
    sums = (spans * takes_turns).sum(axis=1)
    # Replicas share the turns, but no sequence is in two of them.
    shared = sums.max() / num_replicas
    longest = spans[:, 0].max()
    return float(max(shared, longest))


class _OpenBytes(NamedTuple):
    """The least bytes that sequences need on each stage; arrays are (stages, lengths)."""

    closing: Floats
    """While their closing B runs."""
    held: Floats
    """At any time while they are open."""


def _open_bytes(rates: ChunkRates, lengths: Floats, can_split: Bools) -> _OpenBytes:
    sizes = rates.bytes
    num_layers = rates.num_layers
    # B of a whole one holds a layer with its K and V, and the inputs of the others. Until then,
    # it keeps at least the inputs of all.
    whole_closing = (sizes.least + sizes.kv) * lengths
    inputs = num_layers * sizes.input + sizes.beside_layers
    # Whichever is less, before B or within: B may free more of the head's than it needs itself.
    whole_held = np.minimum(inputs, sizes.least) * lengths
    # A split one has its K and V in slots, and in its closing B the gradients of those before its
    # last slice, which may be all but one token.
    split_held = num_layers * lengths * sizes.kv
    split_closing = split_held + num_layers * sizes.kv_gradients
    either_closing = np.minimum(whole_closing, split_closing)
    either_held = np.minimum(whole_held, split_held)
    return _OpenBytes(
        closing=np.where(can_split, either_closing, whole_closing),
        held=np.where(can_split, either_held, whole_held),
    )


def _turn_counts(rates: ChunkRates, needed: _OpenBytes) -> Ints:
    """Return (stages,) how many of the longest sequences take turns."""
    # Of each sequence and the next shorter one.
    longer = np.s_[:, :-1]
    shorter = np.s_[:, 1:]
    while_longer_closes = needed.closing[longer] + needed.held[shorter]
    while_shorter_closes = needed.closing[shorter] + needed.held[longer]
    together = np.minimum(while_shorter_closes, while_longer_closes)
    take_turns = together > rates.backward_room
    turns_so_far = np.cumprod(take_turns, axis=1)
    return np.asarray(1 + turns_so_far.sum(axis=1))


def _open_seconds(rates: ChunkRates, lengths: Floats, can_split: Bools) -> Floats:
    """Return (stages, lengths) the least seconds that a sequence is open on a stage.

    One that is not split is open for its stay, while it travels down from the stage and back. A
    split one is open at least while its slices run on any one of the stages from this one on.
    """
    whole = rates.work.whole_seconds(lengths) + _whole_recompute_seconds(rates, lengths)
    split = rates.work.split_seconds(lengths)
    # On a stage and on all below: from the last stage up.
    stays = whole[::-1].cumsum(axis=0)[::-1]
    slices = np.maximum.accumulate(split[::-1], axis=0)[::-1]
    either = np.minimum(slices, stays)
    return np.where(can_split, either, stays)


def _whole_recompute_seconds(rates: ChunkRates, lengths: Floats) -> Floats:
    """Return (stages, lengths) the least seconds of recompute that a whole sequence forces.

    So many layers drop all, and as many others as it takes then drop all but attention's output.
    """
    sizes = rates.bytes
    freed = sizes.freed + sizes.kv
    freed_but_attention = max(TINY, freed - sizes.attention)
    lacking = whole_lacking_bytes(rates, lengths) / lengths * _ROUNDING
    layer_s = rates.recompute.whole_seconds(lengths)
    layer_but_attention_s = rates.recompute_but_attention.whole_seconds(lengths)
    # All layers drop all, whether that is enough or not.
    least = rates.num_layers * layer_s
    for in_whole in range(int(rates.num_layers.max())):
        left = np.maximum(0.0, lacking - in_whole * freed)
        others = np.ceil(left / freed_but_attention)
        seconds = in_whole * layer_s + others * layer_but_attention_s
        is_possible = in_whole + others <= rates.num_layers
        least = np.where(is_possible, np.minimum(least, seconds), least)
    return least
