"""`KVCache`: the slots it returns, the K/V that a hit finds, and that its counts agree after every verb."""

import doctest
import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from lightkv import KVCache, KVSpec, OutOfRows, OutOfTokens, SequenceTooLong, kv_cache
from lightkv.edits import Edit
from lightkv.ledger.sequence import Sequence
from lightkv.memory.kv_memory import KVMemory
from tests.support.combinations import slow

SPEC = KVSpec(num_layers=1, num_kv_heads=1, k_dim=1, v_dim=1, dtype=torch.float32)


def make_cache(device: torch.device, capacity: int = 40) -> KVCache:
    return KVCache(SPEC, capacity, max_sequences=4, max_entries=24, device=device)


def test_the_example_in_the_docstring_runs() -> None:
    result = doctest.testmod(kv_cache)
    assert result.attempted > 5
    assert not result.failed


@pytest.mark.parametrize(
    "token_ids",
    [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), np.array([1, 2, 3], dtype=np.int32).tobytes()],
    ids=["list", "tuple", "numpy", "bytes"],
)
def test_token_ids_in_any_form_are_the_same(token_ids: kv_cache.TokenIds, device: torch.device) -> None:
    cache = make_cache(device)
    first = cache.open([1, 2, 3])
    cache.extend([first], [3])
    cache.close(first)
    assert cache.open(token_ids).num_hit == 2


@pytest.mark.parametrize("wrong", [[[1, 2]], [2**31], [2**70], [3, -1], b"abc", []])
def test_an_invalid_prompt_is_refused(wrong: kv_cache.TokenIds, device: torch.device) -> None:
    cache = make_cache(device)
    with pytest.raises(ValueError, match=r"token ids"):
        cache.open(wrong)
    cache.check()
    assert cache.num_free == cache.capacity


def test_extend_returns_slots_packed_in_the_order_given(device: torch.device) -> None:
    cache = make_cache(device)
    first, second = cache.open([1, 2, 3]), cache.open([4, 5])
    slots = cache.extend([second, first], [2, 3])
    assert slots.dtype == torch.int64
    table = cache.memory.table
    assert slots.tolist() == table.slots(second.row, 0, 2).tolist() + table.slots(first.row, 0, 3).tolist()


def test_extend_looks_its_entries_up_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(device)
    first, second = cache.open([1, 2, 3]), cache.open([4, 5])
    table, looked_up = cache.memory.table, []
    entries = table.entries
    monkeypatch.setattr(table, "entries", lambda *where: looked_up.append(where) or entries(*where))
    assert len(cache.extend([second, first], [2, 3])) == 5
    assert len(looked_up) == 1
    nothing = cache.extend([], [])
    assert (nothing.tolist(), nothing.dtype, nothing.device) == ([], torch.int64, cache.memory.device)


def test_keep_keeps_the_right_number_for_any_entries(device: torch.device) -> None:
    """In place of an entry that is repeated or out of range, the last entry that was not listed is kept."""
    for entries, kept in (([1, 4], [1, 4]), ([4, 4], [4, 5]), ([-7, 900], [4, 5]), ([], [])):
        cache = make_cache(device)
        sequence = cache.open([1, 2, 3, 4, 5, 6])
        slots = cache.extend([sequence], [6]).tolist()
        assert cache.keep(sequence, torch.tensor(entries, dtype=torch.int64, device=device)) == 6 - len(kept)
        assert cache.slots(sequence).tolist() == [slots[entry] for entry in kept]
        assert cache.positions(sequence).tolist() == kept
        cache.check()


def test_a_callback_can_replay_a_keep(device: torch.device) -> None:
    cache = make_cache(device)
    mirror = KVMemory(SPEC, 41, 4, 24, cache.memory.device)
    events: list[int] = []

    def replay(edits: list[Edit], kept: list[torch.Tensor]) -> None:
        mirror.apply(edits, kept)
        events.append(len(kept))

    cache.on_edits = replay
    sequence = cache.open([1, 2, 3, 4, 5, 6])
    cache.extend([sequence], [6])
    cache.keep(sequence, torch.tensor([5, 0, 2], device=device))
    cache.keep(sequence, torch.tensor([0, 1, 2], device=device))  # all entries stay: nothing changes
    cache.extend([sequence], [2])
    assert events == [0, 1, 0]
    assert torch.equal(mirror.table.req_to_token, cache.memory.table.req_to_token)
    assert torch.equal(mirror.allocator.mem_state, cache.memory.allocator.mem_state)
    assert torch.equal(mirror.positions(sequence.row, 5), cache.positions(sequence))


