"""Profiles: what a model costs on a device, in seconds and in bytes."""

from infinipipe.profiles.logits import logits_tokens
from infinipipe.profiles.models import ARCHITECTURES, read_model
from infinipipe.profiles.presets import PRESETS
from infinipipe.profiles.profile import (
    ELEMENT_BYTES,
    Bytes,
    Curve,
    Device,
    LayerTime,
    Line,
    Links,
    Profile,
    Sample,
    Times,
    pack_profile,
    profile_sha256,
    read_profile,
    write_profile,
)

__all__ = [
    "ARCHITECTURES",
    "ELEMENT_BYTES",
    "PRESETS",
    "Bytes",
    "Curve",
    "Device",
    "LayerTime",
    "Line",
    "Links",
    "Profile",
    "Sample",
    "Times",
    "logits_tokens",
    "pack_profile",
    "profile_sha256",
    "read_model",
    "read_profile",
    "write_profile",
]
