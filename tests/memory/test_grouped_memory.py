"""A device memory of several layer groups, beside a model of it in lists that applies the same edits."""

import random
from array import array
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from lightkv import KVCache, KVSpec
from lightkv.edits import Alloc, AllocPart, Edit, MapSegments, SplitSegment, StoreSegment
from lightkv.errors import CheckFailed, OutOfTokens, SequenceTooLong
from lightkv.layer_groups import FULL, Lifetime
from lightkv.ledger import TokenLedger
from lightkv.ledger.sequence import Sequence
from lightkv.memory.kv_memory import KVMemory
from lightkv.memory.kv_pool import plan_pool
from lightkv.memory.staging import upload
from tests.support.combinations import each_value
from tests.support.grouped_memory import GroupedMemory

ROWS, ENTRIES = 5, 64
WINDOW, NARROW, CHUNK = Lifetime("window", 6), Lifetime("window", 2), Lifetime("chunk", 7)
LIFETIMES = {
    "a full group and two of a window": [WINDOW, WINDOW, FULL, WINDOW, WINDOW, FULL],
    "full, window and chunk": [WINDOW, CHUNK, FULL, CHUNK],
    "two full groups and one of a window": [FULL, FULL, NARROW],
}


@dataclass
class Text:
    """A running sequence and its token ids, of which the first `prompt` are its prompt."""

    sequence: Sequence
    ids: list[int]
    prompt: int


class Pair:
    """A ledger, the device memory, and the model. The two memories may choose different slots, but the same
    entries have to share one."""

    def __init__(self, lifetimes: list[Lifetime], slots_by_group: int, device: torch.device) -> None:
        spec = KVSpec(len(lifetimes), 1, 2, 2, torch.float32, lifetimes=lifetimes)
        capacity = slots_by_group * spec.groups.num_groups
        self.ledger = TokenLedger(capacity, ROWS, ENTRIES, groups=spec.groups)
        self.memory = KVMemory(spec, capacity + 1, ROWS, ENTRIES, device)
        self.model = GroupedMemory(spec.groups, capacity, ROWS, ENTRIES)
        self.kinds: set[type[Edit]] = set()

    def apply(self) -> None:
        edits = self.ledger.drain()
        self.kinds |= set(map(type, edits))
        self.memory.apply(edits)
        self.model.apply(edits)
        self.check()

    def check(self) -> None:
        holdings = self.ledger.holdings()
        self.model.check(holdings, self.ledger.num_free)
        self.memory.check(holdings)
        assert self.memory.num_free == self.ledger.num_free
        table, same = self.memory.table.groups.tolist(), dict[int, int]()
        for row in holdings.rows:
            firsts = [0, *(window.start for window in row.windows)]
            for groups, first in zip(self.model.of_class, firsts, strict=True):
                for group in groups:
                    found = table[group][row.row][first : row.length]
                    expected = self.model.table[group][row.row][first : row.length]
                    for slot, of_model in zip(found, expected, strict=True):
                        assert same.setdefault(of_model, slot) == slot
        assert len(set(same.values())) == len(same)

    def open(self, ids: list[int]) -> Text:
        return Text(self.ledger.open(array("i", ids).tobytes()), ids, len(ids))

    def extend(self, texts: list[Text], rng: random.Random) -> None:
        """Computes a chunk of prompts, and the next token of the others."""
        counts = [max(min(rng.randrange(1, 20), one.prompt - one.sequence.length), 1) for one in texts]
        for text, count in zip(texts, counts, strict=True):
            if text.sequence.length + count > len(text.ids):
                text.ids.append(rng.randrange(3))
        try:
            self.ledger.extend([text.sequence for text in texts], counts)
        except OutOfTokens:
            return
        for text in texts:
            if text.sequence.length <= text.prompt:
                self.ledger.publish(text.sequence)
        self.ledger.confirm(self.ledger.step)

    def close(self, text: Text) -> None:
        self.ledger.close(text.sequence, array("i", text.ids[text.prompt :]).tobytes())


