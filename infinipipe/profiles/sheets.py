"""What data sheets say of devices, and the shares of it that are reached."""

from __future__ import annotations

from dataclasses import dataclass

# One H200 was measured at 788 of 989 TFLOP/s for an 8192^3 product and 4.3 of 4.8 TB/s for a copy;
# the shapes of a layer are less regular than a cube, so a little less is assumed.
_MATMUL_EFFICIENCY = 0.78
_COPY_EFFICIENCY = 0.85
_LINK_EFFICIENCY = 0.75
"""Assumed: protocols and synchronisation take the rest."""


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """One device's data sheet."""

    flops: float
    """Dense bfloat16 per second."""
    bandwidth: float
    """Bytes per second of its memory."""
    link: float
    """Bytes per second to a neighbour, one way: half of what NVLink is sold as."""
    link_between: float
    """Bytes per second to another node, one way, of each device's own network adapter."""
    memory_gib: int
    """As the driver reports it, rounded down."""
    processors: int
    capability: str
    attention_forward: float
    """Share of `flops` that flash attention 2 reaches: it suits sm_80 better than sm_90."""
    attention_backward: float

    @property
    def matmul_flops(self) -> float:
        """What large products reach of `flops`."""
        return self.flops * _MATMUL_EFFICIENCY

    @property
    def copy_bandwidth(self) -> float:
        """What memory traffic reaches of `bandwidth`."""
        return self.bandwidth * _COPY_EFFICIENCY

    @property
    def link_bandwidth(self) -> float:
        """What transfers reach of `link`."""
        return self.link * _LINK_EFFICIENCY

    @property
    def link_between_bandwidth(self) -> float:
        """What transfers reach of `link_between`."""
        return self.link_between * _LINK_EFFICIENCY


# Of the servers that these devices are sold in, each device with an adapter of its own: the data
# sheet of DGX A100 says eight single-port ConnectX-6 of 200 Gb/s, that of DGX H100 and H200
# eight ConnectX-7 of 400 Gb/s.
_HDR = 200e9 / 8
_NDR = 400e9 / 8


def _ampere(link: float) -> Sheet:
    return Sheet(
        flops=312e12,
        bandwidth=2.0e12,
        link=link,
        link_between=_HDR,
        memory_gib=79,
        processors=108,
        capability="sm_80",
        attention_forward=0.60,
        attention_backward=0.52,
    )


def _hopper(bandwidth: float, memory_gib: int) -> Sheet:
    return Sheet(
        flops=989e12,
        bandwidth=bandwidth,
        link=450e9,
        link_between=_NDR,
        memory_gib=memory_gib,
        processors=132,
        capability="sm_90",
        attention_forward=0.42,
        attention_backward=0.36,
    )


SHEETS = {
    "a800-80g": _ampere(link=200e9),
    "a100-80g": _ampere(link=300e9),
    "h100-80g": _hopper(bandwidth=3.35e12, memory_gib=79),
    "h200-141g": _hopper(bandwidth=4.8e12, memory_gib=139),
}
"""By the names that `--analytic` takes."""
