"""JSON in pieces: the long parts of a body are made and encoded only while the body is written. The longest are
log-probabilities of tokens, which are kept as arrays and written some tokens at a time."""

import secrets
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

import msgspec

from lightkv.router.engine.step import PromptLogprobs, TokenLogprobs
from lightkv.router.text.detokenizer import Place

_MARK = secrets.token_hex(16)  # stands for a long part in the JSON around it
_ENCODED_MARK = b'"%b"' % _MARK.encode()
_NUM_IDS = 8192  # in one piece
MIN_JSON_LOGPROB = -9999.0  # written for -inf, which JSON does not have, as in vLLM
_AT_ONCE = 512  # log-probabilities, which are written in half a millisecond

encode = msgspec.json.Encoder().encode
Object = dict[str, Any]  # of JSON


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


def head_of(prefix: str, model: str) -> Object:
    """Returns what all objects of one answer have: an id that begins with `prefix`, the time and the model."""
    return {"id": f"{prefix}-{secrets.token_hex(16)}", "created": int(time.time()), "model": model}


def long_ids(prompt: bytes) -> Any:
    """Returns the tokens of a prompt (int32 bytes) as a `Long` list."""
    ids = memoryview(prompt).cast("i")
    starts = range(0, len(ids), _NUM_IDS)
    return Long(lambda: long_list([encode(ids[i : i + _NUM_IDS].tolist())[1:-1]] for i in starts))


class ScoredToken(NamedTuple):
    """A token and the likeliest tokens in its place, with their log-probabilities as JSON, and its place in the
    text."""

    token_id: int
    logprob: bytes
    top_ids: list[int]
    top_logprobs: list[bytes]
    place: Place


class Places:
    """The places of tokens in a text, eight bytes each. `more`: yields places that are looked up only when they
    are read."""

    __slots__ = ("_more", "_packed")

    def __init__(self, more: Iterable[Place] = ()) -> None:
        self._more = iter(more)
        self._packed = array("q")

    def append(self, place: Place) -> None:
        """Adds the place of the next token."""
        self._packed.append(place.start << 2 | place.begins << 1 | place.is_hidden)

    def extend(self, other: "Places") -> None:
        """Adds the places of `other`, whose tokens come later in the same text."""
        self._packed.extend(other._packed)

    def read(self, start: int, end: int) -> list[Place]:
        """Returns the places of the tokens from `start` to `end`."""
        for place in islice(self._more, max(end - len(self._packed), 0)):
            self.append(place)
        return [Place(one >> 2, bool(one & 2), bool(one & 1)) for one in self._packed[start:end]]


class Scores:
    """The log-probabilities of n tokens, and of the k likeliest tokens in the place of each, which may grow:
    eight bytes for each token and each of its likeliest, and eight for its place.

    ids, logprobs: int32 and float32 [n]. top_ids, top_logprobs: the same [n × k], the likeliest first.
    places: those of the n tokens.
    """

    __slots__ = ("ids", "logprobs", "places", "top_ids", "top_logprobs")

    def __init__(self) -> None:
        self.ids: Any = array("i")
        self.logprobs: Any = array("f")
        self.top_ids: Any = array("i")
        self.top_logprobs: Any = array("f")
        self.places = Places()

    @classmethod
    def of_prompt(cls, prompt: bytes, found: PromptLogprobs, places: Places | None = None) -> "Scores":
        """Returns those of a prompt's tokens from the second on, which do not grow. `prompt`: int32 bytes
        [n + 1]."""
        scores = cls()
        scores.ids, scores.logprobs = memoryview(prompt).cast("i")[1:], memoryview(found.logprobs).cast("f")
        scores.top_ids = memoryview(found.top_ids).cast("i")
        scores.top_logprobs = memoryview(found.top_logprobs).cast("f")
        scores.places = places or Places(repeat(Place(0)))
        return scores

    def __len__(self) -> int:
        return len(self.ids)

    def append(self, token_id: int, found: TokenLogprobs, place: Place) -> None:
        """Adds a token. Each token of an answer has as many likeliest ones."""
        self.ids.append(token_id)
        self.logprobs.append(found.logprob)
        self.top_ids.extend(found.top_ids)
        self.top_logprobs.extend(found.top_logprobs)
        self.places.append(place)

    def extend(self, other: "Scores") -> None:
        """Adds the tokens of `other`, which come later in the same answer."""
        self.ids.extend(other.ids)
        self.logprobs.extend(other.logprobs)
        self.top_ids.extend(other.top_ids)
        self.top_logprobs.extend(other.top_logprobs)
        self.places.extend(other.places)

    @property
    def short(self) -> list[ScoredToken] | None:
        """All tokens, if they are so few that they are written at once."""
        if len(self.ids) + len(self.top_ids) > _AT_ONCE:
            return None
        return next(self.parts(), [])

    def parts(self) -> Iterator[list[ScoredToken]]:
        """Yields all tokens, in parts that are written in half a millisecond or so."""
        num_top = len(self.top_ids) // max(len(self), 1)
        num_tokens = max(_AT_ONCE // (num_top + 1), 1)
        for start in range(0, len(self), num_tokens):
            end = start + num_tokens
            likeliest = slice(start * num_top, end * num_top)
            ids, numbers = self.ids[start:end].tolist(), _numbers(self.logprobs[start:end].tolist())
            top_ids, tops = self.top_ids[likeliest].tolist(), _numbers(self.top_logprobs[likeliest].tolist())
            yield [
                ScoredToken(ids[i], numbers[i], top_ids[first:last], tops[first:last], place)
                for i, place in zip(range(len(ids)), self.places.read(start, end), strict=False)
                for first, last in [(i * num_top, (i + 1) * num_top)]
            ]


def _numbers(logprobs: Sequence[float]) -> list[bytes]:
    """Returns each number as JSON."""
    if not logprobs:
        return []
    encoded = encode(logprobs)
    if b"null" in encoded:  # of an infinity, or of NaN
        encoded = encode([max(one, MIN_JSON_LOGPROB) for one in logprobs])
    return encoded[1:-1].split(b",")
