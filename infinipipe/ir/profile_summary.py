"""What is read of the profile that a plan's header holds, where the rest of it does not matter."""

from __future__ import annotations

import msgspec

from infinipipe.ir.plan import DType, Header, Model


class ProfileSubject(msgspec.Struct, frozen=True):
    """What a profile is of; the header repeats it."""

    model: Model
    dtype: DType


class ProfiledDevice(msgspec.Struct, frozen=True):
    """A device by its name."""

    name: str


class ProfileOrigin(msgspec.Struct, frozen=True):
    """Where a profile's numbers come from."""

    device: ProfiledDevice
    source: str
    """`measured` on the device, or `analytic`: computed from its data sheet."""

    @property
    def is_analytic(self) -> bool:
        """Whether nothing was measured."""
        return self.source == "analytic"


def profile_subject(header: Header) -> ProfileSubject:
    """Return what the plan's profile is of.

    Raises:
        msgspec.MsgspecError: the profile does not say it, so it is damaged or foreign.
        ValueError: so are its characters.
    """
    return msgspec.msgpack.decode(header.profile, type=ProfileSubject)


def profile_origin(header: Header) -> ProfileOrigin:
    """Return where the numbers of the plan's profile come from.

    Raises:
        msgspec.ValidationError: the profile does not say it, as that of a plan made by hand.
    """
    return msgspec.msgpack.decode(header.profile, type=ProfileOrigin)
