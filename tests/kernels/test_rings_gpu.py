"""Rings and beam tables on a GPU: bf16, long texts, Hopper's kernel, and replays of a captured step."""

from typing import Any

import pytest
import torch

from lightkv.triton_kernels.attention.decode.decode_attention import (
    decode_attention,
    decode_attention_reference,
)
from lightkv.triton_kernels.attention.decode.decode_plan import decode_plan
from lightkv.triton_kernels.attention.lookups import BeamTable, RingRows
from lightkv.triton_kernels.attention.mixed_attention import mixed_attention, mixed_attention_reference
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions, HeadShape
from lightkv.triton_kernels.attention.prefill.prefill_attention import (
    prefill_attention,
    prefill_attention_reference,
)
from lightkv.triton_kernels.attention.variants import Window
from lightkv.triton_kernels.layout.ring import Ring
from tests.support.attention.caches import assert_close, poisoned_cache, starts
from tests.support.attention.feature_table import covers
from tests.support.attention.ring_texts import RINGS, beams_of, check_stream, rotation_of, written

pytestmark = pytest.mark.gpu

TYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", RINGS)
@pytest.mark.parametrize(("group", "key_dim"), [(4, 128), (1, 64), (8, 80)], ids=str)
def test_streams(dtype: str, name: str, group: int, key_dim: int) -> None:
    torch.manual_seed(0)
    lengths = [400, 0, 1, 95, 5000, 39]
    texts = written(RINGS[name], lengths, "cuda", TYPES[dtype], key_dim=key_dim, value_dim=key_dim)
    check_stream(texts, group=group)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("ring", [Ring(4, 2044, 64), Ring(0, 4096, 1)], ids=str)
def test_a_large_window(dtype: str, ring: Ring) -> None:
    torch.manual_seed(1)
    texts = written(ring, [9000, 3, 100_000, 2048], "cuda", TYPES[dtype], key_dim=128, value_dim=128)
    check_stream(texts, group=4, num_pairs=64)


@covers("ring, a layer with a window", "Hopper's prefill")
@covers("positions read from other rows", "Hopper's prefill")
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("kind", ["ring", "beams"])
@pytest.mark.parametrize("shift", [0, 4], ids="shift{}".format)
@pytest.mark.parametrize("window", [0, 1024], ids="window{}".format)
def test_prefill_and_mixed_steps(dtype: str, kind: str, shift: int, window: int) -> None:
    """Heads of 128 dims, so that Hopper's kernel computes the prefills where there is one."""
    if kind == "ring" and (shift or not window):
        pytest.skip("rings have no pages, and prefill over them is for layers with a window")
    torch.manual_seed(2)
    options = AttentionOptions().plus(Window(window) if window else None)
    sizes: dict[str, Any] = {"key_dim": 128, "value_dim": 128}
    if kind == "ring":
        texts = written(Ring(2, 2048), [5000, 1300, 70, 9000], "cuda", TYPES[dtype], **sizes)
        kv, rows, lengths = texts[:3]
    else:
        cache = poisoned_cache([3000] * 4, device="cuda", dtype=TYPES[dtype], shift=shift, **sizes)
        table = beams_of(cache.kv, cache.rows, 3000)
        kv, rows, lengths = cache.kv._replace(lookup=BeamTable(table, shift)), cache.rows, cache.lengths
    q_lens = [1024, 700, 33, 1]
    q = torch.randn(sum(q_lens), 8, 128, device="cuda").to(TYPES[dtype])
    step = q, kv, rows, starts(q_lens, "cuda"), lengths, options
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan, device="cuda")
    assert_close(prefill_attention(*step, out=out, lse=lse), prefill_attention_reference(*step))
    assert lse.isfinite().all()
    q = torch.randn(702, 8, 128, device="cuda").to(TYPES[dtype])
    mixed = q, kv, rows, starts([699], "cuda"), lengths, options
    assert_close(mixed_attention(*mixed), mixed_attention_reference(*mixed))
    for num_queries in (1, 4):
        q = torch.randn(4 * num_queries, 8, 128, device="cuda").to(TYPES[dtype])
        decode = q, kv, rows, lengths, options
        expected = decode_attention_reference(*decode, num_queries=num_queries)
        assert_close(decode_attention(*decode, num_queries=num_queries), expected)


def test_a_captured_step_follows_its_lengths() -> None:
    torch.manual_seed(3)
    ring = Ring(4, 300, 7)
    texts = written(ring, [1000, 1000, 1000], "cuda", torch.bfloat16, key_dim=128, value_dim=128)
    kv, rows = texts.kv, texts.rows  # every entry is written, so any length has keys
    lengths = torch.ones(3, dtype=torch.int32, device="cuda")
    inverse = 10.0 ** -torch.linspace(0, 3, 64, dtype=torch.float64, device="cuda")
    q = torch.randn(3, 8, 128, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)

    def step() -> None:
        plan = decode_plan(
            rows, lengths, HeadShape.of(q, kv), dtype=q.dtype, limits=RingRows(ring).limits(())
        )
        turned = kv._replace(lookup=RingRows(ring).rotated(lengths, inverse))
        decode_attention(q, turned, rows, lengths, plan=plan, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for now in ([1, 4, 5], [303, 304, 305], [311, 312, 123_456], [0, 3, 2_000_000]):
        lengths.copy_(torch.tensor(now))
        out.fill_(torch.nan)
        graph.replay()
        angles = [ring.dropped(length - 1) * inverse for length in now]
        rotation = rotation_of(ring, now, 64, "cuda")._replace(
            cos=torch.stack(angles).cos().float(), sin=torch.stack(angles).sin().float()
        )
        turned = kv._replace(lookup=RingRows(ring, rotation))
        assert_close(out, decode_attention_reference(q, turned, rows, lengths))
