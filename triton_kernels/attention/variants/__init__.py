"""The features of attention that the kernels do not know by name, a file each. `VARIANTS` lists them in the
order in which they change scores."""

from collections.abc import Sequence

from .alibi import Alibi
from .chunk import Chunk
from .sink_logits import SinkLogits
from .softcap import Softcap
from .tree import TreeMask
from .values import ValueMask
from .variant import Variant
from .window import Window

__all__ = [
    "VARIANTS",
    "Alibi",
    "Chunk",
    "SinkLogits",
    "Softcap",
    "TreeMask",
    "ValueMask",
    "Variant",
    "Window",
    "in_order",
]

VARIANTS: tuple[type[Variant], ...] = (Softcap, Alibi, ValueMask, Window, Chunk, TreeMask, SinkLogits)


def in_order(variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """Returns variants in the order of `VARIANTS`."""
    return tuple(sorted(variants, key=lambda one: VARIANTS.index(type(one))))
