"""How the weights of a mixer are divided by its heads, for ranks that compute some of them each."""

from collections.abc import Mapping
from typing import NamedTuple


class Heads(NamedTuple):
    """What of a mixer belongs to its heads. It can be divided into as many parts as `num` can.

    `sections`: by the name of a module or a tensor of the mixer, the sizes of its sections, one below the
    other, each of which has rows of all heads in order. `sizes`: the attributes of the mixer that grow with the
    number of its heads. `output`: the linear layer whose inputs are what the heads computed.
    """

    num: int
    sections: Mapping[str, tuple[int, ...]]
    sizes: tuple[str, ...] = ()
    output: str = "out_proj"
