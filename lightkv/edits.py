"""Edits: what the device has to do about a change in the ledger. Plain integers, which encode to bytes.

The ledger decides and emits edits; whoever holds the device memory (`kv_memory.KVMemory`) applies them in
order. An edit names rows, positions and segments, never slots: which slots those are is known on the device
alone. The same list is the record of what happened, so replaying it rebuilds the memory's state.

Every range is half open. Positions are entries of a row of the token table: while a sequence has dropped none
of its tokens, the two are the same.
"""

import struct
from array import array
from collections.abc import Iterable
from typing import NamedTuple


class Alloc(NamedTuple):
    """Row `rows[i]` gets `counts[i]` fresh slots for its positions from `starts[i]` on."""

    rows: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]


class MapSegments(NamedTuple):
    """The first positions of `row`, which begins with it, are the slots of `segments`, one after the other."""

    row: int
    segments: tuple[int, ...]


class StoreSegment(NamedTuple):
    """`segment` is what `row` holds at [start, end) now; whatever it was before is a part of that."""

    row: int
    start: int
    end: int
    segment: int


class SplitSegment(NamedTuple):
    """The first `at` slots of `segment` become the new segment `head`; `segment` keeps the rest."""

    segment: int
    at: int
    head: int


class FreeRange(NamedTuple):
    """The slots of `row` at [start, end) are free again."""

    row: int
    start: int
    end: int


class MergeSegments(NamedTuple):
    """`segment` begins with the slots of `head` now, which is no more: what `SplitSegment` does, undone."""

    segment: int
    head: int


class ForgetSegment(NamedTuple):
    """`segment` is no more; its slots stay with the row that has them."""

    segment: int


class CopyRow(NamedTuple):
    """The first `end` entries of `row` are those of `source` now: the same slots, at the same positions."""

    row: int
    source: int
    end: int


class SetGap(NamedTuple):
    """The row's entries end at `end`, and `dropped` positions lie before the next: of a row that has dropped
    some. With 0 of them its positions are its entries again."""

    row: int
    end: int
    dropped: int


class MoveEntries(NamedTuple):
    """The entries of `row` at [start, end), which are its last, move down to begin at `to`; what was there has
    been given."""

    row: int
    start: int
    end: int
    to: int


class KeepEntries(NamedTuple):
    """Of the entries of `row` at [start, end) `num_kept` stay, those that whoever holds the memory has been
    told; they move down to begin at `start`, and the slots of the others are free again."""

    row: int
    start: int
    end: int
    num_kept: int


class FreeSegment(NamedTuple):
    """The slots of `segment` from `start` on are free again; with start 0 the segment is gone."""

    segment: int
    start: int


Edit = (
    Alloc
    | MapSegments
    | StoreSegment
    | SplitSegment
    | MergeSegments
    | ForgetSegment
    | FreeRange
    | FreeSegment
    | CopyRow
    | SetGap
    | MoveEntries
    | KeepEntries
)

_KINDS: tuple[type, ...] = (
    Alloc,
    MapSegments,
    StoreSegment,
    SplitSegment,
    MergeSegments,
    ForgetSegment,
    FreeRange,
    FreeSegment,
    CopyRow,
    SetGap,
    MoveEntries,
    KeepEntries,
)
_CODES = {kind: code for code, kind in enumerate(_KINDS)}


def encode(edits: Iterable[Edit]) -> bytes:
    """The edits as little-endian int64: kind, number of integers, integers, for each."""
    words: list[int] = []
    for edit in edits:
        if isinstance(edit, Alloc):
            rows, starts, counts = edit
            words += (_CODES[Alloc], 3 * len(rows))
            words += rows
            words += starts
            words += counts
        elif isinstance(edit, MapSegments):
            row, segments = edit
            words += (_CODES[MapSegments], 1 + len(segments), row)
            words += segments
        else:
            words += (_CODES[type(edit)], len(edit))
            words += edit
    return struct.pack(f"<{len(words)}q", *words)


def decode(data: bytes) -> list[Edit]:
    """What `encode` was given. Raises ValueError on bytes that are no edits."""
    words = array("q")
    words.frombytes(data)
    edits: list[Edit] = []
    at = 0
    while at < len(words):
        code, count = words[at : at + 2] if at + 2 <= len(words) else (-1, 0)
        values = tuple(words[at + 2 : at + 2 + count])
        at += 2 + count
        if not 0 <= code < len(_KINDS) or count < 0 or len(values) != count:
            raise ValueError(f"no edit: kind {code} with {len(values)} of {count} integers")
        kind = _KINDS[code]
        if kind is Alloc:
            third, rest = divmod(count, 3)
            if rest:
                raise ValueError(f"no edit: a Take of {count} integers, not three equal parts")
            edits.append(Alloc(values[:third], values[third : 2 * third], values[2 * third :]))
        elif kind is MapSegments:
            if not values:
                raise ValueError("no edit: a Map of no row")
            edits.append(MapSegments(values[0], values[1:]))
        else:
            if count != len(kind._fields):  # type: ignore[attr-defined]
                raise ValueError(f"no edit: {kind.__name__} of {count} integers")
            edits.append(kind(*values))
    return edits
