"""Sessions in the ledger: what they protect, in which order they lose it, and that every count stays exact."""

import random
from array import array

import pytest

from lightkv.errors import CheckFailed, OutOfRows, OutOfTokens
from lightkv.ledger import TokenLedger
from lightkv.ledger.sequence import Sequence
from lightkv.ledger.sessions import MAX_ENDS, Session, SessionCounts
from tests.support.combinations import slow
from tests.support.memory_model import MemoryModel


def ids(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def turn(ledger: TokenLedger, tokens: bytes, name: str | None = None, output: bytes = b"") -> int:
    """Runs one prompt to its end. Returns how many of its tokens were cached."""
    session = None if name is None else ledger.sessions.open(name)
    sequence = ledger.open(tokens, (), session)
    ledger.extend([sequence], [(len(tokens) + len(output)) // 4 - sequence.length])
    ledger.publish(sequence)
    ledger.close(sequence, output)
    ledger.check()
    return sequence.num_hit


def found(ledger: TokenLedger, tokens: bytes) -> int:
    return ledger.match(tokens + ids(999)).num_tokens


A, B, C, D = (ids(*range(100 * i, 100 * i + 20)) for i in range(1, 5))


def test_what_a_session_protects_is_evicted_last() -> None:
    ledger = TokenLedger(100, 4, 50, max_protected=40)
    turn(ledger, A, "a")
    for prompt in (B, C, D, C, D):
        turn(ledger, prompt)
    assert ledger.sessions.counts == SessionCounts(1, 20, 0, 0)
    ledger.evict(60)
    assert [found(ledger, prompt) for prompt in (A, B, C, D)] == [20, 0, 0, 0]
    assert (ledger.num_cached, ledger.sessions.counts) == (20, SessionCounts(1, 20, 0, 0))
    ledger.evict(5)  # a protected token is a cached one: it goes where nothing else is left
    assert found(ledger, A) == 15
    assert ledger.sessions.counts == SessionCounts(1, 15, 5, 0)
    ledger.evict(15)
    assert ledger.sessions.counts == SessionCounts(0, 0, 20, 0)
    assert ledger.num_free == 100
    ledger.check()


def test_a_request_gets_the_tokens_that_sessions_protect_if_it_needs_them() -> None:
    ledger = TokenLedger(40, 4, 50, max_protected=40)
    turn(ledger, A, "a")
    turn(ledger, B, "b")
    assert ledger.num_available == 40
    sequence = ledger.open(ids(7))
    ledger.extend([sequence], [30])
    assert (ledger.num_free, ledger.num_cached, ledger.num_held) == (0, 10, 30)
    assert (found(ledger, A), found(ledger, B)) == (0, 10)  # a was used longer ago
    assert ledger.sessions.counts == SessionCounts(1, 10, 30, 0)
    ledger.check()


def test_the_next_turn_of_a_session_replaces_the_one_before() -> None:
    ledger = TokenLedger(100, 4, 100, max_protected=60)
    turn(ledger, A, "a", ids(1, 2))
    longer = A + ids(1, 2, 3, 4, 5)
    assert turn(ledger, longer, "a") == 22
    assert ledger.sessions.counts == SessionCounts(1, 25, 0, 0)
    assert len(ledger.sessions.open("a").ends) == 1
    # Another session that shares the prefix protects only what it has beyond it.
    turn(ledger, A + ids(8, 8, 8), "b")
    assert ledger.sessions.counts == SessionCounts(2, 28, 0, 0)
    assert ledger.sessions.release("a")
    assert ledger.sessions.counts == SessionCounts(1, 23, 0, 0)
    ledger.check()
    assert ledger.num_cached == 28


def test_the_sessions_that_were_used_the_longest_ago_lose_their_protection_first() -> None:
    ledger = TokenLedger(200, 4, 100, max_protected=45)
    turn(ledger, A, "a")
    turn(ledger, B, "b")
    ledger.sessions.open("a")  # its next turn has come
    turn(ledger, C, "c")
    assert ledger.sessions.counts == SessionCounts(2, 40, 0, 20)
    ledger.evict(20)
    assert [found(ledger, prompt) for prompt in (A, B, C)] == [20, 0, 20]
    # What is larger than the limit is not protected, and takes nothing from the others.
    turn(ledger, ids(*range(900, 950)), "large")
    assert ledger.sessions.counts == SessionCounts(2, 40, 0, 70)


def test_without_a_limit_nothing_is_protected() -> None:
    ledger = TokenLedger(100, 4, 50)
    turn(ledger, A, "a")
    assert ledger.sessions.counts == SessionCounts(0, 0, 0, 0)
    turn(ledger, B)
    ledger.evict(20)
    assert (found(ledger, A), found(ledger, B)) == (0, 20)


def test_a_released_session_protects_nothing_and_neither_do_its_open_sequences() -> None:
    ledger = TokenLedger(100, 4, 50, max_protected=50)
    turn(ledger, A, "a")
    running = ledger.open(B, (), ledger.sessions.open("a"))
    ledger.extend([running], [20])
    assert ledger.sessions.release("a")
    assert not ledger.sessions.release("a")
    assert ledger.sessions.counts.protected == 0
    ledger.close(running)
    assert ledger.sessions.counts == SessionCounts(0, 0, 0, 0)
    turn(ledger, C)
    ledger.evict(40)  # both of the session's prompts are older
    assert [found(ledger, prompt) for prompt in (A, B, C)] == [0, 0, 20]
    ledger.check()


def test_a_session_protects_its_newest_branches() -> None:
    ledger = TokenLedger(1000, 4, 100, max_protected=900)
    for i in range(MAX_ENDS + 3):
        turn(ledger, A + ids(i), "a")
    assert ledger.sessions.counts == SessionCounts(1, 20 + MAX_ENDS, 0, 0)
    ledger.evict(3)
    assert [found(ledger, A + ids(i)) for i in range(MAX_ENDS + 3)] == [20] * 3 + [21] * MAX_ENDS


def test_an_older_branch_is_evicted_to_its_end_before_a_newer_one() -> None:
    """Also where it consists of several turns, each of which is a segment of its own."""
    ledger = TokenLedger(200, 4, 100, max_protected=200)
    turn(ledger, D[:40] + A, "a")
    turn(ledger, D[:40] + A + B, "a")
    turn(ledger, D[:40] + C, "a")  # the client has changed its first message
    left = []
    for _ in range(7):
        ledger.evict(10)
        ledger.check()
        left.append((found(ledger, D[:40] + A + B), found(ledger, D[:40] + C)))
    assert left == [(40, 30), (30, 30), (20, 30), (10, 30), (10, 20), (10, 10), (0, 0)]


def test_what_was_hit_goes_later_than_what_was_not_for_a_while() -> None:
    ledger = TokenLedger(640, 4, 200)
    turn(ledger, A)
    for _ in range(3):
        turn(ledger, A + ids(5))  # three hits, each of which counts like a use 20 tokens later
    turn(ledger, B)
    turn(ledger, C)
    ledger.evict(41)  # the last token of A + [5] is new with each turn but the first, and was hit, too
    assert [found(ledger, prompt) for prompt in (A, B, C)] == [20, 0, 0]
    for i in range(5, 9):
        turn(ledger, ids(*range(100 * i, 100 * i + 40)))
    ledger.evict(20)
    assert found(ledger, A) == 0  # hits do not count for ever
    ledger.check()


def test_a_segment_that_was_hit_does_not_grow() -> None:
    """Otherwise tokens that were never hit would share the hits of those before them."""
    ledger = TokenLedger(640, 4, 200)
    turn(ledger, A)
    turn(ledger, A + ids(1, 2, 3))
    path = list(ledger.match(A + ids(1, 2, 3, 4)).path)
    assert [(segment.length, segment.credit) for segment in path] == [(3, 0), (20, 640 // 32)]


def test_the_check_finds_a_wrong_count() -> None:
    for spoil in ("protected", "_num_protected", "_by_end", "_protecting"):
        ledger = TokenLedger(100, 4, 50, max_protected=50)
        turn(ledger, A, "a")
        sessions = ledger._state.sessions
        if spoil == "protected":
            next(iter(ledger.tree)).protected = 2
        elif spoil == "_num_protected":
            sessions._num_protected += 1
        else:
            getattr(sessions, spoil).clear()
        with pytest.raises(CheckFailed):
            ledger.check()


def protected_tokens(sessions: list[Session]) -> int:
    """Counts by brute force what these sessions protect."""
    segments = {segment for session in sessions for end in session.ends for segment in end.up()}
    return sum(segment.length for segment in segments)


@pytest.mark.parametrize("seed", [*range(12), *slow(*range(12, 40))])
def test_any_mix_of_verbs_keeps_the_counts(seed: int) -> None:
    rng = random.Random(seed)
    capacity, rows, entries = rng.choice([(30, 3, 40), (80, 6, 60), (400, 12, 90)])
    limit = rng.choice([0, capacity // 4, capacity // 2, capacity])
    ledger, model = TokenLedger(capacity, rows, entries, limit), MemoryModel(capacity)
    running: list[tuple[Sequence, list[int]]] = []
    vocabulary = rng.choice([2, 3, 50])
    families = [[rng.randrange(vocabulary) for _ in range(entries)] for _ in range(3)]
    names = [f"session {i}" for i in range(rng.choice([1, 3, 8]))]
    opened: dict[str, Session] = {}
    past = [[1]]
    for step in range(300):
        ledger.step = step
        verb = rng.random()
        if verb < 0.35:
            prompt = rng.choice([*families, rng.choice(past)])[: rng.randint(1, entries)]
            prompt = [*prompt, rng.randrange(vocabulary)][:entries]
            name = rng.choice([*names, None])
            session = None
            if name is not None:
                session = opened[name] = ledger.sessions.open(name)
            try:
                running.append((ledger.open(ids(*prompt), (), session), prompt))
            except OutOfRows:
                assert len(running) == rows
        elif verb < 0.7 and running:
            sequence, known = rng.choice(running)
            count = min(rng.randint(1, 12), entries - sequence.length)
            available = ledger.num_available
            try:
                if count:
                    ledger.extend([sequence], [count])
                    while len(known) < sequence.length:
                        known.append(rng.randrange(vocabulary))
                    first = sequence.length - count
                    model.apply(ledger.drain())
                    model.write(sequence.row, first, known[: sequence.length])
            except OutOfTokens:
                assert count > available
            if rng.random() < 0.7:
                ledger.publish(sequence)
        elif verb < 0.75:
            ledger.confirm(step)
        elif verb < 0.9 and running:
            sequence, known = running.pop(rng.randrange(len(running)))
            past.append(known)
            given = len(sequence.prompt) // 4
            ledger.close(sequence, ids(*known[given:]), cache=rng.random() < 0.9)
        elif verb < 0.95:
            lost = ledger.sessions.counts.evicted
            unprotected = ledger.num_cached - sum(
                segment.length for segment in ledger.tree if segment.protected and not segment.holders
            )
            count = rng.randint(0, ledger.num_cached)
            ledger.evict(count)
            assert ledger.sessions.counts.evicted - lost <= max(count - unprotected, 0)
        elif opened:
            name = rng.choice(list(opened))
            assert ledger.sessions.release(name)
            assert not opened.pop(name).ends
        model.apply(ledger.drain())
        assert len(model.free) == ledger.num_free
        assert ledger.sessions.counts.protected == protected_tokens(list(opened.values())) <= limit
        ledger.check()
    for sequence, _ in running:
        ledger.close(sequence, cache=False)
    ledger.evict(ledger.num_cached)
    ledger.check()
    assert ledger.num_free == capacity
    assert ledger.sessions.counts.num_sessions == 0
