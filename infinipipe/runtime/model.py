"""One stage of a Hugging Face model: its own layers only, under their global names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from infinipipe.errors import InputError
from infinipipe.ir import Model, Stage
from infinipipe.runtime.attention.chunk_attention import ATTENTION_NAME, Segments, chunk_attention
from infinipipe.runtime.loss import head_loss

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

# Fields of a config that say nothing about what the model computes in training.
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

_DTYPES = ("F32", "BF16", "F16")
"""Of weights, by safetensors' names."""

AttentionInterface.register(ATTENTION_NAME, chunk_attention)


class StageModel(nn.Module):
    """A contiguous range of a model's layers, with the embedding on the first stage and norm and head on the last.

    Parameters keep the names they have in the whole model. `init_random` or `load` fills them, moves them to
    the device and gives them gradients of zeros.
    """

    def __init__(self, model: Model, stage: Stage, device: torch.device) -> None:
        super().__init__()
        self.stage = stage
        whole = _whole_model(model)
        self.tied = model.tied and stage.embedding and stage.head
        """Whether one parameter serves as embedding and head."""
        self._keep_own(whole, stage)
        whole.to_empty(device="cpu")
        whole.model.rotary_emb = type(whole.model.rotary_emb)(config=whole.config)
        if self.tied:
            whole.lm_head.weight = whole.model.embed_tokens.weight
        self.whole = whole
        self.device = device
        self.layers = [
            whole.model.layers[i]
            for i in range(stage.first_layer, stage.first_layer + stage.num_layers)
        ]
        self.train()

    @staticmethod
    def _keep_own(whole: Any, stage: Stage) -> None:
        own = range(stage.first_layer, stage.first_layer + stage.num_layers)
        for index in range(len(whole.model.layers)):
            if index not in own:
                whole.model.layers[index] = nn.Identity()
        if not stage.embedding:
            whole.model.embed_tokens = None
        if not stage.head:
            whole.model.norm = whole.lm_head = None

    def global_parameters(self) -> dict[str, nn.Parameter]:
        """Return the stage's parameters by their names in the whole model; a tied one appears once."""
        return dict(self.whole.named_parameters())

    def init_random(self, seed: int) -> None:
        """Fill the weights by the model's own rule; each module's depend on its name and the seed only."""
        for name, module in self.whole.named_modules():
            if not any(True for _ in module.parameters(recurse=False)):
                continue
            if name == "lm_head" and self.whole.config.tie_word_embeddings:
                name, module = (
                    "model.embed_tokens",
                    nn.Embedding.from_pretrained(module.weight.detach()),
                )
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(_name_seed(seed, name))
                self.whole._init_weights(module)
        self._finish()

    def load(self, directory: Path) -> None:
        """Read the stage's weights from a Hugging Face directory's safetensors.

        Raises:
            InputError: a file or a weight is missing, or has another shape.
        """
        files = _weight_files(directory)
        for name, parameter in self.global_parameters().items():
            source = _source(directory, files, name, self.whole.config.tie_word_embeddings)
            with _open_weights(files[source]) as file:
                _check_weight(
                    directory,
                    name,
                    tuple(file.get_slice(source).get_shape()),
                    tuple(parameter.shape),
                    file.get_slice(source).get_dtype(),
                )
                parameter.data.copy_(file.get_tensor(source))
        self._finish()

    def _finish(self) -> None:
        self.whole.to(self.device)
        for parameter in self.whole.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return (1, tokens, hidden size) for (1, tokens) ids."""
        embedded: Tensor = self.whole.model.embed_tokens(tokens)
        return embedded

    def run_layers(
        self, hidden: Tensor, positions: Tensor, segments: Segments, recompute: int
    ) -> Tensor:
        """Run the layers on (1, tokens, hidden size), the first `recompute` of them without keeping activations."""
        rotary = self.whole.model.rotary_emb(hidden, positions)
        for index, layer in enumerate(self.layers):
            if index < recompute:
                # No layer draws random numbers (dropout is refused), so there is no state to restore.
                hidden = checkpoint(
                    layer,
                    hidden,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    position_embeddings=rotary,
                    segments=segments,
                )
            else:
                hidden = layer(hidden, position_embeddings=rotary, segments=segments)
        return hidden

    def loss(self, hidden: Tensor, targets: Tensor, token_weights: Tensor, piece: int) -> Tensor:
        """Return the weighted sum of token losses; see `head_loss`."""
        normed = self.whole.model.norm(hidden)
        return head_loss(normed[0], self.whole.lm_head.weight, targets, token_weights, piece)


def check_checkpoint(model: Model, directory: Path) -> None:
    """Refuse a Hugging Face directory that does not hold the plan's model and all its weights.

    Raises:
        InputError: names the fields of the config, or the weight, that differ or are missing.
    """
    try:
        found = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{directory}: no readable config.json: {error}") from None
    _check_config(
        _config(str(directory), found), _config(model.name, json.loads(model.config)), directory
    )
    files = _weight_files(directory)
    for name, parameter in _whole_model(model).named_parameters():
        source = _source(directory, files, name, model.tied)
        with _open_weights(files[source]) as file:
            piece = file.get_slice(source)
            _check_weight(
                directory, name, tuple(piece.get_shape()), tuple(parameter.shape), piece.get_dtype()
            )


def _check_config(theirs: dict[str, Any], ours: dict[str, Any], directory: Path) -> None:
    differ = [
        k
        for k in sorted(ours.keys() | theirs.keys())
        if k not in _NOT_SHAPE and ours.get(k) != theirs.get(k)
    ]
    if differ:
        key = differ[0]
        raise InputError(
            f"{directory}: is not the model that the plan was compiled for: {', '.join(differ)} differ "
            f"({key} is {theirs.get(key)!r}, the plan says {ours.get(key)!r}); compile with a profile of this model"
        )


def _config(name: str, config: Any) -> dict[str, Any]:
    """Return a config as transformers completes it."""
    try:
        full: dict[str, Any] = AutoConfig.for_model(**config).to_dict()
    except Exception as error:  # transformers validates with exceptions of many kinds
        raise _unusable(name, error) from None
    return full


def _whole_model(model: Model) -> Any:
    """Return the whole model without memory for its weights."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**json.loads(model.config)),
                attn_implementation=ATTENTION_NAME,
                dtype=torch.float32,
            )
    except Exception as error:  # as above
        raise _unusable(model.name, error) from None


