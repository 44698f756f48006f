"""The ledger: which sequence holds how many tokens, and what is shared. Pure Python integers, without torch."""

from .ledger import TokenLedger
from .prefix_tree import Match
from .sequence import Sequence
from .sessions import Session, SessionCounts

__all__ = ["Match", "Sequence", "Session", "SessionCounts", "TokenLedger"]
