"""What chunks, ops and whole programs cost, in seconds and in bytes. It knows no torch."""

from infinipipe.costs.chunks import ChunkSizes, CostedChunks, Recompute
from infinipipe.costs.memory import StageMemory
from infinipipe.costs.model import CostModel, max_sequence_tokens
from infinipipe.costs.predict import Span, check_predictions, is_priced, step_spans
from infinipipe.costs.program import PackedProgram
from infinipipe.costs.rates import ChunkRates
from infinipipe.costs.simulate import Timeline, simulate
from infinipipe.costs.times import curve_seconds, layer_seconds
from infinipipe.costs.work import Work

__all__ = [
    "ChunkRates",
    "ChunkSizes",
    "CostModel",
    "CostedChunks",
    "PackedProgram",
    "Recompute",
    "Span",
    "StageMemory",
    "Timeline",
    "Work",
    "check_predictions",
    "curve_seconds",
    "is_priced",
    "layer_seconds",
    "max_sequence_tokens",
    "simulate",
    "step_spans",
]
