"""The limits of API keys, by a clock of the test's own."""

import math
import random
from pathlib import Path

import pytest

from lightkv.router.service.access.key_file import ApiKeys, read_keys
from lightkv.router.service.access.key_limits import (
    KeyLimiter,
    KeyLimits,
    LimitReached,
    Reservation,
)


class Keys:
    """A limiter of the keys a and b, whose limits a test may change."""

    def __init__(self, **limits: int) -> None:
        self.now = 0.0
        self.limits: dict[bytes, KeyLimits] = {b"a": KeyLimits(**limits), b"b": KeyLimits(**limits)}
        self.limiter = KeyLimiter(self.limits.get, lambda: self.now)

    def take(self, count: int = 1, max_tokens: int = 1, key: bytes = b"a", num_bytes: int = 0) -> Reservation:
        taken = self.limiter.reserve(key, count, max_tokens, num_bytes)
        assert taken is not None
        return taken

    def refused(self, count: int = 1, max_tokens: int = 1, num_bytes: int = 0) -> LimitReached:
        with pytest.raises(LimitReached) as caught:
            self.limiter.reserve(b"a", count, max_tokens, num_bytes)
        return caught.value


def test_requests_a_minute_come_back_evenly_and_each_answer_counts() -> None:
    keys = Keys(rpm=6)
    keys.take(4)
    error = keys.refused(3)
    assert (error.name, error.seconds) == ("rpm", 10)
    keys.take(2)
    assert keys.refused().seconds == 10
    keys.take(6, key=b"b")  # another key is not concerned
    keys.now += 10
    keys.take()
    assert keys.refused().seconds == 10
    keys.now += 3600
    keys.take(6)
    keys.refused()
    assert keys.refused(7).seconds is None  # no time helps


def test_answers_at_once_have_a_limit_until_they_end() -> None:
    keys = Keys(max_parallel_requests=3)
    first = keys.take(2)
    second = keys.take()
    assert (keys.refused().name, keys.refused(4).seconds) == ("max_parallel_requests", None)
    second.end(5, [1])
    keys.take()
    assert keys.refused().seconds == 1
    first.end(0, [])  # it was refused elsewhere
    keys.take(2)


def test_tokens_are_reserved_by_the_estimate_and_what_was_not_used_is_given_back() -> None:
    keys = Keys(tpm=1000)
    one = keys.take(2, max_tokens=100_000)  # 2 × 256 until an answer has ended
    assert keys.refused(2, 100_000).name == "tpm"
    one.add_prompt(400)
    with pytest.raises(LimitReached) as caught:
        keys.take().add_prompt(100)
    assert caught.value.seconds == math.ceil((100 - 87) * 60 / 1000)
    one.end(400, [3, 5])
    keys.take(1, 100).add_prompt(491)  # 1000 - 408 - the one above - 100
    assert keys.refused().name == "tpm"


def test_a_prompt_that_a_minute_never_has_is_refused_for_good() -> None:
    keys = Keys(tpm=1000)
    with pytest.raises(LimitReached) as caught:
        keys.take(1, 100).add_prompt(1001)
    assert caught.value.seconds is None
    keys.now += 60
    keys.take(1, 100).add_prompt(1000)  # which has an answer, too, and owes it


def test_an_estimate_refuses_nothing_for_good() -> None:
    keys = Keys(tpm=100)
    keys.take(1, 32_000).end(50, [20_000])  # the key's answers are long
    assert keys.refused(1, 32_000).seconds == 120
    keys.now += 120
    keys.take(1, 32_000, num_bytes=10**6)


def test_a_prompt_is_estimated_from_the_bytes_of_its_body_before_it_is_known() -> None:
    keys = Keys(tpm=1000)
    one = keys.take(num_bytes=4000)  # 500 tokens and the answer's one
    assert keys.refused(num_bytes=4000).name == "tpm"
    one.add_prompt(100)
    keys.take(num_bytes=4000).end(0, [])


def test_a_request_that_was_refused_elsewhere_is_given_back() -> None:
    keys = Keys(rpm=2)
    for _ in range(5):
        keys.take(2).end(0, [])


def test_a_request_that_was_tokenised_and_refused_counts() -> None:
    keys = Keys(rpm=3, tpm=100)
    keys.take(1, 50)
    for num_tokens in (1000, 95):  # never, and not now
        one = keys.take(1, 10)
        with pytest.raises(LimitReached):
            one.add_prompt(num_tokens)
        one.end(0, [])
    assert keys.refused().name == "rpm"


def test_short_answers_make_no_room_for_many_long_ones() -> None:
    keys = Keys(tpm=1000)
    for _ in range(500):
        keys.take(1, 1).end(1, [1])
        keys.now += 1
    for _ in range(3):
        keys.take(1, 32_000)
    assert keys.refused(1, 32_000).name == "tpm"


