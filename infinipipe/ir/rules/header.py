"""Rules of a plan's header. A broken one raises `VerifyError`.

They run in the order of `HEADER_RULES`. The first paragraph of a rule's docstring is what
`infinipipe verify` says it has checked.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata

import msgspec

from infinipipe.errors import VerifyError
from infinipipe.ir.plan import FORMAT_VERSION, Header
from infinipipe.ir.profile_summary import profile_subject

# Kernels count tokens and rows with 32 bits; ranks, replicas and steps are far fewer.
_MAX_COUNT = 2**31 - 1

# Integers of a plan fit in 64 bits, a sign included.
_MAX_INTEGER = 2**63 - 1

_SHA256 = re.compile("[0-9a-f]{64}")


def check_header_version(header: Header) -> None:
    """The format is the one this program knows."""
    if header.format_version != FORMAT_VERSION:
        raise VerifyError(f"header: format {header.format_version}, not {FORMAT_VERSION}")


# Keys of a Hugging Face config and what the header calls them.
_CONFIG_NAMES = {
    "model_type": "architecture",
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocabulary_size",
    "tie_word_embeddings": "tied",
}


def check_model(header: Header) -> None:
    """The model has a shape."""
    model = header.model
    for field in msgspec.structs.fields(model):
        value = getattr(model, field.name)
        if field.type is int and value < 1:
            raise VerifyError(f"header: the model's {field.name} is {value}, not positive")
    if model.num_heads % model.num_kv_heads:
        raise VerifyError(
            f"header: {model.num_heads} heads cannot share "
            f"{model.num_kv_heads} key-value heads evenly"
        )


def check_config(header: Header) -> None:
    """The model's config is a JSON object that does not contradict its shape."""
    model = header.model
    try:
        config = msgspec.json.decode(model.config, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError):
        raise VerifyError("header: the model's config is not a JSON object") from None
    for key, name in _CONFIG_NAMES.items():
        stated = config.get(key)
        actual = getattr(model, name)
        # What a config does not say, or says by null, has a default.
        if stated is not None and stated != actual:
            raise VerifyError(
                f"header: the model's config says {key} {stated!r}, its {name} is {actual!r}"
            )


def check_stages(header: Header) -> None:
    """Stages cover the layers in order, each at least one; the first embeds, the last has the
    head.
    """
    stages = header.stages
    if not stages:
        raise VerifyError("header: there is no stage")
    layer = 0
    for number, stage in enumerate(stages):
        if stage.first_layer != layer or stage.num_layers < 1:
            raise VerifyError(
                f"header: stage {number} has {stage.num_layers} layers from {stage.first_layer}; "
                f"expected at least one, from {layer}"
            )
        is_first = number == 0
        is_last = number == len(stages) - 1
        if stage.embedding != is_first or stage.head != is_last:
            raise VerifyError(
                f"header: stage {number}: "
                "the first stage embeds, the last has the head, no other does"
            )
        layer += stage.num_layers
    if layer != header.model.num_layers:
        raise VerifyError(
            f"header: the stages hold {layer} layers, the model has {header.model.num_layers}"
        )


def check_names(header: Header) -> None:
    """Names have no control characters, and can be written in UTF-8."""
    names = {
        "model.name": header.model.name,
        "model.tokenizer": header.model.tokenizer,
        "dataset.path": header.dataset.path,
        "dataset.tokenizer": header.dataset.tokenizer,
        "policy": header.policy,
        "infinipipe_version": header.infinipipe_version,
    }
    for field, name in names.items():
        categories = {unicodedata.category(character) for character in name}
        # Control characters, and surrogates: what a name that is no UTF-8 is read as.
        if categories & {"Cc", "Cs"}:
            raise VerifyError(
                f"header: {field} {name!a} has a character that no plan can hold; "
                "choose another name"
            )


def check_header_numbers(header: Header) -> None:
    """Counts, limits and lengths of the header are possible."""
    info = header.dataset
    max_length = 1 if header.max_length is None else header.max_length
    most_truncated = info.num_sequences if header.max_length else 0
    possible = {
        "num_replicas": (header.num_replicas, 1, _MAX_COUNT),
        "sequence_parallel": (header.sequence_parallel, 1, _MAX_COUNT),
        "devices_per_node": (header.devices_per_node, 1, _MAX_COUNT),
        "batch_size": (header.batch_size, 1, _MAX_COUNT),
        "num_steps": (header.num_steps, 1, _MAX_COUNT),
        "seed": (header.seed, 0, _MAX_INTEGER),
        "max_length": (max_length, 1, _MAX_COUNT),
        "logits_tokens": (header.logits_tokens, 1, _MAX_COUNT),
        "dataset.num_sequences": (info.num_sequences, 1, _MAX_INTEGER),
        "dataset.num_tokens": (info.num_tokens, info.num_sequences, _MAX_INTEGER),
        "dataset.num_truncated": (info.num_truncated, 0, most_truncated),
    }
    for name, (value, least, most) in possible.items():
        if not least <= value <= most:
            raise VerifyError(f"header: {name} is {value}; expected {least} to {most}")


def check_sequence_parallel(header: Header) -> None:
    """The ranks that share a sequence share the heads evenly.

    Where they are more than the key-value heads, several have the same one.
    """
    model = header.model
    ranks = header.sequence_parallel
    if not model.shares_heads(ranks):
        raise VerifyError(
            f"header: sequence_parallel is {ranks}; {model.num_heads} heads and "
            f"{model.num_kv_heads} key-value heads cannot be shared evenly"
        )


def check_memory_limits(header: Header) -> None:
    """Every stage has a memory limit."""
    limits = header.memory_limit_bytes
    if len(limits) != len(header.stages) or any(limit < 1 for limit in limits):
        raise VerifyError(
            f"header: {len(limits)} memory limits for {len(header.stages)} stages, "
            "or one is not positive"
        )


def check_digests(header: Header) -> None:
    """Model and profile are those whose digests are given; the dataset's digest is one."""
    if header.model_sha256 != header.model.sha256:
        raise VerifyError("header: model_sha256 is not the digest of the model's config")
    if not _SHA256.fullmatch(header.dataset.sha256):
        raise VerifyError("header: dataset.sha256 is not a sha256")
    profile_sha256 = hashlib.sha256(header.profile).hexdigest()
    if header.profile_sha256 != profile_sha256:
        raise VerifyError("header: profile_sha256 is not the digest of the profile")


def check_profile(header: Header) -> None:
    """The profile is of the header's model and dtype."""
    try:
        profile = profile_subject(header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise VerifyError(f"header: the profile cannot be used: {error}") from None
    for name in ("model", "dtype"):
        if getattr(profile, name) != getattr(header, name):
            raise VerifyError(f"header: the profile is of another {name}")


HEADER_RULES = (
    check_header_version,
    check_model,
    check_config,
    check_names,
    check_stages,
    check_header_numbers,
    check_sequence_parallel,
    check_memory_limits,
    check_digests,
    check_profile,
)
