"""Attention over the K/V pool: the metadata of a step, and the backends that compute it layer by layer."""

from lightkv.triton_kernels.attention.paged_kv import AttentionOptions, PagedKV

from .backend import AttentionBackend, LayerShape
from .cross import CrossMetadata
from .metadata import AttentionMetadata, BatchShape
from .rotary import Rotary, RotaryEmbedding
from .select import BACKENDS, make_backends, pick_backend, prefix_members

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionOptions",
    "BatchShape",
    "CrossMetadata",
    "LayerShape",
    "PagedKV",
    "Rotary",
    "RotaryEmbedding",
    "make_backends",
    "pick_backend",
    "prefix_members",
]
