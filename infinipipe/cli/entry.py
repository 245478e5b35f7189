"""The `infinipipe` command: its commands, and what its exit code says.

Every command imports what it needs when it runs, so that only `profile` and `run` wait for torch.
"""

from __future__ import annotations

import sys

import click

from infinipipe import __version__
from infinipipe.cli.console import say
from infinipipe.cli.inspect import inspect, verify
from infinipipe.cli.plan import compare, compile_
from infinipipe.cli.profile import profile
from infinipipe.cli.run import run
from infinipipe.errors import InfinipipeError

_INTERRUPTED = 130
"""What a shell reports for SIGINT: 128 and the signal's number, 2."""


class _InOrder(click.Group):
    """Lists the commands in the order in which they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=_InOrder, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
@click.version_option(__version__, prog_name="infinipipe")
def cli() -> None:
    """Plan and run pipeline-parallel training of LLMs on long, variable-length sequences.

    \b
    infinipipe profile                  measure this machine    -> profile.json
    infinipipe compile dataset.jsonl    lengths -> schedule     -> plan.msgpack
    infinipipe run plan.msgpack         replay it: train        -> infinipipe-run/
    """


# In the order in which `--help` lists them.
cli.add_command(profile)
cli.add_command(compile_)
cli.add_command(compare)
cli.add_command(inspect)
cli.add_command(verify)
cli.add_command(run)


def main() -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 wrong usage."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: list[str]) -> int:
    """Run one command and return its exit code.

    What a user can cause is reported here, in one line.
    """
    try:
        cli.main(arguments, prog_name="infinipipe", standalone_mode=False)
    except InfinipipeError as error:
        for note in getattr(error, "__notes__", ()):
            say(note)
        say(f"error: {error}")
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return _INTERRUPTED
    return 0
