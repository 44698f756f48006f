"""The check of counts that callers pass: integers of Python or numpy."""

import reprlib
from collections.abc import Iterable
from operator import index
from typing import SupportsIndex


def checked_integer(name: str, value: SupportsIndex) -> int:
    """Returns `value` as an integer. Raises TypeError if it is not an integer, or is True or False."""
    try:
        number = index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; give an integer")
    return number


def checked_count(name: str, value: SupportsIndex, least: int = 1) -> int:
    """Returns `value` as an integer. Raises TypeError as `checked_integer` does, ValueError if it is below
    `least`."""
    number = checked_integer(name, value)
    if number < least:
        raise ValueError(f"{name} is {number}; it has to be at least {least}")
    return number


def checked_counts(name: str, values: Iterable[SupportsIndex]) -> list[int]:
    """Returns `values` as a list of integers. Raises TypeError if they are none."""
    try:
        return list(map(index, values))
    except TypeError as error:
        raise TypeError(
            f"{name} is {reprlib.repr(values)} ({type(values).__name__}); give a list of integers, one for "
            "each sequence"
        ) from error
