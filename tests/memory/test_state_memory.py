"""The device memory of states: it does what a model in lists does, and finds what is wrong in it."""

import random

import pytest
import torch

from lightkv import KVCache, KVSpec, StateTensor
from lightkv.errors import CheckFailed, OutOfMemory, OutOfStates
from lightkv.ledger.sequence import Sequence
from lightkv.memory.kv_memory import KVMemory
from tests.support.combinations import each_value
from tests.support.state_life import ENTRIES, ROWS, Life, live, random_life

GATED = StateTensor("recurrent", (2, 3, 4), torch.float32), StateTensor("convolution", (3, 5), torch.float16)
STATES = [GATED, (StateTensor("window", (7,), torch.bfloat16),), GATED]
SPEC = KVSpec(2, 1, 2, 2, torch.float32, states=STATES)


def cache_of(device: torch.device, num_states: int = 6, **sizes: int) -> KVCache:
    return KVCache(SPEC, **{"capacity": 200, "max_sequences": 4, "max_entries": 90, **sizes}, device=device,
                   num_states=num_states)  # fmt: skip


def write(cache: KVCache, sequence: Sequence, value: float) -> None:
    """Writes a sequence's newest state, as a step does."""
    _, slots = cache.states([sequence])
    states = cache.memory.states
    assert states is not None
    for tensor in states.tensors:
        tensor[slots] = value


def read(cache: KVCache, sequence: Sequence) -> set[float]:
    slots, _ = cache.states([sequence])
    states = cache.memory.states
    assert states is not None
    return {float(one) for tensor in states.tensors for one in tensor[slots].flatten()}


