"""Model shapes, read from Hugging Face configs without transformers or torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from infinipipe.errors import InputError
from infinipipe.ir import Model
from infinipipe.profiles.presets import PRESETS

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""Every layer of these is dense softmax attention and an MLP: what the runtime can segment."""

_ORIGIN_KEYS = ("_name_or_path", "transformers_version")
"""They say where a config came from: equal models must have equal configs."""
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def read_model(name: str) -> Model:
    """Return the shape of a preset, a Hugging Face model directory or a `config.json`.

    Raises:
        InputError: there is no such model, or its layers cannot be segmented.
    """
    if name in PRESETS:
        return model_from_config(name, PRESETS[name])
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    config = _read_config(name, path)
    folder = path.parent.resolve()
    has_tokenizer = (folder / "tokenizer.json").is_file()
    return model_from_config(name, config, str(folder) if has_tokenizer else "bytes")


def _read_config(name: str, path: Path) -> dict[str, Any]:
    try:
        config = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        presets = ", ".join(PRESETS)
        raise InputError(
            f"{name}: no such model: give a preset ({presets}), a model directory or a config.json"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a Hugging Face config: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"{path}: not a Hugging Face config: a JSON object is expected")
    return config


def model_from_config(name: str, config: dict[str, Any], tokenizer: str = "bytes") -> Model:
    """Read the shape out of a Hugging Face config; see `read_model`."""
    config = {key: value for key, value in config.items() if key not in _ORIGIN_KEYS}
    _check_architecture(name, config.get("model_type"))
    read = _Reader(name, config)
    _refuse_unsegmentable(read)
    _write_defaults(read)
    _check_heads(read)
    return Model(
        name=name,
        config=json.dumps(config, sort_keys=True, separators=(",", ":"), allow_nan=False),
        tokenizer=tokenizer,
        architecture=config["model_type"],
        num_layers=read.size("num_hidden_layers"),
        hidden_size=read.size("hidden_size"),
        intermediate_size=read.size("intermediate_size"),
        num_heads=read.size("num_attention_heads"),
        num_kv_heads=read.size("num_key_value_heads"),
        head_dim=read.size("head_dim"),
        vocabulary_size=read.size("vocab_size"),
        tied=read.flag("tie_word_embeddings"),
        layer_parameters=_layer_parameters(read),
    )


