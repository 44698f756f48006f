"""Arguments of the wrong type, devices that are not there, and what the objects of a cache print."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightkv import (
    InvalidDevice,
    KVCache,
    KVFormat,
    KVPool,
    KVSpec,
    LightKVError,
    Ring,
    TokenAllocator,
    TokenLedger,
    TokenTable,
)
from lightkv.ledger import Sequence
from lightkv.memory.kv_memory import KVMemory
from lightkv.triton_kernels.layout.format_names import NAMES
from lightkv.triton_kernels.quantised.kv_format import Elements

SPEC = KVSpec(2, 2, 4, 4, torch.float32)


def make_cache(device: Any = "cpu") -> KVCache:
    return KVCache(SPEC, capacity=60, max_sequences=4, max_entries=32, device=device)


# --------------------------------------------------------------------------------
# Types

VERBS: dict[str, tuple[Callable[[KVCache, Any], object], str]] = {
    "a text as token ids": (lambda cache, one: cache.open("abc"), r"'abc'.*give a list of integers"),
    "no token ids": (lambda cache, one: cache.open(None), r"None.*give a list of integers"),
    "fractions as token ids": (lambda cache, one: cache.match([1.5]), r"float64: give a list of int"),
    "a set as token ids": (
        lambda cache, one: cache.open({1, 2}),
        r"\{1, 2\}.*give a list of integers",
    ),
    "a namespace in a list": (lambda cache, one: cache.open([1], ["a"]), r"\['a'\].*give a tuple"),
    "a number as ring": (lambda cache, one: cache.open_ring([1], 5), "ring is 5.*give a Ring"),
    "a number as cross": (lambda cache, one: cache.open_reader([1], 5), "got 5.*open or fork returned"),
    "one sequence": (
        lambda cache, one: cache.extend(one, [1]),
        r"sequences is Sequence.*such as \[sequence\]",
    ),
    "one count": (lambda cache, one: cache.extend([one], 1), "counts is 1.*one for each sequence"),
    "half a token": (lambda cache, one: cache.extend([one], [1.5]), "1.5.*give a list of integers"),
    "numbers as sequences": (
        lambda cache, one: cache.extend([5], [1]),
        "got 5.*open or fork returned",
    ),
    "a row": (lambda cache, one: cache.publish(one.row), "got 1 .*open or fork returned"),
    "a list to fork": (lambda cache, one: cache.fork([one]), "open or fork returned"),
    "a list to close": (lambda cache, one: cache.close([one]), "open or fork returned"),
    "a text as answer": (lambda cache, one: cache.close(one, "x"), "'x'.*give a list of integers"),
    "a text as length": (
        lambda cache, one: cache.truncate(one, "1"),
        "length is '1'.*give an integer",
    ),
    "part of a token": (lambda cache, one: cache.release(one, 1.0), "count is 1.0.*give an integer"),
    "a shrink of one": (lambda cache, one: cache.shrink(one, [1]), r"such as \[sequence\]"),
    "an eviction": (lambda cache, one: cache.evict("1"), "count is '1'.*give an integer"),
    "the slots of a row": (lambda cache, one: cache.slots(1), "open or fork returned"),
    "indices of one": (lambda cache, one: cache.kv_indices(one), r"such as \[sequence\]"),
    "prefixes of one": (lambda cache, one: cache.shared_prefixes(one, 4), r"such as \[sequence\]"),
    "an import of none": (lambda cache, one: cache.import_sequence([1], None), "None; give what `export`"),
    "a cross of words": (lambda cache, one: cache.open_cross("3"), "length is '3'.*give an integer"),
}


@pytest.mark.parametrize(("verb", "remedy"), VERBS.values(), ids=VERBS)
def test_a_wrong_type_is_refused_with_the_remedy_and_changes_nothing(
    verb: Callable[[KVCache, Sequence], object], remedy: str
) -> None:
    cache = make_cache()
    sequence = cache.open([1, 2, 3])
    cache.extend([sequence], [3])
    before = repr(cache), sequence.length
    with pytest.raises(TypeError, match=remedy):
        verb(cache, sequence)
    assert (repr(cache), sequence.length) == before
    cache.check()


@pytest.mark.parametrize("counts", [[1.5], [1.5, 0.5], ["1"]], ids=str)
def test_a_ledger_counts_whole_tokens(counts: Any) -> None:
    ledger = TokenLedger(100, 4, 32)
    sequences = [ledger.open(b"\1\0\0\0") for _ in counts]
    with pytest.raises(TypeError):
        ledger.extend(sequences, counts)
    assert (ledger.num_held, ledger.drain()) == (0, [])
    ledger.check()
    with pytest.raises(TypeError, match="int32_bytes"):
        ledger.open([1, 2])


@pytest.mark.parametrize("value", [5, None, torch.int8], ids=str)
def test_a_format_of_another_type_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"give a KVFormat or its name, such as \"int8\""):
        KVSpec(2, 2, 4, 4, torch.float32, value)


def test_a_pool_wants_a_spec_and_a_ring_integers() -> None:
    with pytest.raises(TypeError, match=r"spec is 'x' \(str\); give a KVSpec"):
        KVPool("x", 10, "cpu")
    with pytest.raises(TypeError, match="give integers"):
        Ring("1", 2, 3)


# --------------------------------------------------------------------------------
# Devices

MAKERS: dict[str, Callable[[Any], object]] = {
    "KVCache": make_cache,
    "KVMemory": lambda device: KVMemory(SPEC, 10, 4, 32, device),
    "KVPool": lambda device: KVPool(SPEC, 10, device),
    "TokenAllocator": lambda device: TokenAllocator(10, device),
    "TokenTable": lambda device: TokenTable(4, 32, device),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_device_that_is_not_there_is_refused_by_name(
    make: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, remedy in (
        ("cuda", "'cuda': torch .* sees no GPU; .*give cpu"),
        (torch.device("cuda:1"), "'cuda:1': torch .* sees no GPU"),
        ("gpu", "'gpu': torch knows no such device; give cpu, cuda or cuda:N"),
        ("xpu", "runs on cpu and cuda, not on xpu"),
        ("mps", "runs on cpu and cuda, not on mps"),
    ):
        with pytest.raises(InvalidDevice, match=remedy) as caught:
            make(device)
        assert isinstance(caught.value, LightKVError)
    for device in (None, 0):
        with pytest.raises(TypeError, match=r"give a torch\.device or its name"):
            make(device)


def test_a_gpu_beyond_the_last_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InvalidDevice, match="'cuda:2': there are 2 GPUs; give cuda:0 to cuda:1"):
        make_cache("cuda:2")


# --------------------------------------------------------------------------------
# What they print


def test_a_cache_prints_its_counts_and_its_shape() -> None:
    cache = make_cache()
    sequence = cache.open([1, 2, 3])
    cache.extend([sequence], [3])
    shape = (
        "KVSpec(num_layers=2, num_kv_heads=2, k_dim=4, v_dim=4, dtype=torch.float32, "
        "format=KVFormat.parse('auto'), lifetimes=None, layer_heads=None, holders=None, states=())"
    )
    assert repr(SPEC) == shape
    assert repr(cache) == (
        f"KVCache(57 free, 0 cached, 3 held of 60 tokens; 1 of 4 sequences open; on cpu; {shape})"
    )
    assert repr(cache.memory.pool) == f"KVPool(61 slots, 7,808 bytes on cpu; {shape})"
    assert repr(cache.ledger) == (
        "TokenLedger(57 free, 0 cached, 3 held of 60 tokens; 1 of 4 sequences open)"
    )


@pytest.mark.parametrize("name", [*NAMES, "int8-g8", "int4-g16"])
@pytest.mark.parametrize("skipped", [(), (0, 2)])
def test_a_format_prints_the_call_that_makes_it(name: str, skipped: tuple[int, ...]) -> None:
    made = KVFormat.parse(name, skipped)
    assert repr(made).startswith(f"KVFormat.parse('{name}'")
    assert eval(repr(made)) == made


def test_a_format_without_a_name_prints_its_elements() -> None:
    made = KVFormat(Elements(4, group=8))
    assert eval(repr(made)) == made


def test_a_spec_takes_the_name_of_a_format() -> None:
    named = KVSpec(2, 2, 32, 32, torch.float32, format="int8")
    assert named == KVSpec(2, 2, 32, 32, torch.float32, KVFormat.parse("int8"))
    assert named.bytes_per_token == 2 * 2 * (2 * 32 + 2 * 4)
    assert eval(repr(named)) == named
    with pytest.raises(ValueError, match="'int9' is no K/V format; choose one of"):
        KVSpec(2, 2, 32, 32, torch.float32, format="int9")
