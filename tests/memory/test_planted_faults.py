"""Faults that are planted in a cache's host and device state, one at a time: `check` finds each of them."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from lightkv import InvalidFree, KVCache, KVSpec
from lightkv.errors import CheckFailed
from lightkv.ledger.crosses import CrossSequence, ReaderSequence
from lightkv.ledger.sequence import Sequence
from lightkv.ledger.state import LedgerState
from lightkv.triton_kernels.layout.ring import Ring
from tests.support.cache_life import Life

SPEC = KVSpec(num_layers=1, num_kv_heads=1, k_dim=1, v_dim=1, dtype=torch.float32)
WINDOW = Ring(sinks=2, size=6)


@dataclass
class World:
    """A cache that has one of everything: forks, gaps on both sides of a path, rings, cross sequences, sessions
    and cached segments that nobody holds."""

    cache: KVCache
    plain: Sequence  # hit a prefix that `fork` and `gapped` hold, too
    fork: Sequence
    gapped: Sequence  # has dropped tokens of its path
    evicted: Sequence  # has dropped private tokens
    ring: Sequence  # is full and has written over its slots
    young: Sequence  # a ring that is not full
    cross: CrossSequence
    reader: ReaderSequence

    @property
    def state(self) -> LedgerState:
        return self.cache.ledger._state


def make_world(device: torch.device) -> World:
    cache = KVCache(SPEC, 120, max_sequences=12, max_entries=24, device=device)
    # KVCache has no sessions; an engine's ledger has.
    state = cache.ledger._state
    state.sessions.limit = 40

    def fill(sequence: Sequence, count: int) -> Sequence:
        cache.extend([sequence], [count])
        return sequence

    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    first = fill(cache.open(prompt), 8)
    first.session = cache.ledger.sessions.open("one")
    cache.publish(first)
    cache.confirm()
    plain = fill(cache.open([*prompt, 9, 10]), 2)
    gapped = fill(cache.open([*prompt, 11, 12, 13]), 3)
    cache.close(first, [20, 21])
    other = fill(cache.open([50, 51, 52]), 3)
    other.session = cache.ledger.sessions.open("two")
    cache.close(other)
    cache.close(fill(cache.open([60, 61, 62, 63]), 4))
    fill(plain, 2)
    fork = fill(cache.fork(plain), 2)
    cache.release(gapped, 4, sink_tokens=2)
    evicted = fill(cache.open([30, 31, 32, 33, 34]), 5)
    cache.keep(evicted, torch.tensor([0, 2, 4], device=device))
    ring = fill(cache.open_ring([40, 41, 42], WINDOW), 3)
    for _ in range(10):
        fill(ring, 1)
    young = fill(cache.open_ring([43, 44], WINDOW), 2)
    cross = cache.open_cross(5)
    reader = cache.open_reader([70, 71], cross)
    cache.extend([reader], [2])
    cache.check()
    return World(cache, plain, fork, gapped, evicted, ring, young, cross, reader)


def add(holder: Callable[[World], object], name: str, by: int) -> Callable[[World], None]:
    """Returns a fault: an attribute that is `by` too large."""

    def plant(world: World) -> None:
        found = holder(world)
        setattr(found, name, getattr(found, name) + by)

    return plant


def add_at(tensor: Callable[[World], torch.Tensor], at: int, by: int) -> Callable[[World], None]:
    """Returns a fault: an element of a tensor on the device that is `by` too large."""

    def plant(world: World) -> None:
        tensor(world)[at] += by

    return plant


def add_dropped(sequence: Sequence, by: int) -> None:
    sequence.gap = sequence.gap._replace(dropped=sequence.gap.dropped + by)


def swap_slots(slots: torch.Tensor) -> None:
    slots[[0, 1]] = slots[[1, 0]]


def segment_of(world: World) -> torch.Tensor:
    return world.cache.memory.segments.of_class[0][world.plain.node.id]


def table_of(world: World) -> torch.Tensor:
    return world.cache.memory.table.req_to_token


def flip_state(world: World) -> None:
    state = world.cache.memory.allocator.mem_state
    state[int(state.nonzero()[0])] = 0


def move_boundary(world: World) -> None:
    """Two segments in a row, of which one gives a slot to the other."""
    memory, path = world.cache.memory, [segment.id for segment in world.plain.path()]
    lower, upper = memory.segments.of_class[0][path[0]], memory.segments.of_class[0][path[1]]
    memory.segments.of_class[0][path[0]] = torch.cat((upper[-1:], lower))
    memory.segments.of_class[0][path[1]] = upper[:-1]


def shift_positions(world: World) -> None:
    memory = world.cache.memory
    known, dropped = memory._dropped[world.evicted.row]
    memory._dropped[world.evicted.row] = known + dropped, dropped


def forget_end(world: World) -> None:
    sessions = world.state.sessions
    next(iter(sessions._by_name.values())).ends.clear()


def swap_cross(world: World) -> None:
    other = world.cache.open_cross(2)
    other.readers.add(world.reader.row)
    world.cross.readers.clear()
    world.reader.cross = other


def close_cross_row(world: World) -> None:
    world.cache.close(world.cross)
    world.cross.readers.clear()


PLANTED: dict[str, dict[str, Callable[[World], object]]] = {
    "allocator": {
        "a free slot is not free": flip_state,
        "a used slot is free": lambda world: world.cache.memory.allocator.mem_state.index_fill_(
            0, world.cache.slots(world.plain)[:1].long(), 1
        ),
        "the device's count": add_at(lambda world: world.cache.memory.allocator.counters, 0, 1),
        "the flags": add_at(lambda world: world.cache.memory.allocator.counters, 1, 1),
        "the host's count": add(lambda world: world.cache.memory.allocator, "_num_free", -1),
        "a block's count": add_at(lambda world: world.cache.memory.allocator._state.block_free, 0, 1),
        "a bit": add_at(lambda world: world.cache.memory.allocator._state.free_bits, 0, 2),
        "the padding": add_at(lambda world: world.cache.memory.allocator.mem_state, 0, 1),
    },
    "table": {
        "another slot in a shared entry": lambda world: table_of(world)[world.plain.row, 3].fill_(1),
        "two shared entries changed places": lambda world: swap_slots(table_of(world)[world.plain.row, :4]),
        "in a row with a gap": lambda world: swap_slots(table_of(world)[world.gapped.row, 1:4]),
        "in a fork": lambda world: swap_slots(table_of(world)[world.fork.row, 7:10]),
        "a free slot in a private entry": lambda world: table_of(world)[world.reader.row, 0].fill_(119),
        "slot 0": lambda world: table_of(world)[world.ring.row, 4].fill_(0),
        "no slot": lambda world: table_of(world)[world.ring.row, 4].fill_(-1),
        "beyond the pool": lambda world: table_of(world)[world.evicted.row, 1].fill_(500),
    },
    "segment": {
        "two slots changed places": lambda world: swap_slots(segment_of(world)),
        "another slot": lambda world: segment_of(world)[:1].fill_(119),
        "a slot moved to the segment below": move_boundary,
        "it is gone": lambda world: world.cache.memory.segments.of_class[0].pop(world.plain.node.id),
        "one too many": lambda world: world.cache.memory.segments.of_class[0].update(
            {999: torch.empty(0).int()}
        ),
        "its tokens are cut": lambda world: setattr(world.plain.node, "tokens", world.plain.node.tokens[:-4]),
        "a holder more": lambda world: world.plain.node.holders.add(world.ring.row),
        "a holder less": lambda world: world.plain.node.holders.discard(world.fork.row),
    },
    "dropped": {
        "one more, of its path": lambda world: add_dropped(world.gapped, 1),
        "one less, of its path": lambda world: add_dropped(world.gapped, -1),
        "one more, of its own": lambda world: add_dropped(world.evicted, 1),
        "none": lambda world: add_dropped(world.evicted, -world.evicted.dropped),
        "one, of none": lambda world: add_dropped(world.plain, 1),
        "one, of a fork's none": lambda world: add_dropped(world.fork, 1),
        "one, of a ring by edits": lambda world: add_dropped(world.ring, 1),
        "its end in the path": lambda world: setattr(
            world.gapped, "gap", world.gapped.gap._replace(node=None)
        ),
        "one more, of a ring": add(lambda world: world.ring, "dropped", 1),
        "one less, of a ring": add(lambda world: world.ring, "dropped", -1),
        "one, of a young ring": add(lambda world: world.young, "dropped", 1),
        "forgotten by the memory": lambda world: world.cache.memory._dropped.pop(world.gapped.row),
        "of a row that has none": lambda world: world.cache.memory._dropped.update(
            {world.plain.row: (torch.arange(2), 1)}
        ),
        "of a closed row": lambda world: world.cache.memory._dropped.update({12: (torch.arange(2), 1)}),
        "positions beyond its next": shift_positions,
    },
    "readers": {
        "one more": lambda world: world.cross.readers.add(world.plain.row),
        "a row that is not open": lambda world: world.cross.readers.add(12),
        "one less": lambda world: world.cross.readers.clear(),
        "their namespaces": lambda world: world.cross.namespaces.clear(),
    },
    "sessions": {
        "its protection": add(
            lambda world: world.state.tree.roots[()].children[b"\x32\0\0\0"], "protected", 1
        ),
        "its ends": forget_end,
        "tokens protected": add(lambda world: world.state.sessions, "_num_protected", 1),
        "who protects": lambda world: world.state.sessions._protecting.popitem(),
        "ends by segment": lambda world: world.state.sessions._by_end.popitem(),
        "the limit": lambda world: setattr(world.state.sessions, "limit", 2),
    },
    "rings": {
        "a slot less": add(lambda world: world.ring, "length", -1),
        "a slot more": add(lambda world: world.young, "length", 1),
        "tokens undone": add(lambda world: world.ring, "undone", 1),
        "where it was": add(lambda world: world.ring, "end", -1),
        "where it never was": add(lambda world: world.young, "end", 1),
        "another ring": lambda world: setattr(world.ring, "ring", Ring(sinks=2, size=5)),
    },
    "cross": {
        "not in its row": lambda world: setattr(world.reader, "row", world.plain.row),
        "another one": swap_cross,
        "a sequence that is none": lambda world: setattr(world.reader, "cross", world.plain),
        "closed while it is read": close_cross_row,
        "neither read nor kept": lambda world: (
            world.cache.close(world.reader),
            setattr(world.cross, "is_kept", False),
        ),
        "a slot less": add(lambda world: world.cross, "length", -1),
    },
}


@pytest.mark.parametrize(
    ("fault", "name"), [(fault, name) for fault, plants in PLANTED.items() for name in plants], ids=str
)
def test_check_finds_a_planted_fault(fault: str, name: str, device: torch.device) -> None:
    world = make_world(device)
    PLANTED[fault][name](world)
    with pytest.raises((CheckFailed, InvalidFree)):
        world.cache.check()


def is_found(cache: KVCache) -> bool:
    try:
        cache.check()
    except (CheckFailed, InvalidFree):
        return True
    return False


def test_wrong_entries_and_counts_are_found_in_any_state(device: torch.device) -> None:
    life, rng, num_planted = Life(5, device), random.Random(5), 0
    table, dropped = life.cache.memory.table.req_to_token, life.cache.memory._dropped
    for step in range(240):
        life.step()
        for sequence in list(life.cache.ledger.sequences) if step % 8 == 0 else ():
            add_dropped(sequence, 1)
            assert is_found(life.cache)
            add_dropped(sequence, -1)
            if sequence.row in dropped:
                positions, count = dropped[sequence.row]
                dropped[sequence.row] = positions, count - 1
                assert is_found(life.cache)
                dropped[sequence.row] = positions, count
            if sequence.shared:
                where = sequence.row, rng.randrange(sequence.shared)
                slot = int(table[where])
                table[where] = slot % life.cache.capacity + 1
                assert is_found(life.cache), where
                table[where] = slot
            num_planted += 1
            life.cache.check()
    assert num_planted > 60