class _Reader:
    """Reads fields of a config, refusing those of a wrong type."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self.name = name
        self.config = config

    @property
    def architecture(self) -> str:
        return str(self.config["model_type"])

    def size(self, key: str, default: int | None = None) -> int:
        """Return a size; one that is missing or null is the default."""
        value = self.config.get(key)
        if value is None:
            value = default
        # Booleans are integers to Python. Plans hold sizes in signed 32 bits.
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise InputError(
                f"{self.name}: {key} in the config must be a positive integer, not {value!r}"
            )
        return value

    def flag(self, key: str) -> bool:
        """Return a flag; one that is missing or null is false."""
        value = self.config.get(key)
        if not isinstance(value, bool | None):
            raise InputError(
                f"{self.name}: {key} in the config must be true or false, not {value!r}"
            )
        return bool(value)


def _check_architecture(name: str, architecture: object) -> None:
    if architecture not in ARCHITECTURES:
        raise InputError(
            f"{name}: architecture {architecture!r} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )


def _write_defaults(read: _Reader) -> None:
    """Write down what may be left out or null, so that nobody else's default can differ."""
    hidden = read.size("hidden_size")
    heads = read.size("num_attention_heads")
    kv_heads = read.size("num_key_value_heads", _default_kv_heads(read, heads))
    head_dim = read.size("head_dim", 128 if read.architecture == "qwen3" else hidden // heads)
    read.config["num_key_value_heads"] = kv_heads
    read.config["head_dim"] = head_dim
    read.config["tie_word_embeddings"] = read.flag("tie_word_embeddings")


def _default_kv_heads(read: _Reader, heads: int) -> int:
    """Return what transformers takes where `num_key_value_heads` is missing.

    Null means as many as heads everywhere.
    """
    if "num_key_value_heads" in read.config or read.architecture == "llama":
        return heads
    return 8 if read.architecture == "mistral" else 32


def _check_heads(read: _Reader) -> None:
    heads = read.size("num_attention_heads")
    kv_heads = read.size("num_key_value_heads")
    head_dim = read.size("head_dim")
    if heads % kv_heads:
        raise InputError(
            f"{read.name}: {heads} attention heads cannot share {kv_heads} K/V heads evenly"
        )
    if head_dim % 2:
        raise InputError(
            f"{read.name}: head_dim {head_dim} is odd, which rotary embeddings do not allow"
        )


def _layer_parameters(read: _Reader) -> int:
    hidden = read.size("hidden_size")
    inner = read.size("intermediate_size")
    head_dim = read.size("head_dim")
    query = read.size("num_attention_heads") * head_dim
    kv = read.size("num_key_value_heads") * head_dim
    attention = 2 * hidden * query + 2 * hidden * kv + _attention_biases(read, hidden, query, kv)
    norms = 2 * hidden
    if read.architecture == "qwen3":
        # It norms each head of Q and of K besides.
        norms += 2 * head_dim
    mlp = 3 * hidden * inner
    if read.architecture == "llama" and read.flag("mlp_bias"):
        mlp += 2 * inner + hidden
    return attention + norms + mlp


def _attention_biases(read: _Reader, hidden: int, query: int, kv: int) -> int:
    """Return the biases of Q, K and V, and of the output where there is one."""
    if read.architecture == "qwen2":
        return query + 2 * kv
    if read.architecture != "mistral" and read.flag("attention_bias"):
        return query + 2 * kv + hidden
    return 0


def _refuse_unsegmentable(read: _Reader) -> None:
    """Refuse what would be computed wrongly for a slice or a packed neighbour, or not trained."""
    if _has_window(read):
        raise InputError(
            f"{read.name}: sliding-window attention is not supported; "
            "set sliding_window to null in its config"
        )
    if read.config.get("attention_dropout"):
        raise InputError(
            f"{read.name}: attention_dropout is not supported; set it to 0 in its config"
        )
    if read.config.get("quantization_config"):
        raise InputError(
            f"{read.name}: a quantized model cannot be trained; give its unquantized original"
        )
    for key in ("rope_scaling", "rope_parameters"):
        _refuse_length_dependent_rope(read, key)


def _has_window(read: _Reader) -> bool:
    layer_types = read.config.get("layer_types") or ()
    if not isinstance(layer_types, list | tuple):
        raise InputError(
            f"{read.name}: layer_types in the config must be a list, not {layer_types!r}"
        )
    if "sliding_attention" in layer_types:
        return True
    used = read.architecture == "mistral" or read.flag("use_sliding_window")
    if read.architecture == "llama" or not used:
        return False
    # Where it is used and left out, transformers takes 4096.
    return bool(read.config.get("sliding_window", 4096))


def _refuse_length_dependent_rope(read: _Reader, key: str) -> None:
    for rope_type in _rope_types(read.name, key, read.config.get(key)):
        if rope_type in _LENGTH_DEPENDENT_ROPE:
            raise InputError(
                f"{read.name}: {rope_type} rope depends on the length at hand, "
                "so slices of a sequence would disagree; use another rope_type"
            )


def _rope_types(name: str, key: str, rope: object) -> list[object]:
    """Return every type in a rope entry; some models nest one entry for each kind of layer."""
    if rope is None:
        return []
    if not isinstance(rope, dict):
        raise InputError(f"{name}: {key} in the config must be an object, not {rope!r}")
    types = [rope.get("rope_type", rope.get("type"))]
    for entry in rope.values():
        if isinstance(entry, dict):
            types += _rope_types(name, key, entry)
    return types
