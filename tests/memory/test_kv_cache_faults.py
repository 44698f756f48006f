"""Calls that a cache refuses and failures around it: nothing is changed then, and no token stays held."""

import logging
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lightkv import KVCache, KVSpec, LightKVError, MemoryFailed, OutOfTokens, WrongThread
from lightkv.edits import Alloc, Edit, KeepEntries
from lightkv.ledger.sequence import Sequence
from lightkv.memory.exported_kv import ExportedKV
from lightkv.triton_kernels.layout.ring import Ring

SPEC = KVSpec(num_layers=2, num_kv_heads=1, k_dim=2, v_dim=1, dtype=torch.float32)
IDS = [1, 2, 3, 4]


def make_cache(device: torch.device) -> KVCache:
    return KVCache(SPEC, 20, max_sequences=4, max_entries=12, device=device)


def fill(cache: KVCache, token_ids: list[int]) -> Sequence:
    """Opens a sequence and writes each token's id as its K/V."""
    sequence = cache.open(token_ids)
    new = token_ids[sequence.length :]
    slots = cache.extend([sequence], [len(new)])
    for layer_idx in range(SPEC.num_layers):
        values = torch.tensor(new, dtype=SPEC.dtype, device=slots.device)
        cache.memory.pool.kv(layer_idx)[slots] = values[:, None].expand(-1, SPEC.row_width(0))
    return sequence


def exported(length: int = 3) -> ExportedKV:
    return ExportedKV(SPEC, length, [torch.ones(length, SPEC.row_width(0)) for _ in range(SPEC.num_layers)])


def state(cache: KVCache) -> tuple[object, ...]:
    """Returns everything that a refused call must not change."""
    cache.check()
    memory = cache.memory
    return (
        cache.num_free,
        cache.num_cached,
        cache.num_open,
        [repr(sequence) for sequence in cache.ledger.sequences],
        memory.table.req_to_token.tolist(),
        memory.allocator.mem_state.tolist(),
    )


# Verbs by name, called on a cache and a sequence that holds the K/V of IDS alone.
CHANGING: dict[str, Callable[[KVCache, Sequence], object]] = {
    "open": lambda cache, one: cache.open([5]),
    "extend": lambda cache, one: cache.extend([one], [1]),
    "shrink": lambda cache, one: cache.shrink([one], [1]),
    "publish": lambda cache, one: cache.publish(one),
    "confirm": lambda cache, one: cache.confirm(),
    "retract": lambda cache, one: cache.retract(),
    "fork": lambda cache, one: cache.fork(one),
    "truncate": lambda cache, one: cache.truncate(one, 1),
    "release": lambda cache, one: cache.release(one, 1),
    "keep": lambda cache, one: cache.keep(one, torch.tensor([2], device=cache.memory.device)),
    "close": lambda cache, one: cache.close(one),
    "evict": lambda cache, one: cache.evict(0),
    "open_cross": lambda cache, one: cache.open_cross(2),
    "open_reader": lambda cache, one: cache.open_reader([5], cache.open_cross(2)),
    "open_ring": lambda cache, one: cache.open_ring([5], Ring(1, 4)),
    "import_sequence": lambda cache, one: cache.import_sequence([7, 8, 9], exported()),
}
READING: dict[str, Callable[[KVCache, Sequence], object]] = {
    "match": lambda cache, one: cache.match(IDS),
    "slots": lambda cache, one: cache.slots(one),
    "positions": lambda cache, one: cache.positions(one),
    "kv_indices": lambda cache, one: cache.kv_indices([one]),
    "shared_prefixes": lambda cache, one: cache.shared_prefixes([one], 16),
    "export": lambda cache, one: cache.export(one),
    "memory_map": lambda cache, one: cache.memory_map(),
    "check": lambda cache, one: cache.check(),
}
VERBS = CHANGING | READING


