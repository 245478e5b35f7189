"""Model shapes: those that transformers builds, and what is refused as it would be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from infinipipe.errors import InputError
from infinipipe.profiles import PRESETS, read_model
from infinipipe.profiles.models import model_from_config

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 32,
    "intermediate_size": 48,
    "vocab_size": 100,
}


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": None},
        {"head_dim": 8},
        {"head_dim": None},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"tie_word_embeddings": True},
    ],
    ids=str,
)
def test_parameters_equal_those_that_transformers_builds(
    architecture: str, more: dict[str, Any]
) -> None:
    """Also where a key is left out or null: the plan's config then says what was taken."""
    config = (
        SMALL
        | {"model_type": architecture}
        | ({"sliding_window": None} if architecture == "mistral" else {})
        | more
    )
    model = model_from_config(architecture, config)
    written = json.loads(model.config)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**written))
    layer = sum(p.numel() for p in whole.model.layers[0].parameters())
    assert model.layer_parameters == layer
    expected = 2 * layer + (1 if model.tied else 2) * model.embedding_parameters + model.hidden_size
    assert sum(p.numel() for p in whole.parameters()) == expected
    attention = whole.model.layers[0].self_attn
    assert attention.k_proj.out_features == model.kv_size
    assert attention.head_dim == model.head_dim
    if not any(value is None for value in more.values()):
        with torch.device("meta"):
            unwritten = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        assert sum(p.numel() for p in unwritten.parameters()) == expected


PUBLISHED = {
    "llama-7b": 6.738e9,
    "llama-13b": 13.016e9,
    "llama-30b": 32.529e9,
    "llama-70b": 68.977e9,
    "llama3-8b": 8.030e9,
    "llama3-70b": 70.554e9,
    "qwen3-8b": 8.191e9,
    "qwen3-32b": 32.762e9,
}
"""Parameters, from the models' own cards."""


def test_presets_have_the_published_number_of_parameters() -> None:
    assert PRESETS.keys() == {"tiny", *PUBLISHED}
    for preset, parameters in PUBLISHED.items():
        model = read_model(preset)
        total = (
            model.num_layers * model.layer_parameters
            + 2 * model.embedding_parameters
            + model.hidden_size
        )
        assert total == pytest.approx(parameters, rel=1e-3)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "architecture 'mamba' is not supported; supported are llama"),
        ({"model_type": ["llama"]}, "is not supported"),
        ({"model_type": "mistral"}, "sliding-window attention is not supported"),
        (
            {"model_type": "mistral", "sliding_window": 128, "use_sliding_window": False},
            "sliding-window",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1},
            "sliding-window",
        ),
        (
            {"model_type": "qwen3", "layer_types": ["sliding_attention", "full_attention"]},
            "sliding-window",
        ),
        ({"layer_types": 5}, "layer_types in the config must be a list"),
        ({"attention_dropout": 0.1}, "attention_dropout is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized model cannot be trained"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "dynamic rope depends on the length",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "dynamic rope"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope rope"),
        ({"rope_scaling": "linear"}, "rope_scaling in the config must be an object"),
        ({"hidden_size": None}, "hidden_size in the config must be a positive integer, not None"),
        ({"hidden_size": -64}, "must be a positive integer"),
        ({"hidden_size": 2**40}, "must be a positive integer"),
        ({"num_hidden_layers": True}, "must be a positive integer"),
        (
            {"tie_word_embeddings": "false"},
            "tie_word_embeddings in the config must be true or false",
        ),
        ({"num_key_value_heads": 5}, "32 attention heads cannot share 5 K/V heads evenly"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
    ],
    ids=str,
)
def test_configs_are_refused_in_one_line(config: dict[str, Any], message: str) -> None:
    """CASES A13, B9: and everything that is no config at all."""
    with pytest.raises(InputError, match=message) as caught:
        model_from_config("m", SMALL | {"model_type": "llama"} | config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", "NaN", '{"a": NaN}', "\\ud800", ""])
def test_files_that_are_no_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    for name in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(InputError, match="not a Hugging Face config"):
            read_model(str(name))
    with pytest.raises(InputError, match="no such model: give a preset"):
        read_model(str(tmp_path / "nowhere"))


def test_the_tokenizer_is_that_of_the_models_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"model_type": "llama"}))
    assert read_model(str(tmp_path)).tokenizer == "bytes"
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for name in (".", "config.json", str(tmp_path)):
        assert read_model(name).tokenizer == str(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "tokenizer.json").write_text("{}")
    assert read_model("tiny").tokenizer == "bytes"
