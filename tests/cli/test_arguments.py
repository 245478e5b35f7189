"""Sizes and counts as people write them."""

from __future__ import annotations

import click
import pytest

from infinipipe.cli.arguments import Counts, MemoryLimits


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("80GiB", (80 * 2**30,)),
        ("40GB", (40 * 10**9,)),
        ("1.5 gib", (3 * 2**29,)),
        ("512MiB,1GiB", (2**29, 2**30)),
        ("1000", (1000,)),
        ("3KB", (3000,)),
        ("1TiB", (2**40,)),
        ("7B", (7,)),
    ],
)
def test_memory_sizes(text: str, limits: tuple[int, ...]) -> None:
    assert MemoryLimits().convert(text, None, None) == limits


@pytest.mark.parametrize("text", ["", "0", "80XB", "80GiB,", "-1GiB", "1e9", "GiB"])
def test_what_is_no_memory_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is no size such as 80GiB"):
        MemoryLimits().convert(text, None, None)


def test_counts() -> None:
    assert Counts().convert("4,8", None, None) == (4, 8)
    with pytest.raises(click.BadParameter, match="0 is not in the range"):
        Counts().convert("4,0", None, None)
