"""OpenPPL's MultiHeadCacheAttention: writes a step's K/V into the caller's cache and attends, in one call.

The cache is read and written in place, in each of its layouts, by the kernels that lightkv's own backends use.
`docs/kernels.md` says what we decided where the contract leaves something open.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lightkv.errors import UnknownBackend
from lightkv.triton_kernels.attention.attention_reference import attend_request
from lightkv.triton_kernels.attention.decode import decode_tuning
from lightkv.triton_kernels.attention.decode.decode_attention import decode_attention
from lightkv.triton_kernels.attention.paged_kv import DEFAULT_OPTIONS, AttentionOptions, PagedKV
from lightkv.triton_kernels.attention.prefill.prefill_attention import prefill_attention
from lightkv.triton_kernels.attention.variants import Alibi, ValueMask
from lightkv.triton_kernels.attention.variants.alibi import alibi_slopes
from lightkv.triton_kernels.attention.variants.variant import Scored
from lightkv.triton_kernels.layout.strides import has_unit_stride
from lightkv.triton_kernels.operators import operator

from .openppl_cache import LayerCache, Slots, layer_of
from .openppl_inputs import Attributes, check_inputs


def multi_head_cache_attention(
    query: Tensor,
    current_key: Tensor,
    current_value: Tensor,
    seqstarts: Tensor,
    kvstarts: Tensor,
    cachestarts: Tensor,
    start_pos: Tensor,
    decoding_batches: int | Tensor,
    max_seqlen: int | Tensor,
    max_kvlen: int | Tensor,
    cache: Tensor,
    scale: Tensor | None = None,
    attn_mask: Tensor | None = None,
    *,
    num_heads: int,
    head_dim: int,
    is_causal: bool,
    is_alibi: bool = False,
    num_kv_heads: int = 0,
    num_layer: int = 1,
    layer_idx: int = 0,
    quant_bit: int = 0,
    quant_group: int = 8,
    cache_mode: int = 0,
    cache_layout: int = 0,
    page_size: int = 128,
    backend: str | None = None,
) -> Tensor:
    """Writes this step's K/V into the cache and attends to all tokens of each sequence.

    B sequences have S queries together; sequence b has queries [seqstarts[b], seqstarts[b + 1]), of which the
    last is its newest token, and kvstarts[b + 1] - kvstarts[b] tokens. Sequences that decode come first. On a
    GPU nothing is read on the host, so a call can be captured in a CUDA graph and replayed with other values in
    the same tensors, as far as the numbers below stay true.

    Args:
        query: `[S, num_heads, head_dim]`, float32, float16 or bfloat16.
        current_key, current_value: `[S, num_kv_heads, head_dim]`, of query's type.
        seqstarts: int64 `[B + 1]`, from 0 to S.
        kvstarts: int64 `[B + 1]`, from 0 to the tokens of all sequences, these included.
        cachestarts: int64, the slot of each sequence's first token, `[B]`, or in mode 1 the slots at which its
            pages begin, `[B, MaxP]`. Entries of pages that a sequence does not reach are not used.
        start_pos: int64 `[B]`, the position of each sequence's first query.
        decoding_batches: how many of the first sequences decode; these have no causal mask, unless is_alibi.
        max_seqlen, max_kvlen: the most queries, and the most tokens, of a sequence, or more. These three are
            numbers, or int64 tensors of one element on the CPU.
        cache: K and V, with `num_layer` layers L, T slots, `num_kv_heads` heads H and `head_dim` dims D, which
            is written in place: layout 0 `(T, L, 2, H, D)`, 1 `(L, T, 2, H, D)`, 2 `(L, 2, T, H, D)`, 3 `(L, 2,
            H, T, D)`. Float32, float16 or bfloat16; int8 if quant_bit is 8; if it is 4, uint8 or int8 with D /
            2 bytes, of which the low nibble is the even element.
        scale: like the cache, with D / quant_group, float32 or float16; written in place. None if quant_bit
            is 0.
        attn_mask: of a floating type, added to the scores: `[S, width]` or `[num_heads, S, width]`, with a
            column for each token of all sequences, or more columns. A sequence reads its own tokens' columns.
        num_heads, head_dim, num_kv_heads, num_layer, layer_idx: the shapes above; num_kv_heads of 0 stands for
            num_heads.
        is_causal: whether a query that does not decode sees no key after itself.
        is_alibi: whether slope * (key position - query position) is added to the scores. No query sees a key
            after itself then, whatever is_causal and decoding_batches say.
        quant_bit: 0, 8 or 4.
        quant_group: how many neighbouring elements of a head share a scale; divides head_dim.
        cache_mode: 0 for one run of slots per sequence, 1 for pages.
        cache_layout: 0 to 3.
        page_size: tokens of a page, in mode 1.
        backend: ours: "triton", "torch", which reads on the host, or None for the one of the device.

    Returns:
        `[S, num_heads, head_dim]` in query's type. The output of a query that sees no key is zeros.

    Raises:
        ValueError: attributes, shapes, types or devices do not fit. Nothing is written then. The numbers in
            the tensors are not checked.
    """
    attributes = Attributes(
        num_heads,
        head_dim,
        num_kv_heads or num_heads,
        num_layer,
        layer_idx,
        quant_bit,
        quant_group,
        cache_mode,
        cache_layout,
        page_size,
    )
    counts = (
        _on_host("decoding_batches", decoding_batches),
        _on_host("max_seqlen", max_seqlen),
        _on_host("max_kvlen", max_kvlen),
    )
    tensors = {
        "query": query,
        "current_key": current_key,
        "current_value": current_value,
        "seqstarts": seqstarts,
        "kvstarts": kvstarts,
        "cachestarts": cachestarts,
        "start_pos": start_pos,
        "cache": cache,
        "scale": scale,
        "attn_mask": attn_mask,
    }
    check_inputs(tensors, counts, attributes)
    if backend not in (None, "torch", "triton"):
        raise UnknownBackend(str(backend), ["torch", "triton"])
    in_torch = backend == "torch" or (backend is None and query.device.type == "cpu")
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    new = query, current_key, current_value
    starts = seqstarts, kvstarts, cachestarts, start_pos
    _write_and_attend(
        new, starts, counts, cache, scale, attn_mask, attributes, is_causal, is_alibi, in_torch, out
    )
    return out


def _on_host(name: str, value: int | Tensor) -> int:
    if not isinstance(value, Tensor):
        return value
    if value.device.type != "cpu" or value.numel() != 1 or value.dtype != torch.int64:
        raise ValueError(
            f"{name} must be a number, or an int64 tensor of one element on the CPU, so that nothing waits for "
            f"the device; got {value.dtype} {tuple(value.shape)} on {value.device}; keep it on the host"
        )
    return int(value)


@operator("multi_head_cache_attention", writes=("cache", "scale", "out"), records=(Attributes,))
@torch.no_grad()
def _write_and_attend(
    new: tuple[Tensor, Tensor, Tensor],
    starts: tuple[Tensor, Tensor, Tensor, Tensor],
    counts: tuple[int, int, int],
    cache: Tensor,
    scale: Tensor | None,
    attn_mask: Tensor | None,
    attributes: Attributes,
    is_causal: bool,
    is_alibi: bool,
    in_torch: bool,
    out: Tensor,
) -> None:
    """Computes `multi_head_cache_attention` of what its checks have passed."""
    if not out.numel():
        return
    query, current_key, current_value = new
    seqstarts, kvstarts, cachestarts, start_pos = starts
    decoding_batches, max_seqlen, max_kvlen = counts
    bits, layout, layer_idx = attributes.quant_bit, attributes.cache_layout, attributes.layer_idx
    slots = Slots(cachestarts, attributes.page_size if attributes.cache_mode else 0)
    of_layer = LayerCache(
        layer_of(layout, cache.view(torch.uint8) if bits == 4 else cache, layer_idx),
        None if scale is None or not bits else layer_of(layout, scale, layer_idx),
        bits,
    )
    alibi = Alibi(alibi_slopes(attributes.num_heads, device=query.device)) if is_alibi else None
    mask = None if attn_mask is None else ValueMask(_loadable(attn_mask), columns=kvstarts[:-1].int())
    # With is_alibi, the authors' bias is -inf for keys after the query, in every sequence.
    num_whole = 0 if is_alibi else decoding_batches if is_causal else len(start_pos)
    options, lengths = DEFAULT_OPTIONS.plus(alibi, mask), kvstarts.diff().int()
    step = _Step(_loadable(query), seqstarts.int(), lengths, options, num_whole)
    tokens = torch.arange(len(query), device=seqstarts.device)
    sequences = torch.searchsorted(seqstarts[1:].contiguous(), tokens, right=True)
    sequences = sequences.clamp(max=len(start_pos) - 1)
    own_slots = slots.find(sequences, start_pos[sequences] + tokens - seqstarts[sequences])
    of_layer.write(own_slots, current_key, current_value)
    if in_torch:
        _attend_in_torch(step, of_layer, slots, out)
    else:
        _attend_with_kernels(step, of_layer.paged_kv(slots, max_kvlen, query.dtype), max_seqlen, out)


def _loadable(x: Tensor) -> Tensor:
    """Returns x as the kernels load it, with a last stride of 1."""
    return x if has_unit_stride(x) else x.contiguous()


class _Step(NamedTuple):
    """What a call attends from. Queries that are among a sequence's last tokens stand at its last positions."""

    q: Tensor  # [S, H, D]
    q_starts: Tensor  # int32 [B + 1]
    lengths: Tensor  # int32 [B], the tokens of each sequence
    options: AttentionOptions
    num_whole: int  # the first sequences, whose queries see all of their tokens


