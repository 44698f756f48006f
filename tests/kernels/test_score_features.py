"""Compares ALiBi, masks, trees of guesses, windows and full attention, in every attention kernel and its
reference, with attention that is computed key by key in float64.

The caches are those of `test_decode_attention`: shuffled slots, NaN in all free slots. Masks hold NaN where no
request has keys. Tensors that a call allocates for itself, partial outputs above all, hold NaN, too.
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
from lightkv.triton_kernels.attention.decode.decode_plan import decode_plan
from lightkv.triton_kernels.attention.lookups import CONTIGUOUS
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
from lightkv.triton_kernels.attention.variants import Alibi, Chunk, TreeMask, ValueMask, Window
from lightkv.triton_kernels.attention.variants.alibi import alibi_slopes
from lightkv.triton_kernels.attention.variants.variant import limits
from tests.support.attention.caches import (
    TOLERANCE,
    Cache,
    assert_close,
    poisoned_cache,
    share_first_keys,
    starts,
)
from tests.support.attention.feature_table import covers
from tests.support.attention.score_features import FEATURES, Batch, attend_each_key, each_feature

QUICK = ["ALiBi", "window, full", "mask, each head", "tree"]


@pytest.fixture(autouse=True)
def _poison_allocations() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # then torch.empty fills tensors with NaN
    yield
    torch.use_deterministic_algorithms(False)


def small_cache(lengths: list[int], device: torch.device, **sizes: int) -> Cache:
    return poisoned_cache(
        lengths, device=device, **{"num_kv_heads": 1, "key_dim": 16, "value_dim": 16, **sizes}
    )


def make(name: str, q: Tensor, cache: Cache, q_lens: list[int]) -> AttentionOptions:
    lengths, surplus = cache.lengths.tolist(), len(q) - sum(q_lens)
    return FEATURES[name](Batch(q_lens, lengths, surplus, q.shape[1], q.device, q.dtype))


def outputs(q: Tensor) -> dict[str, Tensor]:
    """Returns tensors of NaN for an output and its log-sum-exp."""
    return {"out": torch.full_like(q, torch.nan), "lse": torch.full(q.shape[:2], torch.nan, device=q.device)}


def check_rows(
    out: Tensor, lse: Tensor, q: Tensor, cache: Cache, q_lens: list[int], options: AttentionOptions
) -> None:
    begin, tolerance = 0, TOLERANCE[out.dtype]
    for request, (row, length, count) in enumerate(
        zip(cache.rows, cache.lengths.tolist(), q_lens, strict=True)
    ):
        end = begin + count
        expected, expected_lse, _ = attend_each_key(
            q[begin:end], cache.kv, row, request, length, begin, options
        )
        torch.testing.assert_close(out[begin:end].double(), expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse[begin:end].double(), expected_lse, atol=1e-4, rtol=1e-4)
        begin = end


@each_feature("decode", QUICK)
@pytest.mark.parametrize(
    ("num_queries", "group", "shift", "num_splits"), [(1, 3, 0, 5), (3, 2, 4, 2)], ids=str
)
def test_decode(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    num_queries: int,
    group: int,
    shift: int,
    num_splits: int,
    name: str,
) -> None:
    torch.manual_seed(num_queries)
    monkeypatch.setattr(decode_tuning, "decode_workers", lambda *_: num_splits)
    cache = small_cache([70, 0, 1, 33], device, shift=shift)
    q = torch.randn(4 * num_queries, group, 16, device=device)
    q_lens, written = [num_queries] * 4, outputs(q)
    options = make(name, q, cache, q_lens)
    decode_attention(q, *cache, options, num_queries=num_queries, **written)
    check_rows(*written.values(), q, cache, q_lens, options)
    expected = decode_attention_reference(q, *cache, options, num_queries=num_queries)
    assert_close(expected, written["out"])


@each_feature("a shared prefix", QUICK[:1])
@pytest.mark.parametrize("num_queries", [pytest.param(1, marks=pytest.mark.slow), 2], ids="queries{}".format)
def test_shared_prefix(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, num_queries: int, name: str
) -> None:
    torch.manual_seed(num_queries)
    monkeypatch.setattr(decode_tuning, "decode_workers", lambda *_: 5)
    cache = small_cache([75, 40, 80, 0, 66], device)
    prefixes = share_first_keys(cache, [(64, [0, 2, 4])], 4)
    q = torch.randn(5 * num_queries, 2, 16, device=device)
    q_lens, written = [num_queries] * 5, outputs(q)
    options = make(name, q, cache, q_lens)
    sizes = {"dtype": q.dtype, "num_queries": num_queries, "shared_prefixes": prefixes}
    plan = decode_plan(cache.rows, cache.lengths, HeadShape.of(q, cache.kv), **sizes)
    decode_attention(q, *cache, options, num_queries=num_queries, plan=plan, **written)
    check_rows(*written.values(), q, cache, q_lens, options)


PREFILLS = [(40, 30), (0, 5), (3, 62), (4, -2)]  # queries of a request, and tokens before them


def check_prefill(
    name: str,
    device: torch.device,
    *,
    group: int,
    launch: tuning.Launch | None = None,
    shares: prefill_tuning.PrefillShares | None = None,
    sequences: list[tuple[int, int]] = PREFILLS,
) -> None:
    q_lens = [count for count, _ in sequences]
    cache = small_cache([count + before for count, before in sequences], device)
    q = torch.randn(sum(q_lens) + 2, group, 16, device=device)
    options, written = make(name, q, cache, q_lens), outputs(q)
    args = q, cache.kv, cache.rows, starts(q_lens, device), cache.lengths
    bounds = {"limits": limits(options.variants), "causal": options.causal}
    sizes = {"num_tokens": len(q), "dtype": q.dtype, "launch": launch, "shares": shares}
    plan = prefill_plan(*args[2:], HeadShape.of(q, cache.kv), **sizes, **bounds)
    assert shares is None or int((plan.items[:, 8] >= 0).sum()) > 1  # a tile is cut
    prefill_attention(*args, options, plan=plan, **written)
    check_rows(*written.values(), q, cache, q_lens, options)
    used = sum(q_lens)
    expected = prefill_attention_reference(*args, options)
    assert_close(expected[:used], written["out"][:used])
    assert written["out"][used:].isnan().all()


@each_feature("prefill", QUICK)
def test_prefill(device: torch.device, name: str) -> None:
    torch.manual_seed(1)
    check_prefill(name, device, group=3)


@each_feature("prefill, keys shared out", QUICK[-1:])
def test_prefill_with_shared_out_keys(device: torch.device, name: str) -> None:
    torch.manual_seed(2)
    shares = prefill_tuning.PrefillShares(60 if "window" in name else 4, 4, 32, 1, -1000)
    launch = tuning.Launch(32, 16, 4, 2)
    sequences = [(20, 150), (3, 30), (0, 9)]
    check_prefill(name, device, group=2, launch=launch, shares=shares, sequences=sequences)


def rolled(options: AttentionOptions) -> AttentionOptions:
    """Returns the options where the last two rows of masks are the first."""
    values, tree = options.of(ValueMask), options.of(TreeMask)
    return options.without(ValueMask, TreeMask).plus(
        None if values is None else ValueMask(values.values.roll(2, -2), values.columns),
        None if tree is None else TreeMask(tree.bits.roll(2, 0)),
    )


@each_feature("mixed", QUICK[-1:])
@pytest.mark.parametrize("decodes_first", [pytest.param(False, marks=pytest.mark.slow), True])
def test_mixed(device: torch.device, decodes_first: bool, name: str) -> None:
    torch.manual_seed(3)
    q_lens = [9, 4]
    cache = small_cache([60, 20, 50, 1], device)
    q = torch.randn(13 + 2, 2, 16, device=device)
    q_starts = starts(q_lens, device) + (2 if decodes_first else 0)
    # The requests of the cache are the prefills, then the decodes; masks have rows and blocks in that order.
    made, written = make(name, q, cache, [*q_lens, 1, 1]), outputs(q)
    options = rolled(made) if decodes_first else made
    args = cache.rows, q_starts, cache.lengths
    placed = {"decodes_first": decodes_first}
    sizes = {"num_tokens": 15, "dtype": q.dtype, "options": made}
    plan = mixed_plan(*args, HeadShape.of(q, cache.kv), **sizes, **placed)
    mixed_attention(q, cache.kv, *args, options, plan=plan, **placed, **written)
    assert_close(written["out"], mixed_attention_reference(q, cache.kv, *args, options, **placed))
    if decodes_first:
        q, *rows = (tensor.roll(-2, 0) for tensor in (q, *written.values()))
    else:
        rows = list(written.values())
    check_rows(*rows, q, cache, [*q_lens, 1, 1], made)


@pytest.mark.parametrize("group", [1, pytest.param(16, marks=pytest.mark.slow)], ids="group{}".format)
@pytest.mark.parametrize("name", ["ALiBi", "mask, each head", "tree"])
def test_other_groups_and_strides_of_q(device: torch.device, name: str, group: int) -> None:
    torch.manual_seed(group)
    cache = small_cache([33, 40], device, num_kv_heads=2, key_dim=24, value_dim=16)
    q = torch.randn(4, 3, 2 * group, 24, device=device)[:, 1]
    out = torch.full((4, 2 * group, 16), torch.nan, device=device)
    lse = torch.full(q.shape[:2], torch.nan, device=device)
    options = make(name, q, cache, [2, 2])
    decode_attention(q, *cache, options, num_queries=2, out=out, lse=lse)
    check_rows(out, lse, q, cache, [2, 2], options)
    out.fill_(torch.nan)
    args = q, cache.kv, cache.rows, starts([2, 2], device), cache.lengths, options
    prefill_attention(*args, out=out, lse=lse)
    check_rows(out, lse, q, cache, [2, 2], options)


@covers("keys of another sequence", "decode", "prefill", "mixed")
@pytest.mark.parametrize("num_queries", [1, 5], ids="queries{}".format)
def test_keys_of_another_sequence(device: torch.device, num_queries: int) -> None:
    """Cross attention: the lengths are those of the keys, also fewer than there are queries, and no query is
    causal."""
    torch.manual_seed(num_queries)
    cache = small_cache([3, 40, 0], device)
    q, q_lens = torch.randn(3 * num_queries, 2, 16, device=device), [num_queries] * 3
    options, written = AttentionOptions(causal=False), outputs(q)
    decode_attention(q, *cache, options, num_queries=num_queries, **written)
    check_rows(*written.values(), q, cache, q_lens, options)
    expected = written["out"].clone()
    assert not expected[2 * num_queries :].any()
    args = q, cache.kv, cache.rows, starts(q_lens, device), cache.lengths, options
    prefill_attention(*args, **written)
    assert_close(written["out"], expected)
    q_starts = starts(q_lens[:2], device)
    mixed = mixed_attention(
        q, cache.kv, cache.rows, q_starts, cache.lengths, options, num_queries=num_queries
    )
    assert_close(mixed, expected)


def test_alibi_at_a_million_tokens(device: torch.device) -> None:
    """Positions are subtracted before they become floats. A window leaves 60 keys to read."""
    torch.manual_seed(5)
    begin, end = 999_950, 1_000_010
    k = torch.full((64, 1, 16), torch.nan, device=device)
    k[2:62] = torch.randn(60, 1, 16)
    index = torch.tensor([[2 - begin]], dtype=torch.int32, device=device)  # one run
    kv, rows = PagedKV(k, k, index, CONTIGUOUS), torch.zeros(1, dtype=torch.int32, device=device)
    lengths = torch.tensor([end], dtype=torch.int32, device=device)
    q = torch.randn(3, 2, 16, device=device)
    slopes = alibi_slopes(2, device=device)
    options = AttentionOptions().plus(Window(50), Alibi(slopes))
    near = PagedKV(k, k, torch.full_like(index, 2), CONTIGUOUS)
    near_lengths = torch.full_like(lengths, end - begin)
    for count in (1, 3):
        decode, near_decode = outputs(q[:count]), outputs(q[:count])
        decode_attention(q[:count], kv, rows, lengths, options, num_queries=count, **decode)
        expected = decode_attention_reference(q[:count], near, rows, near_lengths, options, num_queries=count)
        decode_attention(q[:count], near, rows, near_lengths, options, num_queries=count, **near_decode)
        assert_close(decode["out"], expected)
        torch.testing.assert_close(decode["lse"], near_decode["lse"], atol=1e-5, rtol=1e-5)
        prefill_attention(q[:count], kv, rows, starts([count], device), lengths, options, **decode)
        assert_close(decode["out"], expected)


@pytest.mark.parametrize("num_heads", [1, 6, 8, 12, 16, 71, 112])
def test_slopes(num_heads: int) -> None:
    """The rule of Bloom's and of MPT's code, which agree."""
    found = alibi_slopes(num_heads).tolist()
    power = 2 ** (num_heads - 1).bit_length()
    slopes = [2.0 ** (-8 * (head + 1) / power) for head in range(power)]
    mpt = slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads]
    assert found == pytest.approx(mpt)
    assert alibi_slopes(num_heads, max_bias=4.0).tolist() == pytest.approx([slope**0.5 for slope in mpt])


def test_no_bits_but_the_own_are_needed_for_a_line(device: torch.device) -> None:
    """A tree that is a line is causal attention."""
    torch.manual_seed(6)
    cache = small_cache([50], device)
    q = torch.randn(6, 2, 16, device=device)
    bits = torch.tensor([[2 ** (query + 1) - 1] for query in range(6)], device=device)
    args = q, cache.kv, cache.rows, starts([6], device), cache.lengths
    assert_close(prefill_attention(*args, AttentionOptions().plus(TreeMask(bits))), prefill_attention(*args))


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    cache = small_cache([5, 6], device)
    q = torch.zeros(2, 4, 16, device=device)
    slopes, values = alibi_slopes(4, device=device), torch.zeros(2, 6, device=device)
    bits = torch.zeros(2, 1, dtype=torch.int64, device=device)
    columns = torch.zeros(2, dtype=torch.int32, device=device)
    for match, variants in [
        (r"slopes must be contiguous float32 \[H\], with H 4", [Alibi(slopes[:3])]),
        (r"values must be .* \[T, width\].* T 2", [ValueMask(values[:1])]),
        (r"values must be .* \[H, T, width\].* H 4", [ValueMask(values.expand(3, 2, 6))]),
        ("a last stride of 1", [ValueMask(values[:, ::2])]),
        ("bool or float32 or float16 or bfloat16", [ValueMask(values.double())]),
        ("int32 or int64", [TreeMask(bits.short())]),
        (r"bits must be int32 or int64 \[T, words\].* T 2", [TreeMask(bits[:1])]),
        ("a guess's position is its depth", [Window(3), TreeMask(bits)]),
        ("a guess's position is its depth", [Alibi(slopes), TreeMask(bits)]),
        ("a guess's position is its depth", [Chunk(4), TreeMask(bits)]),
        (r"columns must be contiguous int32 \[B\], with B 2", [ValueMask(values, columns=columns[:1])]),
    ]:
        with pytest.raises(ValueError, match=match):
            decode_attention(q, *cache, AttentionOptions().plus(*variants))
    q_starts = starts([1, 1], device)
    args = cache.rows, q_starts, cache.lengths
    plan = prefill_plan(*args, HeadShape.of(q, cache.kv), num_tokens=2, dtype=q.dtype)
    with pytest.raises(ValueError, match=r"\(2, \(\), True\), and the call has \(2, \(\), False\)"):
        prefill_attention(q, cache.kv, *args, AttentionOptions(causal=False), plan=plan)
