"""Attention over the slices of a chunk."""

from infinipipe.runtime.attention.chunk_attention import (
    ATTENTION_NAME,
    KeptAttention,
    Segments,
    chunk_attention,
)
from infinipipe.runtime.attention.kernels import (
    Attended,
    AttentionGradients,
    BlockKernel,
    CpuKernel,
    Kernel,
    kernel_for,
)
from infinipipe.runtime.attention.kv_store import KVStore, Slot
from infinipipe.runtime.attention.segments import Segment

__all__ = [
    "ATTENTION_NAME",
    "Attended",
    "AttentionGradients",
    "BlockKernel",
    "CpuKernel",
    "KVStore",
    "KeptAttention",
    "Kernel",
    "Segment",
    "Segments",
    "Slot",
    "chunk_attention",
    "kernel_for",
]