def test_the_verbs_are_all_here() -> None:
    public = {name for name, value in vars(KVCache).items() if callable(value) and not name.startswith("_")}
    assert public == {*VERBS, "states"}  # which is refused where no layer has states


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_of_another_thread_is_refused(name: str, device: torch.device) -> None:
    cache = make_cache(device)
    sequence = fill(cache, IDS)
    before = state(cache)
    raised: list[WrongThread] = []

    def call() -> None:
        try:
            VERBS[name](cache, sequence)
        except WrongThread as error:
            raised.append(error)

    thread = threading.Thread(target=call, name="stranger")
    thread.start()
    thread.join()
    assert [str(error).split(",")[1].strip() for error in raised] == [
        "and stranger called it; have MainThread make the call"
    ]
    assert state(cache) == before
    VERBS[name](cache, sequence)  # the owner may
    cache.check()


# --------------------------------------------------------------------------------
# Sequences that are not open here

NAMING = sorted(
    set(VERBS)
    - {"open", "open_cross", "open_reader", "open_ring", "match", "confirm", "retract", "evict"}
    - {"import_sequence", "memory_map", "check"}
)


@pytest.mark.parametrize("name", NAMING)
def test_a_closed_sequence_is_refused(name: str, device: torch.device) -> None:
    cache = make_cache(device)
    sequence = fill(cache, IDS)
    cache.close(sequence)
    fill(cache, [9, 8])  # has the closed sequence's row
    before = state(cache)
    with pytest.raises(ValueError, match="closed, or another"):
        VERBS[name](cache, sequence)
    assert state(cache) == before


@pytest.mark.parametrize("name", NAMING)
def test_another_caches_sequence_is_refused(name: str, device: torch.device) -> None:
    cache, other = make_cache(device), make_cache(device)
    mine, theirs = fill(cache, [9, 8, 7, 6, 5]), fill(other, IDS)
    assert mine.row == theirs.row
    before = state(cache), state(other)
    with pytest.raises(ValueError, match="closed, or another"):
        VERBS[name](cache, theirs)
    assert (state(cache), state(other)) == before


@pytest.mark.parametrize("name", ["extend", "shrink", "kv_indices", "shared_prefixes"])
def test_one_sequence_of_another_cache_refuses_the_whole_batch(name: str, device: torch.device) -> None:
    cache, other = make_cache(device), make_cache(device)
    batch = [fill(cache, IDS), fill(other, IDS)]
    before = state(cache), state(other)
    verb = getattr(cache, name)
    with pytest.raises(ValueError, match="closed, or another"):
        verb(*{"kv_indices": [batch], "shared_prefixes": [batch, 16]}.get(name, [batch, [1, 1]]))
    assert (state(cache), state(other)) == before


# --------------------------------------------------------------------------------
# Callbacks


