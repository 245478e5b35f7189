"""Measures a model on this machine, through the very code that will train it.

Only what starts without torch is named here. `measure_profile`, which needs it, is imported from
`infinipipe.measure.measure`.
"""

from infinipipe.measure.refine import refine_profile

__all__ = ["refine_profile"]
