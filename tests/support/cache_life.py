"""A life of a `KVCache`: every verb in random order, beside an independent model of what each slot contains.

A token's K/V is a number that depends on all its sequence's tokens up to it. It is written to the slot that the
cache returns, and read back from every open sequence. So a slot with two owners, a lost slot, and one that is
wrongly shared, moved or dropped all show at once.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from lightkv import KVCache, KVSpec, OutOfRows, OutOfTokens, SequenceTooLong
from lightkv.ledger.sequence import Sequence

SPEC = KVSpec(num_layers=1, num_kv_heads=1, k_dim=1, v_dim=1, dtype=torch.float64)
CAPACITY, ROWS, ENTRIES = 160, 7, 46
VOCABULARY = 3


def content(before: int, token: int, position: int) -> int:
    """Returns the K/V of a token after one with K/V `before`: an integer that float64 represents exactly."""
    return hash((before, token, position)) % 2**52


@dataclass
class Shadow:
    """The expected state of a sequence after all verbs called on it."""

    sequence: Sequence
    root: int  # content before the first token: that of its namespace
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)  # of every position so far
    last: int = 0  # content of the latest position, dropped or not
    contents: list[int] = field(default_factory=list)  # of its entries
    positions: list[int] = field(default_factory=list)  # of its entries
    num_sink_tokens: int = 0

    @property
    def dropped(self) -> int:
        return len(self.tokens) - len(self.contents)

    def add(self, token: int) -> int:
        self.last = content(self.last, token, len(self.tokens))
        self.positions.append(len(self.tokens))
        self.tokens.append(token)
        self.contents.append(self.last)
        return self.last


class Life:
    """One cache, its sequences' shadows, and random verbs."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.rng = random.Random(seed)
        self.cache = KVCache(SPEC, CAPACITY, ROWS, ENTRIES, device)
        self.cache.ledger._state.sessions.limit = CAPACITY // 2  # the service's ledgers have sessions
        self.shadows: list[Shadow] = []
        self.families = [[self.rng.randrange(VOCABULARY) for _ in range(40)] for _ in range(3)]
        self.calls: dict[str, int] = {}
        self.refused: dict[str, int] = {}
        self.num_edits = 0
        self.cache.on_edits = self._count
        self.verbs: list[Callable[[], None]] = [
            *(self.open,) * 3,
            *(self.extend,) * 8,
            *(self.publish,) * 2,
            self.confirm,
            self.shrink,
            self.fork,
            self.fork,
            self.truncate,
            self.release,
            self.release,
            self.keep,
            *(self.close,) * 2,
            self.evict,
            self.fail,
            self.hand_over,
            self.release_session,
        ]

    def _count(self, edits: list[object], kept: list[torch.Tensor]) -> None:
        self.num_edits += len(edits)

    def step(self) -> None:
        verb = self.rng.choice(self.verbs)
        cache = self.cache
        before = cache.num_free, cache.num_cached, cache.num_held
        try:
            verb()
            self.calls[verb.__name__] = self.calls.get(verb.__name__, 0) + 1
        except (OutOfTokens, OutOfRows, SequenceTooLong) as error:
            self.refused[type(error).__name__] = self.refused.get(type(error).__name__, 0) + 1
            assert (cache.num_free, cache.num_cached, cache.num_held) == before
            assert cache.ledger.drain() == []

    def pick(self) -> Shadow | None:
        return self.rng.choice(self.shadows) if self.shadows else None

    def open(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.families)[: rng.randint(1, 40)]
        prompt = prompt + [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 8))]
        namespace = rng.choice([(), (), ("salt",)])
        sequence = self.cache.open(prompt, namespace)
        if rng.random() < 0.5:
            sequence.session = self.cache.ledger.sessions.open(f"session {rng.randrange(3)}")
        shadow = Shadow(sequence, hash(namespace) % 2**52, prompt)
        shadow.last = shadow.root
        for token in prompt[: sequence.length]:
            shadow.add(token)
        assert sequence.num_hit == sequence.length < len(prompt)
        self.shadows.append(shadow)

    def extend(self) -> None:
        """Extends each prompt by a chunk, and every other sequence by one or a few tokens, as a step does."""
        rng = self.rng
        batch = rng.sample(self.shadows, rng.randint(0, len(self.shadows)))
        tokens = []
        for shadow in batch:
            left = shadow.prompt[len(shadow.tokens) :]
            count = rng.randint(1, len(left)) if left else rng.choice([1, 1, 1, 4])
            tokens.append(left[:count] or [rng.randrange(VOCABULARY) for _ in range(count)])
        slots = self.cache.extend([shadow.sequence for shadow in batch], [len(own) for own in tokens])
        written = [shadow.add(token) for shadow, own in zip(batch, tokens, strict=True) for token in own]
        values = torch.tensor(written, dtype=torch.float64, device=slots.device)
        self.cache.memory.pool.kv(0)[slots] = values[:, None]

    def shrink(self) -> None:
        """Allocates the slots of a step that is then not computed, or only in part."""
        rng = self.rng
        batch = rng.sample(self.shadows, rng.randint(0, len(self.shadows)))
        sequences = [shadow.sequence for shadow in batch]
        before = [(sequence.length, sequence.prompt) for sequence in sequences]
        counts = [rng.randint(1, 3) for _ in batch]
        self.cache.extend(sequences, counts)
        self.cache.shrink(sequences, counts)
        assert [(sequence.length, sequence.prompt) for sequence in sequences] == before

    def publish(self) -> None:
        if (shadow := self.pick()) is not None:
            self.cache.publish(shadow.sequence)

    def confirm(self) -> None:
        self.cache.confirm()

    def fork(self) -> None:
        if (shadow := self.pick()) is not None:
            fork = self.cache.fork(shadow.sequence)
            names = ("tokens", "contents", "positions", "prompt")
            lists = {name: list(getattr(shadow, name)) for name in names}
            self.shadows.append(replace(shadow, sequence=fork, **lists))

    def truncate(self) -> None:
        if (shadow := self.pick()) is None:
            return
        length = self.rng.randint(0, self.rng.choice([4, len(shadow.contents)]))
        length = min(length, len(shadow.contents))
        self.cache.truncate(shadow.sequence, length)
        cut = len(shadow.contents) - length
        if length <= shadow.num_sink_tokens:  # nothing before its end was dropped
            shadow.tokens, shadow.num_sink_tokens = shadow.tokens[:length], 0
            shadow.last = shadow.contents[length - 1] if length else shadow.root
        elif cut:
            shadow.tokens = shadow.tokens[: len(shadow.tokens) - cut]
            # Its next tokens have new contents, unless nothing before them was dropped.
            whole = len(shadow.tokens) == length
            shadow.last = shadow.contents[length - 1] if whole else self.rng.randrange(2**52)
        del shadow.contents[length:], shadow.positions[length:]
        shadow.prompt = shadow.prompt[: len(shadow.tokens)]

    def release(self) -> None:
        if (shadow := self.pick()) is None or not shadow.contents:
            return
        length = len(shadow.contents)
        sink_tokens = self.rng.choice([0, 0, 2, 4, shadow.num_sink_tokens, shadow.num_sink_tokens])
        if sink_tokens >= length:
            return
        count = self.rng.randint(1, length - sink_tokens)
        free = self.cache.num_free
        has_both = shadow.sequence.gap.node is not None
        if shadow.dropped and (
            sink_tokens > shadow.num_sink_tokens or (sink_tokens < shadow.num_sink_tokens and has_both)
        ):
            with pytest.raises(ValueError, match="sinks were kept so far"):
                self.cache.release(shadow.sequence, count, sink_tokens)
            return
        assert self.cache.release(shadow.sequence, count, sink_tokens) == self.cache.num_free - free
        del (
            shadow.contents[sink_tokens : sink_tokens + count],
            shadow.positions[sink_tokens : sink_tokens + count],
        )
        shadow.num_sink_tokens = sink_tokens

    def keep(self) -> None:
        if (shadow := self.pick()) is None:
            return
        end = len(shadow.contents)
        start = min(max(shadow.sequence.shared, shadow.num_sink_tokens), end)
        chosen = self.rng.sample(range(start, end), self.rng.randint(0, end - start))
        free = self.cache.num_free
        entries = torch.tensor(chosen, dtype=torch.int64, device=self.cache.memory.device)
        assert self.cache.keep(shadow.sequence, entries) == end - start - len(chosen)
        assert self.cache.num_free == free + end - start - len(chosen)
        stays = [*range(start), *sorted(chosen)]
        shadow.contents = [shadow.contents[i] for i in stays]
        shadow.positions = [shadow.positions[i] for i in stays]

    def close(self) -> None:
        if (shadow := self.pick()) is None:
            return
        self.shadows.remove(shadow)
        made = shadow.tokens[len(shadow.prompt) :]
        self.cache.close(shadow.sequence, made, cache=self.rng.random() < 0.8)

    def evict(self) -> None:
        free, count = self.cache.num_free, self.rng.randint(0, 12)
        self.cache.evict(count)
        assert self.cache.num_free == free + count

    def release_session(self) -> None:
        self.cache.ledger.sessions.release(f"session {self.rng.randrange(3)}")

    def fail(self) -> None:
        """The steps since the last `confirm` fail: the sequences that hold what they published are closed."""
        before = self.cache.num_free, self.cache.num_cached
        try:
            self.cache.retract()
        except ValueError as error:
            assert (self.cache.num_free, self.cache.num_cached) == before
            (listed,) = re.findall(r"rows \[(.*)\] hold", str(error))
            rows = {int(row) for row in listed.split(", ")}
            doubtful = [shadow for shadow in self.shadows if shadow.sequence.row in rows]
            assert len(doubtful) == len(rows)
            for shadow in doubtful:
                self.cache.close(shadow.sequence, cache=False)
                self.shadows.remove(shadow)
            self.cache.retract()

    def hand_over(self) -> None:
        """A sequence's K/V is exported to host memory and imported again."""
        if (shadow := self.pick()) is None or not shadow.contents or shadow.dropped:
            return
        exported = self.cache.export(shadow.sequence)
        namespace = () if shadow.root == hash(()) % 2**52 else ("salt",)
        ids = [*shadow.tokens, *shadow.prompt[len(shadow.tokens) :]]
        imported = self.cache.import_sequence(ids, exported, namespace)
        copy = Shadow(imported, shadow.root, ids)
        copy.last = copy.root
        for token in ids[: imported.length]:
            copy.add(token)
        self.shadows.append(copy)

    def check(self) -> None:
        """Reads everything back."""
        cache = self.cache
        cache.check()
        kv = cache.memory.pool.kv(0).cpu()
        free = cache.memory.allocator.mem_state.cpu().tolist()
        held: dict[int, int] = {}
        for shadow in self.shadows:
            sequence = shadow.sequence
            assert sequence.length == len(shadow.contents) == len(shadow.positions)
            assert (sequence.position, sequence.dropped) == (len(shadow.tokens), shadow.dropped)
            slots = cache.slots(sequence).long().cpu()
            assert kv[slots, 0].tolist() == shadow.contents
            assert kv[slots, 1].tolist() == shadow.contents
            assert cache.positions(sequence).tolist() == shadow.positions
            for slot, value in zip(slots.tolist(), shadow.contents, strict=True):
                assert held.setdefault(slot, value) == value
                assert not free[slot]
        assert len(held) == cache.num_held
        assert sum(free) == cache.num_free
        drawn = cache.memory_map().counts
        assert (drawn.num_free, drawn.num_cached) == (cache.num_free, cache.num_cached)
        assert drawn.num_shared + drawn.num_own == cache.num_held


def live(seed: int, steps: int, device: torch.device) -> Life:
    life = Life(seed, device)
    for _ in range(steps):
        life.step()
        life.check()
    assert min(life.calls.get(verb.__name__, 0) for verb in life.verbs) > steps / 200
    assert set(life.refused) == {"OutOfTokens", "OutOfRows", "SequenceTooLong"}
    for shadow in life.shadows:
        life.cache.close(shadow.sequence, cache=False)
    life.shadows = []
    life.check()
    assert life.cache.num_held == 0
    life.cache.evict(life.cache.num_cached)
    life.check()
    assert life.cache.num_free == CAPACITY
    return life
