"""Compares learned sinks and chunked masks, in every attention kernel and its reference, with a softmax in
float64 that has the sink as one more column.

The caches are those of `test_decode_attention`: shuffled slots, NaN in all free slots. Tensors that a call
allocates for itself, partial outputs above all, hold NaN, too.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.decode import decode_tuning
from lightkv.triton_kernels.attention.decode.decode_attention import (
    decode_attention,
    decode_attention_reference,
)
from lightkv.triton_kernels.attention.decode.decode_plan import SharedPrefixGroups, decode_plan
from lightkv.triton_kernels.attention.decode.decode_tuning import prefix_members
from lightkv.triton_kernels.attention.merge_states import merge_states
from lightkv.triton_kernels.attention.mixed_attention import (
    mixed_attention,
    mixed_attention_reference,
    mixed_plan,
)
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions, HeadShape, PagedKV
from lightkv.triton_kernels.attention.prefill import prefill_tuning
from lightkv.triton_kernels.attention.prefill.prefill_attention import (
    prefill_attention,
    prefill_attention_reference,
)
from lightkv.triton_kernels.attention.prefill.prefill_plan import prefill_plan
from lightkv.triton_kernels.attention.variants import Chunk, SinkLogits, Softcap, Window
from lightkv.triton_kernels.attention.variants.hooks import LOG2_E
from lightkv.triton_kernels.attention.variants.variant import limits
from tests.support.attention.caches import (
    TOLERANCE,
    Cache,
    assert_close,
    poisoned_cache,
    share_first_keys,
    starts,
)
from tests.support.attention.mixed_steps import make_step
from tests.support.attention.softmax import scores_of, weigh
from tests.support.combinations import each_pair_of, slow

LENGTHS = [130, 0, 1, 65]
PREFILLS = [(40, 30), (0, 5), (3, 62)]  # queries of a request, and tokens before them


@pytest.fixture(autouse=True)
def _poison_allocations() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # then torch.empty fills tensors with NaN
    yield
    torch.use_deterministic_algorithms(False)


def sinks(num_heads: int, device: torch.device | str) -> SinkLogits:
    """Returns sinks around the largest scores, one far below all scores, and one far above."""
    logits = torch.randn(num_heads) + 2.0
    logits[0], logits[-1] = -1e4, 60.0
    return SinkLogits(logits.to(device))


def dense(
    q: Tensor, kv: PagedKV, row: Tensor, length: int, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes one request's newest tokens as a softmax over keys and sink: the output `[n, H, Dv]`, the
    log-sum-exp `[n, H]` in base 2, and the probabilities `[H, n, length]`, float64."""
    num_queries = len(q)
    scores, v = scores_of(q, kv, row, length, options)
    chunk, window = options.of(Chunk), options.of(Window)
    positions = torch.arange(length - num_queries, length)
    visible = [
        [
            key <= position
            and (chunk is None or key // chunk.size == position // chunk.size)
            and (window is None or key > position - window.size)
            for key in range(length)
        ]
        for position in positions.tolist()
    ]
    hidden = ~torch.tensor(visible, dtype=torch.bool, device=q.device).view(num_queries, length)
    return weigh(scores.masked_fill(hidden, -torch.inf), v, options)


def check_rows(
    out: Tensor, lse: Tensor, q: Tensor, cache: Cache, q_lens: list[int], options: AttentionOptions
) -> None:
    begin = 0
    tolerance = TOLERANCE[out.dtype]
    for row, length, count in zip(cache.rows, cache.lengths.tolist(), q_lens, strict=True):
        end = begin + count
        expected, expected_lse, _ = dense(q[begin:end], cache.kv, row, length, options)
        torch.testing.assert_close(out[begin:end].double(), expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse[begin:end].double(), expected_lse, atol=2e-2, rtol=1e-3)
        begin = end


def check_decode(cache: Cache, options: AttentionOptions, *, group: int, num_queries: int = 1) -> None:
    _, num_kv_heads, key_dim = cache.kv.k.shape
    shape = len(cache.rows) * num_queries, group * num_kv_heads
    q = torch.randn(*shape, key_dim).to(cache.kv.k)
    out = torch.full((*shape, cache.kv.v.shape[2]), torch.nan, dtype=q.dtype, device=q.device)
    lse = torch.full(shape, torch.nan, device=q.device)
    decode_attention(q, *cache, options, num_queries=num_queries, out=out, lse=lse)
    check_rows(out, lse, q, cache, [num_queries] * len(cache.rows), options)
    assert_close(decode_attention_reference(q, *cache, options, num_queries=num_queries), out)


def masks(device: torch.device | str, num_heads: int) -> dict[str, AttentionOptions]:
    learned = sinks(num_heads, device)
    return {
        "sinks": AttentionOptions().plus(learned),
        "chunks": AttentionOptions().plus(Chunk(48)),
        "both": AttentionOptions().plus(Chunk(32), learned, Softcap(5.0)),
        "window": AttentionOptions().plus(Window(20), learned),
    }


MASKS = ["sinks", "chunks", "both", "window"]


@each_pair_of(
    "mask, num_splits, num_queries, group, shift",
    [
        (*mask, *queries)
        for mask in [("sinks", 1), ("sinks", 7), ("chunks", 1), ("both", 7), ("window", 7)]
        for queries in [(1, 4, 0), (3, 2, 4)]
    ],
)
def test_decode(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    num_splits: int,
    num_queries: int,
    group: int,
    shift: int,
    mask: str,
) -> None:
    torch.manual_seed(num_splits)
    monkeypatch.setattr(decode_tuning, "decode_workers", lambda *_: num_splits)
    cache = poisoned_cache(LENGTHS, device=device, shift=shift, num_kv_heads=1, key_dim=32, value_dim=32)
    check_decode(cache, masks(device, group)[mask], group=group, num_queries=num_queries)


@pytest.mark.parametrize("chunk", [1, *slow(31), 64, 1000], ids="chunk{}".format)
def test_chunks_of_any_length_with_queries_on_both_sides_of_a_border(
    device: torch.device, chunk: int
) -> None:
    torch.manual_seed(chunk)
    lengths = [chunk - 1, chunk, chunk + 1, 2 * chunk + 1] if chunk < 1000 else [70]
    cache = poisoned_cache(lengths, device=device, num_kv_heads=2, key_dim=16, value_dim=16)
    for num_queries in (1, 4):
        check_decode(cache, AttentionOptions().plus(Chunk(chunk)), group=2, num_queries=num_queries)


def check_shared(
    cache: Cache, prefixes: SharedPrefixGroups, options: AttentionOptions, num_queries: int
) -> None:
    num_kv_heads, dim = cache.kv.k.shape[1:]
    q = torch.randn(len(cache.rows) * num_queries, 4 * num_kv_heads, dim).to(cache.kv.k)
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan, device=q.device)
    plan = decode_plan(
        cache.rows,
        cache.lengths,
        HeadShape.of(q, cache.kv),
        dtype=q.dtype,
        limits=limits(options.variants),
        num_queries=num_queries,
        shared_prefixes=prefixes,
    )
    decode_attention(q, *cache, options, num_queries=num_queries, plan=plan, out=out, lse=lse)
    check_rows(out, lse, q, cache, [num_queries] * len(cache.rows), options)


