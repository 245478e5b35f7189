"""Attention over the slices of a chunk."""

from infinipipe.runtime.attention.chunk_attention import (
    ATTENTION_NAME,
    KeptAttention,
    Segments,
    chunk_attention,
)
from infinipipe.runtime.attention.exchange import (
    NO_EXCHANGE,
    Exchange,
    HeadExchange,
    exchange_in,
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
    "NO_EXCHANGE",
    "Attended",
    "AttentionGradients",
    "BlockKernel",
    "CpuKernel",
    "Exchange",
    "HeadExchange",
    "KVStore",
    "KeptAttention",
    "Kernel",
    "Segment",
    "Segments",
    "Slot",
    "chunk_attention",
    "exchange_in",
    "kernel_for",
]
