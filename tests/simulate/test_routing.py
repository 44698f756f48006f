"""Tests the routing policies, and that a router knows of a cache what its events tell, in whole blocks."""

from array import array
from collections.abc import Sequence

import pytest

from lightkv.ledger import TokenLedger
from lightkv.router.simulate.routing import (
    BLOCK_TOKENS,
    View,
    known_tokens,
    least_tokens,
    prefix,
    round_robin,
)

CAPACITY = 8000  # a load of 1,000 counts as idle


def view(
    loads: Sequence[int] = (0, 0, 0), known: Sequence[int] = (0, 0, 0), sent: Sequence[int] = (0, 0, 0),
    number: int = 1,
) -> View:  # fmt: skip
    return View(number, 640, loads, sent, CAPACITY, lambda: known)


def test_round_robin_takes_each_in_turn_whatever_their_loads() -> None:
    chosen = [round_robin(view((9, 1, 5), number=number)) for number in range(1, 8)]
    assert chosen == [0, 1, 2, 0, 1, 2, 0]


def test_least_tokens_takes_the_least_load_and_among_equals_what_was_sent_the_least() -> None:
    assert least_tokens(view((300, 200, 201))) == 1
    assert least_tokens(view((300, 200, 200), sent=(0, 70, 60))) == 2
    assert least_tokens(view((0, 0, 0))) == 0


@pytest.mark.parametrize(
    ("loads", "known", "chosen"),
    [
        ((500, 400, 0), (256, 384, 64), 1),  # the longest prefix
        ((500, 400, 0), (320, 320, 0), 1),  # the less busy of two that have it
        ((1000, 2000, 0), (0, 320, 0), 1),  # at twice the load that counts as idle
        ((1000, 2001, 500), (0, 320, 0), 2),  # beyond it
        ((3000, 6000, 3000), (0, 320, 0), 1),  # at twice the least
        ((3000, 6001, 3000), (0, 320, 0), 0),  # beyond it
        ((500, 400, 300), (0, 256, 0), 2),  # less than half of the prompt
        ((500, 400, 300), (0, 0, 0), 2),
    ],
)
def test_prefix_follows_the_longest_prefix_unless_it_is_short_or_its_replica_too_busy(
    loads: tuple[int, ...], known: tuple[int, ...], chosen: int
) -> None:
    assert prefix(view(loads, known)) == chosen


def test_a_router_knows_whole_blocks_that_are_computed_and_not_evicted() -> None:
    ledger = TokenLedger(1000, 4, 1000)
    prompt = array("i", range(10, 310)).tobytes()
    sequence = ledger.open(prompt)
    ledger.extend([sequence], [200])
    ledger.publish(sequence)
    assert known_tokens(ledger, prompt) == 0  # the step that computes them is under way
    ledger.confirm(ledger.step)
    assert known_tokens(ledger, prompt) == 200 // BLOCK_TOKENS * BLOCK_TOKENS
    ledger.step += 1
    ledger.extend([sequence], [100])
    ledger.publish(sequence)
    assert known_tokens(ledger, prompt) == 192
    ledger.confirm(ledger.step)
    assert known_tokens(ledger, prompt) == 256
    other = array("i", [*range(10, 110), *range(1000)]).tobytes()
    assert known_tokens(ledger, other) == 64
    ledger.close(sequence)
    assert known_tokens(ledger, prompt) == 256
    ledger.evict(150)
    assert known_tokens(ledger, prompt) == 128
    ledger.check()
