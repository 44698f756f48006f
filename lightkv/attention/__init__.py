"""Attention over the pool: the numbers of a step, and the backends that compute it layer by layer."""

from .backend import AttentionBackend, AttentionOptions, LayerShape
from .metadata import AttentionMetadata, KVCacheParams
from .rotary import Rotary, RotaryEmbedding
from .select import BACKENDS, group_members, make_backends, pick_backend

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionOptions",
    "KVCacheParams",
    "LayerShape",
    "Rotary",
    "RotaryEmbedding",
    "group_members",
    "make_backends",
    "pick_backend",
]
