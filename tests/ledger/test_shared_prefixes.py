"""Shared prefixes: the choice compared with brute force, and that the members' slots are the same in any
life."""

import random
from array import array
from collections.abc import Iterator

import pytest
import torch

from lightkv import KVCache, KVSpec, TokenLedger
from lightkv.ledger.prefix_tree import Segment
from lightkv.ledger.sequence import Sequence
from lightkv.ledger.shared_prefixes import BatchPrefixes, PrefixSharing, SharedPrefix, shared_prefixes
from tests.support.cache_life import Life

ANY = PrefixSharing(max_members=64, min_tokens=1, min_saved=1, min_mean=0)
SPEC = KVSpec(num_layers=1, num_kv_heads=1, k_dim=1, v_dim=1, dtype=torch.float32)


def start(ledger: TokenLedger, *tokens: int) -> Sequence:
    """Opens a sequence, publishes its prompt and decodes one token."""
    sequence = ledger.open(array("i", tokens).tobytes())
    ledger.extend([sequence], [len(tokens) - sequence.length])
    ledger.publish(sequence)
    ledger.confirm(ledger.step)
    ledger.extend([sequence], [1])
    return sequence


def choose(ledger: TokenLedger, sharing: PrefixSharing = ANY) -> list[tuple[set[int], int]]:
    found = shared_prefixes(ledger.shared, ledger.sequences, sharing)
    return [(set(prefix.rows), prefix.num_tokens) for prefix in found]


def saved(found: list[SharedPrefix], sharing: PrefixSharing) -> int:
    return sum(sharing.saved(len(prefix.rows), prefix.num_tokens) for prefix in found)


def test_without_sharing_there_are_no_sets() -> None:
    ledger = TokenLedger(100, 4, 50)
    assert choose(ledger) == []
    start(ledger, 1, 2, 3)
    start(ledger, 4, 5, 6)
    assert choose(ledger) == []


def test_a_system_prompt_is_read_once() -> None:
    ledger = TokenLedger(200, 8, 50)
    rows = {start(ledger, *range(20), 100 + i, 5).row for i in range(5)}
    start(ledger, 99, 98)
    assert choose(ledger) == [(rows, 20)]


@pytest.mark.parametrize(
    ("deep", "expected"), [(4, [({1, 2, 3, 4}, 10)]), (30, [({1, 2}, 40), ({3, 4}, 10)])]
)
def test_of_nested_prefixes_the_one_that_saves_more_is_read(deep: int, expected: list[object]) -> None:
    """First a set of all saves more than a set of two; then a set of two, and one of the others."""
    ledger = TokenLedger(500, 8, 90)
    system = list(range(10))
    for own in ([*range(100, 100 + deep), 7], [*range(100, 100 + deep), 8], [5], [6]):
        start(ledger, *system, *own)
    assert choose(ledger) == expected


def test_sequences_with_little_more_in_common_join_the_others() -> None:
    """The example in docs/memory.md, at a hundredth of its lengths."""
    ledger = TokenLedger(500, 8, 120)
    system, chats = list(range(30)), [list(range(100, 160)), [200, 201, 202]]
    for own in ([*chats[0], 1], [*chats[0], 2], [*chats[1], 1], [*chats[1], 2], [300]):
        start(ledger, *system, *own)
    assert choose(ledger) == [({1, 2}, 90), ({3, 4, 5}, 30)]


def test_a_set_of_more_than_max_members_is_divided_by_families() -> None:
    ledger = TokenLedger(900, 16, 90)
    families = []
    for family in range(4):
        deep = [*range(10), 100 + family]
        families.append(({start(ledger, *deep, 10 + i, 1).row for i in range(3)}, 11))
    assert choose(ledger) == [({row for rows, _ in families for row in rows}, 10)]
    assert choose(ledger, ANY._replace(max_members=3)) == families


@pytest.mark.parametrize(
    "sharing",
    [ANY._replace(min_tokens=21), ANY._replace(min_saved=41), ANY._replace(max_members=1)],
    ids=["short", "saves little", "off"],
)
def test_prefixes_that_save_too_little_are_left_out(sharing: PrefixSharing) -> None:
    ledger = TokenLedger(200, 8, 50)
    for own in (100, 101, 102):
        start(ledger, *range(20), own, 5)
    assert choose(ledger, ANY._replace(min_tokens=20, min_saved=40)) == [({1, 2, 3}, 20)]
    assert choose(ledger, sharing) == []