@each_value(seed=range(4))
def test_random_lives_of_the_memory(seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model allocates the lowest free states, too, so the slots are the same."""
    rng = random.Random(seed)
    life = random_life("all", rng)
    ledger = life.ledger
    memory = KVMemory(SPEC, ledger.capacity + 1, ROWS, ENTRIES, device, ledger.states.capacity)
    assert memory.states is not None

    def apply(one: Life) -> None:
        edits = ledger.drain()
        memory.apply(edits)
        one.memory.apply(edits)
        holdings = ledger.holdings()
        memory.check(holdings)
        table = memory.states.table.tolist() if memory.states else []
        for row in [row.row for row in holdings.rows]:
            reads, writes = one.memory.rows[row]
            assert table[row][0] == reads
            assert table[row][1] in (0, writes)

    monkeypatch.setattr(Life, "apply", apply)
    live(life, rng, 150)
    assert len(memory.states.free) == ledger.states.capacity


def test_a_hit_reads_what_was_handed_over_and_leaves_it_as_it_is(device: torch.device) -> None:
    cache = cache_of(device)
    first = cache.open([1] * 20, keep_at=[15])
    for number, count in enumerate((15, 5), start=1):
        assert cache.ledger.piece(first, 20) == count or number == 2
        cache.extend([first], [count])
        assert read(cache, first) == {float(number - 1)}  # at first, the state before any token
        write(cache, first, float(number))
        cache.publish(first)
        cache.confirm()
    cache.check()
    for _ in range(2):
        other = cache.open([1] * 15 + [2] * 3)
        assert other.num_hit == 15
        cache.extend([other], [1])
        assert read(cache, other) == {1.0}
        write(cache, other, 9.0)
        cache.confirm()
        cache.extend([other], [1])
        assert read(cache, other) == {9.0}
        cache.close(other, cache=False)
        cache.check()
    assert cache.memory_map(of_states=True).counts[1:5] == (4, 1, 0, 1)
    cache.extend([first], [1])  # which leaves the snapshot that the step before has read
    assert cache.ledger.states.num_held == 1


def test_a_fork_reads_what_its_parent_has_written(device: torch.device) -> None:
    cache = cache_of(device)
    parent = cache.open([1] * 9)
    cache.extend([parent], [9])
    write(cache, parent, 3.0)
    cache.confirm()
    fork = cache.fork(parent)
    cache.extend([parent, fork], [1, 1])
    assert read(cache, parent) == read(cache, fork) == {3.0}
    assert len(set(cache.states([parent, fork]).writes.tolist())) == 2
    cache.check()


def test_a_sequence_goes_on_in_another_cache(device: torch.device) -> None:
    here, there = cache_of(device), cache_of(device)
    ids = [1] * 20
    first = here.open(ids)
    here.extend([first], [19])
    write(here, first, 5.0)
    here.confirm()
    exported = here.export(first)
    shapes = [(1, 2, 3, 4), (1, 3, 5)]
    assert [tuple(one.shape) for one in exported.states] == [*shapes, (1, 7), *shapes]
    second = there.import_sequence(ids, exported)
    there.check()
    there.extend([second], [1])
    assert read(there, second) == {5.0}
    there.close(second)
    there.check()
    assert there.match([*ids, 7]) == 20
    full = cache_of(device, num_states=1)
    full.extend([full.open([3])], [1])
    with pytest.raises(OutOfStates):
        full.import_sequence(ids, exported)
    full.check()
    with pytest.raises(ValueError, match="of states"):
        there.import_sequence([2] * 20, exported._replace(states=exported.states[:2]))


def test_states_have_the_bytes_of_their_tensors_and_a_cache_of_them_needs_slots(device: torch.device) -> None:
    assert SPEC.bytes_per_state == 2 * (24 * 4 + 15 * 2) + 7 * 2
    for spec, num_states in ((SPEC, 0), (KVSpec(1, 1, 2, 2, torch.float32), 3)):
        with pytest.raises(ValueError, match="state slots"):
            KVCache(spec, 10, 2, 9, device, num_states=num_states)
    with pytest.raises(TypeError, match="StateTensor"):
        KVSpec(1, 1, 2, 2, torch.float32, states=[["recurrent"]])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="at least 1"):
        KVSpec(1, 1, 2, 2, torch.float32, states=[[StateTensor("recurrent", (0,), torch.float32)]])
    huge = KVSpec(1, 1, 2, 2, torch.float32, states=[[StateTensor("recurrent", (2**50,), torch.float32)]])
    with pytest.raises(OutOfMemory, match="8 states"):
        KVCache(huge, 10, 2, 9, device, num_states=7)
    uniform = KVCache(KVSpec(1, 1, 2, 2, torch.float32), 10, 2, 9, device)
    with pytest.raises(ValueError, match="no layer has states"):
        uniform.states([])
    with pytest.raises(ValueError, match="no layer has states"):
        uniform.memory_map(of_states=True)


@pytest.mark.parametrize("fault", ["reads", "writes", "lost", "twice", "zero", "segment"])
def test_a_planted_fault_is_found(fault: str, device: torch.device) -> None:
    cache = cache_of(device)
    first = cache.open([1] * 9)
    cache.extend([first], [9])
    cache.close(first)
    second = cache.open([1] * 9 + [2])
    cache.check()
    states = cache.memory.states
    assert states is not None
    (segment,) = states._segments
    match fault:
        case "reads":
            states.table[second.row, 0] = 3
        case "writes":
            states.table[second.row, 1] = 3
        case "lost":
            states.free.pop()
        case "twice":
            states._segments[segment] = 4
        case "zero":
            states.tensors[1][0, 0] = 1
        case "segment":
            states._segments[segment + 1] = states._segments.pop(segment)
    with pytest.raises(CheckFailed):
        cache.check()


def test_memories_with_the_same_edits_have_the_same_digest(device: torch.device) -> None:
    digests = []
    for num_tokens in (3, 3, 4):
        cache = cache_of(device)
        sequences = [cache.open([token] * 9) for token in (1, 2)]
        cache.extend(sequences[: num_tokens - 2], [1] * (num_tokens - 2))
        digests.append(cache.memory.digest())
    assert digests[0] == digests[1] != digests[2]