@pytest.mark.parametrize(
    ("num_splits", "chunk", "num_queries"), [(1, 0, 1), (9, 0, 2), (1, 200, 1), (9, 48, 2)]
)
def test_a_shared_prefix(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, num_splits: int, chunk: int, num_queries: int
) -> None:
    """With chunks of 48, the members' queries are in the chunk where the prefix ends, in later ones, or on both
    sides of a border; one of them sees none of the prefix."""
    torch.manual_seed(num_splits)
    monkeypatch.setattr(decode_tuning, "decode_workers", lambda *_: num_splits)
    lengths = [140, 65, 145, 0, 131, 200]
    cache = poisoned_cache(lengths, device=device, num_kv_heads=1, key_dim=32, value_dim=32)
    prefixes = share_first_keys(cache, [(128, [0, 2, 4, 5])], 4)
    options = AttentionOptions().plus(Chunk(chunk) if chunk else None, sinks(4, device))
    check_shared(cache, prefixes, options, num_queries)


@pytest.mark.parametrize("mask", MASKS)
def test_prefill(device: torch.device, mask: str) -> None:
    torch.manual_seed(1)
    check_prefill(masks(device, 3)[mask], device, group=3, shift=4)


def test_a_tile_of_many_chunks_and_a_chunk_of_many_tiles(device: torch.device) -> None:
    torch.manual_seed(2)
    launch = tuning.Launch(32, 16, 4, 2)
    for chunk in (5, 96):
        options = AttentionOptions().plus(Chunk(chunk))
        check_prefill(options, device, group=1, sequences=[(40, 90)], head_dim=16, launch=launch)


