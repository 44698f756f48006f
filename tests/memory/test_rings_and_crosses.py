"""Rings and cross sequences in a `KVCache`: counts, slots and positions, beside a model of what each holds.

A token's K/V is a number. It is written to the slot that the cache returns and read back after every verb, so a
slot with two owners, a lost slot and one that is freed too early all show.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from lightkv import KVCache, KVSpec, OutOfRows, OutOfTokens, SequenceTooLong
from lightkv.edits import Alloc, Edit, decode, encode
from lightkv.ledger.crosses import ReaderSequence
from lightkv.ledger.rings import RingSequence
from lightkv.ledger.sequence import Sequence
from lightkv.memory.kv_memory import KVMemory
from lightkv.triton_kernels.layout.ring import Ring
from tests.support.combinations import slow

SPEC = KVSpec(num_layers=1, num_kv_heads=1, k_dim=1, v_dim=1, dtype=torch.float64)


def make_cache(device: torch.device, capacity: int = 60, rows: int = 6, entries: int = 24) -> KVCache:
    return KVCache(SPEC, capacity, max_sequences=rows, max_entries=entries, device=device)


@dataclass
class Text:
    """A sequence, and the number that stands for each position's K/V."""

    sequence: Sequence
    prompt: list[int]
    namespace: int
    written: list[int] = field(default_factory=list)
    cross: "Text | None" = None

    @property
    def ring(self) -> Ring | None:
        return self.sequence.ring if isinstance(self.sequence, RingSequence) else None

    def held(self) -> list[int]:
        """The positions of its entries, by the definition of a ring."""
        ring, count = self.ring, len(self.written)
        if ring is None:
            return list(range(count))
        entries: dict[int, int] = {}
        for position in range(count):
            within = (position - ring.sinks) % ring.size
            entries[position if position < ring.sinks else ring.sinks + within] = position
        return [entries[entry] for entry in sorted(entries)]