@each_value(name=list(LIFETIMES), seed=range(4))
def test_random_lives_of_the_memory(name: str, seed: int, device: torch.device) -> None:
    """The last one applies the edits of several verbs together."""
    pair, rng = Pair(LIFETIMES[name], 80, device), random.Random(f"{name} {seed}")
    ledger, texts, known = pair.ledger, list[Text](), [[1, 2]]
    for _ in range(150):
        verb = rng.choices(["open", "extend", "fork", "truncate", "close", "evict"], [4, 14, 1, 1, 2, 1])[0]
        text = rng.choice(texts) if texts else None
        if verb == "open" and len(texts) < ROWS:
            base = rng.choice(known)
            ids = base[: rng.randrange(1, len(base) + 1)] + rng.choices(range(3), k=rng.randrange(1, 20))
            texts.append(pair.open(ids[:50]))
        elif verb == "evict" and ledger.num_cached:
            ledger.evict(rng.randrange(1, ledger.num_cached + 1))
        elif text is None:
            continue
        elif verb == "extend":
            batch = [one for one in texts if one.sequence.length < ENTRIES - 20]
            pair.extend(rng.sample(batch, rng.randrange(len(batch) + 1)), rng)
        elif verb == "fork" and len(texts) < ROWS:
            texts.append(Text(ledger.fork(text.sequence), text.ids[:], text.prompt))
        elif verb == "truncate" and text.sequence.length > text.prompt:
            ledger.truncate(text.sequence, text.sequence.length - 1)
            text.ids.pop()
        elif verb == "close":
            texts.remove(text)
            known.append(text.ids[: max(text.sequence.length, 1)])
            pair.close(text)
        if seed < 3 or rng.random() < 0.3:
            pair.apply()
    for text in texts:
        pair.close(text)
    ledger.evict(ledger.num_cached)
    pair.apply()
    assert pair.memory.num_free == pair.memory.capacity
    assert pair.kinds >= {Alloc, AllocPart, SplitSegment, StoreSegment, MapSegments}


@pytest.mark.parametrize("cls", [1, 2])
@pytest.mark.parametrize("place", ["shared", "own"])
def test_a_wrong_slot_of_any_class_is_found(cls: int, place: str, device: torch.device) -> None:
    pair, rng = Pair(LIFETIMES["full, window and chunk"], 80, device), random.Random(0)
    first = pair.open([1] * 19)
    while first.sequence.length < first.prompt:
        pair.extend([first], rng)
    pair.close(first)
    second = pair.open([*first.ids, 2])
    for _ in range(3):
        pair.extend([second], rng)
    pair.apply()
    (row,) = (row for row in pair.ledger.holdings().rows if row.row == second.sequence.row)
    window = row.windows[cls - 1]
    entry = window.start if place == "shared" else row.length - 1
    assert window.start < window.own < row.length
    slot = pair.memory.table.groups[pair.model.of_class[cls][0], row.row, entry]
    before = slot.clone()
    slot.copy_(pair.memory.table.groups[0, row.row, 0])
    with pytest.raises(CheckFailed):
        pair.check()
    slot.copy_(before)
    pair.check()


def test_equal_edits_give_equal_memories(device: torch.device) -> None:
    """The digest covers the tables of all groups."""
    pairs = [Pair(LIFETIMES["full, window and chunk"], 80, device) for _ in range(2)]
    for pair in pairs:
        text, rng = pair.open([1] * 19), random.Random(0)
        while text.sequence.length < 30:
            pair.extend([text], rng)
            pair.apply()
    first, second = (pair.memory for pair in pairs)
    assert first.digest() == second.digest()
    first.table.groups[-1, 1, 29] += 1
    assert first.digest() != second.digest()


