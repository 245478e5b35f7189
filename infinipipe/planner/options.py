"""What a user can ask of `compile`, and what it comes to with a profile and a dataset."""

from __future__ import annotations

from dataclasses import dataclass

from infinipipe.errors import InputError
from infinipipe.ir import Layout, LossNorm
from infinipipe.planner.batches import steps_per_epoch
from infinipipe.planner.policies import DEFAULT_POLICY, POLICIES
from infinipipe.profiles import Profile

DEFAULT_BATCH_SIZE = 512
"""Sequences in a step, as in the evaluation of InfiniPipe (arXiv 2509.21275)."""


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Options of `compile`; None stands for a default that the profile or the dataset gives.

    Raises:
        InputError: a value that no profile or dataset could make sense of.
    """

    num_stages: int | None = None
    """Default: as many as the profile's machine has devices, at most one a layer."""
    num_replicas: int = 1
    memory_limit_bytes: tuple[int, ...] | None = None
    """One for all stages, or one per stage. Default: the memory of the profile's device."""
    batch_size: int | None = None
    """Default: `DEFAULT_BATCH_SIZE`; never more than the dataset has."""
    num_steps: int | None = None
    """Default: one epoch. More go on with further epochs, each freshly shuffled."""
    seed: int = 0
    policy: str = DEFAULT_POLICY
    loss_norm: LossNorm = "token"

    def __post_init__(self) -> None:
        _check_count("--stages", self.num_stages)
        _check_count("--replicas", self.num_replicas)
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

    def resolve(self, profile: Profile, num_rows: int) -> Request:
        """Return what is asked for with a profile and a dataset of so many sequences.

        Raises:
            InputError: the options do not fit them.
        """
        layout = self.layout(profile)
        batch_size = min(self.batch_size or DEFAULT_BATCH_SIZE, num_rows)
        return Request(
            layout=layout,
            limits=self.limits(profile),
            batch_size=batch_size,
            num_steps=self.num_steps or steps_per_epoch(num_rows, batch_size),
            seed=self.seed,
            policy=self.policy,
            loss_norm=self.loss_norm,
        )

    def layout(self, profile: Profile) -> Layout:
        """Return how the devices are used.

        Raises:
            InputError: there are more stages than layers.
        """
        num_layers = profile.model.num_layers
        num_stages = self.num_stages
        if num_stages is None:
            num_stages = max(1, min(profile.device.num_devices, num_layers))
        elif num_stages > num_layers:
            raise InputError(
                f"--stages {num_stages}: {profile.model.name} has only {num_layers} layers, "
                f"and every stage needs one; give at most {num_layers}"
            )
        return Layout(num_stages=num_stages, num_replicas=self.num_replicas)

    def limits(self, profile: Profile) -> tuple[int, ...]:
        """Return the memory limit of every stage.

        Raises:
            InputError: the number of limits is neither one nor that of the stages.
        """
        num_stages = self.layout(profile).num_stages
        given = self.memory_limit_bytes or (profile.device.memory_bytes,)
        if len(given) == 1:
            return given * num_stages
        if len(given) != num_stages:
            raise InputError(
                f"--memory: {len(given)} limits for {num_stages} stages; give one, or one for each "
                "stage"
            )
        return given


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
