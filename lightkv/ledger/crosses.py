"""Cross sequences, whose K/V is written once (`TokenLedger.open_cross`), and the sequences that read them
(`open_reader`)."""

from collections.abc import Iterable, Mapping
from typing import ClassVar, NoReturn

from lightkv.errors import CheckFailed

from .changes import Namespace
from .segments import Segment
from .sequence import Sequence

WRITTEN_ONCE = "a cross sequence is written once and keeps its length; extend what reads it"


class CrossSequence(Sequence):
    """Tokens that are written once and read by other sequences, which keep it open.

    readers: the rows of the open sequences that read it. namespaces: where its readers' tokens are cached, in
    the order of the first reader of each. is_kept: False once it was closed; it then goes when its
    last reader closes.
    """

    __slots__ = ("is_kept", "namespaces", "readers")

    slot_per_token: ClassVar[bool] = False
    can_be_read: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__(b"")
        self.readers: set[int] = set()
        self.namespaces: dict[Namespace, None] = {}
        self.is_kept = True

    def let_go(self) -> bool:
        if not self.is_kept:
            raise ValueError(f"{self} is closed, and stays only for those that read it")
        self.is_kept = False
        return not self.readers

    def slots_needed(self, count: int) -> NoReturn:
        raise ValueError(WRITTEN_ONCE)

    def require_shrink(self, count: int) -> NoReturn:
        raise ValueError(WRITTEN_ONCE)

    def require_branching(self) -> None:
        raise ValueError(f"{self} is a cross sequence, which is written once, read, and closed")

    @property
    def num_publishable(self) -> int:
        return 0

    @property
    def is_cacheable(self) -> bool:
        return False  # its tokens have no ids

    def check(self, sequences: Mapping[int, Sequence]) -> None:
        super().check(sequences)
        for row in self.readers:  # each reader checks that it is one of them
            reader = sequences.get(row)
            if reader is None or reader.cross is not self:
                raise CheckFailed(f"{self} counts row {row} as a reader, and that has {reader}")
        if not (self.is_kept or self.readers):
            raise CheckFailed(f"{self} is open, and neither kept nor read")
        if self.shared or self.dropped:
            raise CheckFailed(f"{self} is a cross sequence, which only holds tokens of its own")


class ReaderSequence(Sequence):
    """A sequence that reads a cross sequence, and keeps it open. It shares tokens only with other readers of
    it, because its K/V depends on what it reads."""

    __slots__ = ("cross",)

    cross: CrossSequence

    def __init__(self, prompt: bytes, cross: CrossSequence) -> None:
        if not cross.can_be_read:
            raise ValueError(f"{cross} is no cross sequence; open_cross makes one")
        super().__init__(prompt)
        self.cross = cross

    def enter(self, row: int, root: Segment, node: Segment, shared: int) -> None:
        super().enter(row, root, node, shared)
        self.cross.readers.add(row)
        self.cross.namespaces[root.namespace] = None

    def twin(self) -> "ReaderSequence":
        twin = ReaderSequence(self.prompt, self.cross)
        twin.num_hit, twin.gap = self.num_hit, self.gap
        return twin

    def leave(self) -> Iterable[Sequence]:
        cross, row = self.cross, self.row
        super().leave()
        cross.readers.remove(row)
        return () if cross.is_kept or cross.readers else (cross,)

    @property
    def is_cacheable(self) -> bool:
        # Nothing can hit tokens that depend on a cross sequence that goes.
        return super().is_cacheable and (self.cross.is_kept or len(self.cross.readers) > 1)

    def check(self, sequences: Mapping[int, Sequence]) -> None:
        super().check(sequences)
        cross, namespace = self.cross, self.root.namespace
        if sequences.get(cross.row) is not cross:
            raise CheckFailed(f"{self} reads {cross}, which is not open, or is no cross sequence")
        of_cross = cross.root.namespace
        if (
            self.row not in cross.readers
            or namespace not in cross.namespaces
            or namespace[-len(of_cross) :] != of_cross
        ):
            raise CheckFailed(f"{self} reads {cross}, which does not know it")
