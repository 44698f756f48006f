"""What the layers of a step derive from its metadata on the device, made once and shared."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from .metadata import AttentionMetadata

Plan = TypeVar("Plan")


class StepPlans:
    """What the layers of a step share, such as work lists, one for each shape of layer; the first layer with a
    shape makes its list.

    When that layer attends again, another pass of the model has begun, even if `prepare` was not called in
    between (a graph is warmed up and captured on one step): so each pass makes its lists, and a captured pass
    contains them.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[int, int, Any]] = {}

    def get(self, key: Hashable, step: int, layer_idx: int, make: Callable[[], Plan]) -> Plan:
        """Returns the lists for layer `layer_idx` in a step; calls `make` if they are not there or of an
        earlier pass."""
        made = self._made.get(key)
        if made is None or made[0] != step or made[1] == layer_idx:
            made = self._made[key] = step, layer_idx, make()
        plan: Plan = made[2]
        return plan

    @staticmethod
    def of(metadata: AttentionMetadata) -> "StepPlans":
        """Returns the lists that `metadata` carries."""
        if not isinstance(metadata.plan, StepPlans):
            metadata.plan = StepPlans()
        return metadata.plan
