"""Configs of published models, by the names that the command line knows."""

from __future__ import annotations

from typing import Any

_SHARED = {
    # Stated as configs must; plain rotary embeddings compute nothing from it.
    "max_position_embeddings": 2**20,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
_LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
_LLAMA3 = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
_QWEN3 = {"model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "head_dim": 128}


def _config(
    family: dict[str, Any],
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    inner: int,
    vocabulary: int,
) -> dict[str, Any]:
    shape = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
    }
    return _SHARED | shape | family


# Shapes as published by Touvron et al. 2023 (LLaMA 7B to 65B, here 70B with 8 K/V heads as in
# Llama 2), Meta (Llama 3) and Qwen (Qwen3). `tiny` is ours: small enough to train on a laptop's
# CPU, its vocabulary is bytes. The columns are the arguments of `_config`.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _config(_LLAMA, 8, 128, 4, 2, 256, 256),
    "llama-7b": _config(_LLAMA, 32, 4096, 32, 32, 11008, 32000),
    "llama-13b": _config(_LLAMA, 40, 5120, 40, 40, 13824, 32000),
    "llama-30b": _config(_LLAMA, 60, 6656, 52, 52, 17920, 32000),
    "llama-70b": _config(_LLAMA, 80, 8192, 64, 8, 28672, 32000),
    "llama3-8b": _config(_LLAMA3, 32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": _config(_LLAMA3, 80, 8192, 64, 8, 28672, 128256),
    "qwen3-8b": _config(_QWEN3, 36, 4096, 32, 8, 12288, 151936),
    "qwen3-32b": _config(_QWEN3, 64, 5120, 64, 8, 25600, 151936),
}
"""Hugging Face configs by name."""
