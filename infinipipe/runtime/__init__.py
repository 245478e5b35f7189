"""The thin runtime: replays a plan on PyTorch, one process a stage."""

from infinipipe.runtime.launch import run_plan
from infinipipe.runtime.prepare import RunOptions

__all__ = ["RunOptions", "run_plan"]
