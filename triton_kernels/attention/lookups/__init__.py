"""How a row of an index finds the slot of a position, a file for each way. `LOOKUPS` lists them."""

from lightkv.triton_kernels.layout.ring import Ring

from .beam_table import BeamTable
from .lookup import Lookup
from .pages import CONTIGUOUS, TOKEN_TABLE, Pages
from .ring_rows import HeldTokens, RingRows, SinkRotation

__all__ = ["CONTIGUOUS", "LOOKUPS", "RECORDS", "TOKEN_TABLE", "BeamTable", "Lookup", "Pages", "RingRows"]

LOOKUPS: tuple[type[Lookup], ...] = (Pages, RingRows, BeamTable)
# What lookups consist of; `HeldTokens` is a variant of `Lookup.limits`, which only plans apply.
RECORDS = (*LOOKUPS, Ring, SinkRotation, HeldTokens)
