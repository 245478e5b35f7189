"""A profile as a self-contained HTML page: measured against fitted, without network."""

from __future__ import annotations

import html
from typing import Any

import numpy as np

from infinipipe.costs.cost import layer_seconds
from infinipipe.profiles.profile import SAMPLE_OPS, Profile, Sample
from infinipipe.reports.profile_table import layer_times

_SHELL = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<title>{title}</title>
<style>body {{ font-family: system-ui, sans-serif; margin: 1rem auto; max-width: 75rem }}</style>
</head>
<body>
<h1>{title}</h1>
<p>{facts}</p>
{plots}
</body>
</html>
"""


def profile_page(profile: Profile) -> str:
    """Return the page; a profile without samples has only its curves."""
    # Imported here, as it takes longer than all the rest.
    import plotly.io
    from plotly.offline import get_plotlyjs

    figures = [_curves_figure(profile)]
    if profile.samples:
        figures = [_samples_figure(profile), _errors_figure(profile), *figures]
    config = {"displaylogo": False, "responsive": True}
    plots = [
        plotly.io.to_html(f, config=config, include_plotlyjs=False, full_html=False)
        for f in figures
    ]
    title = html.escape(f"{profile.model.name} on {profile.device.name} ({profile.source})")
    facts = html.escape(
        f"{profile.created}, infinipipe {profile.infinipipe_version}, {_accuracy(profile)}"
    )
    script = f"<script>{get_plotlyjs()}</script>\n"
    return _SHELL.format(title=title, facts=facts, plots=script + "\n".join(plots))


def _accuracy(profile: Profile) -> str:
    held_out = [f"{a.op} {a.median_error:.1%}" for a in profile.accuracy if a.held_out]
    return (
        "median error on chunks held out: " + ", ".join(held_out)
        if held_out
        else "nothing was measured"
    )


def _samples_figure(profile: Profile) -> Any:
    """Return fitted over measured seconds of every sample, next to the line where both are equal."""
    figure = _figure("Fitted against measured", "measured, seconds", "fitted, seconds")
    for name, samples in _groups(profile):
        figure.add_scatter(
            x=[s.seconds for s in samples],
            y=[s.fitted_s for s in samples],
            error_x={"array": [s.spread_s / 2 for s in samples], "thickness": 1},
            text=[_describe(s) for s in samples],
            mode="markers",
            name=name,
        )
    ends = [min(s.seconds for s in profile.samples), max(s.seconds for s in profile.samples)]
    figure.add_scatter(
        x=ends, y=ends, mode="lines", line={"color": "gray", "dash": "dot"}, name="equal"
    )
    return figure.update_yaxes(type="log")


def _errors_figure(profile: Profile) -> Any:
    figure = _figure("Error by size", "tokens of the chunk", "fitted / measured - 1")
    for name, samples in _groups(profile):
        figure.add_scatter(
            x=[sum(length for _, length in s.slices) for s in samples],
            y=[s.fitted_s / s.seconds - 1 for s in samples],
            text=[_describe(s) for s in samples],
            mode="markers",
            name=name,
        )
    return figure.update_yaxes(tickformat=".0%")


def _curves_figure(profile: Profile) -> Any:
    """Return how efficiency falls for small chunks: seconds per token of one whole sequence."""
    figure = _figure("One layer, one sequence", "tokens of the sequence", "microseconds per token")
    times = profile.times
    tokens = np.unique(np.geomspace(16, times.layer_forward.curve.tokens[-1], 60).astype(np.int64))
    pairs, slices = tokens * (tokens + 1) // 2, np.ones_like(tokens)
    for name, layer in layer_times(times).items():
        seconds = layer_seconds(layer, tokens, pairs, slices)
        figure.add_scatter(
            x=tokens.tolist(), y=(1e6 * seconds / tokens).tolist(), mode="lines", name=name
        )
    return figure.update_yaxes(type="log")


def _groups(profile: Profile) -> list[tuple[str, list[Sample]]]:
    kinds = [(op, held_out) for held_out in (False, True) for op in SAMPLE_OPS]
    return [
        (f"{op}, {'held out' if held_out else 'fitted'}", found)
        for op, held_out in kinds
        if (found := [s for s in profile.samples if (s.op, s.held_out) == (op, held_out)])
    ]


def _describe(sample: Sample) -> str:
    shown = ", ".join(f"[{start}, {start + length})" for start, length in sample.slices[:4])
    more = f" and {len(sample.slices) - 4} more" if len(sample.slices) > 4 else ""
    return f"{shown}{more}: {sample.num_repeats} repeats"


def _figure(title: str, x: str, y: str) -> Any:
    import plotly.graph_objects as go

    return go.Figure(
        layout={"title": title, "height": 480, "template": "plotly_white"}
    ).update_layout(xaxis={"title": x, "type": "log"}, yaxis={"title": y})
