"""Attention over the K/V pool: what a step computes (`Batch`), the step on the device (`Step`), and the
backends that compute it layer by layer. `forms` has the ways in which sequences hold their tokens."""

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
from .batch import Batch
from .rotary import Rotary, RotaryEmbedding
from .select import BACKENDS, make_backends, pick_backend, prefix_members
from .static_step import BatchShape, StaticStep
from .step import Step

__all__ = [
    "BACKENDS",
    "Alibi",
    "AttentionBackend",
    "AttentionOptions",
    "Batch",
    "BatchShape",
    "Chunk",
    "LayerShape",
    "PagedKV",
    "Rotary",
    "RotaryEmbedding",
    "SinkLogits",
    "Softcap",
    "StaticStep",
    "Step",
    "TreeMask",
    "ValueMask",
    "Window",
    "make_backends",
    "pick_backend",
    "prefix_members",
]
