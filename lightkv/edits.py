"""Edits: what the device memory has to do after a change in the ledger, as plain integers that encode to bytes.

The ledger emits edits, and `KVMemory` applies them in order. An edit names rows, entries and segments but no
slots, which only the device knows. Replaying all edits rebuilds the memory's state.

Every range is half open. Entries are places in a row of the token table; as long as a sequence has dropped no
token, they are its positions.
"""

import struct
from array import array
from collections.abc import Iterable
from typing import NamedTuple, get_args


class Alloc(NamedTuple):
    """Allocates `counts[i]` slots for the entries of row `rows[i]` from `starts[i]` on."""

    rows: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]


class MapSegments(NamedTuple):
    """Fills a new `row` with the slots of `segments`, one after the other, from entry 0 on."""

    row: int
    segments: tuple[int, ...]


class StoreSegment(NamedTuple):
    """Makes the slots of entries [start, end) of `row` the segment `segment`. If the segment exists already,
    its old slots are among them."""

    row: int
    start: int
    end: int
    segment: int


class SplitSegment(NamedTuple):
    """Moves the first `at` slots of `segment` to a new segment `head`; `segment` keeps the rest."""

    segment: int
    at: int
    head: int


class FreeRange(NamedTuple):
    """Frees the slots of entries [start, end) of `row`."""

    row: int
    start: int
    end: int


class MergeSegments(NamedTuple):
    """Moves the slots of `head` to the front of `segment` and removes `head`: the inverse of `SplitSegment`."""

    segment: int
    head: int


class ForgetSegment(NamedTuple):
    """Removes `segment`; its slots stay with the one row that has them."""

    segment: int


class CopyRow(NamedTuple):
    """Copies the first `end` entries of `source` to `row`: the same slots at the same positions."""

    row: int
    source: int
    end: int


class SetGap(NamedTuple):
    """Cuts a `row` that has dropped tokens to `end` entries. Its next entry's position is `end + dropped`; with
    `dropped` 0 its positions are its entries again."""

    row: int
    end: int
    dropped: int


class MoveEntries(NamedTuple):
    """Moves the last entries of `row`, [start, end), down to begin at `to`. The entries that were there have
    been freed or left, so the row has dropped `start - to` positions more; the moved entries keep theirs."""

    row: int
    start: int
    end: int
    to: int


class KeepEntries(NamedTuple):
    """Keeps `num_kept` of the last entries of `row`, [start, end), and frees the slots of the others. Which
    ones stay is passed to the memory beside the edit (`KVMemory.apply`). They move down to begin at `start`,
    and keep their positions."""

    row: int
    start: int
    end: int
    num_kept: int


class FreeSegment(NamedTuple):
    """Frees the slots of `segment` from `start` on; with `start` 0 the segment is removed."""

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

_KINDS: tuple[type, ...] = get_args(Edit)
_CODES = {kind: code for code, kind in enumerate(_KINDS)}


def encode(edits: Iterable[Edit]) -> bytes:
    """Encodes each edit as little-endian int64: its kind, its number of integers, and the integers."""
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
    """Decodes the bytes of `encode`. Raises ValueError for bytes that are not edits."""
    words = array("q")
    words.frombytes(data)
    edits: list[Edit] = []
    at = 0
    while at < len(words):
        code, count = words[at : at + 2] if at + 2 <= len(words) else (-1, 0)
        values = tuple(words[at + 2 : at + 2 + count])
        at += 2 + count
        if not 0 <= code < len(_KINDS) or count < 0 or len(values) != count:
            raise ValueError(f"not an edit: kind {code} with {len(values)} of {count} integers")
        kind = _KINDS[code]
        if kind is Alloc:
            third, rest = divmod(count, 3)
            if rest:
                raise ValueError(f"not an edit: an Alloc of {count} integers, not three equal parts")
            edits.append(Alloc(values[:third], values[third : 2 * third], values[2 * third :]))
        elif kind is MapSegments:
            if not values:
                raise ValueError("not an edit: a MapSegments without a row")
            edits.append(MapSegments(values[0], values[1:]))
        else:
            if count != len(kind._fields):  # type: ignore[attr-defined]
                raise ValueError(f"not an edit: {kind.__name__} of {count} integers")
            edits.append(kind(*values))
    return edits
