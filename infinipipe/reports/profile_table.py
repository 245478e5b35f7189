"""A profile as tables for people, with rich."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from infinipipe.aliases import Floats, Ints
from infinipipe.costs import curve_seconds, layer_seconds
from infinipipe.profiles import LayerTime, Line, Links, Profile, Times
from infinipipe.profiles.profile import Accuracy, Refinement
from infinipipe.units import show_bytes

_LENGTHS = (64, 256, 1024, 4096, 16384)
"""Of the sequences whose milliseconds are shown, in tokens: from one that a chunk packs many of to
one that is split; five columns fit a terminal."""

# In a second.
_MILLISECONDS = 1e3
_MICROSECONDS = 1e6
_NANOSECONDS = 1e9


def profile_tables(profile: Profile) -> Group:
    """Return what a profile says: what it is of, times, bytes, and how accurate it is."""
    title = f"{profile.model.name} on {profile.device.name}, {profile.source}"
    parts: list[Table | Text] = [
        # Text, as names may look like markup.
        Text(title, style="bold"),
        _facts_table(profile),
        _times_table(profile.times),
        _rates_table(profile.times),
        _bytes_table(profile),
    ]
    if profile.accuracy:
        parts.append(_accuracy_table(profile))
    parts += [Text(_show_refinement(refinement)) for refinement in profile.refinements]
    return Group(*parts)


def _facts_table(profile: Profile) -> Table:
    facts = {
        "device": _show_device(profile),
        "created": f"{profile.created} by infinipipe {profile.infinipipe_version}",
        "software": _show_software(profile),
        "model": _show_model(profile),
    }
    table = Table(show_header=False, box=None)
    for name, text in facts.items():
        table.add_row(name, Text(text))
    return table


def _show_device(profile: Profile) -> str:
    device = profile.device
    memory = show_bytes(device.memory_bytes)
    return f"{device.num_devices} of {memory} each, {device.capability}"


def _show_software(profile: Profile) -> str:
    if not profile.software:
        return "none: computed from a data sheet, nothing was measured"
    return ", ".join(f"{name} {version}" for name, version in sorted(profile.software.items()))


def _show_model(profile: Profile) -> str:
    model = profile.model
    heads = f"{model.num_heads}/{model.num_kv_heads} heads of {model.head_dim}"
    return (
        f"{model.architecture}: {model.num_layers} layers of {model.hidden_size}, {heads}, "
        f"MLP {model.intermediate_size}, vocabulary {model.vocabulary_size:,}, {profile.dtype}"
    )


def _times_table(times: Times) -> Table:
    """Return milliseconds of one whole sequence by its length."""
    lengths = np.array(_LENGTHS)
    curves = {
        "embedding F": times.embedding_forward,
        "embedding B": times.embedding_backward,
        "head and loss F": times.head_forward,
        "head B": times.head_backward,
    }
    columns = [f"{length:,} tokens" for length in _LENGTHS]
    table = _table("milliseconds of one sequence", *columns)
    for name, layer in layer_times(times).items():
        _add_numbers(table, f"layer {name}", _MILLISECONDS * sequence_seconds(layer, lengths))
    for name, curve in curves.items():
        _add_numbers(table, name, _MILLISECONDS * curve_seconds(curve, lengths))
    return table


def sequence_seconds(layer: LayerTime, lengths: Ints) -> Floats:
    """Return the seconds of a layer for whole sequences, each alone in its chunk."""
    pairs = lengths * (lengths + 1) // 2
    return layer_seconds(layer, lengths, pairs, np.ones_like(lengths))


def layer_times(times: Times) -> dict[str, LayerTime]:
    """Return the times of a layer by the names that people read; without I and W if it has none."""
    named = {
        "F": times.layer_forward,
        "B": times.layer_backward,
        "recompute adds": times.layer_recompute,
        "I": times.layer_input_backward,
        "W": times.layer_weight_backward,
    }
    return {name: time for name, time in named.items() if time is not None}


def _rates_table(times: Times) -> Table:
    layers = layer_times(times)
    table = _table("coefficients of a layer", *layers)
    _add_rates(table, list(layers.values()))
    sizes = [f"{len(layer.curve.tokens)}" for layer in layers.values()]
    table.add_row("sizes in the curve", *sizes)
    table.add_section()
    chunk_us = (_MICROSECONDS * times.chunk_forward_s, _MICROSECONDS * times.chunk_backward_s)
    _add_numbers(table, "us per chunk and stage", chunk_us)
    table.add_row("optimizer", _show_line(times.optimizer_s, "parameter"))
    table.add_section()
    _add_links(table, "in a node", times.links)
    if times.links_between is not None:
        _add_links(table, "between nodes", times.links_between)
    return table


def _add_links(table: Table, where: str, links: Links) -> None:
    exchanges = {
        "all-to-all": links.all_to_all_s,
        "reduce-scatter": links.reduce_scatter_s,
        "all-gather": links.all_gather_s,
    }
    table.add_row(f"transfer {where}", _show_line(links.transfer_s, "byte"))
    for name, line in exchanges.items():
        table.add_row(f"{name} of {links.num_ranks} {where}", _show_line(line, "byte"))


def _add_rates(table: Table, layers: list[LayerTime]) -> None:
    units = {
        "s_per_pair": ("ns per pair", _NANOSECONDS),
        "s_per_slice": ("us per slice", _MICROSECONDS),
        "s_per_context": ("us per slice with context", _MICROSECONDS),
        "s_per_context_token": ("ns per token of context", _NANOSECONDS),
        "s_per_continued_token": ("ns per token of a slice with context", _NANOSECONDS),
    }
    for field, (unit, factor) in units.items():
        _add_numbers(table, unit, [factor * getattr(layer, field) for layer in layers])


def _show_line(line: Line, unit: str) -> str:
    constant_us = _MICROSECONDS * line.constant
    rate_ns = _NANOSECONDS * line.rate
    return f"{constant_us:.4g} us + {rate_ns:.4g} ns per {unit}"


def _bytes_table(profile: Profile) -> Table:
    sizes = profile.bytes
    table = _table("bytes", "per token", "at once")
    kept = {
        "a layer keeps": sizes.layer_full_per_token,
        "if it is recomputed": sizes.activation_per_token,
        "its K and V": sizes.layer_kv_per_token,
        "their gradients, of a split sequence": sizes.layer_kv_grad_per_token,
        "a layer keeps from I to W": sizes.layer_split_per_token,
        "a stage keeps of a chunk besides": sizes.chunk_per_token,
        "the first stage besides": sizes.embedding_per_token,
        "the last stage besides": sizes.head_per_token,
    }
    for name, size in kept.items():
        if size is not None:
            table.add_row(name, f"{size:,.0f}")
    transient = {
        "for a moment: F of a layer": sizes.layer_forward_peak,
        "F of a layer that is recomputed": sizes.recompute_forward_peak,
        "B of a layer": sizes.layer_backward_peak,
        "B of the embedding": sizes.embedding_backward_peak,
        "F of the head, without logits": sizes.head_forward_peak,
        "B of the head": sizes.head_backward_peak,
    }
    for name, line in transient.items():
        table.add_row(name, f"{line.rate:,.0f}", f"{line.constant:,.0f}")
    table.add_row("B of a slice, of its own tokens", f"{sizes.slice_backward_per_token:,.0f}")
    table.add_row("B of a slice, of its context", f"{sizes.context_per_token:,.0f}")
    table.add_row("a piece of logits", f"{sizes.logits_per_token:,.0f}")
    table.add_row("static, per parameter", "", f"{sizes.static_per_parameter}")
    table.add_row("and shared by its ranks", "", f"{sizes.sharded_per_parameter}")
    return table


def _accuracy_table(profile: Profile) -> Table:
    table = _table("fitted against measured", "samples", "median error", "90 %", "worst")
    for accuracy in sorted(profile.accuracy, key=_is_held_out):
        table.add_row(
            f"{accuracy.op}, {'held out' if accuracy.held_out else 'fitted'}",
            str(accuracy.num_samples),
            f"{accuracy.median_error:.1%}",
            f"{accuracy.p90_error:.1%}",
            f"{accuracy.worst_error:.1%}",
        )
    return table


def _is_held_out(accuracy: Accuracy) -> bool:
    return accuracy.held_out


def _show_refinement(refinement: Refinement) -> str:
    return (
        f"refined: times x {refinement.scale:.3f} after {refinement.num_steps} steps of a run, "
        f"error {refinement.error_before:.1%} -> {refinement.error_after:.1%}"
    )


def _table(*names: str) -> Table:
    table = Table(box=None, title_justify="left", padding=(0, 2, 0, 0))
    for index, name in enumerate(names):
        table.add_column(name, justify="right" if index else "left")
    return table


def _add_numbers(table: Table, name: str, numbers: Iterable[float]) -> None:
    table.add_row(name, *(f"{number:.4g}" for number in numbers))
