"""Compares `peak_tokens` with brute force, which computes every moment of every batch."""

import random
from typing import NamedTuple

import pytest

from lightkv.router.engine.admission import Demand, peak_tokens


class Run(NamedTuple):
    """A shared run of tokens. Runs are compared by identity, so two runs may have the same length."""

    length: int
    name: object


def random_batch(rng: random.Random, all_decode: bool) -> list[Demand]:
    tree: list[list[Run]] = [[]]  # paths, the deepest segment first
    for _ in range(rng.randint(0, 3)):
        tree.append([Run(rng.randint(1, 12), object()), *rng.choice(tree)])
    return [
        Demand(rng.randint(0, 12), rng.randint(0, 12), rng.choice(tree), all_decode or rng.random() < 0.6)
        for _ in range(rng.randint(1, 6))
    ]


def reached(batch: list[Demand], rng: random.Random, lag: int = 0) -> int:
    """Returns the most tokens held in one random life of the batch.

    A decode grows by one token a step. A prefill waits, grows by chunks with idle steps between them, and then
    decodes. Each holds its tokens for `lag` steps after its last one.
    """
    grown: list[list[int]] = []  # each request's growth by each step; it ends after the last
    for demand in batch:
        taken, history = 0, []
        if not demand.decoding:
            chunked = rng.randint(0, demand.remaining)
            history += [0] * rng.randint(0, 9)
            while taken < chunked:
                taken += rng.randint(1, chunked - taken)
                history += [taken] * rng.randint(1, 3)
        history += range(taken, demand.remaining + 1)
        history += [demand.remaining] * lag
        grown.append(history)
    most = 0
    for step in range(max(map(len, grown))):
        alive = [(demand, taken) for demand, taken in zip(batch, grown, strict=True) if step < len(taken)]
        segments = {id(run): run.length for demand, _ in alive for run in demand.path}
        held = sum(demand.held + taken[step] for demand, taken in alive)
        most = max(most, held + sum(segments.values()))
    return most


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("part", range(4))
def test_the_peak_is_never_below_brute_force(part: int, lag: int) -> None:
    rng = random.Random(part)
    for _ in range(25_000):
        batch = random_batch(rng, all_decode=False)
        assert reached(batch, rng, lag) <= peak_tokens(batch, lag)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("part", range(2))
def test_the_peak_equals_brute_force_where_all_decode(part: int, lag: int) -> None:
    rng = random.Random(100 + part)
    for _ in range(25_000):
        batch = random_batch(rng, all_decode=True)
        assert reached(batch, rng, lag) == peak_tokens(batch, lag)


def test_the_bare_formula_would_be_too_low_for_a_prefill() -> None:
    batch = [Demand(5, 1, [], True), Demand(0, 6, [], False)]
    bare = peak_tokens([demand._replace(decoding=True) for demand in batch])
    assert bare == 7
    assert peak_tokens(batch) == 12  # the prefill takes all six at once, while the other is at its end


def test_a_shared_segment_counts_once_with_its_longest_holder() -> None:
    prompt = [Run(100, "system")]
    short, long = Demand(1, 2, prompt, True), Demand(1, 50, prompt, True)
    assert peak_tokens([short, long]) == 151  # the long one alone at its end, with the segment
    assert peak_tokens([short, short]) == 106
    assert peak_tokens([]) == 0


def test_a_segment_held_in_part_counts_that_part_once() -> None:
    tail, head = Run(10, "tail"), Run(5, "head")
    whole = Demand(1, 4, [tail, head], True)
    part = Demand(0, 20, [tail, head], False, tip=6)
    assert peak_tokens([part]) == 20 + 6 + 5
    assert peak_tokens([whole, part]) == 20 + 10 + 5 + 1 + 4
