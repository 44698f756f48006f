"""What changes scores or hides keys (ALiBi, masks, trees of guesses, windows, full attention), made for a
batch, and the attention that it amounts to, key by key in float64."""

from collections.abc import Callable, Collection
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lightkv.triton_kernels.attention.paged_kv import AttentionOptions, PagedKV
from lightkv.triton_kernels.attention.variants import (
    Alibi,
    SinkLogits,
    Softcap,
    TreeMask,
    ValueMask,
    Variant,
    Window,
)
from lightkv.triton_kernels.attention.variants.alibi import alibi_slopes
from tests.support.attention.softmax import scores_of, weigh


class Batch(NamedTuple):
    """The sizes that a feature is made for: queries and lengths of each request, queries without a request
    after those, and query heads."""

    q_lens: list[int]
    lengths: list[int]
    surplus: int
    num_heads: int
    device: torch.device
    dtype: torch.dtype


def _shown(batch: Batch, width: int) -> Tensor:
    """Returns a random bool mask, of which one row hides all keys."""
    shown = torch.rand(sum(batch.q_lens) + batch.surplus, width) < 0.7
    shown[len(shown) // 2] = False
    return shown


def _values(batch: Batch, *heads: int, dtype: torch.dtype, width: int | None = None) -> ValueMask:
    """Returns random values, -inf for some; NaN after a request's keys, and for queries of no request."""
    width = max(batch.lengths) + 5 if width is None else width
    shown = _shown(batch, width)
    values = torch.randn(*heads, *shown.shape).masked_fill(~shown, -torch.inf)
    begin = 0
    for count, length in zip(batch.q_lens, batch.lengths, strict=True):
        values[..., begin : begin + count, length:] = torch.nan
        begin += count
    values[..., begin:, :] = torch.nan
    return ValueMask(values.to(batch.device, dtype))


def _blocks(batch: Batch) -> ValueMask:
    """Returns a mask whose columns are the keys of all requests, one after the other."""
    begins = torch.tensor([0, *batch.lengths]).cumsum(0)
    values = torch.full((sum(batch.q_lens) + batch.surplus, int(begins[-1]) + 3), torch.nan)
    queries = 0
    for count, length, begin in zip(batch.q_lens, batch.lengths, begins.tolist(), strict=False):
        values[queries : queries + count, begin : begin + length] = torch.randn(count, length)
        queries += count
    return ValueMask(values.to(batch.device), columns=begins[:-1].int().to(batch.device))


def tree_bits(q_lens: list[int], surplus: int, words: int, dtype: torch.dtype) -> Tensor:
    """Returns the bits of random trees: a query sees itself and its ancestors. Bits of later queries are
    random, since they count for nothing in a causal layer."""
    size = 8 * dtype.itemsize
    rows: list[list[int]] = []
    for count in q_lens:
        seen: list[int] = []
        for query in range(count):
            parent = int(torch.randint(-1, query, (1,))) if query else -1
            seen.append((seen[parent] if parent >= 0 else 0) | 1 << query)
        noise = [int(torch.randint(0, 2**30, (1,))) << query + 1 for query in range(count)]
        rows += [[(bits | extra) >> size * word & (1 << size) - 1 for word in range(words)]
                 for bits, extra in zip(seen, noise, strict=True)]  # fmt: skip
    rows += [[0] * words] * surplus
    signed = [[word - (1 << size) if word >> size - 1 else word for word in row] for row in rows]
    return torch.tensor(signed, dtype=dtype).view(len(rows), words)


def _tree(batch: Batch, dtype: torch.dtype) -> TreeMask:
    words = -(-max(batch.q_lens) // (8 * dtype.itemsize))
    return TreeMask(tree_bits(batch.q_lens, batch.surplus, words, dtype).to(batch.device))


def _alibi(batch: Batch) -> Alibi:
    return Alibi(alibi_slopes(batch.num_heads, device=batch.device))


def _sinks(batch: Batch) -> SinkLogits:
    return SinkLogits(torch.linspace(-3.0, 4.0, batch.num_heads).to(batch.device))


def _full(*variants: Variant) -> AttentionOptions:
    return AttentionOptions(causal=False).plus(*variants)


FEATURES: dict[str, Callable[[Batch], AttentionOptions]] = {
    "ALiBi": lambda batch: AttentionOptions().plus(_alibi(batch)),
    "ALiBi, window, soft-cap, sinks": lambda batch: AttentionOptions().plus(
        Window(20), Softcap(5.0), _sinks(batch), _alibi(batch)
    ),
    "ALiBi, full": lambda batch: _full(_alibi(batch)),
    "full": lambda _: _full(),
    "window, full": lambda _: _full(Window(20)),
    "mask, bool": lambda batch: AttentionOptions().plus(
        ValueMask(_shown(batch, max(batch.lengths)).to(batch.device))
    ),
    "mask, additive": lambda batch: AttentionOptions().plus(_values(batch, dtype=batch.dtype)),
    "mask, additive, narrow": lambda batch: AttentionOptions().plus(
        _values(batch, dtype=torch.float32, width=max(batch.lengths) // 2)
    ),
    "mask, each head": lambda batch: AttentionOptions().plus(
        _values(batch, batch.num_heads, dtype=torch.float32)
    ),
    "mask, blocks, ALiBi, full": lambda batch: _full(_alibi(batch), _blocks(batch)),
    "mask, each head, window, sinks": lambda batch: AttentionOptions().plus(
        Window(20), Softcap(5.0), _sinks(batch), _values(batch, batch.num_heads, dtype=batch.dtype)
    ),
    "tree": lambda batch: AttentionOptions().plus(_tree(batch, torch.int64)),
    "tree, sinks": lambda batch: AttentionOptions().plus(_sinks(batch), _tree(batch, torch.int32)),
}

_WITHOUT_WINDOW = [name for name in FEATURES if "window" not in name]
# The features that the tests of each kernel run with.
KERNELS = {
    "decode": list(FEATURES),
    "a shared prefix": _WITHOUT_WINDOW,
    "prefill": list(FEATURES),
    "prefill, keys shared out": list(FEATURES),
    "mixed": list(FEATURES),
}


def each_feature(kernel: str, quick: Collection[str]) -> pytest.MarkDecorator:
    """Parametrizes a test of a kernel with its features, of which all but `quick` are slow."""
    marked = [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in KERNELS[kernel]]
    return pytest.mark.parametrize("name", marked)


def attend_each_key(
    q: Tensor, kv: PagedKV, row: Tensor, request: int, length: int, first: int, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes one request's newest tokens, which are the queries from `first` on: the output `[n, H, Dv]`, the
    log-sum-exp `[n, H]` in base 2, and the probabilities `[H, n, length]`, float64."""
    num_queries, num_heads = q.shape[:2]
    scores, v = scores_of(q, kv, row, length, options)
    window = options.of(Window)
    own_begin = length - num_queries
    for query in range(num_queries):
        position = own_begin + query
        for key in range(length):
            bias = _bias(options, num_heads, request, first + query, key, position, own_begin).to(q.device)
            if options.causal and key > position:
                bias[:] = -torch.inf
            if window is not None and key <= position - window.size:
                bias[:] = -torch.inf
            scores[:, query, key] += bias
    return weigh(scores, v, options)


def _bias(
    options: AttentionOptions,
    num_heads: int,
    request: int,
    token: int,
    key: int,
    position: int,
    own_begin: int,
) -> Tensor:
    """Returns what ALiBi and masks add to the scores of a query, token `token` of q, at a key, `[H]`."""
    bias = torch.zeros(num_heads, dtype=torch.float64)
    alibi, values, tree = (options.of(kind) for kind in (Alibi, ValueMask, TreeMask))
    if alibi is not None:
        bias += alibi.slopes.double().cpu() * (key - position)
    if tree is not None and key >= own_begin:
        size, own = 8 * tree.bits.dtype.itemsize, key - own_begin
        has_bit = own < size * tree.bits.shape[1]
        if not has_bit or not int(tree.bits[token, own // size]) >> own % size & 1:
            bias[:] = -torch.inf
    if values is not None:
        column = key if values.columns is None else int(values.columns[request]) + key
        if column >= values.values.shape[-1]:
            bias[:] = -torch.inf
        elif values.values.dtype == torch.bool:
            bias += 0.0 if values.values[token, column] else -torch.inf
        else:
            bias += values.values[..., token, column].double().cpu()
    return bias
