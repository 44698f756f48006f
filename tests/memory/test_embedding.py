"""The programs of docs/memory.md run and print what the page shows, and its promises hold."""

import random
import re
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch.nn.functional import normalize, scaled_dot_product_attention

from lightkv import KVCache, KVSpec, LightKVError, OutOfTokens, WrongThread
from lightkv.edits import Alloc, Edit, StoreSegment, decode, encode
from lightkv.ledger.sequence import Sequence
from lightkv.memory.exported_kv import ExportedKV
from lightkv.memory.kv_memory import KVMemory
from lightkv.memory.kv_pool import KVPool
from tests.support.combinations import slow

PAGE = Path(__file__).parents[2] / "docs" / "memory.md"
SPEC = KVSpec(num_layers=2, num_kv_heads=2, k_dim=4, v_dim=3, dtype=torch.bfloat16)

# The names of the edits of models whose layers hold their tokens equally long.
OF_ONE_CLASS = {kind.__name__ for kind in get_args(Edit)} - {
    "AllocPart",
    "FreePart",
    "AllocStates",
    "ReadStates",
}


def make_cache(device: torch.device, capacity: int = 60, spec: KVSpec = SPEC) -> KVCache:
    return KVCache(spec, capacity, max_sequences=4, max_entries=32, device=device)


def fill(cache: KVCache, token_ids: list[int]) -> Sequence:
    """Opens a sequence and writes random K/V to its slots."""
    sequence = cache.open(token_ids)
    slots = cache.extend([sequence], [len(token_ids) - sequence.length])
    for layer_idx in range(cache.memory.pool.spec.num_layers):
        kv = cache.memory.pool.kv(layer_idx)
        kv[slots] = torch.randn(len(slots), kv.shape[1], device=kv.device).to(kv.dtype)
    return sequence


def kv_bytes(cache: KVCache, sequence: Sequence) -> list[torch.Tensor]:
    """Returns its K/V, layer by layer, as integers, so that NaN compares as well."""
    slots, pool = cache.slots(sequence).long(), cache.memory.pool
    return [pool.kv(layer_idx)[slots].view(torch.uint8).cpu() for layer_idx in range(pool.spec.num_layers)]


# --------------------------------------------------------------------------------
# The page


def part(heading: str) -> str:
    """Returns one of the page's parts, whose programs go on from one another."""
    return PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]


def blocks(language: str, text: str | None = None) -> list[str]:
    text = part("In an engine of your own") if text is None else text
    return re.findall(rf"^```{language}\n(.*?)^```$", text + "\n", re.MULTILINE | re.DOTALL)


@pytest.fixture
def page(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], str]:
    """Runs the page's first program. Returns its names and its output. Pools are filled with NaN first."""
    make_pool = KVPool.__init__

    def poisoned(pool: KVPool, spec: KVSpec, num_slots: int, device: torch.device) -> None:
        make_pool(pool, spec, num_slots, device)
        for layer_idx in range(spec.num_layers):
            pool.kv(layer_idx)[1:] = torch.nan  # slot 0 is padding, and is read

    monkeypatch.setattr(KVPool, "__init__", poisoned)
    names: dict[str, Any] = {}
    exec(compile(blocks("python")[0], str(PAGE), "exec"), names)
    return names, capsys.readouterr().out


def assert_written(cache: KVCache) -> None:
    """Checks that every held or cached token has its K/V, so that no hit or export reads what was not
    computed."""
    used = cache.memory.allocator.mem_state[1:] == 0
    for layer_idx in range(cache.memory.pool.spec.num_layers):
        assert not cache.memory.pool.kv(layer_idx)[1:][used].isnan().any()


def test_every_program_of_the_page_runs(page: tuple[dict[str, Any], str]) -> None:
    names, _ = page
    for program in blocks("python")[1:]:
        exec(compile(program, str(PAGE), "exec"), names)
        for name in ("cache", "other"):
            if name in names:
                assert_written(names[name])
    assert not any(layer.isnan().any() for layer in names["kept"].layers)
    names["cache"].check()
    names["other"].check()
    names["watched"].check()
    assert len(names["events"]) == 3  # `open` found nothing to share


