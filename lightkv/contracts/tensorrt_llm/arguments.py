"""The arguments of TensorRT-LLM's attention contract that are plain data, with its names and defaults."""

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum, IntEnum, StrEnum
from typing import Any

import torch


class PredefinedAttentionMask(StrEnum):
    """Which keys a query sees: none after itself, or all of its request's."""

    CAUSAL = "causal"
    FULL = "full"


class AttentionInputType(IntEnum):
    """The phases of the sequences whose tokens a call gets."""

    mixed = 0
    context_only = 1
    generation_only = 2


class CacheType(Enum):
    """How a cache lays out a sequence: in one block, in blocks of a fixed size, or token by token."""

    LINEAR = 0
    PAGED = 1
    PER_TOKEN = 2


@dataclass
class AttentionRuntimeFeatures:
    """What the runtime may do. Only `has_speculative_draft_tokens` matters here: generations may then have more
    than one token."""

    chunked_prefill: bool = False
    cache_reuse: bool = False
    has_speculative_draft_tokens: bool = False
    chunk_size: int = 0
    chunked_prefill_buffer_batch_size: int = 4


@dataclass
class KVCacheParams:
    """What a batch's sequences hold in the cache.

    `use_cache`: whether K and V of this step are kept, and those of earlier ones read.
    `num_cached_tokens_per_seq`: tokens of each sequence that are cached before this step.
    `block_ids_per_seq`: the blocks of each sequence: one where the cache is linear, one for each page, or one
    for each token. None: the cache manager knows them (`get_batch_cache_indices`).

    The other fields are TensorRT-LLM's. They are not read here, so `AttentionMetadata.prepare` refuses those
    that are set.
    """

    use_cache: bool
    num_cached_tokens_per_seq: list[int]
    block_ids_per_seq: list[list[int]] | None = None
    host_max_attention_window_sizes: torch.Tensor | None = None
    host_sink_token_length: torch.Tensor | None = None
    num_extra_kv_tokens: Any = 0


@dataclass(kw_only=True, slots=True)
class AttentionForwardArgs:
    """The optional arguments of a layer's `AttentionBackend.forward`.

    `output`: `[num_q_tokens, num_heads * head_dim]` to write to, of q's type, or float8_e4m3fn.
    `out_scale`: float `[1]`: the output is float8_e4m3fn and holds the attention times this number.
    `kv_scale_orig_quant`, `kv_scale_quant_orig`: float `[1]`: what K and V are multiplied by before they are
    stored in 8 bits, and after they are read; if one is given, the other is its reciprocal.
    `attention_mask`: CAUSAL or FULL; cross attention sees all keys with either.
    `attention_window_size`: a query sees itself and so many tokens less one before it.
    `attention_sinks`: float `[num_heads]`: learned scores that join the softmax's sum and have no value.
    `cross_kv`: `[num_kv_tokens, 2 * num_kv_heads * head_dim]`: K and V of cross attention, instead of k and v.
    `is_fused_qkv`: q holds K and V, too.
    `update_kv_cache`: False: nothing is written, and k and v are None: the cache holds them already, as another
    layer's.

    All others are of features that lightkv's kernels do not have, and have to keep their defaults. In
    TensorRT-LLM those of the last two are objects, whose fields all have to keep theirs.
    """

    output: torch.Tensor | None = None
    output_sf: torch.Tensor | None = None
    out_scale: torch.Tensor | None = None
    out_scale_sf: torch.Tensor | None = None
    kv_scale_orig_quant: torch.Tensor | None = None
    kv_scale_quant_orig: torch.Tensor | None = None
    attention_mask: Any = PredefinedAttentionMask.CAUSAL
    attention_input_type: AttentionInputType = AttentionInputType.mixed
    attention_window_size: int | None = None
    attention_mask_data: torch.Tensor | None = None
    attention_sinks: torch.Tensor | None = None
    relative_attention_bias: torch.Tensor | None = None
    relative_attention_max_distance: int = 0
    cross_kv: torch.Tensor | None = None
    latent_cache: torch.Tensor | None = None
    q_pe: torch.Tensor | None = None
    mrope_rotary_cos_sin: torch.Tensor | None = None
    mrope_position_deltas: torch.Tensor | None = None
    softmax_stats_tensor: torch.Tensor | None = None
    chunked_prefill_buffer_batch_size: int = 1
    cu_q_seqlens: torch.Tensor | None = None
    cu_kv_seqlens: torch.Tensor | None = None
    fmha_scheduler_counter: torch.Tensor | None = None
    skip_mla_rope_generation: bool = False
    mla_bmm1_scale: torch.Tensor | None = None
    mla_bmm2_scale: torch.Tensor | None = None
    quant_q_buffer: torch.Tensor | None = None
    quant_scale_qkv: torch.Tensor | None = None
    sage_attn_num_elts_per_blk_q: int = 0
    sage_attn_num_elts_per_blk_k: int = 0
    sage_attn_num_elts_per_blk_v: int = 0
    sage_attn_qk_int8: bool = False
    topk_indices: torch.Tensor | None = None
    is_fused_qkv: bool = False
    update_kv_cache: bool = True
    timestep: torch.Tensor | None = None
    sparse_prediction: Any = None
    skip_softmax_kernel_params: Any = None


HONOURED = frozenset(
    {
        "output",
        "out_scale",
        "kv_scale_orig_quant",
        "kv_scale_quant_orig",
        "attention_mask",
        "attention_input_type",
        "attention_window_size",
        "attention_sinks",
        "cross_kv",
        "is_fused_qkv",
        "update_kv_cache",
    }
)
_DEFAULTS: dict[str, Any] = {one.name: one.default for one in fields(AttentionForwardArgs)}


def merge_attention_forward_args(forward_args: Any | None, kwargs: Mapping[str, Any]) -> Any:
    """Returns the arguments of a call, which are given as `forward_args` or as keywords.

    `forward_args` is an `AttentionForwardArgs`, lightkv's or TensorRT-LLM's. Raises ValueError for an unknown
    keyword, for both forms at once, and for an argument that lightkv does not honour.
    """
    unknown = sorted(set(kwargs) - set(_DEFAULTS))
    if unknown:
        raise ValueError(f"unknown keywords {unknown}; a call of attention takes {sorted(_DEFAULTS)}")
    if forward_args is not None and kwargs:
        raise ValueError(
            f"both forward_args and the keywords {sorted(kwargs)} were given; put them all into one of the two"
        )
    args = AttentionForwardArgs(**kwargs) if forward_args is None else forward_args
    defaults = dict(_DEFAULTS)
    if is_dataclass(args):  # TensorRT-LLM's may have more fields
        defaults |= {one.name: _default_of(one) for one in fields(args)}
    for name, default in defaults.items():
        if name not in HONOURED and not is_default(getattr(args, name, default), default):
            raise ValueError(
                f"{name} is given, but lightkv's kernels have no such feature; leave it at {default!r}. They "
                f"honour {sorted(HONOURED)}"
            )
    return args


def is_default(value: Any, default: Any) -> bool:
    """Returns whether a field has its default value. That is also so for None, and for a dataclass whose fields
    all have theirs."""
    if value is None or value is default:
        return True
    if isinstance(value, torch.Tensor):
        return False
    if is_dataclass(value):
        return all(is_default(getattr(value, one.name), _default_of(one)) for one in fields(value))
    return bool(value == default)


def _default_of(one: Field[Any]) -> Any:
    """Returns the default of a dataclass's field; None if it has none."""
    if one.default_factory is not MISSING:
        return one.default_factory()
    return None if one.default is MISSING else one.default
