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


class KVGatherer:
    """Gathers K/V of any slots from a pool as dense tensors; it holds the scratch memory of one layer."""

    def __init__(self, pool: KVPool) -> None:
        self.num_reads = 0
        self._pool = pool
        self._scratch: torch.Tensor | None = None

    def read(self, layer_idx: int, seen: torch.Tensor) -> KV:
        """Returns K and V at the slots `seen`, int64 `[rows, width]`, as `[rows, heads, width, dim]` in the
        type that the model computes in. They stay valid until the next call."""
        pool = self._pool
        self.num_reads += 1
        if pool.format(layer_idx).is_quantised:
            k, v = pool.read(layer_idx, seen)
            return k.transpose(1, 2), v.transpose(1, 2)
        stored = pool.kv(layer_idx)
        numel = seen.numel() * stored.shape[1]
        if self._scratch is None or self._scratch.numel() < numel:
            # Texts grow by a token in each step, so there is room for half as much again.
            self._scratch = stored.new_empty(numel + numel // 2)
        out = self._scratch[:numel].view(seen.numel(), -1)
        gathered = torch.index_select(stored, 0, seen.flatten(), out=out).view(*seen.shape, -1)
        k, v = pool.spec.split(gathered, layer_idx)
        return k.transpose(1, 2), v.transpose(1, 2)


def write_tokens(
    pool: KVPool, layer_idx: int, slots: torch.Tensor, source: torch.Tensor, kv: Sequence[torch.Tensor]
) -> None:
    """Writes K/V of a layer to `slots`: the tokens at places `source` of K and V `[B, heads, T, dim]`, counted
    through all rows. Both are int64 `[n]`."""
    tokens = (fresh.detach().transpose(1, 2).flatten(0, 1) for fresh in kv)  # [B * T, heads, dim]
    pool.write(layer_idx, slots, *(fresh.index_select(0, source) for fresh in tokens))
