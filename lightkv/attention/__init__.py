"""Attention over the K/V pool: the metadata of a step, and the backends that compute it layer by layer."""

from lightkv.triton_kernels.attention.paged_kv import AttentionOptions, PagedKV
from lightkv.triton_kernels.attention.variants import (
    Alibi,
    Chunk,
    SinkLogits,
    Softcap,
    TreeMask,
    ValueMask,
    Window,
)

from .backend import AttentionBackend, LayerShape
from .cross import CrossMetadata
from .metadata import AttentionMetadata, BatchShape
from .rotary import Rotary, RotaryEmbedding
from .select import BACKENDS, make_backends, pick_backend, prefix_members

__all__ = [
    "BACKENDS",
    "Alibi",
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionOptions",
    "BatchShape",
    "Chunk",
    "CrossMetadata",
    "LayerShape",
    "PagedKV",
    "Rotary",
    "RotaryEmbedding",
    "SinkLogits",
    "Softcap",
    "TreeMask",
    "ValueMask",
    "Window",
    "make_backends",
    "pick_backend",
    "prefix_members",
]
