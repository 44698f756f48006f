"""How the weights of a mixer are divided by its heads, for ranks that compute some of them each."""

from collections.abc import Mapping
from typing import NamedTuple


class Heads(NamedTuple):
    """What of a mixer belongs to its heads. It can be divided into as many parts as `num` can.

    `sections`: by the name of a module or a tensor of the mixer, the sizes of its sections, one below the other,
    in each of which the heads stand in turn. `sizes`: its attributes that count all heads. `output`: the linear
    layer that maps what the heads computed to the output.
    """

    num: int
    sections: Mapping[str, tuple[int, ...]]
    sizes: tuple[str, ...] = ()
    output: str = "out_proj"