def test_a_callback_that_fails_does_not_change_what_the_caller_gets(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    cache, calm = make_cache(device), make_cache(device)
    for one in (cache, calm):
        first = fill(one, IDS)
        one.publish(first)
        one.confirm()

    def fail(*told: object) -> None:
        raise RuntimeError("no room in the log")

    cache.on_edits = fail
    with caplog.at_level(logging.ERROR, "lightkv"):
        for one in (cache, calm):
            sequence = one.open([*IDS, 5])  # a MapSegments
            assert sequence.length == 4
            assert len(one.extend([sequence], [2])) == 2
            assert one.fork(sequence).length == 6
            assert one.import_sequence([7, 8, 9], exported()).length == 3
    assert state(cache) == state(calm)
    assert len(caplog.records) == 4
    assert all("no room in the log" in str(record.exc_info) for record in caplog.records)


@pytest.mark.parametrize("name", VERBS)
def test_a_callback_may_read_but_not_change(name: str, device: torch.device) -> None:
    cache = make_cache(device)
    sequence = fill(cache, IDS)
    refused: list[LightKVError] = []
    states = []

    def call(*told: object) -> None:
        before = state(cache)
        try:
            VERBS[name](cache, sequence)
        except LightKVError as error:
            refused.append(error)
        states.append((before, state(cache)))

    cache.on_edits = call
    cache.extend([sequence], [1])
    assert len(refused) == (name in CHANGING)
    assert all("once that one has returned" in str(error) for error in refused)
    assert [before for before, _ in states] == [after for _, after in states] != []
    cache.on_edits = None
    VERBS[name](cache, sequence)  # it may now
    cache.check()


# --------------------------------------------------------------------------------
# A memory that fails

FAILURES = [torch.OutOfMemoryError("no room for an index"), KeyboardInterrupt("in the middle")]


def assert_every_verb_is_refused(cache: KVCache, sequence: Sequence, error: BaseException) -> None:
    for name, verb in VERBS.items():
        with pytest.raises(MemoryFailed, match="make a new cache") as refused:
            verb(cache, sequence)
        assert refused.value.failure == f"{type(error).__name__}: {error}", name


@pytest.mark.parametrize("error", FAILURES, ids=repr)
@pytest.mark.parametrize("name", sorted(set(CHANGING) - {"confirm"}))
def test_after_a_failure_of_the_memory_every_verb_is_refused(
    name: str, error: BaseException, device: torch.device
) -> None:
    cache = make_cache(device)
    cache.close(fill(cache, [8, 9]))  # to be hit, and evicted
    sequence = fill(cache, IDS)
    apply = cache.memory.apply

    def fail_halfway(edits: list[Edit], kept: list[torch.Tensor]) -> None:
        num = len(edits) // 2
        apply(edits[:num], kept[: sum(isinstance(edit, KeepEntries) for edit in edits[:num])])
        raise error

    cache.memory.apply = fail_halfway  # type: ignore[method-assign, assignment]
    told: list[object] = []
    cache.on_edits = lambda *edits: told.append(edits)
    with pytest.raises(type(error), match=str(error)):
        CHANGING[name](cache, sequence)
    cache.memory.apply = apply  # type: ignore[method-assign]
    assert_every_verb_is_refused(cache, sequence, error)
    assert not told


def test_an_allocation_that_fails_on_the_device_makes_no_wrong_slots(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger has counted the tokens by then."""
    cache = make_cache(device)
    sequence = fill(cache, IDS)

    def fail(*told: object, **named: object) -> None:
        raise FAILURES[0]

    monkeypatch.setattr(cache.memory.allocator, "alloc", fail)
    with pytest.raises(torch.OutOfMemoryError):
        cache.extend([sequence], [3])
    monkeypatch.undo()
    assert (cache.num_free, cache.memory.num_free) == (13, 16)
    assert_every_verb_is_refused(cache, sequence, FAILURES[0])


def test_slots_that_the_caller_never_learns_are_a_failure(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is closed then would be cached without K/V."""
    cache = make_cache(device)
    sequence = fill(cache, IDS)

    def fail(slots: torch.Tensor) -> None:
        raise FAILURES[0]

    monkeypatch.setattr(torch.Tensor, "long", fail)
    with pytest.raises(torch.OutOfMemoryError):
        cache.extend([sequence], [1])
    monkeypatch.undo()
    assert_every_verb_is_refused(cache, sequence, FAILURES[0])


@pytest.mark.parametrize("error", FAILURES, ids=repr)
def test_an_import_whose_memory_fails_raises_that_error(error: BaseException, device: torch.device) -> None:
    cache = make_cache(device)
    sequence = fill(cache, IDS)
    apply = cache.memory.apply

    def fail_at_slots(edits: list[Edit], kept: list[torch.Tensor]) -> torch.Tensor | None:
        if any(isinstance(edit, Alloc) for edit in edits):
            raise error
        return apply(edits, kept)

    cache.memory.apply = fail_at_slots  # type: ignore[method-assign, assignment]
    with pytest.raises(type(error), match=str(error)):
        cache.import_sequence([7, 8, 9], exported())
    assert_every_verb_is_refused(cache, sequence, error)


# --------------------------------------------------------------------------------
# Import

GOOD = exported().layers
NO_KV: dict[str, list[torch.Tensor]] = {
    "no layer": [],
    "a layer short": GOOD[:1],
    "a layer more": GOOD * 2,
    "a short layer": [GOOD[0], GOOD[1][:2]],
    "a long layer": [GOOD[0], torch.ones(4, SPEC.row_width(0))],
    "a narrow layer": [GOOD[0], GOOD[1][:, :2]],
    "flat layers": [layer.flatten() for layer in GOOD],
    "another type": [layer.half() for layer in GOOD],
}


@pytest.mark.parametrize("layers", NO_KV.values(), ids=NO_KV)
def test_layers_of_another_shape_are_refused(layers: list[torch.Tensor], device: torch.device) -> None:
    cache = make_cache(device)
    events: list[object] = []
    cache.on_edits = lambda *told: events.append(told)
    before = state(cache)
    with pytest.raises(ValueError, match=r"where 2 are .*give what `export` returned"):
        cache.import_sequence([7, 8, 9], ExportedKV(SPEC, 3, layers))
    assert state(cache) == before
    assert not events


@pytest.mark.parametrize("error", [RuntimeError("the copy failed"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("num_shared", [0, 2])
def test_a_copy_that_fails_leaves_nothing_held_or_cached(
    error: BaseException, num_shared: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(device)
    if num_shared:
        cache.close(fill(cache, [7, 8]))
    last = cache.memory.pool.buffers[-1]
    copy = torch.Tensor.index_copy_

    def fail_at_the_last(rows: torch.Tensor, *args: int | torch.Tensor) -> torch.Tensor:
        if rows is last:
            raise error
        return copy(rows, *args)

    monkeypatch.setattr(torch.Tensor, "index_copy_", fail_at_the_last)
    with pytest.raises(type(error)):
        cache.import_sequence([7, 8, 9], exported())
    monkeypatch.undo()
    assert (cache.num_open, cache.num_held, cache.num_cached) == (0, 0, num_shared)
    assert cache.open([7, 8, 9, 10]).num_hit == num_shared
    cache.check()


def test_an_import_that_finds_no_room_caches_nothing(device: torch.device) -> None:
    cache = make_cache(device)
    for ids in ([10 + i for i in range(12)], [30 + i for i in range(6)]):
        fill(cache, ids)
    before = state(cache)
    with pytest.raises(OutOfTokens):
        cache.import_sequence([7, 8, 9], exported())
    assert state(cache) == before


# --------------------------------------------------------------------------------
# Counts

COUNTED: dict[str, Callable[[KVCache, Sequence, object], object]] = {
    "extend": lambda cache, one, count: cache.extend([one], [count]),  # type: ignore[list-item]
    "extend, an array": lambda cache, one, count: cache.extend([one], np.array([count])),  # type: ignore[arg-type]
    "shrink": lambda cache, one, count: cache.shrink([one], [count]),  # type: ignore[list-item]
    "truncate": lambda cache, one, count: cache.truncate(one, count),  # type: ignore[arg-type]
    "release": lambda cache, one, count: cache.release(one, count),  # type: ignore[arg-type]
    "release, sinks": lambda cache, one, count: cache.release(one, 1, count),  # type: ignore[arg-type]
    "evict": lambda cache, one, count: cache.evict(count),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("count", [1.0, np.float64(1), "1", None], ids=repr)
def test_a_count_that_is_not_an_integer_is_refused(name: str, count: object, device: torch.device) -> None:
    cache = make_cache(device)
    cache.close(fill(cache, [7, 8]))
    sequence = fill(cache, IDS)
    before = state(cache)
    with pytest.raises(TypeError, match="integer"):
        COUNTED[name](cache, sequence, count)
    assert state(cache) == before


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8])
def test_numpy_integers_are_accepted_as_counts(name: str, kind: type, device: torch.device) -> None:
    states = []
    for count in (1, kind(1)):
        cache = make_cache(device)
        cache.close(fill(cache, [7, 8]))
        COUNTED[name](cache, fill(cache, IDS), count)
        states.append(state(cache))
        assert all(type(sequence.length) is int for sequence in cache.ledger.sequences)
        assert type(cache.num_free) is int
    assert states[0] == states[1]
