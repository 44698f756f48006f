"""TensorRT-LLM's attention contract over lightkv's memory and kernels: `AttentionBackend`, `AttentionMetadata`,
and a cache manager. Without tensorrt_llm it stands on its own; with it, its classes are their bases."""

from typing import TYPE_CHECKING

from . import backend, metadata
from .arguments import (
    AttentionForwardArgs,
    AttentionInputType,
    AttentionRuntimeFeatures,
    CacheType,
    KVCacheParams,
    PredefinedAttentionMask,
    merge_attention_forward_args,
)
from .cache_manager import KVCacheManager
from .upstream import subclassed, upstream_interface

if TYPE_CHECKING:
    from .backend import AttentionBackend
    from .metadata import AttentionMetadata
else:
    _interface = upstream_interface()
    AttentionMetadata = subclassed(metadata.AttentionMetadata, _interface)
    AttentionBackend = subclassed(backend.AttentionBackend, _interface, Metadata=AttentionMetadata)

__all__ = [
    "AttentionBackend",
    "AttentionForwardArgs",
    "AttentionInputType",
    "AttentionMetadata",
    "AttentionRuntimeFeatures",
    "CacheType",
    "KVCacheManager",
    "KVCacheParams",
    "PredefinedAttentionMask",
    "merge_attention_forward_args",
]
