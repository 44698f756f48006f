"""The layers of a LightKVCache, with the methods that transformers calls, and the K/V that they return."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from lightkv.memory.kv_pool import KVPool

KV = tuple[torch.Tensor, torch.Tensor]


class CacheLayer(CacheLayerMixin):
    """One layer of a decoder's own K/V. `owner` is its LightKVCache, or a weak reference to it.

    `span` is the size of the window or chunk that a sliding layer sees, the largest of them in its model; it is
    0 for a layer that sees everything. The K/V and the mask of a sliding layer begin `span - 1` columns before
    those that the call computes, even where a chunk begins later, as in transformers' own caches. transformers
    may leave the mask out where there are fewer columns than `span`: it takes them for one window or chunk.
    """

    is_croppable = True
    keys: Any = None
    values: Any = None

    def __init__(self, owner: Any, layer_idx: int, span: int = 0) -> None:
        # transformers' own constructor would set keys and values, which are properties of some layers.
        self.is_initialized = False
        self.is_sliding = span > 0
        self._span = span
        self._owner = owner
        self._layer_idx = layer_idx

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing: the pool is allocated when the cache is made."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> KV:
        k, v = self._owner.update_layer(self._layer_idx, key_states, value_states, self._first)
        holders = self._owner.kv.memory.pool.spec.holders or ()
        # What layers after it read, too, must not be written over by the next layer's K/V.
        return (k.clone(), v.clone()) if holders.count(self._layer_idx) > 1 else (k, v)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = self._first
        return self._owner.num_columns + query_length - first, first

    @property
    def _first(self) -> int:
        """The first column of the K/V that `update` returns."""
        return max(int(self._owner.num_columns) - self._span + 1, 0) if self.is_sliding else 0

    def get_seq_length(self) -> int:
        return int(self._owner.num_columns)

    def get_max_length(self) -> int:
        return int(self._owner.max_entries)


class ReadableLayer(CacheLayer):
    """A CacheLayer with `keys` and `values`, which Whisper's `generate` copies into its output."""

    def read(self) -> KV:
        """Returns the layer's K/V of all columns."""
        found: KV = self._owner.read_layer(self._layer_idx)
        return found

    @property
    def keys(self) -> torch.Tensor:  # type: ignore[override]
        return self.read()[0]

    @property
    def values(self) -> torch.Tensor:  # type: ignore[override]
        return self.read()[1]


class CrossLayer(ReadableLayer):
    """One layer of the K/V that a decoder reads of the encoder's output. A model writes it once with `update`,
    and reads `keys` and `values` from then on."""

    def read(self) -> KV:
        found: KV = self._owner.read_cross(self._layer_idx)
        return found

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> KV:
        self._owner.update_cross(self._layer_idx, key_states, value_states)
        return self.read()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.encoder_width, 0

    def get_seq_length(self) -> int:
        return int(self._owner.encoder_width)


def write_tokens(
    pool: KVPool, layer_idx: int, slots: torch.Tensor, source: torch.Tensor, kv: Sequence[torch.Tensor]
) -> None:
    """Writes K/V of a layer to `slots`: the tokens at places `source` of K and V `[B, heads, T, dim]`, counted
    through all rows. Both are int64 `[n]`."""
    tokens = (fresh.detach().transpose(1, 2).flatten(0, 1) for fresh in kv)  # [B * T, heads, dim]
    pool.write(layer_idx, slots, *(fresh.index_select(0, source) for fresh in tokens))
