"""One stage of a Hugging Face model: its own layers only, under their global names."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from infinipipe.errors import InputError
from infinipipe.ir import Model, Stage
from infinipipe.runtime.attention import ATTENTION_NAME, KeptAttention, Segments, chunk_attention
from infinipipe.runtime.device import DTYPE
from infinipipe.runtime.flat import flatten
from infinipipe.runtime.loss import head_loss

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
"""Names of the weights at both ends, which are the same in every architecture that is planned."""

AttentionInterface.register(ATTENTION_NAME, chunk_attention)


class StageModel(nn.Module):
    """A contiguous range of a model's layers; the ends hold embedding, and norm and head, too.

    Parameters keep the names they have in the whole model. Its weights have no values until
    `init_random` or `checkpoint.load_weights`, which also allocates their gradients.

    Args:
        model: the whole model.
        stage: which part of it.
        device: where the stage trains.
        num_shards: how many ranks hold this stage and share its optimizer.
    """

    def __init__(
        self, model: Model, stage: Stage, device: torch.device, *, num_shards: int = 1
    ) -> None:
        super().__init__()
        self.stage = stage
        self._num_shards = num_shards
        self.device = device
        self.dtype = DTYPE
        own_layers = range(stage.first_layer, stage.first_layer + stage.num_layers)
        self.whole = whole_model(model)
        self._drop_others(own_layers)
        one_weight_for_both = model.tied and stage.embedding and stage.head
        self._allocate(tied=one_weight_for_both)
        self.layers = [self.whole.model.layers[index] for index in own_layers]
        self.train()

    def _drop_others(self, own_layers: range) -> None:
        """Drop what other stages hold."""
        decoder = self.whole.model
        for index in range(len(decoder.layers)):
            if index not in own_layers:
                decoder.layers[index] = nn.Identity()
        if not self.stage.embedding:
            decoder.embed_tokens = None
        if not self.stage.head:
            decoder.norm = None
            self.whole.lm_head = None

    def _allocate(self, *, tied: bool) -> None:
        """Give the weights memory on the CPU, where they are filled."""
        decoder = self.whole.model
        self.whole.to_empty(device="cpu")
        # Its table was computed without memory, so without values.
        decoder.rotary_emb = type(decoder.rotary_emb)(config=self.whole.config)
        if tied:
            # `to_empty` has given each its own memory.
            self.whole.lm_head.weight = decoder.embed_tokens.weight

    def global_parameters(self) -> dict[str, nn.Parameter]:
        """Return the stage's parameters by their names in the whole model, a tied one once."""
        return dict(self.whole.named_parameters())

    def init_random(self, seed: int) -> None:
        """Fill the weights by the model's own rule, and make the stage ready to train.

        Each module's weights depend on its name and the seed only, so not on the stages.
        """
        for name, module in self.whole.named_modules():
            has_own = next(module.parameters(recurse=False), None) is not None
            if has_own:
                self._init_module(name, module, seed)
        self.make_trainable()

    def _init_module(self, name: str, module: nn.Module, seed: int) -> None:
        if name == "lm_head" and self.whole.config.tie_word_embeddings:
            # A copy of the embedding on another stage: drawn as the embedding is.
            name = "model.embed_tokens"
            weight = module.get_parameter("weight").detach()
            module = nn.Embedding.from_pretrained(weight)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_name_seed(seed, name))
            self.whole._init_weights(module)

    def make_trainable(self) -> None:
        """Move the weights, which have their values now, to the device; add gradients of zeros.

        Both become views of `flat`, so that ranks can share them in few transfers.
        """
        parameters = self.global_parameters()
        self.flat = flatten(parameters, self._tied_name(), self._num_shards, self.device)
        # What is left are tables.
        self.whole.to(self.device)

    def _tied_name(self) -> str | None:
        """Return the name of the weight of which the stage at the other end holds a copy."""
        if not self.whole.config.tie_word_embeddings or self.stage.embedding == self.stage.head:
            return None
        return EMBEDDING if self.stage.embedding else HEAD

    def embed(self, tokens: Tensor) -> Tensor:
        """Return (1, tokens, hidden size) for (1, tokens) ids."""
        embedded: Tensor = self.whole.model.embed_tokens(tokens)
        return embedded

    def run_layers(
        self,
        hidden: Tensor,
        positions: Tensor,
        segments: Segments,
        recompute: int,
        keep_attention: int = 0,
    ) -> Tensor:
        """Run the layers on (1, tokens, hidden size).

        The first `recompute` of them keep only their input and compute the rest again in backward.
        The next `keep_attention` of them keep what attention gave as well, and do all but attention
        again.
        """
        rotary = self.whole.model.rotary_emb(hidden, positions)
        first_whole = recompute + keep_attention
        for index, layer in enumerate(self.layers):
            if index >= first_whole:
                hidden = layer(hidden, position_embeddings=rotary, segments=segments)
                continue
            own_segments = segments
            if index >= recompute:
                own_segments = replace(segments, kept=KeptAttention())
            # No layer draws random numbers (dropout is refused), so no state to restore.
            hidden = checkpoint(
                layer,
                hidden,
                use_reentrant=False,
                preserve_rng_state=False,
                position_embeddings=rotary,
                segments=own_segments,
            )
        return hidden

    def loss(
        self, hidden: Tensor, targets: Tensor, token_weights: Tensor, block_tokens: int
    ) -> Tensor:
        """Return the weighted sum of token losses; see `head_loss`."""
        normed = self.whole.model.norm(hidden)
        weight = self.whole.lm_head.weight
        return head_loss(normed[0], weight, targets, token_weights, block_tokens)


def whole_model(model: Model) -> Any:
    """Return transformers' model with `chunk_attention`, without memory for its weights.

    Raises:
        InputError: transformers cannot use the config.
    """
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**json.loads(model.config)),
                attn_implementation=ATTENTION_NAME,
                dtype=DTYPE,
            )
    except Exception as error:  # transformers validates with exceptions of many kinds
        raise _unusable(model.name, error) from None


def complete_config(name: str, config: Any) -> dict[str, Any]:
    """Return a config as transformers completes it.

    Raises:
        InputError: transformers cannot use the config.
    """
    try:
        complete: dict[str, Any] = AutoConfig.for_model(**config).to_dict()
    except Exception as error:  # as above
        raise _unusable(name, error) from None
    return complete


def _unusable(name: str, error: Exception) -> InputError:
    reason = " ".join(str(error).split())
    return InputError(f"{name}: transformers cannot use its config: {reason}")


def _name_seed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    # 63 bits: torch's seeds are signed.
    return int.from_bytes(digest[:8], "big") >> 1