def _attend_with_kernels(step: _Step, kv: PagedKV, max_seqlen: int, out: Tensor) -> None:
    """Writes the attention of all queries to `out`, by the kernels."""
    q, q_starts, lengths, options, num_whole = step
    batch = len(lengths)
    rows = torch.arange(batch, device=q.device, dtype=torch.int32)
    if max_seqlen == 1 and len(q) == batch and q.shape[1] // kv.k.shape[1] <= decode_tuning.MOST_DECODE_ROWS:
        # Every sequence has one query, its newest token, which sees all of its tokens in any layer.
        decode_attention(q, kv, rows, lengths, options, out=out)
        return
    # How many queries a sequence that decodes has is known on the device alone, so prefill's kernel, which
    # reads q_starts there, takes them, too.
    for begin, end, causal in ((0, num_whole, False), (num_whole, batch, True)):
        if begin < end:
            prefill_attention(
                q,
                kv,
                rows[begin:end],
                q_starts[begin : end + 1],
                lengths[begin:end],
                options.of_requests(begin, end)._replace(causal=causal),
                out=out,
            )


def _attend_in_torch(step: _Step, of_layer: LayerCache, slots: Slots, out: Tensor) -> None:
    """Writes the attention of all queries to `out`, sequence by sequence and in float32."""
    q, q_starts, lengths, options, num_whole = step
    starts = q_starts.tolist()
    for sequence, length in enumerate(lengths.tolist()):
        queries = slice(starts[sequence], starts[sequence + 1])
        if queries.start == queries.stop:
            continue
        positions = torch.arange(length, device=q.device)
        k, v = of_layer.read(slots.find(torch.full_like(positions, sequence), positions))
        scored = Scored.of_last(queries, sequence, length, q.device)
        causal = options._replace(causal=sequence >= num_whole)
        out[queries] = attend_request(q[queries].float(), k, v, causal, scored)