def _unusable(name: str, error: Exception) -> InputError:
    return InputError(f"{name}: transformers cannot use its config: {' '.join(str(error).split())}")


def _name_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1


def _weight_files(directory: Path) -> dict[str, Path]:
    """Map each weight's name to the safetensors file that holds it."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if not index.exists():
        with _open_weights(single) as file:
            return dict.fromkeys(file.keys(), single)
    try:
        names = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (OSError, ValueError) as error:
        raise InputError(f"{index}: not an index of weights: {error}") from None
    return {name: directory / file for name, file in names.items()}


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


@contextmanager
def _open_weights(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def _source(directory: Path, files: dict[str, Path], name: str, tied: bool) -> str:
    """Return the name a weight has in a checkpoint; a tied one may leave the head out."""
    source = EMBEDDING if tied and name == HEAD and name not in files else name
    if source not in files:
        raise InputError(f"{directory}: no weight named {name}; is it a checkpoint of this model?")
    return source


def _check_weight(
    directory: Path, name: str, found: tuple[int, ...], expected: tuple[int, ...], dtype: str
) -> None:
    if found != expected:
        shapes = f"{found} in the checkpoint, {expected} in the plan's model"
        raise InputError(
            f"{directory}: weight {name} has shape {shapes}; give the --model the plan was made for"
        )
    if dtype not in _DTYPES:
        raise InputError(
            f"{directory}: weight {name} is {dtype}; only {', '.join(_DTYPES)} can be trained"
        )
