"""What the layers of a step derive from it on the device, made once and shared."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Made = TypeVar("Made")


class StepPlans:
    """What the layers of one step share, such as work lists, one for each shape of layer; the first layer with
    a shape makes its list.

    When that layer attends again, another pass of the model has begun over the same step (a graph is warmed up
    and captured on one step): so each pass makes its lists, and a captured pass contains them.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[int, Any]] = {}
        self._kept: dict[Hashable, Any] = {}

    def get(self, key: Hashable, layer_idx: int, make: Callable[[], Made]) -> Made:
        """Returns the lists for layer `layer_idx`; calls `make` if they are not there or of an earlier pass."""
        made = self._made.get(key)
        if made is None or made[0] == layer_idx:
            made = self._made[key] = layer_idx, make()
        found: Made = made[1]
        return found

    def keep(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Returns what all passes over the step share, such as scratch memory; the first call makes it."""
        if key not in self._kept:
            self._kept[key] = make()
        kept: Made = self._kept[key]
        return kept