def test_the_estimate_follows_the_answers_of_the_key_and_more_is_a_debt() -> None:
    keys = Keys(tpm=10_000)
    for _ in range(100):
        keys.take(1, 5000).end(0, [10])
        keys.now += 60
    one = keys.take(1, 5000)
    keys.take(1, 5000).end(0, [15_000])
    assert keys.refused().seconds == math.ceil((15_000 + 256 + 1 - 10_000) * 60 / 10_000)
    one.end(0, [0])
    keys.now += 61
    keys.take()


def test_a_key_owes_at_most_a_minutes_tokens() -> None:
    keys = Keys(tpm=1000)
    for one in [keys.take(1, 5000) for _ in range(3)]:
        one.end(0, [10**9])
    assert keys.refused(1, 1).seconds == math.ceil(1001 * 60 / 1000)
    keys.now += 121  # whatever is asked for
    keys.take(1, 10**9).end(0, [0])


def test_a_request_that_counts_tokens_is_one_of_the_minutes() -> None:
    keys = Keys(rpm=2, tpm=1000, max_parallel_requests=1)
    one = keys.take(1, 1)
    keys.limiter.take_request(b"a")  # while an answer is not complete
    with pytest.raises(LimitReached) as caught:
        keys.limiter.take_request(b"a")
    assert (caught.value.name, caught.value.seconds) == ("rpm", 30)
    assert keys.refused().name == "max_parallel_requests"
    one.end(0, [2000])
    keys.now += 59  # 1000 are owed
    with pytest.raises(LimitReached) as caught:
        keys.limiter.take_request(b"a")
    assert (caught.value.name, caught.value.seconds) == ("tpm", 2)
    keys.now += 2
    keys.limiter.take_request(b"a")
    keys.limiter.take_request(b"none")


def test_changed_limits_begin_anew_and_the_open_requests_still_count() -> None:
    keys = Keys(rpm=1, max_parallel_requests=2)
    one = keys.take()
    keys.refused()
    keys.limits[b"a"] = KeyLimits(max_parallel_requests=2)
    keys.take()
    assert keys.refused().name == "max_parallel_requests"
    one.end(0, [])
    keys.take()
    keys.limits[b"a"] = KeyLimits()
    assert keys.limiter.reserve(b"a", 100, 1) is None


def test_what_is_known_of_keys_that_are_gone_is_forgotten() -> None:
    number = 0

    def limits_of(key: bytes) -> KeyLimits | None:
        return KeyLimits(rpm=5) if key.startswith(b"%d-" % number) else None

    limiter = KeyLimiter(limits_of)
    for number in range(5):
        for i in range(3000):
            limiter.reserve(b"%d-%d" % (number, i), 1, 1)
    assert 3000 <= len(limiter._used) <= 3 * 3000


def test_no_sequence_of_requests_takes_more_than_the_limits() -> None:
    rng = random.Random(1)
    keys = Keys(rpm=30, tpm=5000, max_parallel_requests=8)
    opened: list[tuple[Reservation, int, int]] = []
    taken: list[tuple[float, int]] = []
    for _ in range(4000):
        keys.now += rng.random() * 2
        if opened and rng.random() < 0.5:
            one, prompt, count = opened.pop(rng.randrange(len(opened)))
            one.end(prompt, [rng.randrange(200) for _ in range(count)])
            continue
        count, prompt = rng.randint(1, 4), rng.randrange(400)
        try:
            one = keys.take(count, 200)
        except LimitReached:
            continue
        try:
            one.add_prompt(prompt)
        except LimitReached:
            one.end(0, [])
            continue
        taken.append((keys.now, count))
        opened.append((one, prompt, count))
        assert sum(count for _, _, count in opened) <= 8
    assert len(taken) > 200
    for start, _ in taken:  # a bucket that is full may be emptied while it is refilled
        assert sum(count for at, count in taken if start <= at < start + 60) <= 2 * 30


def test_the_limits_of_a_file_are_read_and_a_key_may_look_like_one(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice k1 rpm=60 tpm=1000\nk2 max_parallel_requests=4\nbob rpm=5\nrpm=7\n")
    found = read_keys(file)
    assert found["k1"] == ("alice", KeyLimits(60, 1000))
    assert found["k2"].limits == KeyLimits(max_parallel_requests=4)
    assert found["bob"].limits == KeyLimits(rpm=5)  # the key bob
    assert found["rpm=7"].limits == KeyLimits()  # of one word, it is a key
    keys = ApiKeys(["given"], str(file))
    assert keys.any_limits
    assert keys.limits(b"k1") == KeyLimits(60, 1000)
    assert keys.limits(b"given") == KeyLimits()
    assert keys.limits(b"none") is None
