"""A profile as tables for people, with rich."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from infinipipe.costs.cost import curve_seconds, layer_seconds
from infinipipe.profiles.profile import LayerTime, Line, Profile, Times

_SIZES = (64, 256, 1024, 4096, 16384)


def profile_tables(profile: Profile) -> Group:
    """Return what a profile says: of what it is, times, bytes, and how accurate it is."""
    parts: list[Table | Text] = [
        # Text, as names may look like markup.
        Text(f"{profile.model.name} on {profile.device.name}, {profile.source}", style="bold"),
        _facts_table(profile),
        _times_table(profile),
        _rates_table(profile),
        _bytes_table(profile),
    ]
    if profile.accuracy:
        parts.append(_accuracy_table(profile))
    parts += [Text(line) for line in _refinements(profile)]
    return Group(*parts)


def _facts_table(profile: Profile) -> Table:
    device, model = profile.device, profile.model
    versions = ", ".join(f"{name} {version}" for name, version in sorted(profile.software.items()))
    rows = [
        (
            "device",
            f"{device.num_devices} of {device.memory_bytes / 2**30:.2f} GiB each, {device.capability}",
        ),
        ("created", f"{profile.created} by infinipipe {profile.infinipipe_version}"),
        ("software", versions or "none: computed from a data sheet, nothing was measured"),
        (
            "model",
            f"{model.architecture}: {model.num_layers} layers of {model.hidden_size}, "
            f"{model.num_heads}/{model.num_kv_heads} heads of {model.head_dim}, MLP {model.intermediate_size}, "
            f"vocabulary {model.vocabulary_size:,}, {profile.dtype}",
        ),
    ]
    table = Table(show_header=False, box=None)
    for name, text in rows:
        table.add_row(name, Text(text))
    return table


def _times_table(profile: Profile) -> Table:
    """Return milliseconds of one whole sequence by its length."""
    times, tokens = profile.times, np.array(_SIZES)
    pairs, slices = tokens * (tokens + 1) // 2, np.ones_like(tokens)
    curves = (
        ("embedding F", times.embedding_forward),
        ("embedding B", times.embedding_backward),
        ("head and loss F", times.head_forward),
        ("head B", times.head_backward),
    )
    table = _table("milliseconds of one sequence", *(f"{size:,} tokens" for size in _SIZES))
    for name, layer in layer_times(times).items():
        _add_row(table, f"layer {name}", 1e3 * layer_seconds(layer, tokens, pairs, slices))
    for name, curve in curves:
        _add_row(table, name, 1e3 * curve_seconds(curve, tokens))
    return table


def _rates_table(profile: Profile) -> Table:
    times = profile.times
    layers = layer_times(times)
    table = _table("coefficients of a layer", *layers)
    units = {
        "s_per_pair": ("ns per pair", 1e9),
        "s_per_slice": ("us per slice", 1e6),
        "s_per_context": ("us per slice with context", 1e6),
        "s_per_context_token": ("ns per token of context", 1e9),
        "s_per_continued_token": ("ns per token of a slice with context", 1e9),
    }
    for name, (unit, factor) in units.items():
        _add_row(table, unit, (factor * getattr(layer, name) for layer in layers.values()))
    _add_row(
        table, "sizes in the curve", (f"{len(layer.curve.tokens)}" for layer in layers.values())
    )
    table.add_section()
    _add_row(
        table, "us per chunk and stage", (1e6 * times.chunk_forward_s, 1e6 * times.chunk_backward_s)
    )
    for name, line, unit in (
        ("optimizer", times.optimizer_s, "parameter"),
        ("transfer", times.transfer_s, "byte"),
        (f"all-to-all of {times.all_to_all_ranks} ranks", times.all_to_all_s, "byte"),
        (f"all-reduce of {times.all_to_all_ranks} ranks", times.all_reduce_s, "byte"),
    ):
        if line is not None:
            table.add_row(name, _line(line, unit))
    return table


def layer_times(times: Times) -> dict[str, LayerTime]:
    """Return the times of a layer by the names that people read; I and W where the profile has them."""
    found = {
        "F": times.layer_forward,
        "B": times.layer_backward,
        "recompute adds": times.layer_recompute,
        "I": times.layer_input_backward,
        "W": times.layer_weight_backward,
    }
    return {name: time for name, time in found.items() if time is not None}


def _line(line: Line, unit: str) -> str:
    return f"{1e6 * line.constant:.4g} us + {1e9 * line.rate:.4g} ns per {unit}"


def _bytes_table(profile: Profile) -> Table:
    sizes = profile.bytes
    table = _table("bytes", "per token", "at once")
    per_token = {
        "a layer keeps": sizes.layer_full_per_token,
        "if it is recomputed": sizes.activation_per_token,
        "its K and V": sizes.layer_kv_per_token,
        "their gradients, of a split sequence": sizes.layer_kv_grad_per_token,
        "a layer keeps from I to W": sizes.layer_split_per_token,
        "a stage keeps of a chunk besides": sizes.chunk_per_token,
        "the first stage besides": sizes.embedding_per_token,
        "the last stage besides": sizes.head_per_token,
    }
    for name, size in per_token.items():
        if size is not None:
            table.add_row(name, f"{size:,.0f}")
    peaks = {
        "for a moment: F of a layer": sizes.layer_forward_peak,
        "F of a layer that is recomputed": sizes.recompute_forward_peak,
        "B of a layer": sizes.layer_backward_peak,
        "B of the embedding": sizes.embedding_backward_peak,
        "F of the head, without logits": sizes.head_forward_peak,
        "B of the head": sizes.head_backward_peak,
    }
    for name, line in peaks.items():
        table.add_row(name, f"{line.rate:,.0f}", f"{line.constant:,.0f}")
    table.add_row("B of a slice, of its own tokens", f"{sizes.slice_backward_per_token:,.0f}")
    table.add_row("B of a slice, of its context", f"{sizes.context_per_token:,.0f}")
    table.add_row("a piece of logits", f"{sizes.logits_per_token:,.0f}")
    table.add_row("static, per parameter", "", f"{sizes.static_per_parameter}")
    return table


def _accuracy_table(profile: Profile) -> Table:
    table = _table("fitted against measured", "samples", "median error", "90 %", "worst")
    for row in sorted(profile.accuracy, key=lambda a: a.held_out):
        errors = (f"{error:.1%}" for error in (row.median_error, row.p90_error, row.worst_error))
        table.add_row(
            f"{row.op}, {'held out' if row.held_out else 'fitted'}", str(row.num_samples), *errors
        )
    return table


def _refinements(profile: Profile) -> list[str]:
    return [
        f"refined: times x {r.scale:.3f} after {r.num_steps} steps of a run, error {r.error_before:.1%} -> "
        f"{r.error_after:.1%}"
        for r in profile.refinements
    ]


def _table(*names: str) -> Table:
    table = Table(box=None, title_justify="left", padding=(0, 2, 0, 0))
    for index, name in enumerate(names):
        table.add_column(name, justify="right" if index else "left")
    return table


def _add_row(table: Table, name: str, values: Iterable[float | str]) -> None:
    table.add_row(name, *(value if isinstance(value, str) else f"{value:.4g}" for value in values))
