"""What a user can ask of `compile`, and what it comes to with a profile and a dataset."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from infinipipe.errors import InputError
from infinipipe.ir import Layout, LossNorm
from infinipipe.planner.batches import steps_per_epoch
from infinipipe.planner.policies import DEFAULT_POLICY, ONE_STAGE, POLICIES
from infinipipe.profiles import Profile

_MOST_DEVICES = 2**17
"""Ten times as many as any job has had; every rank has a place in memory while links are priced."""
DEFAULT_BATCH_SIZE = 512
"""Sequences in a step, as in the evaluation of InfiniPipe (arXiv 2509.21275)."""


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Options of `compile`; None stands for a default that the profile or the dataset gives.

    Raises:
        InputError: a value that no profile or dataset could make sense of.
    """

    num_devices: int | None = None
    """Default: those of the profile; where these are no multiple of what is given of the layout,
    as many as that needs."""
    num_stages: int | None = None
    """Default: searched, as the next two are."""
    sequence_parallel: int | None = None
    num_replicas: int | None = None
    devices_per_node: int | None = None
    """Default: those of the profile's machine."""
    memory_limit_bytes: tuple[int, ...] | None = None
    """One for all stages, or one per stage, which says how many stages there are. Default: the
    memory of the profile's device."""
    batch_size: int | None = None
    """Default: `DEFAULT_BATCH_SIZE`; never more than the dataset has."""
    num_steps: int | None = None
    """Default: one epoch. More go on with further epochs, each freshly shuffled."""
    seed: int = 0
    policy: str = DEFAULT_POLICY
    loss_norm: LossNorm = "token"

    def __post_init__(self) -> None:
        _check_count("--devices", self.num_devices)
        _check_count("--stages", self.num_stages)
        _check_count("--sequence-parallel", self.sequence_parallel)
        _check_count("--replicas", self.num_replicas)
        _check_count("--devices-per-node", self.devices_per_node)
        _check_count("--batch-size", self.batch_size)
        _check_count("--steps", self.num_steps)
        if self.seed < 0:
            raise InputError(f"--seed {self.seed}: a number from 0 up is needed")
        limits = self.memory_limit_bytes
        if limits is not None and min(limits, default=0) < 1:
            raise InputError("--memory: a positive size for every stage is needed, such as 80GiB")
        if self.policy not in POLICIES:
            policies = ", ".join(POLICIES)
            raise InputError(f"--policy {self.policy}: no such policy; there are {policies}")
        if self.loss_norm not in ("token", "sequence"):
            raise InputError(f"--loss-norm {self.loss_norm}: token or sequence is needed")

    def resolve(self, profile: Profile, num_rows: int, layout: Layout | None = None) -> Request:
        """Return what is asked for with a profile and a dataset of so many sequences.

        Args:
            profile: of the model and the device.
            num_rows: sequences of the dataset.
            layout: one of `layouts`. Default: the only one that there is.

        Raises:
            InputError: the options do not fit them.
        """
        if layout is None:
            layouts = self.layouts(profile)
            assert len(layouts) == 1, "several layouts are possible: choose one of them first"
            (layout,) = layouts
        batch_size = min(self.batch_size or DEFAULT_BATCH_SIZE, num_rows)
        return Request(
            layout=layout,
            limits=self.limits(profile, layout),
            batch_size=batch_size,
            num_steps=self.num_steps or steps_per_epoch(num_rows, batch_size),
            seed=self.seed,
            policy=self.policy,
            loss_norm=self.loss_norm,
        )

    def with_layout(self, layout: Layout) -> CompileOptions:
        """Return the same options for one layout."""
        return replace(
            self,
            num_devices=None,
            num_stages=layout.num_stages,
            sequence_parallel=layout.sequence_parallel,
            num_replicas=layout.num_replicas,
            devices_per_node=layout.devices_per_node,
        )

    def layouts(
        self, profile: Profile, *, across_nodes: bool = False, share_heads: bool = True
    ) -> tuple[Layout, ...]:
        """Return every way to use the devices that is allowed, by stages, then by ranks of each.

        Args:
            profile: of the model and the device.
            across_nodes: whether ranks that share sequences may be on several nodes, though it was
                not asked for.
            share_heads: whether they share the heads, as all that runs does.

        Raises:
            InputError: there is none.
        """
        self._check_axes(profile)
        num_devices = self._devices(profile)
        num_stages = self._stages
        per_node = self.devices_per_node or profile.device.num_devices
        anywhere = across_nodes or self.sequence_parallel is not None or self.policy in ONE_STAGE
        found = []
        for stages in _choices(num_stages, num_devices, profile.model.num_layers):
            for shared in _choices(self.sequence_parallel, num_devices // stages, num_devices):
                replicas = num_devices // (stages * shared)
                if self.num_replicas not in (None, replicas):
                    continue
                is_placed = anywhere or per_node % shared == 0
                if is_placed and (profile.model.shares_heads(shared) or not share_heads):
                    layout = Layout(
                        num_stages=stages,
                        sequence_parallel=shared,
                        num_replicas=replicas,
                        devices_per_node=per_node,
                    )
                    found.append(layout)
        if not found:
            raise InputError(
                f"--devices {num_devices}: no layout of {profile.model.name} uses them all; "
                "give another number, or fewer of --stages, --sequence-parallel and --replicas"
            )
        return tuple(found)

    @property
    def _stages(self) -> int | None:
        """Stages as given, be it by their limits or by the policy; None if they are not."""
        if self.num_stages is not None:
            return self.num_stages
        if self.memory_limit_bytes is not None and len(self.memory_limit_bytes) > 1:
            return len(self.memory_limit_bytes)
        return 1 if self.policy in ONE_STAGE else None

    def _check_axes(self, profile: Profile) -> None:
        """Refuse what no number of devices makes possible."""
        model = profile.model
        num_stages = self._stages
        shared = self.sequence_parallel
        if num_stages is not None and num_stages > model.num_layers:
            raise InputError(
                f"--stages {num_stages}: {model.name} has only {model.num_layers} layers, "
                f"and every stage needs one; give at most {model.num_layers}"
            )
        if num_stages not in (None, 1) and self.policy in ONE_STAGE:
            raise InputError(
                f"--policy {self.policy}: it has one stage, not {num_stages}; give --stages 1, or "
                "another --policy"
            )
        if shared is not None and not model.shares_heads(shared):
            raise InputError(
                f"--sequence-parallel {shared}: {model.name} has {model.num_heads} heads and "
                f"{model.num_kv_heads} of K and V; give a divisor of the first that divides the "
                "second or is a multiple of it"
            )

    def _devices(self, profile: Profile) -> int:
        """Return how many devices there are.

        Raises:
            InputError: what is given of the layout does not fit to them.
        """
        axes = {
            "--stages": self._stages,
            "--sequence-parallel": self.sequence_parallel,
            "--replicas": self.num_replicas,
        }
        given = {option: count for option, count in axes.items() if count is not None}
        product = math.prod(given.values())
        of_profile = profile.device.num_devices
        is_whole = len(given) == len(axes)
        if self.num_devices is None:
            return product if is_whole or of_profile % product else of_profile
        if self.num_devices > _MOST_DEVICES:
            raise InputError(
                f"--devices {self.num_devices}: at most {_MOST_DEVICES} can be planned"
            )
        fits = product == self.num_devices if is_whole else self.num_devices % product == 0
        if not fits:
            asked = " x ".join(f"{option} {count}" for option, count in given.items())
            raise InputError(
                f"--devices {self.num_devices}: {asked} takes {'' if is_whole else 'multiples of '}"
                f"{product}; give another number, or fewer of these options"
            )
        return self.num_devices

    def limits(self, profile: Profile, layout: Layout) -> tuple[int, ...]:
        """Return the memory limit of every stage.

        Raises:
            InputError: the number of limits is neither one nor that of the stages.
        """
        given = self.memory_limit_bytes or (profile.device.memory_bytes,)
        if len(given) == 1:
            return given * layout.num_stages
        if len(given) != layout.num_stages:
            raise InputError(
                f"--memory: {len(given)} limits for {layout.num_stages} stages; give one, or one "
                "for each stage"
            )
        return given


def _choices(given: int | None, num_devices: int, most: int) -> list[int]:
    """Return what an axis can be: as given, or any divisor of the devices up to the most."""
    if given is not None:
        return [given] if num_devices % given == 0 else []
    small = [count for count in range(1, 1 + math.isqrt(num_devices)) if num_devices % count == 0]
    divisors = {*small, *(num_devices // count for count in small)}
    return sorted(count for count in divisors if count <= most)


def _check_count(option: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise InputError(f"{option} {value}: at least 1 is needed")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be planned: the options, resolved with a profile and a dataset."""

    layout: Layout
    limits: tuple[int, ...]
    """Bytes per stage."""
    batch_size: int
    num_steps: int
    seed: int
    policy: str
    loss_norm: LossNorm