def test_sequences_that_have_dropped_tokens_are_left_out() -> None:
    ledger = TokenLedger(300, 8, 90)
    one, two, three, four = (start(ledger, *range(20), 100 + i, 5) for i in range(4))
    ledger.release(three, 5, sink_tokens=4)
    ledger.keep(four, 0)
    assert choose(ledger) == [({one.row, two.row}, 20)]
    ledger.truncate(three, 4)  # no more than its sinks: its entries are positions again
    ledger.extend([three], [1])
    assert three.dropped == 0
    assert choose(ledger) == [({one.row, two.row}, 20)]


def test_a_fork_joins_a_set_once_it_has_a_token_of_its_own() -> None:
    ledger = TokenLedger(300, 8, 90)
    one = start(ledger, *range(20))
    two, three = ledger.fork(one), ledger.fork(one)
    assert choose(ledger) == []  # the newest token is shared, and not every query sees it
    ledger.extend([one, two], [1, 1])
    assert choose(ledger) == [({one.row, two.row}, 21)]
    ledger.extend([three], [1])
    assert choose(ledger) == [({one.row, two.row, three.row}, 21)]
    ledger.truncate(two, 15)
    ledger.extend([two], [1])
    assert choose(ledger) == [({one.row, two.row, three.row}, 15)]


def test_namespaces_share_nothing() -> None:
    ledger = TokenLedger(300, 8, 90)
    for tenant in ("a", "b"):
        sequence = ledger.open(array("i", range(20)).tobytes(), (tenant,))
        ledger.extend([sequence], [20])
        ledger.publish(sequence)
        ledger.extend([sequence], [1])
    assert choose(ledger) == []


def antichains(segments: list[Segment]) -> Iterator[list[Segment]]:
    """Yields every set of segments none of which is on the path of another."""
    if not segments:
        yield []
        return
    first, *others = segments
    yield from antichains(others)
    on_path = [s for s in others if s in set(first.up()) or first in set(s.up())]
    for rest in antichains([s for s in others if s not in on_path]):
        yield [first, *rest]


def partitions(rows: list[int]) -> Iterator[list[list[int]]]:
    if not rows:
        yield []
        return
    for rest in partitions(rows[1:]):
        yield [[rows[0]], *rest]
        for i, part in enumerate(rest):
            yield [*rest[:i], [rows[0], *part], *rest[i + 1 :]]


def grown(rng: random.Random, num_sequences: int) -> TokenLedger:
    """Returns a ledger of sequences whose prompts share prefixes, some of them forked and truncated."""
    ledger = TokenLedger(5000, 16, 200)
    family = [rng.randrange(2) for _ in range(40)]
    for i in range(num_sequences):
        if i and rng.random() < 0.3:
            fork = ledger.fork(rng.choice(list(ledger.sequences)))
            ledger.truncate(fork, rng.randint(1, fork.length))
        else:
            prompt = [*family[: rng.randint(0, 40)], *(rng.randrange(2) for _ in range(rng.randint(1, 12)))]
            start(ledger, *prompt)
    sequences = list(ledger.sequences)
    ledger.extend(sequences, [1] * len(sequences))
    return ledger


@pytest.mark.parametrize("max_members", [2, 3, 64])
@pytest.mark.parametrize("seed", range(25))
def test_the_choice_compared_with_brute_force(seed: int, max_members: int) -> None:
    """It saves at least as much as the best choice of segments, and at most as much as the best partition."""
    rng = random.Random(seed)
    sharing = PrefixSharing(max_members, rng.choice([1, 8]), rng.choice([1, 20]), min_mean=0)
    ledger = grown(rng, rng.randint(2, 7))
    found = shared_prefixes(ledger.shared, ledger.sequences, sharing)
    rows = [row for prefix in found for row in prefix.rows]
    assert len(set(rows)) == len(rows)

    paths = {s.row: dict.fromkeys(s.path()) for s in ledger.sequences}

    def common(part: list[int]) -> int:
        shared = set.intersection(*(set(paths[row]) for row in part))
        return sum(segment.length for segment in shared)

    for prefix in found:
        assert prefix.num_tokens <= common(list(prefix.rows))
        assert sharing.saved(len(prefix.rows), prefix.num_tokens)
    best_nodes = max(
        sum(sharing.saved(len(s.holders), sum(above.length for above in s.up())) for s in chosen)
        for chosen in antichains(list(ledger.shared))
    )
    best = max(
        sum(sharing.saved(len(part), common(part)) for part in parts) for parts in partitions(sorted(paths))
    )
    assert best_nodes <= saved(found, sharing) <= best


