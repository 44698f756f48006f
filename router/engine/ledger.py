"""What the engine calls of a ledger: `TokenLedger` in the service, and the simulator's ledgers for other
allocations (`lightkv/router/simulate/paged_ledger.py`)."""

from collections.abc import Iterator, Set
from collections.abc import Sequence as Seq
from typing import Protocol

from lightkv.edits import Alloc, Edit
from lightkv.holdings import Holdings
from lightkv.ledger import Match, Sequence, Session, SessionCounts
from lightkv.ledger.prefix_tree import Namespace, Segment


class Ledger(Protocol):
    """Counts of free, cached and held tokens, and the verbs that change them; `TokenLedger` documents each.

    A refused verb changes nothing. After each verb `num_free + num_cached + num_held == capacity`.
    """

    step: int
    """The number of the next step to plan."""

    @property
    def capacity(self) -> int:
        """Tokens of the pool."""

    @property
    def num_free(self) -> int:
        """Tokens that no sequence holds and the cache does not keep."""

    @property
    def num_cached(self) -> int:
        """Tokens that no sequence holds, kept because a prompt may hit them."""

    @property
    def num_held(self) -> int:
        """Tokens that open sequences hold; shared tokens count once."""

    @property
    def num_available(self) -> int:
        """Tokens that `extend` can allocate: the free ones and, by eviction, the cached ones."""

    @property
    def num_open(self) -> int:
        """Open sequences."""

    @property
    def shared(self) -> Set[Segment]:
        """The segments that more than one open sequence holds."""

    def holders(self, segment: Segment) -> Iterator[Sequence]:
        """Yields the open sequences that hold `segment`."""

    def holdings(self) -> Holdings:
        """Returns what each open sequence's row and each segment holds, once the edits so far are applied."""

    def match(self, token_ids: bytes, namespace: Namespace = ()) -> Match:
        """Returns what `open` would hit."""

    def open(self, token_ids: bytes, namespace: Namespace = (), session: Session | None = None) -> Sequence:
        """Opens a sequence that holds the longest cached prefix of its prompt."""

    @property
    def session_counts(self) -> SessionCounts:
        """The sessions that protect tokens, and how many tokens they protect and have lost."""

    def growth(self, sequences: Seq[Sequence], count: int = 1) -> int:
        """Returns how many available slots are needed to extend each of these by `count` tokens."""

    def extend(self, sequences: Seq[Sequence], counts: Seq[int]) -> Alloc:
        """Allocates `counts[i]` more slots for `sequences[i]`, all or none; evicts cached tokens as needed.
        Returns the edit of the allocation, which `drain` hands out, too."""

    def publish(self, sequence: Sequence) -> None:
        """Lets other sequences hit those tokens of its prompt that have slots."""

    def confirm(self, step: int) -> None:
        """Keeps what was published up to and including `step`."""

    def retract(self) -> None:
        """Drops what the unconfirmed steps have published."""

    def close(self, sequence: Sequence, output_ids: bytes = b"", cache: bool = True) -> None:
        """Closes a sequence; with `cache` its tokens stay to be hit."""

    def evict(self, count: int) -> None:
        """Frees `count` cached tokens, those that sessions protect last."""

    def drain(self) -> list[Edit]:
        """Returns the edits since the last call, in order."""

    def check(self) -> None:
        """Recounts everything. Raises CheckFailed."""
