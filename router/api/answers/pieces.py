"""JSON in pieces: the long parts of a body are made and encoded only while the body is written."""

import secrets
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import msgspec

_MARK = secrets.token_hex(16)  # stands for a long part in the JSON around it
_ENCODED_MARK = b'"%b"' % _MARK.encode()
_NUM_IDS = 8192  # in one piece

encode = msgspec.json.Encoder().encode


class Long:
    """A part of a body that is too long to be made at once. `pieces`: yields its JSON, each time anew. An empty
    piece gives the writer the chance to let other tasks run."""

    def __init__(self, pieces: Callable[[], Iterator[bytes]]) -> None:
        self.pieces = pieces


def in_pieces(content: Any) -> Iterator[bytes]:
    """Returns an iterator over the JSON of `content`, whose dictionaries and lists may hold `Long` parts. All
    but these is encoded at once."""
    parts: list[Long] = []

    def note(part: Any) -> str:
        parts.append(part)
        return _MARK

    before, *after = msgspec.json.encode(content, enc_hook=note).split(_ENCODED_MARK)
    between = (chain(part.pieces(), [rest]) for part, rest in zip(parts, after, strict=True))
    return chain([before], chain.from_iterable(between))


def long_list(items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Yields the JSON of a list. Each of `items` yields the JSON of one or more of its members."""
    mark = b"["
    for item in items:
        yield mark
        yield from item
        mark = b","
    yield b"[]" if mark == b"[" else b"]"


def long_ids(prompt: bytes) -> Any:
    """Returns the tokens of a prompt (int32 bytes) as a `Long` list."""
    ids = memoryview(prompt).cast("i")
    starts = range(0, len(ids), _NUM_IDS)
    return Long(lambda: long_list([encode(ids[i : i + _NUM_IDS].tolist())[1:-1]] for i in starts))
