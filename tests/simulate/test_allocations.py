"""Compares PagedLedger with brute force over sets of pages, and checks ContiguousLedger."""

import random
from array import array

import pytest

from lightkv.errors import OutOfTokens
from lightkv.ledger import Sequence
from lightkv.router.simulate.config import ALLOCATIONS, InvalidSimulation, SimulationConfig, page_of
from lightkv.router.simulate.paged_ledger import ContiguousLedger, PagedLedger, make_ledger


class Pages:
    """The pages that a paged allocator can hit; a page is identified by its ids and all ids before it."""

    def __init__(self, ledger: PagedLedger) -> None:
        self.page = ledger.page
        self.known: set[tuple[int, ...]] = set()  # prefixes of whole pages that were published or cached

    def prefixes(self, ids: list[int]) -> list[tuple[int, ...]]:
        return [tuple(ids[:end]) for end in range(self.page, len(ids) + 1, self.page)]

    def find(self, prompt: list[int]) -> int:
        """Returns the number of tokens in known whole pages; at least one token is left to compute."""
        found = 0
        for prefix in self.prefixes(prompt[:-1]):
            if prefix not in self.known:
                break
            found = len(prefix)
        return found

    def publish(self, sequence: Sequence, ids: list[int]) -> None:
        """Adds the sequence's pages, unless another sequence's page is known in their place: then they stay
        private."""
        if tuple(ids[: sequence.shared + self.page]) not in self.known:
            self.known.update(self.prefixes(ids[: sequence.length]))