def test_a_refused_verb_changes_nothing(device: torch.device) -> None:
    cache = make_cache(device, capacity=10)
    sequences = [cache.open([row]) for row in range(4)]
    cache.extend(sequences, [2, 2, 2, 2])
    before = cache.memory.table.req_to_token.clone()
    with pytest.raises(OutOfTokens, match="3 tokens needed, 2"):
        cache.extend(sequences[:1], [3])
    with pytest.raises(OutOfRows):
        cache.open([9])
    with pytest.raises(SequenceTooLong):
        cache.extend(sequences[:1], [23])
    with pytest.raises(OutOfTokens):
        cache.evict(1)
    assert torch.equal(cache.memory.table.req_to_token, before)
    assert (cache.num_free, cache.num_cached, cache.num_held) == (2, 0, 8)
    cache.check()


def test_namespaces_share_nothing(device: torch.device) -> None:
    cache = make_cache(device)
    first = cache.open([1, 2, 3], namespace=("a",))
    cache.extend([first], [3])
    cache.publish(first)
    assert cache.open([1, 2, 3], namespace=("b",)).num_hit == 0
    assert cache.open([1, 2, 3], namespace=("a",)).num_hit == 2


def test_shrink_undoes_an_extend_and_leaves_the_prompt(device: torch.device) -> None:
    cache = make_cache(device)
    first, second = cache.open([1, 2, 3, 4]), cache.open([5, 6])
    cache.extend([first, second], [2, 1])
    before = cache.num_free, cache.slots(first).tolist(), cache.slots(second).tolist()
    cache.extend([first, second], [2, 1])  # for a forward pass that fails
    with pytest.raises(ValueError, match="cannot free 3 of 2"):
        cache.shrink([first, second], [2, 3])
    assert (first.length, second.length) == (4, 2)
    cache.shrink([first, second], [2, 1])
    assert (cache.num_free, cache.slots(first).tolist(), cache.slots(second).tolist()) == before
    cache.check()
    cache.extend([first, second], [2, 1])
    cache.close(first)
    assert cache.match([1, 2, 3, 4, 5]) == 4  # two entries would be left of the truncated sequence
    cache.check()


def test_match_says_what_open_would_hit_and_changes_nothing(device: torch.device) -> None:
    cache = make_cache(device)
    for ids in ([1, 2, 3, 4], [5, 6]):
        first = cache.open(ids, namespace=("a",))
        cache.extend([first], [len(ids)])
        cache.close(first)
    for prompt in ([1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 9], [9]):
        found = cache.match(prompt, ("a",))
        assert cache.match(np.array(prompt), namespace=("b",)) == cache.match(prompt) == 0
        assert (cache.num_cached, cache.num_open) == (6, 0)
        sequence = cache.open(prompt, ("a",))
        assert found == sequence.num_hit
        cache.close(sequence)
    for _ in range(4):  # as often as the other was hit
        cache.close(cache.open([5, 6, 7], ("a",)))
    assert (
        cache.match([1, 2, 3, 4, 5], ("a",)) == 4
    )  # a match does not count as use: this one is evicted first
    cache.evict(4)
    assert (cache.match([1, 2], ("a",)), cache.match([5, 6, 7], ("a",))) == (0, 2)
    with pytest.raises(ValueError, match="token ids"):
        cache.match([])


def test_the_counts_are_the_ledgers(device: torch.device) -> None:
    cache = make_cache(device)
    first = cache.open([1, 2, 3])
    cache.extend([first], [3])
    assert (cache.num_open, cache.max_sequences, cache.num_available) == (1, 4, 37)
    cache.close(first)
    assert (cache.num_open, cache.num_cached, cache.num_available) == (0, 3, 40)
    sequence = cache.open([9])
    with pytest.raises(OutOfTokens):
        cache.extend([sequence, cache.open([8])], [20, 21])
    cache.extend([sequence], [20])
    assert cache.num_available == 20


@dataclass
class Running:
    """A sequence of the walk with all its token ids, generated ones included."""

    sequence: Sequence
    namespace: tuple[int, ...]
    num_prompt: int
    token_ids: list[int]


def signature(namespace: tuple[int, ...], token_ids: list[int], end: int) -> float:
    """Returns a number in place of the K of the last of `token_ids[:end]`, which depends on all tokens before
    it."""
    return float(hash((namespace, tuple(token_ids[:end]))) % (1 << 22))


def write(cache: KVCache, group: list[Running], counts: list[int]) -> None:
    """Extends the sequences and writes each new token's signature to its slot."""
    starts = [one.sequence.length for one in group]
    slots = cache.extend([one.sequence for one in group], counts)
    values = [
        signature(one.namespace, one.token_ids, position + 1)
        for one, start, count in zip(group, starts, counts, strict=True)
        for position in range(start, start + count)
    ]
    cache.memory.pool.k(0)[slots] = torch.tensor(values, device=slots.device).view(-1, 1, 1)