class Life:
    """One cache, with prompts, rings and cross sequences, and random verbs."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.rng = random.Random(seed)
        self.cache = make_cache(device)
        self.mirror = KVMemory(SPEC, 61, 6, 24, self.cache.memory.device)
        self.cache.on_edits = self.replay
        self.texts: list[Text] = []
        self.crosses: list[Text] = []  # those that are not closed
        self.calls: dict[str, int] = {}
        self.next = 1

    def replay(self, edits: list[Edit], kept: list[torch.Tensor]) -> None:
        self.mirror.apply(decode(encode(edits)), kept)

    def number(self, text: Text) -> int:
        """What the K/V of the next token is: that of its prefix, where others may share it."""
        position = len(text.written)
        if position < len(text.prompt):
            return hash((text.namespace, tuple(text.prompt[: position + 1]))) % 2**40
        self.next += 1
        return self.next

    def open(self) -> None:
        rng = self.rng
        prompt = [rng.randrange(2) for _ in range(rng.randint(1, 12))]
        cross = rng.choice([None, None, None, *self.crosses])
        if cross is not None:
            sequence: Sequence = self.cache.open_reader(prompt, cross.sequence)
            text = Text(sequence, prompt, cross.namespace, cross=cross)
        elif (ring := rng.choice([None, Ring(2, 8, 3), Ring(4, 5, 1), Ring(0, 6, 6)])) is not None:
            sequence = self.cache.open_ring(prompt, ring)
            text = Text(sequence, prompt, 0)
            assert sequence.length <= ring.sinks
        else:
            sequence = self.cache.open(prompt)
            text = Text(sequence, prompt, 0)
        for _ in range(sequence.length):
            text.written.append(self.number(text))
        self.texts.append(text)

    def open_cross(self) -> None:
        length = self.rng.randint(1, 10)
        before = self.cache.num_held
        sequence = self.cache.open_cross(length)
        assert self.cache.num_held == before + length
        self.next += 1
        text = Text(sequence, [], -self.next)
        for _ in range(length):
            text.written.append(self.number(text))
        self.write(self.cache.slots(sequence), text.written)
        self.crosses.append(text)

    def extend(self) -> None:
        batch = self.rng.sample(self.texts, self.rng.randint(0, len(self.texts)))
        counts = []
        for text in batch:
            ring = text.ring
            counts.append(self.rng.randint(1, 3 if ring is None else ring.room(text.sequence.position)))
        slots = self.cache.extend([text.sequence for text in batch], counts)
        numbers = []
        for text, count in zip(batch, counts, strict=True):
            for _ in range(count):
                text.written.append(self.number(text))
                numbers.append(text.written[-1])
        self.write(slots, numbers)

    def shrink(self) -> None:
        """A step is planned, overwrites K/V, and fails."""
        if not self.texts:
            return
        text = self.rng.choice(self.texts)
        sequence, ring = text.sequence, text.ring
        count = 2 if ring is None else ring.room(sequence.position)
        before = sequence.length, sequence.position
        seen = None if ring is None else ring.first_key(sequence.position - 1)
        slots = self.cache.extend([sequence], [count])
        positions = range(before[1], before[1] + count)
        self.cache.memory.pool.kv(0)[slots] = -1.0
        self.cache.shrink([sequence], [count])
        assert (sequence.length, sequence.position) == before
        if ring is not None and sequence.position >= ring.capacity:
            # What the failed step overwrote is dropped: it is not what the next token sees.
            gone = {position - ring.size for position in positions}
            first = ring.first_key(sequence.position)
            assert all(position < first for position in gone)
            assert seen is not None
            for position in gone:
                text.written[position] = -1

    def publish(self) -> None:
        if self.texts:
            self.cache.publish(self.rng.choice(self.texts).sequence)
            self.cache.confirm()

    def fork(self) -> None:
        if not self.texts:
            return
        text = self.rng.choice(self.texts)
        if text.ring is not None:
            with pytest.raises(ValueError, match="is a ring, whose slots are written again"):
                self.cache.fork(text.sequence)
            return
        fork = self.cache.fork(text.sequence)
        assert type(fork) is type(text.sequence)
        if isinstance(fork, ReaderSequence):
            assert text.cross is not None
            assert fork.cross is text.cross.sequence
        self.texts.append(Text(fork, list(text.prompt), text.namespace, list(text.written), text.cross))

    def close(self) -> None:
        if self.texts:
            text = self.texts.pop(self.rng.randrange(len(self.texts)))
            self.cache.close(text.sequence, cache=self.rng.random() < 0.7)

    def close_cross(self) -> None:
        if self.crosses:
            text = self.crosses.pop(self.rng.randrange(len(self.crosses)))
            self.cache.close(text.sequence)

    def evict(self) -> None:
        self.cache.evict(self.rng.randint(0, self.cache.num_cached))

    def write(self, slots: torch.Tensor, numbers: list[int]) -> None:
        values = torch.tensor(numbers, dtype=torch.float64, device=slots.device)
        self.cache.memory.pool.kv(0)[slots.long()] = values[:, None]

    def step(self) -> None:
        verb = self.rng.choice(
            [self.open, self.open, self.open_cross, *[self.extend] * 6, self.shrink, self.publish, self.fork,
             self.close, self.close, self.close_cross, self.evict]
        )  # fmt: skip
        cache = self.cache
        before = cache.num_free, cache.num_cached, cache.num_held, cache.num_open
        try:
            verb()
            name = verb.__name__
        except (OutOfTokens, OutOfRows, SequenceTooLong) as error:
            name = type(error).__name__
            assert (cache.num_free, cache.num_cached, cache.num_held, cache.num_open) == before
            assert cache.ledger.drain() == []
        self.calls[name] = self.calls.get(name, 0) + 1

    def check(self) -> None:
        cache = self.cache
        cache.check()
        assert torch.equal(self.mirror.table.req_to_token, cache.memory.table.req_to_token)
        assert torch.equal(self.mirror.allocator.mem_state, cache.memory.allocator.mem_state)
        read = {text.cross.sequence.row: text.cross for text in self.texts if text.cross is not None}
        crosses = {text.sequence.row: text for text in self.crosses} | read
        assert cache.num_open == len(self.texts) + len(crosses)
        kv = cache.memory.pool.kv(0)
        owners: dict[int, int] = {}
        for text in [*self.texts, *crosses.values()]:
            sequence = text.sequence
            held = text.held()
            assert sequence.position == len(text.written)
            assert cache.positions(sequence).tolist() == held
            slots = cache.slots(sequence).tolist()
            assert kv[slots, 0].tolist() == [text.written[position] for position in held]
            for slot, position in zip(slots, held, strict=True):
                assert owners.setdefault(slot, text.written[position]) == text.written[position]
        assert len(owners) == cache.num_held


@pytest.mark.parametrize("seed", [0, 1, *slow(2, 3)])
def test_random_lives(seed: int, device: torch.device) -> None:
    life = Life(seed, device)
    for _ in range(150):
        life.step()
        life.check()
    assert len(life.calls) >= 10, life.calls
    for text in life.texts:
        life.cache.close(text.sequence, cache=False)
    for text in life.crosses:
        life.cache.close(text.sequence)
    life.texts, life.crosses = [], []
    life.check()
    life.cache.evict(life.cache.num_cached)
    assert life.cache.num_free == life.cache.capacity


@pytest.mark.parametrize("ring", [Ring(2, 6, 2), Ring(0, 5), Ring(4, 1), Ring(7, 3, 3)])
@pytest.mark.parametrize("numbers", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_entries_and_positions_of_a_ring(ring: Ring, numbers: Callable[[list[int]], Any]) -> None:
    newest: dict[int, int] = {}  # of each entry
    entries = [p if p < ring.sinks else ring.sinks + (p - ring.sinks) % ring.size for p in range(40)]
    assert ring.entries(numbers(list(range(40)))).tolist() == entries
    for position, entry in enumerate(entries):
        assert ring.entries(position) == entry
        newest[entry] = position
        used = sorted(newest)
        assert used == list(range(min(position + 1, ring.capacity)))
        assert ring.positions(numbers(used), position + 1).tolist() == [newest[one] for one in used]


def test_rings_and_plain_sequences_grow_in_one_step(device: torch.device) -> None:
    """A full ring takes no slot, one that is not takes its last one, and the slots of all come in order."""
    cache = make_cache(device)
    full, nearly = cache.open_ring([1] * 30, Ring(2, 6, 3)), cache.open_ring([2] * 30, Ring(0, 5, 3))
    plain = cache.open([3, 4, 5])
    cache.extend([full, nearly, plain], [8, 4, 3])
    cache.release(plain, 1)
    edits: list[Edit] = []
    cache.on_edits = lambda new, _: edits.extend(new)
    slots = cache.extend([plain, full, nearly], [2, 3, 1]).tolist()
    (edit,) = edits
    assert edit == Alloc((plain.row, nearly.row), (2, 4), (2, 1))
    expected = [*cache.slots(plain)[2:4].tolist(), *cache.slots(full)[2:5].tolist()]
    assert slots == [*expected, *cache.slots(nearly)[4:].tolist()]
    cache.check()
    held = [(one.length, one.position) for one in (full, nearly, plain)]
    edits.clear()
    for count, match in [(4, "which takes 3 at once"), (0, "at least one of each")]:
        with pytest.raises(ValueError, match=match):
            cache.extend([plain, full], [1, count])
    assert held == [(one.length, one.position) for one in (full, nearly, plain)]
    assert edits == []


def test_places_outside_the_table_are_refused(device: torch.device) -> None:
    table = make_cache(device, rows=6, entries=24).memory.table
    assert table.places(np.array([2, 0]), np.array([23, 0])).tolist() == [2 * 24 + 23, 0]
    assert table.places(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []
    for row, entry in [(7, 0), (-1, 0), (1, 24), (1, -1)]:
        with pytest.raises(IndexError, match="7 rows of 24 entries"):
            table.places(np.array([1, row]), np.array([1, entry]))


def test_a_ring_keeps_its_slots(device: torch.device) -> None:
    cache = make_cache(device)
    sequence = cache.open_ring([1] * 30, Ring(2, 6, 2))
    edits: list[Edit] = []
    cache.extend([sequence], [8])
    slots = cache.slots(sequence).tolist()
    cache.on_edits = lambda new, _: edits.extend(new)
    for position in range(8, 100, 2):
        step = cache.extend([sequence], [2])
        entries = [2 + (position + i - 2) % 6 for i in range(2)]
        assert step.tolist() == [slots[entry] for entry in entries]
    assert edits == []
    assert (sequence.length, sequence.position, cache.num_held) == (8, 100, 8)
    assert cache.slots(sequence).tolist() == slots
    assert cache.positions(sequence).tolist() == [0, 1, 98, 99, 94, 95, 96, 97]
    with pytest.raises(ValueError, match="which takes 2 at once"):
        cache.extend([sequence], [3])
    cache.extend([sequence], [1])
    with pytest.raises(ValueError, match="cannot go 2 tokens back"):
        cache.shrink([sequence], [2])
    for verb in (cache.release, cache.truncate):
        with pytest.raises(ValueError, match="is a ring"):
            verb(sequence, 1)
    cache.check()
    cache.close(sequence)
    assert cache.num_free == cache.capacity


def test_a_ring_whose_failed_step_overwrote_tokens_caches_none(device: torch.device) -> None:
    cache = make_cache(device)
    sequence = cache.open_ring([1, 2, 3, 4, 5, 6, 7], Ring(1, 4, 2))
    cache.extend([sequence], [5])
    cache.extend([sequence], [2])  # the slots of positions 1 and 2
    cache.shrink([sequence], [2])
    assert (sequence.position, sequence.dropped) == (5, 0)
    with pytest.raises(ValueError, match="dropped tokens"):
        cache.export(sequence)
    cache.close(sequence)
    assert cache.match([1, 2, 3, 4, 5, 6, 7]) == 0
    assert cache.num_free == cache.capacity
    cache.check()


@pytest.mark.parametrize(("ring", "steps"), [(Ring(2, 6), [8, 1, 1]), (Ring(1, 4, 2), [3, 2, 2])])
def test_steps_of_a_ring_are_not_undone_one_by_one_past_what_they_overwrote(
    ring: Ring, steps: list[int], device: torch.device
) -> None:
    cache = make_cache(device)
    sequence = cache.open_ring([1] * 30, ring)
    for count in steps:
        cache.extend([sequence], [count])
    end = sequence.position
    cache.shrink([sequence], steps[-1:])
    with pytest.raises(ValueError, match="others took their entries"):
        cache.shrink([sequence], steps[-2:-1])  # both steps at once are refused, too
    assert sequence.position == end - steps[-1]
    cache.extend([sequence], steps[-1:])
    cache.shrink([sequence], steps[-1:])
    assert sequence.position == end - steps[-1]
    cache.check()


def test_a_ring_shares_its_sinks_alone(device: torch.device) -> None:
    cache = make_cache(device)
    plain = cache.open([1, 2, 3, 4, 5, 6])
    cache.extend([plain], [6])
    cache.publish(plain)
    first = cache.open_ring([1, 2, 3, 4, 5, 6, 7], Ring(3, 6))
    assert (first.length, first.shared, cache.num_held) == (3, 3, 6)
    with pytest.raises(SequenceTooLong):
        cache.open_ring([1], Ring(3, 22))
    other = cache.open_ring([9, 8, 7, 6], Ring(3, 6))
    cache.extend([other], [4])
    cache.publish(other)
    assert cache.match([9, 8, 7, 6, 5]) == 3
    cache.close(other)  # nothing of it was dropped, so all its tokens can be cached
    assert cache.match([9, 8, 7, 6, 5]) == 4
    cache.check()


def test_a_cross_sequence_goes_with_its_last_reader(device: torch.device) -> None:
    cache = make_cache(device)
    cross = cache.open_cross(10)
    slots = cache.slots(cross).tolist()
    assert len(set(slots)) == 10
    first = cache.open_reader([1, 2, 3], cross)
    cache.extend([first], [3])
    beams = [cache.fork(first) for _ in range(3)]
    assert (cache.num_held, len(cross.readers)) == (13, 4)
    for match, verb in [
        ("written once, read", lambda: cache.fork(cross)),
        ("written once, read", lambda: cache.truncate(cross, 2)),
        ("keeps its length", lambda: cache.extend([cross], [1])),
        ("keeps its length", lambda: cache.shrink([cross], [1])),
        ("no cross sequence", lambda: cache.open_reader([1], first)),
        ("at least one", lambda: cache.open_cross(0)),
    ]:
        with pytest.raises(ValueError, match=match):
            verb()
    cache.close(cross)
    with pytest.raises(ValueError, match="stays only for those that read it"):
        cache.close(cross)
    for sequence in [first, *beams[1:]]:
        cache.close(sequence)
        assert cache.slots(cross).tolist() == slots
        cache.check()
    cache.close(beams[0])
    assert (cross.row, cache.num_held, cache.num_open) == (0, 0, 0)
    cache.check()


def test_only_readers_of_one_cross_sequence_share_tokens(device: torch.device) -> None:
    cache = make_cache(device)
    crosses = [cache.open_cross(2), cache.open_cross(2)]
    first = cache.open_reader([1, 2, 3], crosses[0])
    cache.extend([first], [3])
    cache.publish(first)
    assert cache.open_reader([1, 2, 3], crosses[0]).num_hit == 2
    assert cache.open_reader([1, 2, 3], crosses[1]).num_hit == 0
    assert cache.open([1, 2, 3]).num_hit == 0


@pytest.mark.parametrize("order", ["reader first", "cross first"])
def test_what_readers_leave_cached_goes_with_the_cross_sequence(order: str, device: torch.device) -> None:
    """Nothing can hit it any more, so it would only take the place of what can be hit."""
    cache = make_cache(device)
    plain = cache.open([1, 2, 3, 4])
    cache.extend([plain], [4])
    cache.close(plain)
    cross = cache.open_cross(2)
    for namespace in ((), ("salt",)):
        first = cache.open_reader([1, 2, 3], cross, namespace)
        cache.extend([first], [3])
        cache.publish(first)
        cache.confirm()
        cache.close(first)
    last = cache.open_reader([1, 2, 9], cross)
    cache.extend([last], [1])
    cache.publish(last)
    assert (last.num_hit, cache.num_cached) == (2, 4 + 1 + 3)
    for sequence in (last, cross) if order == "reader first" else (cross, last):
        cache.close(sequence)
        cache.check()
    cache.confirm()
    cache.retract()
    assert (cache.num_cached, cache.num_free) == (4, cache.capacity - 4)
    assert cache.match([1, 2, 3, 4, 5]) == 4
    cache.check()


def test_readers_of_a_cross_sequence_have_namespaces_that_no_caller_can_name(device: torch.device) -> None:
    cache = make_cache(device)
    first = cache.open_reader([1, 2, 3], cache.open_cross(2))
    cache.extend([first], [3])
    cache.publish(first)
    assert cache.match([1, 2, 3], ("cross", 1)) == 0


def test_a_refused_cross_sequence_changes_nothing(device: torch.device) -> None:
    cache = make_cache(device, capacity=12, rows=2)
    held = cache.open([1, 2])
    cache.extend([held], [2])
    with pytest.raises(OutOfTokens, match=re.escape("11 tokens needed, 10 available")):
        cache.open_cross(11)
    with pytest.raises(SequenceTooLong):
        cache.open_cross(25)
    cache.open([5])
    with pytest.raises(OutOfRows):
        cache.open_cross(1)
    assert (cache.num_free, cache.num_open) == (10, 2)
    cache.check()
