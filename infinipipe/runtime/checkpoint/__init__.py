"""Checkpoints: weights on disk, as Hugging Face directories."""

from infinipipe.runtime.checkpoint.hf_load import check_checkpoint, load_weights
from infinipipe.runtime.checkpoint.hf_save import save_weights

__all__ = ["check_checkpoint", "load_weights", "save_weights"]