def test_in_any_life_the_members_have_the_same_slots() -> None:
    num_sets = num_drops = 0
    for seed in range(2):
        life = Life(seed, torch.device("cpu"))
        for _ in range(600):
            life.step()
            cache = life.cache
            sequences = [shadow.sequence for shadow in life.shadows]
            found = shared_prefixes(cache.ledger.shared, sequences, ANY)
            num_drops += any(sequence.dropped for sequence in sequences)
            by_row = {sequence.row: sequence for sequence in sequences}
            for rows, num_tokens in found:
                first, *others = (cache.slots(by_row[row])[:num_tokens] for row in rows)
                assert len(first) == num_tokens > 0
                assert others
                assert all(torch.equal(first, slots) for slots in others)
                assert all(by_row[row].length > num_tokens for row in rows)
                num_sets += 1
    assert num_sets > 200
    assert num_drops > 200


def test_a_cache_says_what_its_sequences_share() -> None:
    cache = KVCache(SPEC, 5000, max_sequences=4, max_entries=2000, device="cpu")
    system = list(range(1400))
    sequences = []
    for i in range(4):
        sequence = cache.open([*system, 2000 + i])
        cache.extend([sequence], [1401 - sequence.length])
        cache.publish(sequence)
        sequences.append(sequence)
    cache.extend(sequences, [1] * 4)
    assert cache.shared_prefixes(sequences, max_members=16) == [SharedPrefix((1, 2, 3, 4), 1400)]
    assert cache.shared_prefixes(sequences[:3], max_members=16) == []  # saves too little
    cache.close(sequences[0])
    with pytest.raises(ValueError, match="closed"):
        cache.shared_prefixes(sequences, max_members=16)


def test_a_few_that_share_do_not_slow_all_others() -> None:
    ledger = TokenLedger(1000, 8, 100)
    for last in (7, 8):
        start(ledger, *range(1, 41), last)
    sharing = ANY._replace(min_mean=10)
    assert choose(ledger, sharing) == [({1, 2}, 40)]
    start(ledger, 90, 91)
    start(ledger, 92, 93)
    assert choose(ledger, sharing) == [({1, 2}, 40)]  # 40 tokens, 10 each
    start(ledger, 94, 95)
    assert choose(ledger, sharing) == []
    assert choose(ledger) == [({1, 2}, 40)]


@pytest.mark.parametrize("max_members", [2, 64])
@pytest.mark.parametrize("seed", range(8))
def test_a_batch_that_changes_gets_the_same_sets_as_a_new_one(
    seed: int, max_members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through arrivals, forks and ends, also of sequences outside the batch; computed only where it may
    differ."""
    rng = random.Random(seed)
    ledger = TokenLedger(20_000, 12, 400)
    sharing = PrefixSharing(max_members, 20, rng.choice([1, 30]), rng.choice([0, 1, 3]))
    prefixes = BatchPrefixes(ledger, sharing)
    looked: list[int] = []
    renew = prefixes._renew
    monkeypatch.setattr(prefixes, "_renew", lambda changed: looked.append(1) or renew(changed))
    families = [[rng.randrange(50) for _ in range(60)] for _ in range(2)]
    batch: list[Sequence] = []
    waiting: list[Sequence] = []  # open, and not in the batch yet
    num_sets = num_alone = 0
    for step in range(300):
        ledger.step = step
        kind = rng.random()
        if kind < 0.2 and ledger.num_open < 12:
            if rng.random() < 0.5:
                prompt = [*rng.choice(families)[: rng.randint(1, 60)], *(rng.choices(range(50), k=3))]
            else:
                prompt = rng.choices(range(50, 99), k=30)
            waiting.append(start(ledger, *prompt))
        elif kind < 0.3 and batch and ledger.num_open < 12:
            batch.append(ledger.fork(rng.choice(batch)))
            prefixes.join(batch[-1])
        elif kind < 0.45 and batch:
            prefixes.leave(sequence := batch.pop(rng.randrange(len(batch))))
            ledger.close(sequence)
        elif kind < 0.7 and waiting:
            batch.append(waiting.pop())
            prefixes.join(batch[-1])
        before = len(looked)
        ledger.extend(batch, [1] * len(batch))
        found = prefixes.find()
        assert found == shared_prefixes(ledger.shared, batch, sharing)
        assert prefixes.find() is found
        num_sets += len(found)
        num_alone += len(looked) == before
        assert set(prefixes._family.values()) == prefixes._families
    assert num_sets > 100
    assert num_alone > 150  # most steps change nothing