def check_prefill(
    options: AttentionOptions,
    device: torch.device | str,
    *,
    group: int,
    shift: int = 0,
    num_kv_heads: int = 1,
    sequences: list[tuple[int, int]] = PREFILLS,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    launch: tuning.Launch | None = None,
    shares: prefill_tuning.PrefillShares | None = None,
) -> None:
    lengths = [count + before for count, before in sequences]
    cache = poisoned_cache(
        lengths,
        device=device,
        dtype=dtype,
        num_kv_heads=num_kv_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        shift=shift,
    )
    q_lens = [count for count, _ in sequences]
    q = torch.randn(sum(q_lens), group * num_kv_heads, head_dim).to(device, dtype)
    args = q, cache.kv, cache.rows, starts(q_lens, device), cache.lengths
    plan = prefill_plan(
        *args[2:],
        HeadShape.of(q, cache.kv),
        num_tokens=len(q),
        dtype=dtype,
        limits=limits(options.variants),
        launch=launch,
        shares=shares,
    )
    assert shares is None or int((plan.items[:, 8] >= 0).sum()) > 1  # a tile is cut
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan, device=device)
    prefill_attention(*args, options, plan=plan, out=out, lse=lse)
    check_rows(out, lse, q, cache, q_lens, options)
    assert_close(prefill_attention_reference(*args, options), out)


@pytest.mark.parametrize("mask", [*slow("sinks"), "both", "window", "chunks of 200"])
def test_a_prefill_whose_keys_are_shared_out(device: torch.device, mask: str) -> None:
    """The sinks join one of a tile's parts, and chunks begin inside of parts."""
    torch.manual_seed(3)
    options = masks(device, 2) | {"chunks of 200": AttentionOptions().plus(Chunk(200), sinks(2, device))}
    shares = prefill_tuning.PrefillShares(8, 8, 32, 1, -1000)
    launch = tuning.Launch(32, 16, 4, 2)
    sequences = [(20, 390), (3, 30), (0, 9)]
    check_prefill(
        options[mask], device, group=2, sequences=sequences, head_dim=16, launch=launch, shares=shares
    )


def test_more_queries_than_tokens_gives_zeros_and_the_sink(device: torch.device) -> None:
    torch.manual_seed(3)
    cache = poisoned_cache([2], device=device, num_kv_heads=1, key_dim=16, value_dim=16)
    options = AttentionOptions().plus(Chunk(8), sinks(4, device))
    q = torch.randn(5, 4, 16, device=device)
    out, lse = torch.full_like(q, torch.nan), torch.full((5, 4), torch.nan, device=device)
    prefill_attention(q, cache.kv, cache.rows, starts([5], device), cache.lengths, options, out=out, lse=lse)
    assert not out[:3].any()
    torch.testing.assert_close(lse[:3], (options.of(SinkLogits).logits * LOG2_E).expand(3, 4))
    check_rows(out[3:], lse[3:], q[3:], cache, [2], options)


def test_mixed(device: torch.device) -> None:
    torch.manual_seed(4)
    step = make_step([(33, 40), (0, 7), (5, 0)], [130, 0, 1, 65], device=device, key_dim=32, value_dim=32)
    options = masks(device, 4)["both"]
    out = torch.full_like(step.q, torch.nan)
    lse = torch.full(step.q.shape[:2], torch.nan, device=device)
    mixed_attention(*step, options, out=out, lse=lse)
    assert_close(out, mixed_attention_reference(*step, options))
    check_rows(out, lse, step.q, Cache(step.kv, step.rows, step.lengths), [33, 0, 5, 1, 1, 1, 1], options)


@pytest.mark.parametrize("decodes_first", [*slow(False), True])
def test_mixed_where_keys_are_shared_out(device: torch.device, decodes_first: bool) -> None:
    """The prefill's tiles are cut, and so are the decodes' runs; a decode is in its last chunk alone."""
    torch.manual_seed(7)
    num_decodes, q_lens, sizes = 3, [9, 4], {"num_kv_heads": 1, "key_dim": 32, "value_dim": 32}
    cache = poisoned_cache([260, 200, 130, 1, 97], device=device, **sizes)
    options = AttentionOptions().plus(Chunk(192), sinks(4, device))
    q = torch.randn(num_decodes + 13, 4, 32, device=device)
    q_starts = starts(q_lens, device) + (num_decodes if decodes_first else 0)
    args = cache.rows, q_starts, cache.lengths
    placed = {"decodes_first": decodes_first}
    plan = mixed_plan(
        *args, HeadShape.of(q, cache.kv), num_tokens=len(q), dtype=q.dtype, options=options, **placed
    )
    assert plan.prefill is not None
    assert device.type == "cuda" or int((plan.prefill.items[:, 8] >= 0).sum()) > 1  # a tile is cut
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan, device=device)
    mixed_attention(q, cache.kv, *args, options, plan=plan, out=out, lse=lse, **placed)
    assert_close(out, mixed_attention_reference(q, cache.kv, *args, options, **placed))
    if decodes_first:
        q, out, lse = (tensor.roll(-num_decodes, 0) for tensor in (q, out, lse))
    check_rows(out, lse, q, cache, [*q_lens, 1, 1, 1], options)


