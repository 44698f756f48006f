"""Gathers the K/V of any slots of a pool as dense tensors, for attention functions that take them so."""

import torch

from .kv_pool import KVPool


class KVGatherer:
    """Reads a pool; it holds the scratch memory of one layer."""

    def __init__(self, pool: KVPool) -> None:
        self.num_reads = 0
        self._pool = pool
        self._scratch: torch.Tensor | None = None

    def read(self, layer_idx: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V of slots, int64 `[...]`, in the type that the model computes in: `[..., num_kv_heads,
        k_dim]` and `[..., num_kv_heads, v_dim]`. They stay valid until the next call."""
        pool = self._pool
        self.num_reads += 1
        if pool.format(layer_idx).is_quantised:
            return pool.read(layer_idx, slots)
        stored = pool.kv(layer_idx)
        numel = slots.numel() * stored.shape[1]
        if self._scratch is None or self._scratch.numel() < numel:
            # Texts grow by a token in each step, so there is room for half as much again.
            self._scratch = stored.new_empty(numel + numel // 2)
        out = self._scratch[:numel].view(slots.numel(), -1)
        gathered = torch.index_select(stored, 0, slots.flatten(), out=out).view(*slots.shape, -1)
        return pool.spec.split(gathered, layer_idx)
