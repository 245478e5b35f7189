"""Numbers and names as people read them."""

from __future__ import annotations

import pytest

from infinipipe.units import show_bytes, show_fraction, shown


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (12_345, "12.1 KiB"),
        (10**6, "977 KiB"),
        (54 * 2**20, "54.0 MiB"),
        (80 * 2**30, "80.0 GiB"),
        (3 * 2**40, "3.00 TiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_bytes_have_three_digits(count: int, text: str) -> None:
    assert show_bytes(count) == text


def test_no_part_of_nothing() -> None:
    assert show_fraction(1, 8) == "12.5%"
    assert show_fraction(0, 0) == "0.0%"


def test_names_stay_on_one_line() -> None:
    assert shown("a\nb\u202ec") == "a\\nb\\u202ec"