def test_a_step_that_follows_another_uploads_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a plan, too, where the Alloc of the decodes is the last edit; some rows reuse slots, others do not."""
    spec = KVSpec(2, 1, 2, 2, torch.float32, lifetimes=[FULL, WINDOW])
    ledger = TokenLedger(400, 2, 90, groups=spec.groups)
    memory = KVMemory(spec, 401, 2, 90, device)
    ids = array("i", [1]).tobytes()
    sequences = [ledger.open(ids), ledger.open(ids)]
    ledger.extend(sequences, [30, 1])
    uploads: list[int] = []  # in each step

    def counted(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
        uploads[-1] += 1
        return upload(arrays, device)

    monkeypatch.setattr("lightkv.memory.kv_memory.upload", counted)
    for _ in range(6):
        uploads.append(0)
        alloc = ledger.extend(sequences, [1, 1])
        edits = ledger.drain()
        memory.apply([*(edit for edit in edits if edit is not alloc), alloc])
    assert set(map(type, edits)) == {Alloc, AllocPart}
    assert set(edits[1].reused) == {0, 2}
    assert uploads[0]
    assert uploads[-3:] == [0, 0, 0]
    memory.check(ledger.holdings())


def test_several_plans_are_applied_at_once(device: torch.device) -> None:
    """The first decode after a prompt reuses a slot that the prompt has allocated: it has window and slack."""
    spec = KVSpec(3, 1, 2, 2, torch.float32, lifetimes=[FULL, WINDOW, CHUNK])
    ledger, memory = TokenLedger(400, 2, 90, groups=spec.groups), KVMemory(spec, 401, 2, 90, device)
    first, second = (ledger.open(array("i", [token]).tobytes()) for token in (1, 2))
    ledger.extend([first, second], [WINDOW.size + WINDOW.slack, 3])
    edits = ledger.drain()
    for _ in range(3):
        alloc = ledger.extend([first, second], [1, 1])
        edits += [*(edit for edit in ledger.drain() if edit is not alloc), alloc]
    assert any(edit.reused[0] for edit in edits[: edits.index(alloc)] if isinstance(edit, AllocPart))
    newest = memory.apply(edits)
    assert newest is not None
    rows = zip(alloc.rows, alloc.starts, strict=True)
    assert newest.tolist() == [int(memory.table.req_to_token[row, entry]) for row, entry in rows]
    memory.check(ledger.holdings())


def test_a_refused_extension_leaves_ledger_and_memory_equal(device: torch.device) -> None:
    spec = KVSpec(2, 1, 2, 2, torch.float32, lifetimes=[FULL, WINDOW])
    cache = KVCache(spec, 100, max_sequences=2, max_entries=200, device=device)
    sequence = cache.open([1] * 40)
    cache.extend([sequence], [40])
    cache.publish(sequence)
    cache.confirm()
    with pytest.raises(OutOfTokens):
        cache.extend([sequence], [120])
    cache.check()
    assert (sequence.length, cache.num_free) == (40, 100 - 40 - 11)


def test_a_prompt_hits_what_an_open_sequence_still_has(device: torch.device) -> None:
    """`match` says so, too; a call that is refused changes nothing."""
    spec = KVSpec(2, 1, 2, 2, torch.float32, lifetimes=[FULL, WINDOW])
    cache = KVCache(spec, 400, max_sequences=3, max_entries=90, device=device)
    first = cache.open([1] * 40 + [2] * 30)
    cache.extend([first], [70])
    cache.publish(first)
    prompt = [1] * 40 + [3] * 10
    assert cache.match(prompt) == 40
    before = cache.ledger.holdings()
    with pytest.raises(SequenceTooLong):
        cache.open(prompt * 2)
    assert cache.ledger.holdings() == before
    second = cache.open(prompt)
    assert second.num_hit == 40
    cache.extend([second], [10])
    cache.confirm()
    cache.extend([first, second], [1, 1])
    cache.check()
    assert cache.match(prompt) == 40


def rows_by_layer(cache: KVCache, sequence: Sequence, first: int = 0) -> list[torch.Tensor]:
    """Returns the K/V of what each layer sees of a sequence, from entry `first` of it on."""
    spec, found = cache.memory.pool.spec, []
    for layer in range(spec.num_layers):
        assert spec.lifetimes is not None
        seen = max(spec.lifetimes[layer].rule.first_seen(sequence.length), first)
        slots = cache.slots(sequence, layer)[seen:].long()
        found.append(torch.cat([one.flatten(1) for one in cache.memory.pool.read(layer, slots)], 1))
    return found


@pytest.mark.parametrize("format", ["auto", "int8"])
@pytest.mark.parametrize("name", LIFETIMES)
def test_a_sequence_goes_on_in_another_cache(name: str, format: str, device: torch.device) -> None:
    """Its windows bring what they keep alone, it can go back within the slack, and it shares what is there."""
    lifetimes = LIFETIMES[name]
    spec = KVSpec(len(lifetimes), 1, 8, 8, torch.float32, format, lifetimes=lifetimes)
    here, there = (KVCache(spec, 60 * spec.groups.num_groups, ROWS, ENTRIES, device) for _ in range(2))
    ids = [1] * 20 + [2] * 30
    sequence = here.open(ids)
    for count in (20, 29):
        slots = here.extend([sequence], [count])
        for layer in range(spec.num_layers):
            group = here.memory.group_of_layer[layer]
            here.memory.pool.write(layer, slots[group], *torch.randn(2, count, 1, 8, device=device))
    exported = here.export(sequence)
    assert exported.length == 49
    first = there.import_sequence(ids, exported)
    there.check()
    assert (first.length, there.num_held) == (49, spec.groups.slots(49))
    for ours, theirs in zip(rows_by_layer(there, first), rows_by_layer(here, sequence), strict=True):
        assert torch.equal(ours, theirs)
    there.truncate(first, 48)
    there.extend([first], [1])
    there.close(first)
    second = there.import_sequence([1] * 20 + [2] * 28 + [3, 4], exported._replace(length=49))
    assert second.num_hit >= 46
    there.check()
    there.close(second)
    there.evict(there.num_cached)
    assert there.num_free == there.capacity
    full = there.open(range(10, 10 + 50))
    there.extend([full], [50])
    before = there.ledger.holdings(), there.num_free
    with pytest.raises(OutOfTokens):
        there.import_sequence(ids, exported)
    assert (there.ledger.holdings(), there.num_free) == before
    there.check()


@pytest.mark.parametrize("lifetimes", [None, [FULL, CHUNK]])
def test_nothing_is_extended_and_exported(lifetimes: list[Lifetime] | None, device: torch.device) -> None:
    """A sequence without tokens, and one that begins with a chunk, of which it holds nothing yet."""
    spec = KVSpec(2, 1, 2, 2, torch.float32, lifetimes=lifetimes)
    here, there = (KVCache(spec, 400, max_sequences=3, max_entries=90, device=device) for _ in range(2))
    assert here.extend([], []).shape == ((2, 0) if lifetimes else (0,))
    sequence = here.open([1] * 14)
    assert [layer.shape[-2] for layer in here.export(sequence).layers] == [0, 0]
    here.extend([sequence], [14])
    here.close(sequence)
    here.evict(7 if lifetimes else 0)  # what was kept of the chunk before
    hit = here.open([1] * 14 + [2])
    exported = here.export(hit)
    assert [layer.shape[-2] for layer in exported.layers] == ([14, 0] if lifetimes else [14, 14])
    there.extend([there.import_sequence([1] * 14 + [2], exported)], [1])
    there.check()


def test_an_import_of_other_groups_or_of_less_than_is_seen_is_refused(device: torch.device) -> None:
    spec = KVSpec(2, 1, 2, 2, torch.float32, lifetimes=[FULL, WINDOW])
    cache = KVCache(spec, 400, max_sequences=3, max_entries=90, device=device)
    sequence = cache.open([1] * 30)
    cache.extend([sequence], [30])
    cache.publish(sequence)  # so that a prompt which turns off from it would split its segment
    exported = cache.export(sequence)
    assert [layer.shape[-2] for layer in exported.layers] == [30, 11]  # 5 are seen, and 6 more are kept
    cut = [exported.layers[0], exported.layers[1][:, -4:]]
    before = cache.ledger.holdings()
    for layers, said in [
        (cut, "sees those from"),
        (exported.layers[:1], "1 tensors"),
        ([exported.layers[0], exported.layers[1][0]], "2 are needed"),
        ([exported.layers[0], torch.cat([exported.layers[1]] * 3, 1)], "begins at"),
        ([], "0 tensors"),
    ]:
        with pytest.raises(ValueError, match=said):
            cache.import_sequence([1] * 20 + [2] * 11, exported._replace(layers=layers))
        assert cache.ledger.holdings() == before
    with pytest.raises(TypeError, match="NoneType"):
        cache.import_sequence([1] * 31, exported._replace(layers=[exported.layers[0], None]))
    uniform = KVCache(KVSpec(2, 1, 2, 2, torch.float32), 400, max_sequences=3, max_entries=90, device=device)
    with pytest.raises(ValueError, match="in a cache of"):
        uniform.import_sequence([1] * 31, exported)
    cache.check()


def test_a_pools_plan_tells_tokens_that_were_asked_for_and_bytes_of_slots() -> None:
    spec = KVSpec(2, 1, 2, 2, torch.float32, lifetimes=[FULL, WINDOW])
    asked = plan_pool(spec, torch.device("cpu"), num_tokens=30)
    assert (asked.num_tokens, asked.why) == (60, "30 tokens were asked for")
    assert plan_pool(spec, torch.device("cpu")).why.endswith("at 16 bytes a slot")
