"""Limits of API keys: requests and tokens a minute, and requests at once. They begin anew with the process.

A minute's limit is a bucket that holds as much as the limit and is refilled evenly, so that it is known when
what it lacks is there. A key without limits has no bucket, and waits for no other key.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from lightkv.errors import LightKVError

LEAST_LENGTH = 256  # of an answer, if its limit is larger: short ones must not make room for many long ones
_BYTES_A_TOKEN = 8  # of a request's body, until its prompt is known
_MOST_KEPT = 1024  # keys, before those that the file has no more are looked for
_WEIGHT = 1 / 16  # of the newest answer in the mean length of a key's answers


class KeyLimits(NamedTuple):
    """The limits of one key, under litellm's names; None is none. `rpm`, `tpm`: requests and tokens a minute.
    `max_parallel_requests`: answers that are not complete."""

    rpm: int | None = None
    tpm: int | None = None
    max_parallel_requests: int | None = None


class LimitReached(LightKVError):
    """A key has reached a limit. `name`: the limit's. `seconds`: until the request fits it; None: never."""

    def __init__(self, name: str, limit: int, asked: int, seconds: float | None) -> None:
        self.name = name
        self.seconds = None if seconds is None else max(math.ceil(seconds), 1)
        remedy = f"try again in {self.seconds} s"
        if seconds is None:
            remedy = f"the request asks for {asked}; send a smaller one"
        super().__init__(f"this API key has a limit of {name}={limit}, which is reached; {remedy}")


class _Bucket:
    """What is left of a limit of `most` a minute."""

    def __init__(self, most: int, now: float) -> None:
        self.most = most
        self._left = float(most)
        self._at = now

    def wait(self, count: int, now: float) -> float | None:
        """Returns the seconds until `count` is there, 0 if it is; None if it never will be."""
        self._refill(now)
        return None if count > self.most else max(count - self._left, 0.0) * 60 / self.most

    def take(self, count: int, now: float) -> None:
        """Takes `count`, whether it is there or not; a negative one is given back. What is owed is at most a
        minute's, so that no key has to wait for more than two."""
        self._refill(now)
        self._left = max(min(self._left - count, self.most), -self.most)

    def _refill(self, now: float) -> None:
        self._left = min(self._left + (now - self._at) * self.most / 60, self.most)
        self._at = now


class _Used:
    """What one key has used of its limits."""

    def __init__(self, limits: KeyLimits, now: float) -> None:
        self.num_open = 0
        self.mean_length = float(LEAST_LENGTH)
        self.begin(limits, now)

    def begin(self, limits: KeyLimits, now: float) -> None:
        """Takes the limits of a key that is new, or whose limits have changed: they begin full."""
        self.limits = limits
        self.requests = None if limits.rpm is None else _Bucket(limits.rpm, now)
        self.tokens = None if limits.tpm is None else _Bucket(limits.tpm, now)


@dataclass
class Reservation:
    """What one request has taken of its key's limits, until `end`. `counts`: whether it is one of the minute's
    requests even without answers, because it was refused for its own fault."""

    used: _Used
    num_answers: int
    answers: int  # the tokens that they are expected to have
    taken: int  # of the minute's tokens
    clock: Callable[[], float]
    counts: bool = False

    def add_prompt(self, num_tokens: int) -> None:
        """Takes the tokens of the prompts, which are known by now. Raises LimitReached."""
        if (tokens := self.used.tokens) is not None:
            now = self.clock()
            self.counts = True  # if it is refused here, its text was tokenised for nothing
            if num_tokens > tokens.most:
                raise LimitReached("tpm", tokens.most, num_tokens, None)
            more = min(num_tokens + self.answers, tokens.most) - self.taken
            _require("tpm", tokens, more, now)
            tokens.take(more, now)
            self.taken += more
            self.counts = False

    def end(self, num_prompt: int, lengths: list[int]) -> None:
        """Gives back what the request did not use. `lengths`: the tokens of its answers; none if it was
        refused."""
        used = self.used
        used.num_open -= self.num_answers
        if used.requests is not None and not lengths and not self.counts:
            used.requests.take(-self.num_answers, self.clock())
        if used.tokens is not None:
            used.tokens.take(num_prompt + sum(lengths) - self.taken, self.clock())
        for length in lengths:
            used.mean_length += (length - used.mean_length) * _WEIGHT