def test_parts_merge_if_one_of_them_has_the_sinks(device: torch.device) -> None:
    torch.manual_seed(6)
    cache = poisoned_cache([90], device=device, num_kv_heads=1, key_dim=32, value_dim=32)
    q = torch.randn(1, 4, 32, device=device)
    options = AttentionOptions().plus(sinks(4, device))
    halves = [cache.kv._replace(index=cache.kv.index[:, begin:]) for begin in (0, 40)]
    out, lse = torch.empty(2, 1, 4, 32, device=device), torch.empty(2, 1, 4, device=device)
    for part, (kv, length) in enumerate(zip(halves, (40, 50), strict=True)):
        lengths = torch.tensor([length], dtype=torch.int32, device=device)
        own = options if part == 0 else AttentionOptions()
        decode_attention(q, kv, cache.rows, lengths, own, out=out[part], lse=lse[part])
    merged, merged_lse = merge_states(out, lse)
    check_rows(merged, merged_lse, q, cache, [1], options)


def test_a_decode_reads_the_newest_chunk_alone(device: torch.device) -> None:
    """The index of all earlier chunks names slots that do not exist."""
    torch.manual_seed(7)
    cache = poisoned_cache([150, 96], device=device, num_kv_heads=1, key_dim=16, value_dim=16)
    options = AttentionOptions().plus(Chunk(48))
    q = torch.randn(2, 2, 16, device=device)
    expected = decode_attention_reference(q, *cache, options)
    for row, first in zip(cache.rows.tolist(), (144, 48), strict=True):
        cache.kv.index[row, :first] = -(2**30)
    assert_close(decode_attention(q, *cache, options), expected)
    plan = decode_plan(
        cache.rows, cache.lengths, HeadShape.of(q, cache.kv), dtype=q.dtype, limits=(Chunk(48),)
    )
    assert plan.items[:2, 2:].tolist() == [[144, 150], [48, 80]]


def test_a_prefill_reads_the_chunks_of_its_tile_alone(device: torch.device) -> None:
    torch.manual_seed(8)
    cache = poisoned_cache([150], device=device, num_kv_heads=1, key_dim=16, value_dim=16)
    options = AttentionOptions().plus(Chunk(48))
    q = torch.randn(20, 2, 16, device=device)
    args = q, cache.kv, cache.rows, starts([20], device), cache.lengths, options
    expected = prefill_attention_reference(*args)
    cache.kv.index[cache.rows[0], :96] = -(2**30)
    assert_close(prefill_attention(*args), expected)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    cache = poisoned_cache([5, 6], device=device)
    q = torch.zeros(2, 4, 64, device=device)
    good = torch.zeros(4, device=device)
    for match, options in [
        ("a window, or chunks, or neither", AttentionOptions().plus(Window(3), Chunk(4))),
        ("a chunk must be positive, got -1", AttentionOptions().plus(Chunk(-1))),
        (
            r"logits must be contiguous float32 \[H\]",
            AttentionOptions().plus(SinkLogits(good.half())),
        ),
        (r"logits must be .* H 4; got .*\(3,\)", AttentionOptions().plus(SinkLogits(good[:3]))),
    ]:
        with pytest.raises(ValueError, match=match):
            decode_attention(q, *cache, options)
    plan = decode_plan(
        cache.rows, cache.lengths, HeadShape.of(q, cache.kv), dtype=q.dtype, limits=(Chunk(3),)
    )
    with pytest.raises(ValueError, match=r"Chunk\(size=3\).* and the call .*Chunk\(size=4\)"):
        decode_attention(q, *cache, AttentionOptions().plus(Chunk(4)), plan=plan)
    prefill = prefill_plan(
        cache.rows,
        starts([1, 1], device),
        cache.lengths,
        HeadShape.of(q, cache.kv),
        num_tokens=2,
        dtype=q.dtype,
        limits=(Chunk(3),),
    )
    with pytest.raises(ValueError, match=r"Chunk\(size=3\).* and the call .*Chunk\(size=4\)"):
        prefill_attention(
            q,
            cache.kv,
            cache.rows,
            starts([1, 1], device),
            cache.lengths,
            AttentionOptions().plus(Chunk(4)),
            plan=prefill,
        )


