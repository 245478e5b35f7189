"""Model shapes: the presets, and Hugging Face configs read without transformers or torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from infinipipe.errors import InputError
from infinipipe.ir import Model

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""Every layer of these is dense softmax attention and an MLP, which is what the runtime can segment."""


def _llama(
    layers: int, hidden: int, heads: int, intermediate: int, vocabulary: int = 32000, **more: Any
) -> dict[str, Any]:
    config = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2**20,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
    }
    return config | more


def _qwen3(layers: int, hidden: int, heads: int, intermediate: int) -> dict[str, Any]:
    return _llama(layers, hidden, heads, intermediate, 151936) | {
        "model_type": "qwen3",
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    }


# Shapes as published by Touvron et al. 2023 (LLaMA 7B to 65B, here 70B with 8 K/V heads as in Llama 2),
# Meta (Llama 3) and Qwen (Qwen3). `tiny` is ours: small enough to train on a laptop's CPU, its vocabulary is bytes.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _llama(8, 128, 4, 256, 256, num_key_value_heads=2),
    "llama-7b": _llama(32, 4096, 32, 11008),
    "llama-13b": _llama(40, 5120, 40, 13824),
    "llama-30b": _llama(60, 6656, 52, 17920),
    "llama-70b": _llama(80, 8192, 64, 28672, num_key_value_heads=8),
    "llama3-8b": _llama(32, 4096, 32, 14336, 128256, num_key_value_heads=8, rope_theta=500000.0),
    "llama3-70b": _llama(80, 8192, 64, 28672, 128256, num_key_value_heads=8, rope_theta=500000.0),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600),
}


def read_model(name: str) -> Model:
    """Return the shape of a preset, a Hugging Face model directory or a `config.json`.

    Raises:
        InputError: there is no such model, or its layers cannot be segmented.
    """
    if name in PRESETS:
        return model_from_config(name, PRESETS[name])
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        raise InputError(
            f"{name}: no such model: give a preset ({', '.join(PRESETS)}), a model directory or a config.json"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a Hugging Face config: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"{path}: not a Hugging Face config: a JSON object is expected")
    folder = path.parent.resolve()
    return model_from_config(
        name, config, str(folder) if (folder / "tokenizer.json").is_file() else "bytes"
    )


def model_from_config(name: str, config: dict[str, Any], tokenizer: str = "bytes") -> Model:
    """Read the shape out of a Hugging Face config; see `read_model`."""
    config = {k: v for k, v in config.items() if k not in ("_name_or_path", "transformers_version")}
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise InputError(
            f"{name}: architecture {kind!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    read = _Reader(name, config)
    _refuse_unsegmentable(read)
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    # What may be left out or null is written down, so that nobody else's default can differ.
    config["num_key_value_heads"] = kv_heads = read.size(
        "num_key_value_heads", _default_kv_heads(kind, config, heads)
    )
    config["head_dim"] = head_dim = read.size(
        "head_dim", 128 if kind == "qwen3" else hidden // heads
    )
    config["tie_word_embeddings"] = read.flag("tie_word_embeddings")
    if heads % kv_heads:
        raise InputError(
            f"{name}: {heads} attention heads cannot share {kv_heads} K/V heads evenly"
        )
    if head_dim % 2:
        raise InputError(
            f"{name}: head_dim {head_dim} is odd, which rotary embeddings do not allow"
        )
    return Model(
        name=name,
        config=json.dumps(config, sort_keys=True, separators=(",", ":"), allow_nan=False),
        tokenizer=tokenizer,
        architecture=kind,
        num_layers=read.size("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=read.size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary_size=read.size("vocab_size"),
        tied=config["tie_word_embeddings"],
        layer_parameters=_layer_parameters(
            kind, read, hidden, heads * head_dim, kv_heads * head_dim, head_dim
        ),
    )


class _Reader:
    """Reads fields of a config, refusing those of a wrong type."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self.name, self.config = name, config

    def size(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise InputError(
                f"{self.name}: {key} in the config must be a positive integer, not {value!r}"
            )
        return value

    def flag(self, key: str) -> bool:
        value = self.config.get(key)
        if not isinstance(value, bool | None):
            raise InputError(
                f"{self.name}: {key} in the config must be true or false, not {value!r}"
            )
        return bool(value)


def _default_kv_heads(kind: str, config: dict[str, Any], heads: int) -> int:
    """Return what transformers takes for a missing `num_key_value_heads`; null means as many as heads everywhere."""
    if "num_key_value_heads" in config or kind == "llama":
        return heads
    return 8 if kind == "mistral" else 32


def _layer_parameters(
    kind: str, read: _Reader, hidden: int, query: int, kv: int, head_dim: int
) -> int:
    inner = read.size("intermediate_size")
    attention = 2 * hidden * query + 2 * hidden * kv
    if kind == "qwen2":
        attention += query + 2 * kv
    elif kind != "mistral" and read.flag("attention_bias"):
        attention += query + 2 * kv + hidden
    norms = 2 * hidden + (2 * head_dim if kind == "qwen3" else 0)
    mlp = 3 * hidden * inner + (
        2 * inner + hidden if kind == "llama" and read.flag("mlp_bias") else 0
    )
    return attention + mlp + norms


def _refuse_unsegmentable(read: _Reader) -> None:
    """Refuse what would be computed wrongly for a slice or a packed neighbour, or cannot be trained."""
    name, config = read.name, read.config
    if _has_window(read):
        raise InputError(
            f"{name}: sliding-window attention is not supported; set sliding_window to null in its config"
        )
    if config.get("attention_dropout"):
        raise InputError(f"{name}: attention_dropout is not supported; set it to 0 in its config")
    if config.get("quantization_config"):
        raise InputError(
            f"{name}: a quantized model cannot be trained; give its unquantized original"
        )
    for key in ("rope_scaling", "rope_parameters"):
        for kind in _rope_types(name, key, config.get(key)):
            if kind in ("dynamic", "longrope"):
                raise InputError(
                    f"{name}: {kind} rope depends on the length at hand, so slices of a sequence would disagree; "
                    "use another rope_type"
                )


def _has_window(read: _Reader) -> bool:
    kinds = read.config.get("layer_types") or ()
    if not isinstance(kinds, list | tuple):
        raise InputError(f"{read.name}: layer_types in the config must be a list, not {kinds!r}")
    if "sliding_attention" in kinds:
        return True
    used = read.config["model_type"] == "mistral" or read.flag("use_sliding_window")
    # Where it is used and left out, transformers takes 4096.
    return (
        used
        and read.config["model_type"] != "llama"
        and bool(read.config.get("sliding_window", 4096))
    )


def _rope_types(name: str, key: str, rope: object) -> list[object]:
    """Return every type in a rope entry; some models nest one entry for each kind of layer."""
    if rope is None:
        return []
    if not isinstance(rope, dict):
        raise InputError(f"{name}: {key} in the config must be an object, not {rope!r}")
    nested = [
        kind
        for entry in rope.values()
        if isinstance(entry, dict)
        for kind in _rope_types(name, key, entry)
    ]
    return [rope.get("rope_type", rope.get("type")), *nested]


# Logits are computed for so many elements at a time: 256 MiB in float32.
LOGITS_ELEMENTS = 2**26


def logits_tokens(vocabulary_size: int) -> int:
    """Return for how many tokens at most the head computes logits at a time."""
    return min(1024, max(64, LOGITS_ELEMENTS // vocabulary_size))
