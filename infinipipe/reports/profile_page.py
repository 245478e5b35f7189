"""A profile as a self-contained HTML page: measured against fitted, without network."""

from __future__ import annotations

import html
from typing import Any

import numpy as np

from infinipipe.profiles import Profile, Sample, Times
from infinipipe.profiles.profile import SAMPLE_OPS
from infinipipe.reports.profile_table import layer_times, sequence_seconds

# The page loads nothing: plotly is in it, and draws images of its own.
_CONTENT_SECURITY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="{content_security}">
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

_SHORTEST = 16
"""Tokens where the curves begin, for a logarithmic axis cannot begin at none."""

_NUM_POINTS = 60
"""Of a curve: more could not be told apart on a page."""

_MOST_SLICES = 4
"""Of a chunk, beside the mouse: as many as fit one line."""


def profile_page(profile: Profile) -> str:
    """Return the page; a profile without samples has only its curves."""
    # Imported here, as it takes longer than all the rest.
    import plotly.io
    from plotly.offline import get_plotlyjs

    figures = [_curves_figure(profile.times)]
    if profile.samples:
        figures = [_samples_figure(profile), _errors_figure(profile), *figures]
    config = {"displaylogo": False, "responsive": True}
    plots = [f"<script>{get_plotlyjs()}</script>"]
    for figure in figures:
        plots.append(
            plotly.io.to_html(figure, config=config, include_plotlyjs=False, full_html=False)
        )
    title = f"{profile.model.name} on {profile.device.name} ({profile.source})"
    facts = f"{profile.created}, infinipipe {profile.infinipipe_version}, {_accuracy(profile)}"
    return _PAGE.format(
        content_security=_CONTENT_SECURITY,
        title=html.escape(title),
        facts=html.escape(facts),
        plots="\n".join(plots),
    )


def _accuracy(profile: Profile) -> str:
    errors = [f"{row.op} {row.median_error:.1%}" for row in profile.accuracy if row.held_out]
    if not errors:
        return "nothing was measured"
    return "median error on chunks held out: " + ", ".join(errors)


def _samples_figure(profile: Profile) -> Any:
    """Return fitted over measured seconds of every sample, next to where both are equal."""
    figure = _figure("Fitted against measured", "measured, seconds", "fitted, seconds")
    for name, samples in _groups(profile).items():
        measured_s = [sample.seconds for sample in samples]
        fitted_s = [sample.fitted_s for sample in samples]
        half_spreads_s = [sample.spread_s / 2 for sample in samples]
        texts = [_describe(sample) for sample in samples]
        figure.add_scatter(
            x=measured_s,
            y=fitted_s,
            error_x={"array": half_spreads_s, "thickness": 1},
            text=texts,
            mode="markers",
            name=name,
        )
    seconds = [sample.seconds for sample in profile.samples]
    ends = [min(seconds), max(seconds)]
    line = {"color": "gray", "dash": "dot"}
    figure.add_scatter(x=ends, y=ends, mode="lines", line=line, name="equal")
    return figure.update_yaxes(type="log")


def _errors_figure(profile: Profile) -> Any:
    figure = _figure("Error by size", "tokens of the chunk", "fitted / measured - 1")
    for name, samples in _groups(profile).items():
        sizes = [_num_tokens(sample) for sample in samples]
        errors = [sample.fitted_s / sample.seconds - 1 for sample in samples]
        texts = [_describe(sample) for sample in samples]
        figure.add_scatter(x=sizes, y=errors, text=texts, mode="markers", name=name)
    return figure.update_yaxes(tickformat=".0%")


def _curves_figure(times: Times) -> Any:
    """Return how efficiency falls for small chunks: seconds per token of one whole sequence."""
    figure = _figure("One layer, one sequence", "tokens of the sequence", "microseconds per token")
    longest = times.layer_forward.curve.tokens[-1]
    spaced = np.geomspace(_SHORTEST, longest, _NUM_POINTS)
    lengths = np.unique(spaced.astype(np.int64))
    for name, layer in layer_times(times).items():
        microseconds = 1e6 * sequence_seconds(layer, lengths)
        per_token = microseconds / lengths
        figure.add_scatter(x=lengths.tolist(), y=per_token.tolist(), mode="lines", name=name)
    return figure.update_yaxes(type="log")


def _groups(profile: Profile) -> dict[str, list[Sample]]:
    """Return the samples by op and by whether they were fitted, those that there are."""
    groups: dict[str, list[Sample]] = {}
    for use in ("fitted", "held out"):
        for op in SAMPLE_OPS:
            groups[f"{op}, {use}"] = []
    for sample in profile.samples:
        use = "held out" if sample.held_out else "fitted"
        groups[f"{sample.op}, {use}"].append(sample)
    return {name: samples for name, samples in groups.items() if samples}


def _num_tokens(sample: Sample) -> int:
    return sum(length for _, length in sample.slices)


def _describe(sample: Sample) -> str:
    ranges = [f"[{start}, {start + length})" for start, length in sample.slices[:_MOST_SLICES]]
    rest = len(sample.slices) - len(ranges)
    more = f" and {rest} more" if rest else ""
    return f"{', '.join(ranges)}{more}: {sample.num_repeats} repeats"


def _figure(title: str, x: str, y: str) -> Any:
    import plotly.graph_objects as go

    figure = go.Figure(layout={"title": title, "height": 480, "template": "plotly_white"})
    return figure.update_layout(xaxis={"title": x, "type": "log"}, yaxis={"title": y})