RAGGED = [(300, 0), (37, 512), (0, 9), (333, 1300), (18, 3000), (1, 127), (128, 128)]


@pytest.mark.gpu
@pytest.mark.parametrize("num_queries", [1, 5], ids="queries{}".format)
@pytest.mark.parametrize("mask", [*MASKS, "long"])
def test_decode_in_bfloat16(num_queries: int, mask: str) -> None:
    torch.manual_seed(num_queries)
    options = masks("cuda", 8)
    options["long"] = AttentionOptions().plus(Chunk(1024), *options["sinks"].variants)
    for head_dim in (64, 128):
        cache = poisoned_cache(
            [3000, 0, 1, 64, 1025, 2047, 517],
            device="cuda",
            dtype=torch.bfloat16,
            key_dim=head_dim,
            value_dim=head_dim,
        )
        check_decode(cache, options[mask], group=4, num_queries=num_queries)


@pytest.mark.gpu
@pytest.mark.parametrize("num_queries", [1, 3], ids="queries{}".format)
@pytest.mark.parametrize("chunk", [0, 1024, 4096], ids="chunk{}".format)
def test_a_shared_prefix_in_bfloat16(chunk: int, num_queries: int) -> None:
    torch.manual_seed(4)
    lengths = [2000 + 37 * request for request in range(20)]
    cache = poisoned_cache(lengths, device="cuda", dtype=torch.bfloat16)
    prefixes = share_first_keys(cache, [(1950, list(range(0, 20, 2)))], prefix_members(num_queries, 4))
    options = AttentionOptions().plus(Chunk(chunk) if chunk else None, sinks(8, "cuda"))
    check_shared(cache, prefixes, options, num_queries)


@pytest.mark.gpu
@pytest.mark.parametrize("launch", ["hopper", "general"])
@pytest.mark.parametrize("head_dim", [64, 128, 256], ids="dim{}".format)
@pytest.mark.parametrize("mask", [*MASKS, "long"])
def test_prefill_in_bfloat16(launch: str, head_dim: int, mask: str) -> None:
    torch.manual_seed(head_dim)
    options = masks("cuda", 8)
    options["long"] = AttentionOptions().plus(Chunk(256), *options["sinks"].variants)
    device_class = tuning.device_class(torch.device("cuda"))
    tiles = prefill_tuning.hopper_prefill_launch(device_class, head_dim, head_dim, 2)
    if launch == "general":
        tiles = tuning.Launch(64, 32, 4, 2)
    elif tiles is None:
        pytest.skip("needs compute capability 9")
    check_prefill(
        options[mask],
        "cuda",
        group=4,
        num_kv_heads=2,
        sequences=RAGGED,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        launch=tiles,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("launch", ["hopper", "general"])
@pytest.mark.parametrize("mask", ["sinks", "both", "long"])
def test_a_prefill_whose_keys_are_shared_out_in_bfloat16(launch: str, mask: str) -> None:
    torch.manual_seed(5)
    options = masks("cuda", 8)
    options["long"] = AttentionOptions().plus(Chunk(5000), *options["sinks"].variants)
    device_class = tuning.device_class(torch.device("cuda"))
    tiles = prefill_tuning.hopper_prefill_launch(device_class, 128, 128, 2)
    if launch == "general":
        tiles = tuning.Launch(64, 64, 4, 3)
    elif tiles is None:
        pytest.skip("needs compute capability 9")
    check_prefill(
        options[mask],
        "cuda",
        group=4,
        num_kv_heads=2,
        sequences=[(64, 9000), (30, 4970), (8, 300)],
        head_dim=128,
        dtype=torch.bfloat16,
        launch=tiles,
        shares=prefill_tuning.PrefillShares(66, 132, 128, 1, -(2**20)),
    )


@pytest.mark.gpu
def test_a_captured_step_follows_chunks_of_other_lengths() -> None:
    torch.manual_seed(9)
    step = make_step(
        [(100, 400), (30, 0)], [900, 300, 64], device="cuda", dtype=torch.bfloat16, group=4, num_kv_heads=2
    )
    options = AttentionOptions().plus(Chunk(128), sinks(8, "cuda"))
    out = torch.empty_like(step.q)
    mixed_attention(*step, options, out=out)  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mixed_attention(*step, options, out=out)
    step.q_starts.copy_(starts([60, 70], "cuda"))
    lengths = torch.tensor([270, 30, 513, 129, 1], dtype=torch.int32, device="cuda")
    for other in (lengths, lengths.roll(1).clamp(max=30)):
        step.lengths.copy_(other)
        out.fill_(torch.nan)
        graph.replay()
        assert_close(out, mixed_attention_reference(*step, options))
