"""Reads weights from a Hugging Face directory, and refuses one that is of another model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from infinipipe.errors import InputError
from infinipipe.ir import Model
from infinipipe.runtime.model import EMBEDDING, HEAD, StageModel, complete_config, whole_model

_NOT_SHAPE = {
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "max_position_embeddings",
    "pad_token_id",
    "pretraining_tp",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""Fields of a config that say nothing about what the model computes in training."""

_DTYPES = ("F32", "BF16", "F16")
"""Of weights, by safetensors' names: those that float32 holds exactly."""


def check_checkpoint(model: Model, directory: Path) -> None:
    """Refuse a Hugging Face directory that does not hold the plan's model and all its weights.

    Raises:
        InputError: names the fields of the config, or the weight, that differ or are missing.
    """
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{directory}: no readable config.json: {error}") from None
    actual = complete_config(str(directory), config)
    stated = complete_config(model.name, json.loads(model.config))
    _check_config(directory, actual, stated)
    weights = _Weights(directory, model.tied)
    # Every weight before any worker starts: each worker then reads only its stage's.
    for name, parameter in whole_model(model).named_parameters():
        weights.check(name, tuple(parameter.shape))


def load_weights(stage: StageModel, directory: Path) -> None:
    """Read a stage's weights from a Hugging Face directory, and make the stage ready to train.

    Raises:
        InputError: a file or a weight is missing, or has another shape.
    """
    weights = _Weights(directory, stage.whole.config.tie_word_embeddings)
    for name, parameter in stage.global_parameters().items():
        weights.check(name, tuple(parameter.shape))
        parameter.data.copy_(weights.read(name))
    stage.make_trainable()


def _check_config(directory: Path, actual: dict[str, Any], stated: dict[str, Any]) -> None:
    fields = sorted((stated.keys() | actual.keys()) - _NOT_SHAPE)
    differ = [field for field in fields if stated.get(field) != actual.get(field)]
    if not differ:
        return
    first = differ[0]
    raise InputError(
        f"{directory}: is not the model that the plan was compiled for: {', '.join(differ)} differ "
        f"({first} is {actual.get(first)!r}, the plan says {stated.get(first)!r}); "
        "compile with a profile of this model"
    )


class _Weights:
    """The weights of a directory's safetensors, by their names in the model."""

    def __init__(self, directory: Path, tied: bool) -> None:
        self._directory = directory
        self._tied = tied
        self._files = _weight_files(directory)

    def check(self, name: str, planned: tuple[int, ...]) -> None:
        """Refuse a weight that is missing, or of another shape or type."""
        stored = self._stored_name(name)
        with _open_weights(self._files[stored]) as file:
            weight = file.get_slice(stored)
            actual = tuple(weight.get_shape())
            dtype = weight.get_dtype()
        if actual != planned:
            raise InputError(
                f"{self._directory}: weight {name} has shape {actual} in the checkpoint, "
                f"{planned} in the plan's model; give the --model the plan was made for"
            )
        if dtype not in _DTYPES:
            raise InputError(
                f"{self._directory}: weight {name} is {dtype}; "
                f"only {', '.join(_DTYPES)} can be trained"
            )

    def read(self, name: str) -> torch.Tensor:
        """Return a weight as it is stored."""
        stored = self._stored_name(name)
        with _open_weights(self._files[stored]) as file:
            weight: torch.Tensor = file.get_tensor(stored)
        return weight

    def _stored_name(self, name: str) -> str:
        """Return the name a weight has in the files; a tied model may leave the head out."""
        left_out = self._tied and name == HEAD and name not in self._files
        stored = EMBEDDING if left_out else name
        if stored not in self._files:
            raise InputError(
                f"{self._directory}: no weight named {name}; is it a checkpoint of this model?"
            )
        return stored


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _weight_files(directory: Path) -> dict[str, Path]:
    """Map each weight's name to the safetensors file that holds it."""
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if not index.exists():
        with _open_weights(single) as file:
            return dict.fromkeys(file.keys(), single)
    try:
        names = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (OSError, ValueError) as error:
        raise InputError(f"{index}: not an index of weights: {error}") from None
    return {name: directory / file for name, file in names.items()}


@contextmanager
def _open_weights(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
