"""The error bits that the allocator's kernels set. This file imports no torch, so that any process can read
them."""

from enum import IntFlag


class SlotFlag(IntFlag):
    """What went wrong on the device: the bits of `SlotState.counters[1]`, which are never cleared."""

    SHORT = 1  # fewer slots were free than an allocation asked for
    DOUBLE_FREE = 2  # a slot was freed that was free already
    OUT_OF_RANGE = 4  # a number was freed that is not a slot of the pool, or is slot 0


_MEANINGS = {
    SlotFlag.SHORT: "fewer slots were free than an allocation asked for",
    SlotFlag.DOUBLE_FREE: "a slot was freed that was free already",
    SlotFlag.OUT_OF_RANGE: "a number was freed that is not a slot of the pool, or is slot 0",
}


def describe_flags(flags: int) -> str:
    """Returns the bits of `flags` in words; an empty string for 0."""
    return "; ".join(meaning for flag, meaning in _MEANINGS.items() if flags & flag)
