"""One open sequence: its row of the token table, what it shares, and how many slots it has. Only the ledger
changes one.

`Sequence` is the plain kind: each token has an entry and a slot of its own until it is dropped. The other
kinds, in files of their own, derive from it and answer the same questions, so the ledger's verbs name none.
"""

import reprlib
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any, ClassVar, NamedTuple, Self

from lightkv.errors import CheckFailed
from lightkv.triton_kernels.layout.ring import Ring

from .changes import Namespace
from .holds import Hold
from .segments import TOKEN_BYTES, Segment
from .sessions import Session
from .snapshots import StateHold


class Gap(NamedTuple):
    """What a sequence has dropped; all zero where it holds all its tokens.

        position   0       start                      start + dropped
                   ├─ node ─┤   dropped, no entries    ├─ the other entries ─┤

    start: the first entries, which stay whatever is dropped (`sink_tokens` of `TokenLedger.release`); `keep`
    may have dropped tokens anywhere after them. dropped: positions that are not held any more. node: the last
    segment before the gap, or the root where none is held there; None where the gap is not in the shared path.
    """

    start: int = 0
    dropped: int = 0
    node: Segment | None = None

    def widened(self, start: int, count: int) -> "Gap":
        """Returns the gap once `count` more tokens are dropped, and the first `start` ones stay."""
        return Gap(start, self.dropped + count, self.node)

    def after(self, node: Segment | None) -> "Gap":
        """Returns the gap once `node` is the last segment before it."""
        return self if node is self.node else Gap(self.start, self.dropped, node)

    def cut(self, length: int) -> "Gap":
        """Returns the gap once only the first `length` entries are left: none if they all come before it."""
        return NO_GAP if length <= self.start else self


NO_GAP = Gap()


def require_sequence(value: object) -> None:
    """Raises TypeError unless `value` is a sequence of a ledger."""
    if not isinstance(value, Sequence):
        raise TypeError(
            f"got {reprlib.repr(value)} ({type(value).__name__}); give what open or fork returned"
        )


def require_list(sequences: Seq["Sequence"]) -> None:
    """Raises TypeError unless these can be the sequences of a batch."""
    if not isinstance(sequences, (list, tuple, Seq)):  # an ABC alone is slow to ask
        raise TypeError(f"sequences is {reprlib.repr(sequences)}; give a list, such as [sequence]")


def require_lists(sequences: Seq["Sequence"], counts: Seq[int]) -> None:
    """Raises TypeError unless both can be the lists of a batch, ValueError if one is longer than the other."""
    require_list(sequences)
    if not isinstance(counts, (list, tuple, Seq)):
        raise TypeError(f"counts is {reprlib.repr(counts)}; give a list with a count for each sequence")
    if len(sequences) != len(counts):
        raise ValueError(f"{len(sequences)} sequences and {len(counts)} counts; give one count for each")


