"""The check of counts that callers pass: integers of Python or numpy."""

from operator import index
from typing import SupportsIndex


def checked_count(name: str, value: SupportsIndex, least: int = 1) -> int:
    """Returns `value` as an integer.

    Raises TypeError if it is not an integer, or is True or False; ValueError if it is below `least`.
    """
    try:
        number = index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; give an integer")
    if number < least:
        raise ValueError(f"{name} is {number}; it has to be at least {least}")
    return number
