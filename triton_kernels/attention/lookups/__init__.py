"""How a row of an index finds the slot of a position, a file for each way. `LOOKUPS` lists them."""

from .beam_table import BeamTable
from .lookup import Lookup
from .pages import CONTIGUOUS, TOKEN_TABLE, Pages
from .ring_rows import HeldTokens, RingRows

__all__ = ["CONTIGUOUS", "LOOKUPS", "PLAN_LIMITS", "TOKEN_TABLE", "BeamTable", "Lookup", "Pages", "RingRows"]

LOOKUPS: tuple[type[Lookup], ...] = (Pages, RingRows, BeamTable)
PLAN_LIMITS = (HeldTokens,)  # the variants of `Lookup.limits`, which only plans apply
