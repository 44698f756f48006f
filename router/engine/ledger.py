"""What the engine calls of a ledger: `TokenLedger` in the service, and the simulator's ledgers for other
allocations (`lightkv/router/simulate/paged_ledger.py`)."""

from collections.abc import Iterator, Set
from collections.abc import Sequence as Seq
from typing import Protocol

from lightkv.edits import Alloc, Edit
from lightkv.holdings import Holdings
from lightkv.layer_groups import LayerGroups
from lightkv.ledger import Match, Sequence, Session, SessionCounts
from lightkv.ledger.extension import Branch
from lightkv.ledger.prefix_tree import Namespace, PrefixTree, Segment


class Ledger(Protocol):
    """Counts of free, cached and held slots, and the verbs that change them; `TokenLedger` documents each.

    A refused verb changes nothing, but that `extend` frees first what windows have passed. After each verb
    `num_free + num_cached + num_held == capacity`.
    """

    step: int
    """The number of the next step to plan."""

    @property
    def groups(self) -> LayerGroups: ...

    @property
    def capacity(self) -> int: ...

    @property
    def num_free(self) -> int: ...

    @property
    def num_cached(self) -> int: ...

    @property
    def num_held(self) -> int: ...

    @property
    def num_available(self) -> int: ...

    @property
    def num_open(self) -> int: ...

    @property
    def shared(self) -> Set[Segment]: ...

    def holders(self, segment: Segment) -> Iterator[Sequence]: ...

    def holdings(self) -> Holdings: ...

    @property
    def tree(self) -> PrefixTree: ...

    def match(self, token_ids: bytes, namespace: Namespace = ()) -> Match: ...

    def find_branch(self, token_ids: bytes, namespace: Namespace = ()) -> Branch | None: ...

    def keep_branch(self, branch: Branch) -> None: ...

    def open(
        self, token_ids: bytes, namespace: Namespace = (), session: Session | None = None
    ) -> Sequence: ...

    @property
    def session_counts(self) -> SessionCounts: ...

    def growth(self, sequences: Seq[Sequence], count: int = 1) -> int: ...

    def extend(self, sequences: Seq[Sequence], counts: Seq[int]) -> Alloc: ...

    def publish(self, sequence: Sequence) -> None: ...

    def confirm(self, step: int) -> None: ...

    def retract(self) -> None: ...

    def close(self, sequence: Sequence, output_ids: bytes = b"", cache: bool = True) -> None: ...

    def evict(self, count: int) -> None: ...

    def drain(self) -> list[Edit]: ...

    def check(self) -> None: ...
