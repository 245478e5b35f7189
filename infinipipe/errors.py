"""Every error a user can meet, in one tree.

    InfinipipeError          exit code 1, one line on stderr
    |-- InputError           a dataset, model, option or file given by the user cannot be used
    |-- InfeasibleError      no plan fits the memory limit or the number of stages
    |-- PlanFileError        a plan is damaged, truncated, foreign, newer, or made from other inputs
    |   `-- VerifyError      a plan breaks a rule: names step, stage and op
    `-- RunError             a worker process failed; in training, names rank, stage, chunk and op

A message says what is wrong, where, and which option would help. Faults of this
program are plain `assert`s and keep their traceback.
"""

import math

__all__ = [
    "InfeasibleError",
    "InfinipipeError",
    "InputError",
    "PlanFileError",
    "RunError",
    "VerifyError",
]


class InfinipipeError(Exception):
    """A failure that the user can understand from its message alone."""

    exit_code = 1


class InputError(InfinipipeError):
    """A dataset, a model, an option or a file given by the user cannot be used."""


class InfeasibleError(InfinipipeError):
    """No plan fits; the message names stage, bytes needed, limit and what would help."""

    missing_bytes: float = math.inf
    """What the stage lacks; infinity where that is not known."""


class PlanFileError(InfinipipeError):
    """A plan file is damaged, truncated, foreign, of a newer format, or made from other inputs."""


class VerifyError(PlanFileError):
    """A plan breaks one of the rules of `infinipipe.ir.verify`."""


class RunError(InfinipipeError):
    """A worker process failed or died."""