def tokens(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()


@pytest.mark.parametrize("page", [2, 3, 16])
@pytest.mark.parametrize("seed", range(3))
def test_a_long_life_without_eviction_matches_pages(seed: int, page: int) -> None:
    """The prompts have few distinct ids, so that they differ within pages and at their ends."""
    rng = random.Random(seed)
    ledger = PagedLedger(200_000, 20, 200, page)
    model = Pages(ledger)
    open_now: list[
        tuple[Sequence, list[int]]
    ] = []  # each with the token ids of its entries and of the entries to come
    prompt_lengths: dict[Sequence, int] = {}
    num_hits, past = 0, [[rng.randrange(2) for _ in range(8 * page)]]
    for _ in range(600):
        if rng.random() < 0.5 and len(open_now) < 20:
            begun = rng.choice(past)
            prompt = begun[: rng.randint(0, len(begun))] + [
                rng.randrange(2) for _ in range(rng.randint(1, 9))
            ]
            prompt = prompt[: 8 * page]
            past.append(prompt)
            expected = model.find(prompt)
            assert ledger.match(tokens(prompt)).num_tokens == expected
            sequence = ledger.open(tokens(prompt))
            assert sequence.num_hit == expected
            num_hits += expected > 0
            open_now.append((sequence, prompt))
            prompt_lengths[sequence] = len(prompt)
        elif open_now and rng.random() < 0.6:
            sequence, ids = rng.choice(open_now)
            if sequence.length < len(ids):
                count = rng.randint(1, len(ids) - sequence.length)
                free, before = ledger.num_free, sequence.length
                ledger.extend([sequence], [count])
                pages = -(-(before + count) // page) - -(-before // page)
                assert free - ledger.num_free == pages * page
                model.publish(sequence, ids)
                ledger.publish(sequence)
            else:
                ids.append(rng.randrange(2))
                free = ledger.num_free
                assert ledger.growth([sequence]) == (page if sequence.length % page == 0 else 0)
                grown = ledger.growth([sequence])
                ledger.extend([sequence], [1])
                assert free - ledger.num_free == grown
        elif open_now:
            sequence, ids = open_now.pop(rng.randrange(len(open_now)))
            model.known.update(model.prefixes(ids[: sequence.length]))
            ledger.close(sequence, tokens(ids[prompt_lengths[sequence] :]))
        ledger.confirm(ledger.step)
        ledger.drain()
        assert ledger.padding == sum(-sequence.length % page for sequence, _ in open_now)
        # Every known prefix is one page; every other page is private to a sequence.
        private = 0
        for sequence, _ in open_now:
            private += -(-(sequence.length - sequence.shared) // page) * page
        assert ledger.capacity - ledger.num_free == len(model.known) * page + private
    ledger.check()
    assert num_hits > 20


@pytest.mark.parametrize("seed", range(3))
def test_eviction_frees_whole_pages_and_no_more_than_needed(seed: int) -> None:
    rng = random.Random(seed)
    page, ledger = 4, PagedLedger(103, 8, 60, 4)
    assert ledger.capacity == 100
    open_now: list[Sequence] = []
    for _ in range(2000):
        if open_now and (rng.random() < 0.3 or len(open_now) == 8):
            ledger.close(open_now.pop(rng.randrange(len(open_now))), tokens([5] * rng.randint(0, 9)))
        else:
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 20))]
            sequence = ledger.open(tokens(prompt))
            open_now.append(sequence)
            count = len(prompt) - sequence.length
            needed = page * (-(-len(prompt) // page) - sequence.length // page)
            free, cached = ledger.num_free, ledger.num_cached
            if needed > free + cached:
                with pytest.raises(OutOfTokens):
                    ledger.extend([sequence], [count])
                assert (ledger.num_free, ledger.num_cached) == (free, cached)
                ledger.close(open_now.pop())
            else:
                ledger.extend([sequence], [count])
                assert ledger.num_free == max(free - needed, 0)
                assert ledger.num_cached == cached - max(needed - free, 0)
                ledger.publish(sequence)
        ledger.confirm(ledger.step)
        ledger.drain()
        ledger.check()
        assert len(ledger._numbers) < 5000


def test_the_numbers_of_evicted_pages_are_removed() -> None:
    ledger = PagedLedger(64, 2, 64, 2)
    for i in range(4000):
        sequence = ledger.open(tokens([i, i, i, i]))
        ledger.extend([sequence], [4])
        ledger.publish(sequence)
        ledger.confirm(ledger.step)
        ledger.close(sequence)
        ledger.drain()
    assert len(ledger._numbers) < 1200
    assert ledger.match(tokens([3999] * 5)).num_tokens == 4
    ledger.check()


def test_growth_by_many_tokens_equals_the_growth_of_as_many_steps() -> None:
    lengths = [1, 2, 3, 4, 7, 8, 9]
    one, many = PagedLedger(1000, 8, 100, 4), PagedLedger(1000, 8, 100, 4)
    pairs = []
    for ledger in (one, many):
        sequences = [ledger.open(tokens([i] * length)) for i, length in enumerate(lengths)]
        ledger.extend(sequences, lengths)
        pairs.append(sequences)
    grown = many.growth(pairs[1], 13)
    for _ in range(13):
        grown -= one.growth(pairs[0])
        one.extend(pairs[0], [1] * len(lengths))
    assert grown == 0
    many.extend(pairs[1], [13] * len(lengths))
    assert (many.num_free, many.padding) == (one.num_free, one.padding)


def test_a_run_is_held_from_open_to_close() -> None:
    ledger = ContiguousLedger(100, 4, 100, max_new=10)
    sequence = ledger.open(tokens([1, 2, 3]))
    assert (ledger.num_free, ledger.num_held, ledger.padding) == (88, 12, 12)
    ledger.extend([sequence], [3])
    ledger.publish(sequence)
    ledger.extend([sequence], [1])
    ledger.check()
    assert (ledger.num_free, ledger.num_held, ledger.padding) == (88, 12, 8)
    ledger.close(sequence, tokens([4]))
    ledger.check()
    assert (ledger.num_free, ledger.num_cached, ledger.padding) == (100, 0, 0)
    assert ledger.match(tokens([1, 2, 3])).num_tokens == 0


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_each_allocation_has_its_ledger(allocation: str) -> None:
    ledger = make_ledger(SimulationConfig(allocation, max_num_seqs=4, max_new=10), 1024, 1024)
    sequence = ledger.open(tokens(list(range(100))))
    ledger.extend([sequence], [100])
    page = page_of(allocation)
    assert ledger.num_held == (-(-100 // page) * page if page else 109)
    ledger.check()


@pytest.mark.parametrize("name", ["pages", "paged", "paged:x", "paged:016x"])
def test_the_error_for_an_unknown_allocation_lists_the_known_ones(name: str) -> None:
    with pytest.raises(InvalidSimulation, match=r"token, contiguous, or paged:N"):
        page_of(name)


def test_a_pool_smaller_than_a_page_is_refused() -> None:
    with pytest.raises(InvalidSimulation, match="larger --capacity"):
        PagedLedger(100, 2, 100, 128)
