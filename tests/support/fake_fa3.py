"""FlashAttention 3 in plain torch, with the operators' schemas as vLLM 0.33's library registers them."""

from typing import Any

import torch
from torch import Tensor

from bench.kernels.attention_batches import attend_reference
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions
from lightkv.triton_kernels.attention.variants.variant import Scored

# As `torch.ops._vllm_fa3_C.fwd.default._schema` and that of `get_scheduler_metadata` print them.
FORWARD = """fwd(
    Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out,
    Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k,
    int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k,
    Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary,
    Tensor? q_descale, Tensor? k_descale, Tensor? v_descale,
    float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap,
    bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin,
    Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k
) -> Tensor[]"""
SCHEDULER = """get_scheduler_metadata(
    int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, int headdim,
    int headdim_v, ScalarType qkv_dtype, Tensor seqused_k,
    Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k,
    int? page_size, int max_seqlen_k_new, bool is_causal, int window_size_left, int window_size_right,
    bool has_softcap, int num_splits, bool? pack_gqa, int sm_margin
) -> Tensor"""


def names_of(schema: str) -> list[str]:
    """Returns the names of a schema's arguments."""
    return [argument.name for argument in torch._C.parse_schema(schema).arguments]


def scheduler(*arguments: Any) -> Tensor:
    """Returns what the metadata was made for, so that `forward` can compare it."""
    given = dict(zip(names_of(SCHEDULER), arguments, strict=True))
    assert given["qkv_dtype"] == torch.float16
    assert given["seqused_k"].dtype == given["cu_seqlens_q"].dtype == torch.int32
    assert len(given["cu_seqlens_q"]) == len(given["seqused_k"]) + 1 == given["batch_size"] + 1
    names = ("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads", "num_heads_k", "headdim", "headdim_v",
             "page_size", "num_splits")  # fmt: skip
    return torch.tensor([given[name] for name in names], dtype=torch.int32, device=given["seqused_k"].device)


def forward(*arguments: Any) -> list[Tensor]:
    """Attends as the library documents it, and makes its checks."""
    given = dict(zip(names_of(FORWARD), arguments, strict=True))
    q, k, v, out = (given[name] for name in ("q", "k", "v", "out"))
    table, starts, lengths = (given[name] for name in ("page_table", "cu_seqlens_q", "seqused_k"))
    assert q.dtype == k.dtype == v.dtype == out.dtype
    for tensor in (q, k, v, out, table):
        assert tensor.stride(-1) == 1
    for numbers in (table, starts, lengths):
        assert numbers.dtype == torch.int32
    assert starts.is_contiguous()
    assert lengths.is_contiguous()
    (num_pages, page, num_kv_heads, _), num_requests = k.shape, len(lengths)
    assert v.shape[:3] == k.shape[:3]
    assert out.shape == (*q.shape[:2], v.shape[3])
    assert len(table) == num_requests == len(starts) - 1
    assert 0 <= int(table.min()) <= int(table.max()) < num_pages
    assert given["max_seqlen_q"] == int(starts.diff().max())
    assert given["max_seqlen_k"] == int(lengths.max()) <= table.shape[1] * page
    assert given["is_causal"]
    assert (given["window_size_left"], given["window_size_right"], given["cp_world_size"]) == (-1, -1, 1)
    made_for = [num_requests, given["max_seqlen_q"], given["max_seqlen_k"], q.shape[1], num_kv_heads,
                q.shape[2], v.shape[3], page, given["num_splits"]]  # fmt: skip
    assert given["scheduler_metadata"].tolist() == made_for
    for request, length in enumerate(lengths.tolist()):
        key, value = (half[table[request].long()].flatten(0, 1)[:length] for half in (k, v))
        queries = slice(int(starts[request]), int(starts[request + 1]))
        options = AttentionOptions(given["softmax_scale"])
        scored = Scored.of_last(queries, request, length, q.device)
        out[queries] = attend_reference(q[queries], key, value, options, scored).to(out.dtype)
    return [q.new_zeros(1)]  # the library returns out too, which torch forbids operators in Python


_LIBRARY = torch.library.Library("lightkv_fake_fa3", "DEF")
for _schema, _function in ((FORWARD, forward), (SCHEDULER, scheduler)):
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_schema.partition("(")[0], _function, "CompositeExplicitAutograd")
FAKE_FA3 = torch.ops.lightkv_fake_fa3
