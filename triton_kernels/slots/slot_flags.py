"""The error bits that the allocator's kernels set. Imports nothing heavy: whoever reads the bits on the host
needs no torch for it."""

from enum import IntFlag


class SlotFlag(IntFlag):
    """What went wrong on the device; the bits of `SlotState.counters[1]`, never cleared."""

    SHORT = 1  # fewer slots were free than were to be taken
    DOUBLE_FREE = 2  # a slot was given that was free already
    OUT_OF_RANGE = 4  # something was given that is no slot of the pool, or is slot 0


_MEANINGS = {
    SlotFlag.SHORT: "fewer slots were free than were taken",
    SlotFlag.DOUBLE_FREE: "a slot was given back that was free already",
    SlotFlag.OUT_OF_RANGE: "a number was given back that is no slot of the pool, or is slot 0",
}


def describe_flags(flags: int) -> str:
    """The bits of `flags` in words; empty for none."""
    return "; ".join(meaning for flag, meaning in _MEANINGS.items() if flags & flag)
