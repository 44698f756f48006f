"""Compares ALiBi, masks, trees of guesses, windows and full attention with the references in float64, on a GPU:
16-bit types, the sizes of models, Hopper's kernel, and CUDA graphs."""

import pytest
import torch
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.decode.decode_attention import (
    decode_attention,
    decode_attention_reference,
)
from lightkv.triton_kernels.attention.decode.decode_plan import decode_plan
from lightkv.triton_kernels.attention.decode.decode_tuning import prefix_members
from lightkv.triton_kernels.attention.mixed_attention import (
    mixed_attention,
    mixed_attention_reference,
    mixed_plan,
)
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions, HeadShape
from lightkv.triton_kernels.attention.prefill import prefill_tuning
from lightkv.triton_kernels.attention.prefill.prefill_attention import (
    _hopper_launch,
    prefill_attention,
    prefill_attention_reference,
)
from lightkv.triton_kernels.attention.prefill.prefill_plan import prefill_plan
from lightkv.triton_kernels.attention.variants import ValueMask
from lightkv.triton_kernels.attention.variants.variant import limits
from tests.support.attention.caches import Cache, assert_close, poisoned_cache, share_first_keys, starts
from tests.support.attention.feature_table import covers
from tests.support.attention.log_sum_exps import lse_reference
from tests.support.attention.mixed_steps import make_step
from tests.support.attention.score_features import FEATURES, Batch

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
each_feature = pytest.mark.parametrize("name", FEATURES)
RAGGED = [(300, 0), (37, 512), (0, 9), (333, 1300), (18, 3000), (1, 127), (128, 128)]


def make(name: str, q: Tensor, lengths: list[int], q_lens: list[int]) -> AttentionOptions:
    return FEATURES[name](Batch(q_lens, lengths, len(q) - sum(q_lens), q.shape[1], CUDA, q.dtype))


def big_cache(lengths: list[int], head_dim: int, dtype: torch.dtype = torch.bfloat16) -> Cache:
    return poisoned_cache(lengths, device="cuda", dtype=dtype, key_dim=head_dim, value_dim=head_dim)


def in_whole_vectors(options: AttentionOptions) -> AttentionOptions:
    """Returns options whose mask of values has rows that begin at multiples of 16 bytes, as Hopper's kernel
    asks for, with numbers after the last column that nobody may see."""
    mask = options.of(ValueMask)
    if mask is None:
        return options
    width = mask.values.shape[-1]
    value = torch.nan if mask.values.is_floating_point() else True
    padded = torch.nn.functional.pad(mask.values, (0, 16 + -width % 16), value=value)
    return options.without(ValueMask).plus(ValueMask(padded[..., :width], mask.columns))


