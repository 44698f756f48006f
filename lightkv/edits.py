"""Edits: what the device memory has to do after a change in the ledger, as plain integers that encode to bytes.

The ledger emits edits, and `KVMemory` applies them in order. An edit names rows, entries and segments but no
slots, which only the device knows. Replaying all edits rebuilds the memory's state.

Every range is half open. Entries are places in a row of the token table; as long as a sequence has dropped no
token, they are its positions.

What a verb of the ledger moves between its counts, and the edits that it may emit, in their order; models whose
layers do not all see everything have those of parts beside them:

    open      cached to held            SplitSegment, MapSegments
    extend    cached and free to held   FreeSegment, Alloc
    shrink    held to free              of each sequence FreeRange, SetGap
    publish   nothing                   StoreSegment
    confirm   nothing                   none
    retract   cached to free            FreeSegment
    fork      nothing                   StoreSegment, MergeSegments, CopyRow
    truncate  held to free and cached   FreeRange, SplitSegment, FreeSegment, ForgetSegment, SetGap
    release   held to free and cached   SplitSegment, FreeSegment, ForgetSegment, FreeRange, MoveEntries
    keep      held to free              KeepEntries
    close     held to free and cached   SplitSegment, FreeRange, StoreSegment, FreeRange, FreeSegment,
                                        ForgetSegment, SetGap
    evict     cached to free            FreeSegment
"""

import struct
from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple, get_args


class Alloc(NamedTuple):
    """Allocates `counts[i]` slots for the entries of row `rows[i]` from `starts[i]` on."""

    rows: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]


class AllocPart(NamedTuple):
    """Does what Alloc does in several classes, bit c of `classes` for class c. In those of `reused[i]`, the one
    token of row `rows[i]` takes no free slot, but that of the entry which passes (`Lifetime.distance`)."""

    classes: int
    rows: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    reused: tuple[int, ...]


class AllocStates(NamedTuple):
    """Allocates a state slot for each of `rows`, which the row's next pieces write."""

    rows: tuple[int, ...]


class ReadStates(NamedTuple):
    """Has each of `rows` read the state slot that it writes."""

    rows: tuple[int, ...]


class MapSegments(NamedTuple):
    """Fills `row` with the slots that `segments` have in class `cls`, one after the other, from entry `start`
    on."""

    row: int
    start: int
    segments: tuple[int, ...]
    cls: int = 0


class FreePart(NamedTuple):
    """Frees the slots of the part that `segment` has in class `cls`, and forgets it."""

    cls: int
    segment: int


class StoreSegment(NamedTuple):
    """Makes the slots of entries [start, end) of `row` in class `cls` those of `segment`. If it has some there
    already, these are among them."""

    row: int
    start: int
    end: int
    segment: int
    cls: int = 0


class SplitSegment(NamedTuple):
    """Moves the first `at` slots of `segment` to a new segment `head`; `segment` keeps the rest."""

    segment: int
    at: int
    head: int


class FreeRange(NamedTuple):
    """Frees the slots of entries [start, end) of `row` in class `cls`."""

    row: int
    start: int
    end: int
    cls: int = 0


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
    | AllocPart
    | FreePart
    | AllocStates
    | ReadStates
)

_KINDS: tuple[type, ...] = get_args(Edit)
_CODES = {kind: code for code, kind in enumerate(_KINDS)}
# Edits of lists: how many integers come before their lists, and how many lists of equal length they have.
_LISTS = {Alloc: (0, 3), AllocPart: (1, 4), MapSegments: (2, 1), AllocStates: (0, 1), ReadStates: (0, 1)}


def encode(edits: Iterable[Edit]) -> bytes:
    """Encodes each edit as little-endian int64: its kind, its number of integers, and the integers."""
    words: list[int] = []
    for edit in edits:
        kind = type(edit)
        values: tuple[Any, ...] = edit
        if kind in _LISTS:
            first, num_lists = _LISTS[kind]
            lists, rest = values[first : first + num_lists], values[first + num_lists :]
            words += (_CODES[kind], first + sum(map(len, lists)) + len(rest), *values[:first])
            for one in lists:
                words += one
            words += rest
        else:
            words += (_CODES[kind], len(values), *values)
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
        kind: Any = _KINDS[code]
        first, num_lists = _LISTS.get(kind, (len(kind._fields), 0))
        last = len(kind._fields) - first - num_lists  # integers after the lists
        length, rest = divmod(count - first - last, num_lists) if num_lists else (0, count - first)
        if rest or length < 0:
            raise ValueError(
                f"not an edit: {kind.__name__} of {count} integers, which has {first + last} and {num_lists} "
                "lists of equal length"
            )
        lists = (values[first + i * length : first + (i + 1) * length] for i in range(num_lists))
        edits.append(kind(*values[:first], *lists, *values[first + num_lists * length :]))
    return edits
