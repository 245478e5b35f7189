"""A layer whose times are known, which fits and surveys should find."""

from __future__ import annotations

from infinipipe.profiles import Curve, LayerTime

TRUTH = LayerTime(
    curve=Curve(tokens=(1, 64, 256, 1024, 4096), seconds=(3e-3, 4e-3, 6e-3, 0.015, 0.06)),
    s_per_pair=1e-8,
    s_per_slice=2e-4,
    s_per_context=4e-4,
    s_per_context_token=3e-7,
    s_per_continued_token=3e-6,
)
