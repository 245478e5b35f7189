"""Attention over the slices of a chunk."""

from infinipipe.runtime.attention.chunk_attention import (
    ATTENTION_NAME,
    Segments,
    chunk_attention,
)
from infinipipe.runtime.attention.kernels import (
    Attended,
    BlockKernel,
    CpuKernel,
    Gradients,
    Kernel,
    kernel_for,
)
from infinipipe.runtime.attention.kv_store import KVStore, Slot
from infinipipe.runtime.attention.segments import Segment

__all__ = [
    "ATTENTION_NAME",
    "Attended",
    "BlockKernel",
    "CpuKernel",
    "Gradients",
    "KVStore",
    "Kernel",
    "Segment",
    "Segments",
    "Slot",
    "chunk_attention",
    "kernel_for",
]
