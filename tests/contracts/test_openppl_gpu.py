"""OpenPPL's MultiHeadCacheAttention on a GPU: its kernels, and replays of captured calls."""

from typing import Any

import pytest
import torch

from lightkv.contracts.openppl import multi_head_cache_attention
from tests.support.contracts.openppl_authors import recorded, sample
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

pytestmark = pytest.mark.gpu

SLACK = 4.0  # kernels round the weights to the type of q

BF16 = [
    Setting(torch.bfloat16, bits, is_alibi=alibi, mask=mask)
    for bits, alibi, mask in ((0, False, "none"), (8, True, "2d"), (4, False, "3d"))
]
LARGE = [
    Setting(dtype, bits, group, is_alibi=alibi, num_heads=32, num_kv_heads=4, head_dim=128)
    for dtype, bits, group, alibi in (
        (torch.float16, 0, 8, False),
        (torch.float16, 8, 8, True),
        (torch.float16, 8, 128, False),
        (torch.bfloat16, 4, 16, False),
        (torch.float32, 8, 64, False),
    )
]


@pytest.mark.parametrize("setting", [*GRID[::5], *BF16], ids=str)
def test_a_sample_of_the_grid(setting: Setting) -> None:
    torch.manual_seed(0)
    check(Batch(PAST, COUNTS, 2, setting, "cuda"), PLACES, slack=SLACK)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("decoding", [0, 3, 4])
def test_no_key_after_a_query_is_seen_with_alibi(decoding: int, is_causal: bool) -> None:
    torch.manual_seed(0)
    setting = Setting(torch.float16, is_alibi=True, is_causal=is_causal)
    check(Batch(PAST, COUNTS, decoding, setting, "cuda"), PLACES[::5], slack=SLACK)


def test_the_authors_recorded_outputs() -> None:
    expected = recorded()
    for name, batch in sample("cuda").items():
        for place in PLACES[::5]:
            out = multi_head_cache_attention(**batch.arguments(place)).cpu()
            limit = 8e-3 if out.dtype == torch.float16 else 1e-4
            difference = (out - torch.from_numpy(expected[name])).abs()
            assert bool((difference <= limit * (1 + out.abs())).all()), (name, place)


@pytest.mark.slow
@pytest.mark.parametrize("setting", GRID, ids=str)
def test_the_grid(setting: Setting) -> None:
    torch.manual_seed(0)
    check(Batch(PAST, COUNTS, 2, setting, "cuda"), PLACES, slack=SLACK)


@pytest.mark.parametrize("counts", [[1, 1, 5, 3], [1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("setting", LARGE, ids=str)
def test_large_heads(setting: Setting, counts: list[int]) -> None:
    torch.manual_seed(0)
    check(Batch([70, 1, 33, 129], counts, 2, setting, "cuda"), PLACES[::5], slack=SLACK)


@pytest.mark.parametrize("group", [1, 6, 12])
def test_groups_that_are_copied_first(group: int) -> None:
    torch.manual_seed(0)
    setting = Setting(torch.float16, 8, group, is_alibi=True, mask="2d", head_dim=24)
    for counts in (COUNTS, [1] * 4):
        check(Batch(PAST, counts, 2, setting, "cuda"), PLACES[::5], slack=SLACK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_two_sequences_of_a_larger_model(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    setting = Setting(dtype, 8, 8, num_heads=32, num_kv_heads=4, head_dim=128)
    steps_of_two_sequences(setting, Place(layout=3, page=128), "cuda", SLACK)


GRAPHS = {
    "decode": (Setting(torch.float16, 8, is_alibi=True), [1] * 4, [1] * 4, Place(3, 16)),
    "mixed": (Setting(torch.float16, mask="padded"), COUNTS, [1, 2, 3, 4], Place(0)),
    "copied": (Setting(torch.float32, 8, 3, head_dim=24), COUNTS, [1, 1, 4, 4], Place(1, 7)),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_captured_call_is_replayed_with_other_values(name: str) -> None:
    """A graph of one batch is replayed for another one, of other lengths, that fits the same tensors."""
    setting, counts, others, place = GRAPHS[name]
    torch.manual_seed(0)
    first = Batch([9, 9, 9, 9], counts, 2, setting, "cuda")
    second = Batch([8, 1, 4, 7], others, 2, setting, "cuda")
    static, given = first.arguments(place), second.arguments(place)
    num_tokens = max(first.kvstarts[-1], second.kvstarts[-1]) + 5
    if setting.mask != "none":
        static["attn_mask"], given["attn_mask"] = (
            torch.nn.functional.pad(mask, (0, num_tokens - mask.shape[1]))
            for mask in (static["attn_mask"], given["attn_mask"])
        )
    # Both batches have one cache, as large as the first one's needs to be.
    starts, num_slots = first.slots(place)
    for arguments, batch in ((static, first), (given, second)):
        filled = batch.filled(place, num_slots, starts, batch.stored, batch.scales)
        arguments["cache"], arguments["scale"] = filled
        arguments["cachestarts"] = torch.tensor(starts, device="cuda")
        arguments["max_kvlen"] = 14
        arguments["max_seqlen"] = max(*counts, *others)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        multi_head_cache_attention(**static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = multi_head_cache_attention(**static)
    for value, new in zip(static.values(), given.values(), strict=True):
        if isinstance(value, torch.Tensor):
            value.copy_(new)
    graph.replay()
    expected: Any = multi_head_cache_attention(**given)
    assert same_bytes(out, expected)
    assert same_bytes(static["cache"], given["cache"])
    assert same_bytes(static["scale"], given["scale"])
    torch.testing.assert_close(out.double(), second.result()[0], rtol=8e-3, atol=8e-3)