def assert_reads_its_own(cache: KVCache, one: Running) -> None:
    """Checks that the slots of the sequence's row hold the K of its own tokens."""
    slots = cache.memory.table.slots(one.sequence.row, 0, one.sequence.length)
    expected = [signature(one.namespace, one.token_ids, end + 1) for end in range(one.sequence.length)]
    assert cache.memory.pool.k(0)[slots.long()].flatten().tolist() == expected


@pytest.mark.parametrize("seed", [0, 1, *slow(2, 3, 4, 5)])
def test_random_walk_of_verbs(seed: int, device: torch.device) -> None:
    """After every verb the counts agree, and every open sequence reads the K of exactly its own tokens."""
    rng = random.Random(seed)
    cache = make_cache(device, capacity=32)
    running: list[Running] = []
    hits = refusals = 0
    for _ in range(120):
        verb = rng.choice(["open", "open", "decode", "decode", "decode", "publish", "close", "evict"])
        try:
            if verb == "open":
                prompt = [rng.randrange(2) for _ in range(rng.randint(1, 14))]
                namespace = rng.choice([(), (7,)])
                one = Running(cache.open(prompt, namespace), namespace, len(prompt), prompt)
                running.append(one)
                hits += one.sequence.num_hit > 0
                assert_reads_its_own(cache, one)
                done = one.sequence.length
                chunk = rng.randint(1, len(prompt) - done)
                write(cache, [one], [chunk])
            elif verb == "decode" and running:
                group = rng.sample(running, rng.randint(1, len(running)))
                for one in group:
                    while len(one.token_ids) <= one.sequence.length:
                        one.token_ids.append(rng.randrange(2))
                write(cache, group, [1] * len(group))
            elif verb == "publish" and running:
                cache.publish(rng.choice(running).sequence)
            elif verb == "close" and running:
                one = running.pop(rng.randrange(len(running)))
                cache.close(one.sequence, one.token_ids[one.num_prompt :], cache=rng.random() < 0.8)
            elif verb == "evict":
                cache.evict(rng.randint(0, cache.num_cached))
        except (OutOfTokens, OutOfRows, SequenceTooLong):
            refusals += 1
        cache.check()
        assert cache.num_free + cache.num_cached + cache.num_held == cache.capacity
        assert cache.num_held >= max((one.sequence.length for one in running), default=0)
        for one in running:
            assert_reads_its_own(cache, one)
    assert hits
    assert refusals
    for one in running:
        cache.close(one.sequence)
    cache.evict(cache.num_cached)
    cache.check()
    assert cache.num_free == cache.capacity


@pytest.mark.parametrize("name", ["capacity", "max_sequences", "max_entries"])
@pytest.mark.parametrize("wrong", [1.5, True, "4", None, 0, -1], ids=str)
def test_an_invalid_count_is_refused(name: str, wrong: Any) -> None:
    sizes = {"capacity": 40, "max_sequences": 4, "max_entries": 24, name: wrong}
    error = ValueError if type(wrong) is int else TypeError
    with pytest.raises(error, match=f"{name} is {wrong!r}"):
        KVCache(SPEC, **sizes, device="cpu")


def test_counts_may_be_numpy_integers(device: torch.device) -> None:
    cache = KVCache(SPEC, np.int64(40), np.int32(4), np.int64(24), device)  # type: ignore[arg-type]
    assert type(cache.capacity) is int
    cache.check()


@pytest.mark.parametrize(
    "changes", [{"num_layers": 1.5}, {"k_dim": True}, {"dtype": "float32"}, {"dtype": None}]
)
def test_an_invalid_spec_is_refused(changes: dict[str, Any]) -> None:
    ((name, wrong),) = changes.items()
    with pytest.raises(TypeError, match=f"{name} is {wrong!r}.*give"):
        replace(SPEC, **changes)


def test_the_meta_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"meta device stores nothing.*give cpu or cuda"):
        KVCache(SPEC, 40, 4, 24, device="meta")


@pytest.mark.parametrize("entries", [[0, 1], np.array([0, 1])], ids=["list", "numpy"])
def test_keep_accepts_only_a_tensor(entries: Any, device: torch.device) -> None:
    cache = make_cache(device)
    sequence = cache.open([1, 2, 3])
    cache.extend([sequence], [3])
    with pytest.raises(TypeError, match=r"entries is a \w+; give a tensor, int64 \[n\]"):
        cache.keep(sequence, entries)
    assert sequence.length == 3
    cache.check()


def test_a_table_of_one_entry(device: torch.device) -> None:
    cache = KVCache(SPEC, capacity=2, max_sequences=1, max_entries=1, device=device)
    for token in (5, 6, 5):
        sequence = cache.open([token])
        assert cache.extend([sequence], [1]).tolist() == cache.slots(sequence).tolist()
        cache.publish(sequence)
        cache.confirm()
        cache.close(sequence)
    cache.check()
    with pytest.raises(SequenceTooLong):
        cache.open([1, 2])
