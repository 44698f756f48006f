"""The ledger: who holds how many tokens, and what is shared. Integers alone; loads no torch."""

from .ledger import Match, TokenLedger
from .sequence import Sequence

__all__ = ["Match", "Sequence", "TokenLedger"]
