"""What commands print: results on stdout, everything else on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import RenderableType

    from infinipipe.aliases import Progress
    from infinipipe.ir import PlanReader, Step

_FILE_WIDTH = 120
"""Columns of tables in a pipe or a file, which has no width of its own: fewer would cut the widest
tables, more would wrap where they are read."""


def say(line: str) -> None:
    """Print a line for a person, on stderr."""
    click.echo(line, err=True)


def show(line: str) -> None:
    """Print a line of a result, on stdout."""
    click.echo(line)


def show_tables(tables: RenderableType) -> None:
    """Print tables on stdout, as wide as the terminal."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _FILE_WIDTH
    Console(width=width).print(tables)


def say_tables(tables: RenderableType) -> None:
    """Print tables for a person, on stderr."""
    from rich.console import Console

    width = None if sys.stderr.isatty() else _FILE_WIDTH
    Console(width=width, stderr=True).print(tables)


def show_json(document: object) -> None:
    """Print plain data on stdout, indented."""
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def compact_json(document: object) -> str:
    """Return plain data as JSON on one line."""
    import msgspec

    return msgspec.json.encode(document).decode()


@contextmanager
def progress_bar(what: str) -> Iterator[Progress]:
    """Show a bar on stderr while something runs, if somebody can see it move."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=not console.is_interactive) as bar:
        task = bar.add_task(what, total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield advance


def read_steps(reader: PlanReader) -> Iterator[Step]:
    """Yield every step and show how many there have been."""
    with progress_bar("read") as progress:
        for step in reader:
            yield step
            progress(step.index + 1, reader.num_steps)
