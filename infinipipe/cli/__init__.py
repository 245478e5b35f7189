"""The command line: the only place that prints and exits."""

from infinipipe.cli.entry import cli, main, run_command

__all__ = ["cli", "main", "run_command"]