class Sequence:
    """A row whose first `length` entries have slots: shared entries first, then private ones.

        entry      0                    shared               length          len(prompt) + outputs
                   ├──── shared path ────┼── private entries ──┼─── no slots yet ───┤
        held as    segments of the tree   its own

    An entry is a position less the positions that were dropped before it (`release`, `keep`). Entries and
    positions are the same while nothing was dropped. Once something was dropped out of the path, the path has
    two parts, which end at `gap.node` and at `node` (`Gap`).

    row: 1 and up; 0 once closed. prompt: int32 bytes. node: the last segment of the path, or the root. shared:
    entries that are in segments. length: entries that have a slot. num_hit: tokens found in the cache by
    `open`. gap: what was dropped. session: the one that protects its tokens once it has closed, if any.

    holds: what it has in each class of layers that do not see everything; the others of these are of use only
    where there are such. keep_at: the places that `open` was given. matched: the tokens of its prompt that the
    tree had. points: the entries ahead, ascending, at which its prompt ends or others may diverge from it, and
    those of `keep_at`. What is seen there is kept for others. look_at: the length from which on `extend` has
    more to do for it than to give it slots. has_passed: the branch that it cannot serve any more (`Branches`),
    or None. published: how many tokens of its prompt others may hit. Those that `publish` could not store are
    stored as soon as it shares the ones before them. published_in: the step of the last `publish`.
    """

    __slots__ = (
        "gap", "has_passed", "holds", "keep_at", "length", "look_at", "matched", "node", "num_hit", "points",
        "prompt", "published", "published_in", "root", "row", "session", "shared",
    )  # fmt: skip

    # Whether each new token takes a slot of its own, so that `extend` need not ask `slots_needed`.
    slot_per_token: ClassVar[bool] = True
    can_be_read: ClassVar[bool] = False  # by sequences that are opened with it

    # The namespaces in which nothing can be hit any more once it is closed.
    namespaces: Iterable[Namespace] = ()
    cross: "Sequence | None" = None  # the one that it reads
    ring: Ring | None = None  # what its row is, if it is one

    row: int
    root: Segment
    node: Segment
    shared: int
    length: int
    num_hit: int
    points: list[int]
    look_at: int
    matched: int
    has_passed: object
    published: int
    published_in: int

    def __init__(self, prompt: bytes, session: Session | None = None) -> None:
        """Makes one without a row (`enter`)."""
        self.prompt = prompt
        self.session = session
        self.gap: Gap = NO_GAP
        self.holds: Seq[Hold | StateHold] = ()
        self.keep_at: Seq[int] = ()

    @property
    def num_private(self) -> int:
        """Tokens of the private tail."""
        return self.length - self.shared

    @property
    def dropped(self) -> int:
        """Positions that it has passed and no longer holds."""
        return self.gap.dropped

    @property
    def position(self) -> int:
        """The position of its next token."""
        return self.length + self.dropped

    @property
    def is_whole(self) -> bool:
        """Whether its entries are its first tokens, unchanged since they were computed."""
        return not self.gap.dropped

    def path(self) -> Iterator[Segment]:
        """Yields the segments that it holds, the deepest first."""
        row = self.row
        for end in (self.node, self.gap.node):
            node = end
            while node is not None and node.parent is not None and row in node.holders:
                yield node
                node = node.parent

    # Opening and closing

    @property
    def lookup_key(self) -> bytes:
        """The tokens whose cached prefix, less the last token, it may share."""
        return self.prompt

    def enter(self, row: int, root: Segment, node: Segment, shared: int) -> None:
        """Takes a row, whose first `shared` entries are those of the path from `root` to `node`."""
        self.row = row
        self.root = root
        self.node = node
        self.shared = self.length = shared

    def twin(self) -> Self:
        """Returns another sequence of this kind for the same text, which has no row yet."""
        twin = type(self)(self.prompt, self.session)
        twin.num_hit, twin.gap = self.num_hit, self.gap
        return twin

    def let_go(self) -> bool:
        """Ends the hold of whoever has opened it. Returns whether it closes now. Raises ValueError if the hold
        has ended before."""
        return True

    def leave(self) -> "Iterable[Sequence]":
        """Gives up its row. Returns the sequences that close with it, because it alone has kept them open."""
        self.row = 0
        return ()

    # Growing and shrinking

    def slots_needed(self, count: int) -> int:
        """Returns how many slots its next `count` tokens take. Raises ValueError if it cannot be extended by
        so many."""
        return count

    def advance(self, count: int) -> None:
        """Moves it on by `count` tokens, whose slots are allocated."""
        self.length += count

    def require_shrink(self, count: int) -> None:
        """Raises ValueError unless its last `count` tokens can be undone."""
        if not 0 <= count <= self.length - self.shared:
            raise ValueError(f"{self} cannot free {count} of {self.num_private} private tokens")
        for hold in self.holds:
            hold.require_back(self.length - count)
            if count and self.length - count < hold.own:
                raise ValueError(
                    f"{self} cannot free {count} tokens: others may hold those before {hold.own}"
                )

    def require_truncate(self, length: int) -> None:
        """Raises ValueError unless all but its first `length` entries can be dropped."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot cut a sequence of {self.length} entries to {length}")
        for hold in self.holds:
            hold.require_back(length)

    def shrink(self, count: int) -> int:
        """Moves it back by `count` tokens. Returns how many of its last entries are to be freed."""
        for hold in self.holds:
            hold.free_after(self.length - count, self.length)
        self.length -= count
        return count

    def require_branching(self) -> None:
        """Raises ValueError unless it can be forked, and tokens of it dropped."""

    # What others may hit

    @property
    def num_publishable(self) -> int:
        """The first entries that others may hit while it runs."""
        return 0 if self.gap.dropped else min(self.length, len(self.prompt) // TOKEN_BYTES)

    @property
    def is_cacheable(self) -> bool:
        """Whether its tokens can be hit once it is closed."""
        return not self.gap.dropped

    # Entries and positions

    def entries_at(self, positions: Any) -> Any:
        """Returns the entries of its newest tokens, by their positions: a tensor or an array of numpy."""
        return positions - self.gap.dropped

    def positions_of(self, known: Any) -> Any:
        """Returns the positions of its entries. `known`: what the device memory has for them, which has learned
        from edits what was dropped; a tensor or an array of numpy."""
        return known

    def check(self, sequences: "Mapping[int, Sequence]") -> None:
        """Raises CheckFailed unless its numbers fit each other and those of the other open `sequences`, by
        row."""
        path = list(self.path())
        if sequences.get(self.row) is not self or self.shared != sum(segment.length for segment in path):
            raise CheckFailed(f"{self} in row {self.row} has a path of {path}")
        if self.length < self.shared:
            raise CheckFailed(f"{self} is shorter than its path")
        for hold in self.holds:
            hold.check()

    def __repr__(self) -> str:
        dropped = f", dropped={self.dropped}" if self.dropped else ""
        return f"{type(self).__name__}(row={self.row}, length={self.length}, shared={self.shared}{dropped})"


def prompt_length(prompt: bytes) -> int:
    """Returns the tokens of a prompt of int32 bytes. Raises TypeError, ValueError for what is none."""
    if not isinstance(prompt, bytes):
        raise TypeError(
            f"a prompt is int32 bytes, not a {type(prompt).__name__}: lightkv.token_ids.int32_bytes"
        )
    length, rest = divmod(len(prompt), TOKEN_BYTES)
    if rest or not length:
        raise ValueError(f"a prompt is int32 token ids, at least one: got {len(prompt)} bytes")
    return length