class KeyLimiter:
    """The limits of all keys. `limits_of` returns those of a key, which may change; None for an unknown key."""

    def __init__(
        self, limits_of: Callable[[bytes], KeyLimits | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits_of = limits_of
        self._clock = clock
        self._used: dict[bytes, _Used] = {}  # by key, of those that have limits and were used
        self._most_kept = _MOST_KEPT

    def reserve(
        self, key: bytes, num_answers: int, max_tokens: int, num_bytes: int = 0
    ) -> Reservation | None:
        """Takes a request of so many answers, and for each the smaller of `max_tokens` and the mean length of
        the key's answers; for the prompt an estimate from the bytes of the body, until `add_prompt`. Returns
        None for a key without limits. Raises LimitReached, and nothing is taken."""
        used, now = self._of(key), self._clock()
        if used is None:
            return None
        at_once = used.limits.max_parallel_requests
        if at_once is not None and used.num_open + num_answers > at_once:
            seconds = None if num_answers > at_once else 1.0
            raise LimitReached("max_parallel_requests", at_once, num_answers, seconds)
        answers = num_answers * min(max_tokens, max(math.ceil(used.mean_length), LEAST_LENGTH))
        num_tokens = answers + num_bytes // _BYTES_A_TOKEN
        if used.tokens is not None:
            num_tokens = min(num_tokens, used.tokens.most)  # an estimate refuses nothing for good
            _require("tpm", used.tokens, num_tokens, now)
        if used.requests is not None:
            _require("rpm", used.requests, num_answers, now)
            used.requests.take(num_answers, now)
        if used.tokens is not None:
            used.tokens.take(num_tokens, now)
        used.num_open += num_answers
        return Reservation(used, num_answers, answers, num_tokens, self._clock)

    def require(self, key: bytes, num_answers: int) -> None:
        """Raises LimitReached where a key is at a limit, whatever else is asked for, before the body is read.
        `num_answers`: the fewest; 0 for a request that counts tokens."""
        used, now = self._of(key), self._clock()
        if used is None:
            return
        at_once = used.limits.max_parallel_requests
        if at_once is not None and num_answers and used.num_open >= at_once:
            raise LimitReached("max_parallel_requests", at_once, num_answers, 1.0)
        if used.tokens is not None:
            _require("tpm", used.tokens, 1, now)
        if used.requests is not None:
            _require("rpm", used.requests, 1, now)

    def take_request(self, key: bytes) -> None:
        """Takes one of the minute's requests for one that counts tokens and has no answer. Raises LimitReached,
        also where the minute's tokens are used up, of which it takes none."""
        self.require(key, 0)
        if (used := self._of(key)) is not None and used.requests is not None:
            used.requests.take(1, self._clock())

    def _of(self, key: bytes) -> _Used | None:
        """Returns what a key has used; None for one without limits."""
        limits = self._limits_of(key)
        if limits is None or limits == KeyLimits():
            return None
        found = self._used.get(key)
        if found is None:
            if len(self._used) >= self._most_kept:
                known = {one: used for one, used in self._used.items() if self._limits_of(one) is not None}
                self._used, self._most_kept = known, 2 * len(known) + _MOST_KEPT
            found = self._used[key] = _Used(limits, self._clock())
        elif found.limits != limits:
            found.begin(limits, self._clock())
        return found


def _require(name: str, bucket: _Bucket, count: int, now: float) -> None:
    """Raises LimitReached unless `count` is there."""
    seconds = bucket.wait(count, now)
    if seconds != 0:
        raise LimitReached(name, bucket.most, count, seconds)
