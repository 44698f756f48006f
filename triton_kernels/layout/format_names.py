"""The names of K/V formats on the command line, for the processes that do not load torch."""

import re

GROUPED_NAMES = ("int8", "int4")
NAMES = ("auto", "int8", "int8-hadamard", "int4", "fp8-static")
FORMAT_NAMES = (*NAMES, *(f"{name}-gN" for name in GROUPED_NAMES))


def split_name(name: str) -> tuple[str, int]:
    """Splits the name of a format into one of `NAMES` and the elements of a group, 0 for a whole head.

    Raises ValueError for a name that is none.
    """
    match = re.fullmatch(r"(.+?)(?:-g([1-9]\d*))?", name)
    base, group = (match[1], int(match[2] or 0)) if match else (name, 0)
    if base not in NAMES or (group and base not in GROUPED_NAMES):
        raise ValueError(
            f"{name!r} is no K/V format; choose one of {', '.join(FORMAT_NAMES)}, with a number for N"
        )
    return base, group
