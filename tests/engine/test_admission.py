"""Compares `peak_tokens` with brute force, which computes every moment of random lives of random batches."""

import random
from typing import NamedTuple

import pytest

from lightkv.router.engine.prefill_budget import PrefillBudget
from lightkv.router.engine.step import Limits
from tests.support.peaks import Demand, peak_tokens


class Run(NamedTuple):
    """A shared run of tokens. Runs are compared by identity, so two runs may have the same length."""

    length: int
    name: object


def random_budget(rng: random.Random) -> PrefillBudget:
    """Returns a budget of up to 8 tokens a step, and at the least between one and all of them."""
    most = rng.randint(1, 8)
    budget = PrefillBudget(Limits(8, 100, most, 100))
    budget.least = rng.randint(1, most)
    return budget


def random_batch(rng: random.Random, budget: PrefillBudget, num_prefills: int) -> list[Demand]:
    """Returns the prefills in their order, and then up to five decodes."""
    tree: list[list[Run]] = [[]]  # paths, the deepest segment first
    for _ in range(rng.randint(0, 3)):
        tree.append([Run(rng.randint(1, 12), object()), *rng.choice(tree)])
    windows = budget.windows([rng.randint(1, 12) for _ in range(num_prefills)])
    prefills = [
        Demand(rng.randint(0, 12), window.left + rng.randint(0, 12), rng.choice(tree), False, window=window)
        for window in windows
    ]
    decodes = [
        Demand(rng.randint(0, 12), rng.randint(0, 12), rng.choice(tree), True)
        for _ in range(rng.randint(0, 5))
    ]
    return prefills + decodes


class Life:
    """A life of a batch, step by step. Each decode takes a token a step; the prefills share a number of tokens
    between the least and the most of the budget, in their order. With `ends` some requests end early. A request
    holds its tokens for `lag` steps after its last one."""

    def __init__(
        self, batch: list[Demand], budget: PrefillBudget, lag: int, ends: random.Random | None
    ) -> None:
        self.batch = batch
        self.budget = budget
        self.lag = lag
        self.ends = ends
        self.taken = [0] * len(batch)
        # The step before which each request is freed, where it has ended; -1 once it is freed.
        self.freed_in = [None if demand.remaining else lag for demand in batch]
        self.left = [d.window.left if d.window else 0 for d in batch]

    def peak(self) -> int:
        """Returns the most tokens that are held at any time."""
        most, step = self._held(), 0
        while any(freed is None or freed > step for freed in self.freed_in):
            self._step(step)
            most = max(most, self._held())
            step += 1
            self._free(step)
        return most

    def _held(self) -> int:
        alive = [i for i, freed in enumerate(self.freed_in) if freed != -1]
        segments = {id(run): run.length for i in alive for run in self.batch[i].path}
        return sum(self.batch[i].held + self.taken[i] for i in alive) + sum(segments.values())

    def _free(self, step: int) -> None:
        for i, freed in enumerate(self.freed_in):
            if freed is not None and freed != -1 and freed <= step:
                self.freed_in[i] = -1

    def _step(self, step: int) -> None:
        rng = self.ends
        self._free(step)
        if rng is not None:
            for i, freed in enumerate(self.freed_in):
                if freed is None and rng.random() < 0.1:
                    self.freed_in[i] = step + rng.randint(0, self.lag)
            self._free(step)
        room = self.budget.most if rng is None else rng.randint(self.budget.least, self.budget.most)
        for i, demand in enumerate(self.batch):
            if self.freed_in[i] is not None:
                continue
            count = 1
            if self.left[i]:
                count = min(self.left[i], room)
                self.left[i] -= count
                room -= count
            self.taken[i] += count
            if self.taken[i] == demand.remaining:
                self.freed_in[i] = step + 1 + self.lag


def check_never_short(seed: int, num_batches: int, lag: int) -> None:
    rng = random.Random(seed)
    for _ in range(num_batches):
        budget = random_budget(rng)
        batch = random_batch(rng, budget, rng.randint(0, 3))
        peak = peak_tokens(batch, lag)
        for ends in (None, rng, rng):
            assert Life(batch, budget, lag, ends).peak() <= peak


@pytest.mark.parametrize("lag", [0, 1])
def test_the_peak_is_never_below_brute_force(lag: int) -> None:
    check_never_short(lag, 1_500, lag)


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("part", range(4))
def test_the_peak_is_never_below_brute_force_in_many_batches(part: int, lag: int) -> None:
    check_never_short(10 + part, 25_000, lag)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("num_prefills", [0, 1])
def test_the_peak_equals_brute_force_where_nothing_is_unknown(num_prefills: int, lag: int) -> None:
    """All decode but one, which takes its prompt by a fixed budget, as under first come, first served."""
    rng = random.Random(100 + num_prefills)
    for _ in range(2_000):
        budget = random_budget(rng)
        budget.least = budget.most
        batch = random_batch(rng, budget, num_prefills)
        assert Life(batch, budget, lag, None).peak() == peak_tokens(batch, lag)


def test_a_prefill_grows_by_its_chunks_and_then_by_one_token_a_step() -> None:
    """The issue's case: one request is at its second of 91 tokens, and another comes with 50 and 5."""
    window = PrefillBudget(Limits(8, 200, 512, 100)).windows([50])[0]
    first = Demand(10, 90, [], True)
    assert peak_tokens([first, Demand(0, 54, [], False, window=window)]) == 100
    assert peak_tokens([first, Demand(0, 54, [], False)]) == 154  # without a window it counts in full


def test_a_prefill_counts_as_early_and_as_late_as_it_may_be() -> None:
    """The second prefill may begin to decode in step 1, if the first is aborted, and in step 3 otherwise."""
    first, second = PrefillBudget(Limits(8, 100, 4, 100)).windows([8, 4])
    assert (first.first, first.last) == (1, 1)
    assert (second.first, second.last) == (0, 2)
    demand = Demand(0, 4 + 3, [], False, window=second)
    assert [demand.held_in(step) for step in range(-1, 7)] == [0, 4, 5, 6, 7, 7, 7, 7]
    assert demand.last(lag=0) == 5  # it computes its prompt in step 2, and its last tokens in steps 3 to 5
    assert demand.last(lag=1) == 6


def test_tokens_that_are_freed_before_the_next_step_count_now_alone() -> None:
    ended, other = Demand(7, -1, [], True), Demand(8, 2, [], True)
    assert peak_tokens([ended, other], lag=1) == 15
    assert peak_tokens([ended._replace(remaining=0), other], lag=1) == 16


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