def test_the_example_is_short_and_prints_what_the_page_says(page: tuple[dict[str, Any], str]) -> None:
    assert len(blocks("python")[0].splitlines()) < 60
    assert page[1] == blocks("text")[0]


def test_the_example_answers_as_attention_without_a_cache(page: tuple[dict[str, Any], str]) -> None:
    names, _ = page
    embedding, dim = names["embedding"], names["DIM"]
    assert [one.num_hit for one in names["sequences"]] == [0, 12]
    for prompt, answer in zip(names["prompts"], names["answers"], strict=True):
        ids = list(prompt)
        for token in answer:
            x = embedding[ids]
            q, k, v = ((x @ names[w]).unflatten(1, (-1, dim)).transpose(0, 1) for w in ("w_q", "w_k", "w_v"))
            attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = normalize(x + attended.transpose(0, 1).flatten(1) @ names["w_out"])
            assert int((x[-1] @ names["head"].T).argmax()) == token
            ids.append(token)
    assert len(set(names["answers"][0])) > 2  # the answer does not repeat one token


@pytest.fixture
def names(page: tuple[dict[str, Any], str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Runs the page's scheduler after its first program. Returns their names."""
    programs = [program for program in blocks("python") if "class Scheduler" in program]
    exec(compile(programs[0], str(PAGE), "exec"), page[0])
    assert capsys.readouterr().out == blocks("text")[1]
    return page[0]


def test_the_engine_with_states_answers_as_without_a_cache(
    names: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = [program for program in blocks("python") if "class HybridEngine" in program]
    assert len(program.splitlines()) <= 120
    assert "router" not in program
    exec(compile(program, str(PAGE), "exec"), names)
    assert capsys.readouterr().out == blocks("text")[2]
    engine, dim, width = names["engine"], names["DIM"], names["WIDTH"]
    assert min(engine.num_hits, engine.num_preempted) > 0
    for job in engine.finished:
        for at in range(len(job.output)):
            x = names["embedding"][job.prompt + job.output[:at]]
            q, k, v = ((x @ names[w]).unflatten(1, (-1, dim)).transpose(0, 1) for w in ("w_q", "w_k", "w_v"))
            attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = normalize(x + attended.transpose(0, 1).flatten(1) @ names["w_out"])
            fresh = torch.zeros(names["HEADS"], dim, dim), torch.zeros(3, width)
            x = normalize(x + names["gated_delta"](x, *fresh)[0] @ names["w_out"])
            best = (x[-1] @ names["head"].T).topk(2).indices.tolist()
            assert job.output[at] == best[0] or (at == 0 and job.output[0] in best)  # an answer of two
    engine.cache.check()


def windowed(names: dict[str, Any], prompt: list[int], first: int, count: int) -> list[int]:
    """Returns the `count` tokens after `prompt` by attention without a cache, where the first of them is the
    one that comes at place `first` in the order of scores."""
    ids, places = list(prompt), [first] + [0] * (count - 1)
    for place in places:
        x = names["embedding"][ids]
        heads = ((x @ names[w]).unflatten(1, (-1, names["DIM"])) for w in ("w_q", "w_k", "w_v"))
        q, k, v = (head.transpose(0, 1) for head in heads)
        seen = torch.ones(len(ids), len(ids), dtype=torch.bool).tril().triu(1 - names["WINDOW"])
        attended = scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        x = normalize(x + attended.transpose(0, 1).flatten(1) @ names["w_out"])
        ids.append(int((x[-1] @ names["head"].T).topk(place + 1).indices[place]))
    return ids[len(prompt) :]


def asked(names: dict[str, Any]) -> list[Any]:
    """Returns requests of which some have to wait, and some are preempted, in a pool of 48 tokens."""
    make, system = names["Request"], names["system"]
    few = [make([*system, 20, 21], 20, num_answers=2), make(list(range(40, 60)), 12), make([*system, 30], 24)]
    return few + [make([70 + i, 5, 9], 9 + i, num_answers=1 + i % 3) for i in range(2)]


def test_the_scheduler_is_short() -> None:
    (program,) = (program for program in blocks("python") if "class Scheduler" in program)
    lines = program.partition("class Scheduler")[2].partition("def make_forward")[0].splitlines()
    assert len([line for line in lines if line]) <= 60


@pytest.mark.parametrize("failing", [(), range(0, 200, 2)], ids=["no step", "each other step"])
def test_the_scheduler_answers_as_attention_without_a_cache(names: dict[str, Any], failing: Any) -> None:
    """Also where the forward pass fails in many steps, and each of these is tried again."""
    cache = KVCache(names["spec"], capacity=48, max_sequences=4, max_entries=64, device="cpu")
    forward, num_calls, num_out = names["make_forward"](cache), 0, 0
    extend = cache.extend

    def failing_forward(batch: list[Any], num_prefills: int) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls - 1 in failing:  # with nothing written
            raise RuntimeError("no such luck")
        return forward(batch, num_prefills)

    def counted_extend(sequences: list[Sequence], counts: list[int]) -> torch.Tensor:
        nonlocal num_out
        try:
            return extend(sequences, counts)
        except OutOfTokens:
            num_out += 1
            raise

    cache.extend = counted_extend  # type: ignore[method-assign]
    scheduler = names["Scheduler"](cache, failing_forward)
    scheduler.waiting += (requests := asked(names))
    expected = [
        windowed(names, request.prompt, place, request.max_tokens)
        for request in requests
        for place in range(request.num_answers)
    ]
    num_failed = 0
    while scheduler.waiting or scheduler.running:
        before = len(scheduler.waiting) + len(scheduler.running), cache.num_open
        try:
            scheduler.step()
        except RuntimeError:
            num_failed += 1
            assert len(scheduler.waiting) + len(scheduler.running) == before[0]
            assert cache.num_open == len(scheduler.running) <= before[1]
        cache.check()
        assert_written(cache)
        assert all(one.length <= names["WINDOW"] for _, one in scheduler.running if one.dropped)
        assert num_calls < 1000
    assert num_out > 3
    assert num_failed == len([call for call in range(num_calls) if call in failing])
    assert sorted(one.output for one in scheduler.finished) == sorted(expected)
    assert (cache.num_held, cache.num_open) == (0, 0)


def test_every_life_makes_the_edits_that_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    text = part("What happens inside")
    programs = re.findall(
        r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", text, re.MULTILINE | re.DOTALL
    )
    names: dict[str, Any] = {}
    kinds = set()
    for program, printed in programs:
        exec(compile(program, "memory.md", "exec"), names)
        assert capsys.readouterr().out == printed, program
        kinds |= set(re.findall(r"^(\w+)\(", printed, re.MULTILINE))
    assert kinds >= OF_ONE_CLASS


# --------------------------------------------------------------------------------
# Indices for the kernels of other libraries


def test_a_batch_as_flashinfer_wants_it(device: torch.device) -> None:
    cache = make_cache(device)
    first = fill(cache, [1, 2, 3, 4, 5])
    cache.publish(first)
    second = fill(cache, [1, 2, 3, 9])
    cache.extend([first], [2])
    batch = [second, first, cache.fork(second)]
    indptr, indices, last_page_len = cache.kv_indices(batch)
    for numbers in (indptr, indices, last_page_len):
        assert (numbers.dtype, numbers.device) == (torch.int32, cache.memory.device)
        assert numbers.is_contiguous()
    assert indptr.tolist() == [0, 4, 11, 15]
    assert last_page_len.tolist() == [1, 1, 1]
    for idx, sequence in enumerate(batch):
        own = indices[int(indptr[idx]) : int(indptr[idx + 1])]
        assert torch.equal(own, cache.slots(sequence))
        pages = cache.memory.pool.k(1)[:, None]  # [num_pages, page size, num_kv_heads, dim]
        assert pages.shape == (61, 1, 2, 4)
        read = pages[own.long()].flatten(0, 1)[: len(own) - 1 + int(last_page_len[idx])]
        assert torch.equal(read.view(torch.uint8), cache.memory.pool.k(1)[own.long()].view(torch.uint8))
    assert indices[:3].tolist() == indices[4:7].tolist()  # the prefix that they share
    assert indices[:4].tolist() == indices[11:].tolist()  # and the fork, all of it


def test_no_sequence_is_an_empty_batch(device: torch.device) -> None:
    assert [numbers.tolist() for numbers in make_cache(device).kv_indices([])] == [[0], [], []]


# --------------------------------------------------------------------------------
# Export and import


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_an_import_into_another_cache_has_the_same_bytes(dtype: torch.dtype, device: torch.device) -> None:
    spec = KVSpec(num_layers=3, num_kv_heads=2, k_dim=4, v_dim=3, dtype=dtype)
    cache, other = make_cache(device, spec=spec), make_cache(device, capacity=25, spec=spec)
    fill(other, [7, 8])  # so that the slots differ
    sequence = fill(cache, list(range(10, 20)))
    cache.memory.pool.k(1)[cache.slots(sequence)[3].long()] = float("nan")
    exported = cache.export(sequence)
    copy = other.import_sequence(range(10, 22), exported)
    assert copy.length == exported.length == 10
    assert cache.slots(sequence).tolist() != other.slots(copy).tolist()
    for ours, theirs in zip(kv_bytes(cache, sequence), kv_bytes(other, copy), strict=True):
        assert torch.equal(ours, theirs)
    assert all(layer.device.type == "cpu" for layer in exported.layers)
    assert all(layer.is_pinned() == (device.type == "cuda") for layer in exported.layers)
    cache.check()
    other.check()


def test_an_export_outlives_its_sequence_and_is_imported_again(device: torch.device) -> None:
    cache = make_cache(device)
    sequence = fill(cache, [1, 2, 3, 4, 5, 6])
    before, exported = kv_bytes(cache, sequence), cache.export(sequence)
    cache.close(sequence, cache=False)
    fill(cache, [9] * 20)  # gets the same slots
    back = cache.import_sequence([1, 2, 3, 4, 5, 6], exported)
    assert all(torch.equal(a, b) for a, b in zip(before, kv_bytes(cache, back), strict=True))


def test_tokens_that_the_other_cache_has_are_shared_and_not_copied(device: torch.device) -> None:
    cache, other = make_cache(device), make_cache(device)
    exported = cache.export(fill(cache, [1, 2, 3, 4, 5, 6]))
    theirs = fill(other, [1, 2, 3, 4])
    other.publish(theirs)
    before = other.num_free
    copy = other.import_sequence([1, 2, 3, 4, 5, 6], exported)
    assert (copy.num_hit, before - other.num_free) == (4, 2)
    assert other.slots(copy)[:4].tolist() == other.slots(theirs).tolist()
    for layer, found in zip(exported.layers, kv_bytes(other, copy), strict=True):
        assert torch.equal(found[4:], layer[4:].view(torch.uint8))
        assert not torch.equal(found[:4], layer[:4].view(torch.uint8))  # the other cache's own K/V stays
    other.check()


def test_a_refused_import_changes_nothing(device: torch.device) -> None:
    cache = make_cache(device)
    exported = cache.export(fill(cache, [1, 2, 3]))
    other = make_cache(device, spec=KVSpec(2, 2, 4, 4, torch.bfloat16))
    full = make_cache(device, capacity=2)
    for target, ids in ((other, [1, 2, 3]), (cache, [1, 2]), (full, [1, 2, 3])):
        before = target.num_free, target.num_cached, target.ledger.num_open
        with pytest.raises((ValueError, LightKVError)):
            target.import_sequence(ids, exported)
        assert (target.num_free, target.num_cached, target.ledger.num_open) == before
        target.check()


# --------------------------------------------------------------------------------
# The edits as a stream


def random_verbs(cache: KVCache, rng: random.Random, num_verbs: int) -> set[str]:
    """Calls random verbs. Returns the names of those that were called."""
    running: list[Sequence] = []
    called = set()
    verbs = ["open", "open", "extend", "extend", "publish", "fork", "truncate", "release", "keep"]
    for _ in range(num_verbs):
        verb = rng.choice(verbs) if running else "open"
        one = rng.choice(running) if running else None
        try:
            match verb:
                case "open":
                    running.append(cache.open([rng.randrange(2) for _ in range(rng.randint(1, 12))]))
                case "extend":
                    cache.extend(running, [rng.randint(1, 3) for _ in running])
                case "publish" if one:
                    cache.publish(one)
                case "fork" if one:
                    running.append(cache.fork(one))
                case "truncate" if one:
                    cache.truncate(one, rng.randint(0, one.length))
                case "release" if one:
                    cache.release(one, rng.randint(0, one.length // 2), one.gap.start)
                case "keep" if one:
                    entries = rng.sample(range(one.shared, one.length), rng.randint(0, one.num_private))
                    cache.keep(one, torch.tensor(entries, dtype=torch.int64, device=cache.memory.device))
            called.add(verb)
        except LightKVError:  # full: one ends
            gone = running.pop(rng.randrange(len(running)))
            cache.close(gone, [rng.randrange(2) for _ in range(4)], cache=rng.random() < 0.7)
            called.add("close")
    return called


@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3)])
def test_a_memory_with_the_same_edits_is_the_same(seed: int, device: torch.device) -> None:
    cache, mirror = make_cache(device), KVMemory(SPEC, 61, 4, 32, device)
    events: list[tuple[bytes, list[torch.Tensor]]] = []
    cache.on_edits = lambda edits, kept: events.append((encode(edits), kept))
    called = random_verbs(cache, random.Random(seed), 1500)
    assert called == {"open", "extend", "publish", "fork", "truncate", "release", "keep", "close"}
    kinds = set()
    for event, kept in events:
        edits = decode(event)
        kinds |= {type(edit).__name__ for edit in edits}
        mirror.apply(edits, kept)
    assert kinds == OF_ONE_CLASS
    memory = cache.memory
    assert torch.equal(mirror.table.req_to_token, memory.table.req_to_token)
    assert torch.equal(mirror.allocator.mem_state, memory.allocator.mem_state)
    assert mirror.num_free == memory.num_free
    assert mirror.segments.of_class[0].keys() == memory.segments.of_class[0].keys()
    assert all(
        torch.equal(mirror.segments.of_class[0][name], slots)
        for name, slots in memory.segments.of_class[0].items()
    )
    for sequence in cache.ledger.sequences:
        length = sequence.length
        assert torch.equal(mirror.positions(sequence.row, length), memory.positions(sequence.row, length))
    cache.check()


def edits_page() -> tuple[str, dict[str, Any]]:
    """Returns the parts that specify edits and their bytes, and the names of the reader's programs."""
    text = part("What happens inside") + part("The bytes of edits")
    names: dict[str, Any] = {}
    for program in blocks("python", part("The bytes of edits")):
        exec(compile(program, "memory.md", "exec"), names)
    return text, names


def test_the_page_of_the_bytes_has_every_edit_with_its_number_and_its_integers() -> None:
    text, names = edits_page()
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| ([^|]*) \|", text, re.MULTILINE)
    kinds = get_args(Edit)
    assert {name for _, name, _ in rows} == {kind.__name__ for kind in kinds} == set(names["SIZES"])
    for number, name, integers in rows:
        (kind,) = (kind for kind in kinds if kind.__name__ == name)
        types = [kind.__annotations__[field] for field in kind._fields]
        edit = kind(*(7 if one is int else (8, 9) for one in types))
        num_single = next((at for at, one in enumerate(types) if one is not int), len(types))
        assert integers.split(", then ")[0].split(", ")[:num_single] == list(kind._fields[:num_single])
        assert int.from_bytes(encode([edit])[:8], "little") == int(number) == list(names["SIZES"]).index(name)
    (example,) = re.findall(r"^```text\n((?:[0-9a-f]{2}\s+)+)```$", text, re.MULTILINE)
    assert decode(bytes.fromhex(example)) == [Alloc((1,), (0,), (3,)), StoreSegment(1, 0, 3, 1)]
    reader = text.partition("import struct")[2].partition("```")[0].splitlines()
    assert len([line for line in reader if line]) <= 30


@pytest.mark.parametrize(
    "message",
    [b"1234567", bytes(8), encode([Alloc((1,), (0,), (3,))])[:-8], *(
        struct.pack(f"<{2 + n}q", kind, n, *range(n))
        for kind, n in ((16, 1), (-1, 2), (0, 4), (1, 1), (1, 2), (2, 4), (6, 3), (12, 3), (12, 0), (13, 3))
    ), struct.pack("<2q", 5, -1)],
)  # fmt: skip
def test_bytes_that_are_no_edits_are_refused_by_both_readers(message: bytes) -> None:
    for reader in (decode, edits_page()[1]["read"]):
        with pytest.raises((ValueError, IndexError, struct.error)):
            reader(message)


@pytest.mark.parametrize("seed", range(2))
def test_the_reader_of_the_page_follows_a_cache(seed: int, device: torch.device) -> None:
    cache, (_, names) = make_cache(device), edits_page()
    memory, seen = names["Memory"](60, 4, 32), set()

    def follow(edits: list[Edit], kept: list[torch.Tensor]) -> None:
        found = names["read"](encode(edits))
        assert [name for name, _ in found] == [type(edit).__name__ for edit in edits]
        left = [entries.tolist() for entries in kept]
        for name, numbers in found:
            seen.add(name)
            memory.apply(name, numbers, left)
        assert not left
        ours = cache.memory
        assert memory.free == set(ours.allocator.mem_state.nonzero().flatten().tolist())
        assert memory.segments == {name: slots.tolist() for name, slots in ours.segments.of_class[0].items()}
        for row, _, start, end, *_ in cache.ledger.holdings().rows:
            assert memory.table[row][start:end] == ours.table.slots(row, start, end).tolist()

    failed: list[BaseException] = []
    cache.on_edits = lambda edits, kept: failing(lambda: follow(edits, kept), failed)
    called = random_verbs(cache, random.Random(seed), 800)
    assert not failed
    assert called == {"open", "extend", "publish", "fork", "truncate", "release", "keep", "close"}
    assert seen == OF_ONE_CLASS
    assert memory.table == cache.memory.table.req_to_token.tolist()


def failing(check: Callable[[], None], failed: list[BaseException]) -> None:
    """Runs a check in a callback, whose exceptions are logged and not raised, and keeps what it raises."""
    try:
        check()
    except BaseException as error:
        failed.append(error)
        raise


def test_a_verb_that_changes_nothing_calls_no_callback(device: torch.device) -> None:
    cache = make_cache(device)
    events: list[list[Edit]] = []
    cache.on_edits = lambda edits, kept: events.append(edits)
    sequence = cache.open([1, 2, 3])
    cache.publish(sequence)
    cache.evict(0)
    assert events == []
    cache.extend([sequence], [3])
    assert len(events) == 1


# --------------------------------------------------------------------------------
# One owner

ONE_TOKEN = ExportedKV(SPEC, 1, [torch.zeros(1, SPEC.row_width(0), dtype=SPEC.dtype)] * SPEC.num_layers)
VERBS: dict[str, Callable[[KVCache, Sequence], object]] = {
    "open": lambda cache, one: cache.open([5]),
    "extend": lambda cache, one: cache.extend([one], [1]),
    "publish": lambda cache, one: cache.publish(one),
    "confirm": lambda cache, one: cache.confirm(),
    "retract": lambda cache, one: cache.retract(),
    "fork": lambda cache, one: cache.fork(one),
    "truncate": lambda cache, one: cache.truncate(one, 1),
    "release": lambda cache, one: cache.release(one, 1),
    "keep": lambda cache, one: cache.keep(one, cache.positions(one)[:1]),
    "close": lambda cache, one: cache.close(one),
    "evict": lambda cache, one: cache.evict(0),
    "export": lambda cache, one: cache.export(one),
    "import": lambda cache, one: cache.import_sequence([1, 2, 3], ONE_TOKEN),
}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_a_verb_of_another_thread_raises_and_changes_nothing(
    verb: Callable[[KVCache, Sequence], object], device: torch.device
) -> None:
    cache = make_cache(device)
    sequence = fill(cache, [1, 2, 3])
    before = cache.num_free, sequence.length, cache.memory.table.req_to_token.clone()
    raised: list[BaseException] = []

    def call() -> None:
        try:
            verb(cache, sequence)
        except WrongThread as error:
            raised.append(error)

    thread = threading.Thread(target=call, name="stranger")
    thread.start()
    thread.join()
    assert "stranger called it" in str(raised[0])
    assert (cache.num_free, sequence.length) == before[:2]
    assert torch.equal(cache.memory.table.req_to_token, before[2])
    cache.check()
    verb(cache, sequence)  # the owner may
    cache.check()
