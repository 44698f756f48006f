"""OpenPPL's MultiHeadCacheAttention against a reference that is written from its contract."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightkv.contracts import openppl
from lightkv.contracts.openppl import _write_and_attend, multi_head_cache_attention
from lightkv.contracts.openppl_cache import LayerCache
from tests.support.combinations import covering_pairs, slow
from tests.support.contracts.openppl_checks import (
    COUNTS,
    GRID,
    PAST,
    PLACES,
    check,
    same_bytes,
    steps_of_two_sequences,
)
from tests.support.contracts.openppl_reference import Batch, Place, Setting

SAMPLE = covering_pairs([(one.dtype, one.quant_bit, one.is_alibi, one.is_causal, one.mask) for one in GRID])


def check_grid(setting: Setting, decoding: int = 2, places: list[Place] = PLACES) -> None:
    torch.manual_seed(0)
    check(Batch(PAST, COUNTS, decoding, setting), places)


@pytest.mark.parametrize("at", range(len(SAMPLE)))
def test_a_sample_of_the_grid(at: int) -> None:
    """Every pair of settings, each with some places of the cache, and all of these among five settings."""
    dtype, bits, alibi, causal, mask = SAMPLE[at]
    setting = Setting(dtype, bits, is_alibi=alibi, is_causal=causal, mask=mask)
    check_grid(setting, places=PLACES[at % 5 :: 5])


@pytest.mark.slow
@pytest.mark.parametrize("setting", GRID, ids=str)
def test_the_grid(setting: Setting) -> None:
    check_grid(setting)


@pytest.mark.parametrize("places", [PLACES[::5], *slow(PLACES)], ids=["some places", "all places"])
@pytest.mark.parametrize("decoding", [0, 3, 4])
@pytest.mark.parametrize("is_alibi", [False, True])
def test_sequences_that_decode_see_all_of_their_tokens_but_with_alibi(
    decoding: int, is_alibi: bool, places: list[Place]
) -> None:
    check_grid(Setting(is_alibi=is_alibi), decoding, places)


@pytest.mark.parametrize("heads", [(1, 1), (6, 3), (12, 4)])
def test_heads_of_any_number(heads: tuple[int, int]) -> None:
    torch.manual_seed(0)
    setting = Setting(is_alibi=True, num_heads=heads[0], num_kv_heads=heads[1], head_dim=24)
    check(Batch(PAST, COUNTS, 2, setting), PLACES[::5])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [1, 2, 3, 6, 8, 12, 24])
def test_groups_of_any_size(group: int, bits: int) -> None:
    torch.manual_seed(0)
    setting = Setting(torch.float16, bits, group, head_dim=24, scale_dtype=torch.float32)
    check(Batch(PAST, COUNTS, 2, setting), PLACES[::5])


def test_sequences_without_queries_and_pages_of_any_size() -> None:
    torch.manual_seed(0)
    for bits in (0, 8):
        batch = Batch([7, 3, 0, 9, 0], [1, 0, 5, 3, 0], 2, Setting(quant_bit=bits))
        check(batch, [Place(page=page) for page in (0, 3, 7, 16)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_two_sequences_of_a_larger_model(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    setting = Setting(dtype, 8, 8, num_heads=32, num_kv_heads=4, head_dim=128)
    steps_of_two_sequences(setting, Place(layout=3, page=128))


def test_a_query_that_sees_no_key_gets_zeros() -> None:
    torch.manual_seed(0)
    batch = Batch(PAST, COUNTS, 2, Setting(mask="2d"))
    assert batch.mask is not None
    batch.mask[3, batch.kvstarts[2] : batch.kvstarts[3]] = float("-inf")
    assert not check(batch, PLACES[::5])[3].any()


def test_a_key_of_zeros_has_the_smallest_scale() -> None:
    batch = Batch([0], [2], 0, Setting(quant_bit=8))
    arguments = batch.arguments(Place(num_layers=1, layer_idx=0))
    multi_head_cache_attention(**arguments)
    slot = int(arguments["cachestarts"][0]) + 1
    assert not arguments["cache"][slot, 0, 0].any()
    assert (arguments["scale"][slot, 0, 0] == 1e-5).all()


def test_numbers_may_be_tensors_on_the_host_and_an_empty_step_does_nothing() -> None:
    batch = Batch(PAST, COUNTS, 2, Setting())
    plain, other = batch.arguments(Place()), batch.arguments(Place())
    for name in ("decoding_batches", "max_seqlen", "max_kvlen"):
        other[name] = torch.tensor(other[name])
    assert torch.equal(multi_head_cache_attention(**plain), multi_head_cache_attention(**other))
    empty = Batch([3], [0], 1, Setting(mask="2d")).arguments(Place())
    assert multi_head_cache_attention(**empty).shape == (0, 4, 16)


def test_the_operator_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(PAST, COUNTS, 2, Setting(torch.float16, 8, mask="2d", is_alibi=True))
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(openppl, "_write_and_attend", lambda *given: calls.append(given))
    multi_head_cache_attention(**batch.arguments(Place(2, 16)))
    (*given, out) = calls[0]
    flat = _write_and_attend.flat(*given, torch.zeros_like(out))
    operator = torch.ops.lightkv.multi_head_cache_attention.default
    torch.library.opcheck(operator, flat, test_utils=("test_schema", "test_faketensor"))


def test_it_is_compiled_without_a_break() -> None:
    batch = Batch(PAST, COUNTS, 2, Setting(torch.float32, 8))
    place = Place(3, 16)
    arguments, others = batch.arguments(place), batch.arguments(place)
    compiled = torch.compile(multi_head_cache_attention, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(**arguments), multi_head_cache_attention(**others))
    assert same_bytes(arguments["cache"], others["cache"])
    assert same_bytes(arguments["scale"], others["scale"])


def test_the_example_of_the_docs_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if "contracts.openppl" in block)
    exec(block, {})


# --------------------------------------------------------------------------------
# What is refused


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("num_heads 4 must be a multiple of num_kv_heads 3", {"num_kv_heads": 3}),
    ("layer_idx 2 must be one of num_layer 2", {"layer_idx": 2}),
    ("cache_mode must be 0 .*got 2 and 0", {"cache_mode": 2}),
    ("cache_layout 0 to 3; got 0 and 4", {"cache_layout": 4}),
    ("page_size 0 must be at least 1", {"cache_mode": 1, "page_size": 0}),
    ("quant_bit must be 0 .* got 2", {"quant_bit": 2}),
    ("quant_group 5 must divide head_dim 16", {"quant_bit": 8, "quant_group": 5}),
    ("query must be", {"head_dim": 8}),
    (
        "query, current_key and current_value must have one type",
        {"current_key": torch.zeros(10, 2, 16).half()},
    ),
    ("seqstarts must be int64", {"seqstarts": torch.zeros(5, dtype=torch.int32)}),
    ("cachestarts must be int64 \\[B, pages\\], with B 4", {"cache_mode": 1}),
    ("cache must be int8", {"quant_bit": 8}),
    ("cache must be .* L 3", {"num_layer": 3}),
    ("decoding_batches 5 must be 0 to 4", {"decoding_batches": 5}),
    ("max_kvlen of 3: there must be a sequence, and 1 <= max_seqlen <= max_kvlen", {"max_kvlen": 3}),
    ("10 queries do not fit 4 sequences of at most max_seqlen 2", {"max_seqlen": 2}),
    ("max_kvlen 100 is more than the 42 slots", {"max_kvlen": 100}),
    ("attn_mask must be float32 or float16", {"attn_mask": torch.zeros(10, 40, dtype=torch.bool)}),
    ("decoding_batches must be a number", {"decoding_batches": torch.tensor([1, 2])}),
    ("no attention backend is called 'cuda'", {"backend": "cuda"}),
]


@pytest.mark.parametrize(("message", "changes"), REFUSED, ids=[message for message, _ in REFUSED])
def test_what_does_not_fit_is_refused_and_nothing_is_written(message: str, changes: dict[str, Any]) -> None:
    arguments = Batch(PAST, COUNTS, 2, Setting()).arguments(Place())
    before = arguments["cache"].clone()
    with pytest.raises(ValueError, match=message):
        multi_head_cache_attention(**{**arguments, **changes})
    assert same_bytes(arguments["cache"], before)


def test_scales_that_do_not_fit_are_refused() -> None:
    arguments = Batch(PAST, COUNTS, 2, Setting(quant_bit=8)).arguments(Place())
    before = arguments["cache"].clone()
    for scale in (None, arguments["scale"].double(), arguments["scale"][..., :1]):
        with pytest.raises(ValueError, match="scale must be float32 or float16"):
            multi_head_cache_attention(**{**arguments, "scale": scale})
    assert same_bytes(arguments["cache"], before)


# --------------------------------------------------------------------------------
# The kernels


def suits(**changes: Any) -> bool:
    """Whether the kernels read such a cache in place."""
    setting = Setting(**{"quant_bit": 8, "head_dim": 24, **changes})
    cache, scale = Batch([2], [1], 0, setting).filled(Place(), 8, [0], [], [])
    return LayerCache(cache[:, 0], None if scale is None else scale[:, 0], setting.quant_bit).suits_kernels


def test_which_groups_the_kernels_read_in_place() -> None:
    assert [group for group in (1, 2, 3, 4, 6, 8, 12, 24) if suits(quant_group=group)] == [2, 4, 8, 24]
    assert [group for group in (1, 2, 3, 4, 6, 8, 12, 24) if suits(quant_bit=4, quant_group=group)] == [
        4,
        8,
        24,
    ]
    assert suits(quant_bit=0, head_dim=5)


KERNELS = {
    "int8": (Setting(torch.float32, 8, is_alibi=True, mask="3d"), COUNTS, [PLACES[2]]),
    "int4": (Setting(torch.float16, 4, is_causal=False, mask="padded"), COUNTS, [PLACES[9]]),
    "decode": (Setting(torch.float32, 8, 16), [1] * 4, [PLACES[15]]),
    "copied": (Setting(torch.float32, 8, 6, mask="2d", head_dim=24), [1] * 4, [Place(1, 7)]),
    "float16": (Setting(torch.float16, is_alibi=True), COUNTS, [Place(2, 7)]),
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernels(name: str, device: torch.device) -> None:
    torch.manual_seed(0)
    setting, counts, places = KERNELS[name]
    check(Batch(PAST, counts, 2, setting, device.type), places, "triton", slack=4.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "int4", "decode"])
def test_the_kernels_give_the_same_bits_in_all_places(name: str, device: torch.device) -> None:
    torch.manual_seed(0)
    setting, counts, _ = KERNELS[name]
    check(Batch(PAST, counts, 2, setting, device.type), PLACES, "triton", slack=4.0)
