"""Log-probabilities of tokens as arrays, which are read as JSON some tokens at a time."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightkv.router.engine.step import PromptLogprobs, TokenLogprobs

from .pieces import encode

MIN_JSON_LOGPROB = -9999.0  # written for -inf, which JSON does not have, as in vLLM
_AT_ONCE = 512  # log-probabilities, which are written in half a millisecond


class ScoredToken(NamedTuple):
    """A token and the likeliest tokens in its place, with their log-probabilities as JSON."""

    token_id: int
    logprob: bytes
    top_ids: list[int]
    top_logprobs: list[bytes]


@dataclass(frozen=True)
class Scores:
    """The log-probabilities of n tokens, and of the k likeliest tokens in the place of each.

    ids, logprobs: int32 and float32 [n]. top_ids, top_logprobs: the same [n × k], the likeliest first.
    """

    ids: memoryview
    logprobs: "memoryview[Any]"
    top_ids: memoryview
    top_logprobs: "memoryview[Any]"

    @classmethod
    def of_prompt(cls, prompt: bytes, found: PromptLogprobs) -> "Scores":
        """Returns those of a prompt's tokens from the second on. `prompt`: int32 bytes [n + 1]."""
        top_ids, top_logprobs = memoryview(found.top_ids), memoryview(found.top_logprobs)
        ids, logprobs = memoryview(prompt).cast("i")[1:], memoryview(found.logprobs)
        return cls(ids, logprobs.cast("f"), top_ids.cast("i"), top_logprobs.cast("f"))

    def __len__(self) -> int:
        return len(self.ids)

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
                ScoredToken(ids[i], numbers[i], top_ids[first:last], tops[first:last])
                for i in range(len(ids))
                for first, last in [(i * num_top, (i + 1) * num_top)]
            ]


class GrowingScores:
    """The log-probabilities of an answer that grows: eight bytes for each token and each of its likeliest."""

    __slots__ = ("_ids", "_logprobs", "_top_ids", "_top_logprobs")

    def __init__(self) -> None:
        self._ids, self._top_ids = array("i"), array("i")
        self._logprobs, self._top_logprobs = array("f"), array("f")

    def __len__(self) -> int:
        return len(self._ids)

    def append(self, token_id: int, found: TokenLogprobs) -> None:
        """Adds a token. Each token of an answer has as many likeliest ones."""
        self._ids.append(token_id)
        self._logprobs.append(found.logprob)
        self._top_ids.extend(found.top_ids)
        self._top_logprobs.extend(found.top_logprobs)

    def extend(self, other: "GrowingScores") -> None:
        """Adds the tokens of `other`, which come later in the same answer."""
        self._ids.extend(other._ids)
        self._logprobs.extend(other._logprobs)
        self._top_ids.extend(other._top_ids)
        self._top_logprobs.extend(other._top_logprobs)

    @property
    def first(self) -> TokenLogprobs:
        """The log-probabilities of the first token."""
        num_top = len(self._top_ids) // len(self)
        top_ids, top_logprobs = self._top_ids[:num_top], self._top_logprobs[:num_top]
        return TokenLogprobs(self._logprobs[0], top_ids.tolist(), top_logprobs.tolist())

    def read(self) -> Scores:
        """Returns all of them. Nothing can be added while the result is in use."""
        own = memoryview(self._ids), memoryview(self._logprobs)
        return Scores(*own, memoryview(self._top_ids), memoryview(self._top_logprobs))


def _numbers(logprobs: Sequence[float]) -> list[bytes]:
    """Returns each number as JSON."""
    if not logprobs:
        return []
    encoded = encode(logprobs)
    if b"null" in encoded:  # of an infinity, or of NaN
        encoded = encode([max(one, MIN_JSON_LOGPROB) for one in logprobs])
    return encoded[1:-1].split(b",")
