"""Budgets as a person states them."""

import pytest

from rematplan.plans.budgets import parse_budget


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0", 0),
        ("123456", 123456),
        ("7B", 7),
        ("1kB", 1000),
        ("512MB", 512 * 10**6),
        ("4GiB", 4 * 2**30),
        ("4gib", 4 * 2**30),
        ("4 GiB", 4 * 2**30),
        (" 2KiB ", 2048),
        ("1.5GiB", 3 * 2**29),
        ("0.1KiB", 102),  # rounded down
        ("60%", 599),  # of 999, rounded down
        ("100%", 999),
        ("33.3 %", 332),
        ("150%", 1498),
        ("min", 77),
        ("MIN", 77),
    ],
)
def test_bytes(text: str, wanted: int) -> None:
    assert parse_budget(text).bytes(999, lambda: 77) == wanted


def test_a_large_percentage_is_exact() -> None:
    peak = 2**60 + 1
    assert parse_budget("100%").bytes(peak, lambda: 0) == peak


def test_the_smallest_is_asked_for_only_when_needed() -> None:
    def never() -> int:
        raise AssertionError

    assert parse_budget("60%").bytes(10, never) == 6
