"""Numbers of answers that may be missing, where a benchmark cannot go on without them."""

from __future__ import annotations


def known(number: int | None) -> int:
    """A number of an answer; an error where the library has none."""
    if number is None:
        raise ValueError("the answer lacks a number that this benchmark needs")
    return number


def between(low: int | None, high: int | None, share: float) -> int:
    """The number a share of the way from one to another."""
    return known(low) + round((known(high) - known(low)) * share)