@each_feature
@pytest.mark.parametrize(
    ("num_queries", "group", "head_dim"),
    [(1, 4, 128), (1, 16, 64), (1, 1, 256), (5, 4, 128), (9, 8, 64)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_decode(name: str, num_queries: int, group: int, head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(num_queries)
    lengths = [3000, 0, 1, 64, 1025, 2047, 517]
    cache = big_cache(lengths, head_dim, dtype)
    q = torch.randn(len(lengths) * num_queries, 2 * group, head_dim).to(CUDA, dtype)
    options = make(name, q, lengths, [num_queries] * len(lengths))
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan, device="cuda")
    decode_attention(q, *cache, options, num_queries=num_queries, out=out, lse=lse)
    assert_close(out, decode_attention_reference(q, *cache, options, num_queries=num_queries))
    q_starts = starts([num_queries] * len(lengths), "cuda")
    expected = lse_reference(q, cache.kv, cache.rows, q_starts, cache.lengths, options)
    torch.testing.assert_close(lse, expected, atol=2e-2, rtol=1e-3)


@pytest.mark.parametrize("name", [name for name in FEATURES if "window" not in name])
@pytest.mark.parametrize("num_queries", [1, 3], ids="queries{}".format)
def test_a_shared_prefix(name: str, num_queries: int) -> None:
    torch.manual_seed(4)
    lengths = [2000 + 37 * request for request in range(20)]
    cache = big_cache(lengths, 128)
    prefixes = share_first_keys(cache, [(1950, list(range(0, 20, 2)))], prefix_members(num_queries, 4))
    q = torch.randn(20 * num_queries, 8, 128).to(cache.kv.k)
    options = make(name, q, lengths, [num_queries] * 20)
    sizes = {"dtype": q.dtype, "num_queries": num_queries, "shared_prefixes": prefixes}
    plan = decode_plan(cache.rows, cache.lengths, HeadShape.of(q, cache.kv), **sizes)
    out = torch.full_like(q, torch.nan)
    decode_attention(q, *cache, options, num_queries=num_queries, plan=plan, out=out)
    assert_close(out, decode_attention_reference(q, *cache, options, num_queries=num_queries))


def check_prefill(
    name: str,
    launch: str,
    head_dim: int,
    *,
    group: int = 4,
    sequences: list[tuple[int, int]] = RAGGED,
    shares: prefill_tuning.PrefillShares | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    tiles = tuning.Launch(64, 32, 4, 2)
    if launch == "hopper":
        device_class = tuning.device_class(CUDA)
        found = prefill_tuning.hopper_prefill_launch(device_class, head_dim, head_dim, 2)
        if found is None:
            pytest.skip("needs compute capability 9")
        tiles = found
        plain = "window" not in name
        if not plain or "mask" in name:  # the plan's own tiles; general prefill may run in its place
            tiles = prefill_tuning.prefill_launch(device_class, 1, 2, 4096, head_dim, head_dim, 2, plain)
    lengths, q_lens = [sum(pair) for pair in sequences], [count for count, _ in sequences]
    cache = big_cache(lengths, head_dim, dtype)
    q = torch.randn(sum(q_lens) + 3, group * 2, head_dim).to(CUDA, dtype)
    options = make(name, q, lengths, q_lens)
    if launch == "hopper":
        options = in_whole_vectors(options)
        found_launch = _hopper_launch(q, cache.kv, torch.empty_like(q), options, tiles.block_m)
        assert ("blocks" in name) == (found_launch is None)
    args = q, cache.kv, cache.rows, starts(q_lens, "cuda"), cache.lengths
    bounds = {"limits": limits(options.variants), "causal": options.causal}
    sizes = {"num_tokens": len(q), "dtype": dtype, "launch": tiles, "shares": shares}
    plan = prefill_plan(*args[2:], HeadShape.of(q, cache.kv), **sizes, **bounds)
    assert shares is None or "window" in name or int((plan.items[:, 8] >= 0).sum()) > 1  # a tile is cut
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan, device="cuda")
    prefill_attention(*args, options, plan=plan, out=out, lse=lse)
    used = sum(q_lens)
    assert_close(out[:used], prefill_attention_reference(*args, options)[:used])
    torch.testing.assert_close(lse[:used], lse_reference(*args, options)[:used], atol=2e-2, rtol=1e-3)


@pytest.mark.parametrize("hidden", [-1e8, -1e9, -1e10, -1e30, -3e38])
@pytest.mark.parametrize("num_queries", [1, 64])
@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_mask_that_hides_keys_by_huge_numbers(
    dtype: torch.dtype, where: str, num_queries: int, hidden: float
) -> None:
    """The tiles of keys that a kernel reads first are hidden from all queries, and the largest score so far is
    a huge number."""
    torch.manual_seed(5)
    cache = big_cache([300], 64, dtype)
    q = (torch.randn(num_queries, 8, 64) * 5).to(CUDA, dtype)
    values = torch.zeros(8, num_queries, 300, device=CUDA)
    values[:, :, slice(128) if where == "first" else slice(110, None)] = hidden
    out, options = torch.full_like(q, torch.nan), AttentionOptions().plus(ValueMask(values))
    if num_queries == 1:
        decode_attention(q, *cache, options, out=out)
        expected = decode_attention_reference(q, *cache, options)
    else:
        args = q, cache.kv, cache.rows, starts([num_queries], "cuda"), cache.lengths
        prefill_attention(*args, options, out=out)
        expected = prefill_attention_reference(*args, options)
    assert_close(out, expected)


@each_feature
@pytest.mark.parametrize("launch", ["hopper", "general"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256], ids="dim{}".format)
def test_prefill(name: str, launch: str, head_dim: int) -> None:
    torch.manual_seed(head_dim)
    check_prefill(name, launch, head_dim)


@covers("keys of another sequence", "Hopper's prefill")
@pytest.mark.parametrize("launch", ["hopper", "general"])
def test_prefill_of_keys_of_another_sequence(launch: str) -> None:
    """Fewer keys than queries, more, and none."""
    torch.manual_seed(7)
    check_prefill("full", launch, 128, sequences=[(700, -400), (37, 2000), (130, -130), (300, -299)])


@pytest.mark.parametrize(
    "name", ["ALiBi", "ALiBi, full", "full", "window, full", "mask, bool", "mask, each head", "tree"]
)
@pytest.mark.parametrize("group", [1, 8, 16], ids="group{}".format)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_prefill_of_other_groups(name: str, group: int, dtype: torch.dtype) -> None:
    torch.manual_seed(group)
    check_prefill(name, "hopper", 128, group=group, dtype=dtype)


@each_feature
@pytest.mark.parametrize("launch", ["hopper", "general"])
def test_prefill_with_shared_out_keys(name: str, launch: str) -> None:
    torch.manual_seed(5)
    check_prefill(
        name,
        launch,
        128,
        sequences=[(64, 9000), (30, 4970), (8, 300)],
        shares=prefill_tuning.PrefillShares(66, 132, 128, 1, -(2**20)),
    )


@each_feature
def test_a_captured_step_follows_other_lengths(name: str) -> None:
    """The plan is made in the graph; masks are of the longest requests, in the same tensors."""
    torch.manual_seed(9)
    step = make_step(
        [(100, 400), (30, 0)], [900, 300, 64], device="cuda", dtype=torch.bfloat16, group=4, num_kv_heads=2
    )
    options = make(name, step.q, [900] * 5, [100, 30, 1, 1, 1])
    mask = options.of(ValueMask)
    if mask is not None and mask.values.is_floating_point():
        shown = mask.values.nan_to_num(0.0, neginf=-torch.inf)
        options = options.without(ValueMask).plus(ValueMask(shown, mask.columns))
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


def test_a_mixed_step_with_a_kept_plan() -> None:
    torch.manual_seed(10)
    step = make_step([(70, 2000), (30, 0)], [900, 300], device="cuda", dtype=torch.bfloat16, group=4)
    full = AttentionOptions(causal=False)
    plan = mixed_plan(
        *step[2:],
        HeadShape.of(step.q, step.kv),
        num_tokens=len(step.q),
        dtype=step.q.dtype,
        options=full,
    )
    values = torch.randn(8, len(step.q), 2070, device="cuda")
    for mask in (None, ValueMask(values), ValueMask(values[0].bfloat16())):
        options = full.plus(mask)
        out = mixed_attention(*step, options, plan=plan, out=torch.full_like(step.q, torch.nan))
        assert_close(out, mixed_attention_reference(*step, options))
