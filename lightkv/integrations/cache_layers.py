"""The layers of a LightKVCache, with the methods that transformers calls, and the K/V that they return."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers.cache_utils import CacheLayerMixin

from lightkv.memory.kv_pool import KVPool

KV = tuple[torch.Tensor, torch.Tensor]


class LayerOwner(Protocol):
    """What a layer asks of the cache that it belongs to."""

    @property
    def num_columns(self) -> int:
        """Columns of the batch before the call."""

    @property
    def max_entries(self) -> int:
        """The most tokens of a text."""

    def update_layer(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> KV:
        """Writes a layer's new K/V, and returns all that its attention sees."""


class ReadableOwner(LayerOwner, Protocol):
    """A cache whose K/V can be read between two calls of the model."""

    def read_layer(self, layer_idx: int) -> KV:
        """Returns a layer's K/V of all columns."""


class CacheLayer(CacheLayerMixin):
    """One layer of a decoder's own K/V. `owner` is the cache, or a weak reference to it."""

    is_croppable = True
    keys: Any = None
    values: Any = None

    def __init__(self, owner: LayerOwner, layer_idx: int) -> None:
        # transformers' own constructor would set keys and values, which are properties of some layers.
        self.is_initialized = False
        self._owner = owner
        self._layer_idx = layer_idx

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing: the pool is allocated when the cache is made."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._owner.update_layer(self._layer_idx, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.num_columns + query_length, 0

    def get_seq_length(self) -> int:
        return self._owner.num_columns

    def get_max_length(self) -> int:
        return self._owner.max_entries


class ReadableLayer(CacheLayer):
    """A CacheLayer with `keys` and `values`, which Whisper's `generate` copies into its output."""

    def __init__(self, owner: ReadableOwner, layer_idx: int) -> None:
        super().__init__(owner, layer_idx)
        self._reader = owner

    @property
    def keys(self) -> torch.Tensor:  # type: ignore[override]
        return self._reader.read_layer(self._layer_idx)[0]

    @property
    def values(self) -> torch.Tensor:  # type: ignore[override]
        return self._reader.read_layer(self._layer_idx)[1]


def write_tokens(
    pool: KVPool, layer_idx: int, slots: torch.Tensor, source: torch.Tensor, kv: Sequence[torch.Tensor]
) -> None:
    """Writes K/V of a layer to `slots`: the tokens at places `source` of K and V `[B, heads, T, dim]`, counted
    through all rows. Both are int64 `[n]`."""
    tokens = (fresh.detach().transpose(1, 2).flatten(0, 1) for fresh in kv)  # [B * T, heads, dim]
    pool.write(layer_idx, slots, *(fresh.index_select(0, source) for fresh in tokens))
