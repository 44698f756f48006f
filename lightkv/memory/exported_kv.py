"""A sequence's K/V in host memory: copied out of the slots of its row, and into those of another row."""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch

from .kv_memory import KVMemory
from .kv_pool import KVPool
from .kv_spec import KVSpec


class ExportedKV(NamedTuple):
    """The K/V of `length` tokens in host memory (pinned if the cache is on a GPU).

    layers: one tensor `[length, width]` per layer, and another for the scales of each layer that is quantised,
    in the order of `KVPool.buffers`. Where layers have groups, so many for each class of them in turn, of those
    tokens that the class keeps: `[groups of the class, kept, width]`. Static scales belong to the model and are
    not among them. states: the state after these tokens, `[1, *shape]` for each tensor of it in turn.
    """

    spec: KVSpec
    length: int
    layers: list[torch.Tensor]
    states: Seq[torch.Tensor] = ()

    def by_class(self, num_buffers: int) -> list[list[torch.Tensor]]:
        """Returns the tensors of each class: as many as a pool has buffers."""
        return [self.layers[i : i + num_buffers] for i in range(0, len(self.layers), num_buffers)]

    def require_fit(self, pool: KVPool, num_ids: int) -> list[int]:
        """Returns, for each class, the first of the tokens that it has. Raises ValueError, TypeError unless it
        has the form of K/V of the first of `num_ids` tokens in such a pool, and all that the next one sees."""
        if self.spec != pool.spec or not 1 <= self.length <= num_ids:
            raise ValueError(
                f"K/V of {self.length} tokens of {self.spec} for {num_ids} token ids in a cache of "
                f"{pool.spec}; give the ids that it was computed from, at least one"
            )
        if others := {type(layer).__name__ for layer in self.layers if not isinstance(layer, torch.Tensor)}:
            raise TypeError(f"layers are of {sorted(others)}; give tensors, as `export` returned them")
        classes = self.spec.groups.classes
        needed = len(classes) * len(pool.buffers)
        firsts, expected = [], []
        for one, rows in zip(classes, self.by_class(len(pool.buffers)), strict=False):
            kept = rows[0].shape[-2] if one.lifetime.size and rows[0].dim() > 1 else self.length
            firsts.append(self.length - kept)
            shape = (kept,) if self.spec.groups.is_uniform else (one.num_groups, kept)
            expected += [((*shape, buffer.shape[1]), buffer.dtype) for buffer in pool.buffers]
        found = [(tuple(layer.shape), layer.dtype) for layer in self.layers]
        if len(found) != needed or found != expected:
            raise ValueError(
                f"K/V in {len(found)} tensors {sorted(set(map(str, found)))} where {needed} are "
                f"needed, the first of {pool.buffers[0].shape[1]} elements a token; give what `export` "
                "returned, whole"
            )
        wanted = [(one.shape, one.dtype) for tensors in self.spec.states for one in tensors]
        if wanted != [(tuple(one.shape[1:]), one.dtype) for one in self.states]:
            raise ValueError(
                f"{len(self.states)} tensors of states for {len(wanted)}; give those of `export`"
            )
        self.spec.groups.require_import(self.length, firsts[1:])
        return firsts


def read_row(memory: KVMemory, row: int, firsts: Seq[int], length: int) -> ExportedKV:
    """Copies the K/V of a row's entries up to `length`, in each class from its entry in `firsts` on. Waits for
    the device."""
    device, layers, states = memory.device, list[torch.Tensor](), list[torch.Tensor]()

    def copied(found: torch.Tensor) -> torch.Tensor:
        host = torch.empty(found.shape, dtype=found.dtype, pin_memory=device.type == "cuda")
        return host.copy_(found, non_blocking=True)

    if memory.states is not None:
        place = memory.states.newest(row)
        states += [copied(tensor[place]) for tensor in memory.states.tensors]
    for cls, first in enumerate(firsts):
        slots = memory.entries(cls, row, first, length).long()
        for rows in memory.pool.buffers:
            found = rows.index_select(0, slots.flatten()).unflatten(0, slots.shape)
            layers.append(copied(found))
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return ExportedKV(memory.pool.spec, length, layers, states)


def write_row(memory: KVMemory, row: int, start: int, exported: ExportedKV) -> None:
    """Copies K/V into the slots of a row's entries from `start` on, as far as it has them."""
    buffers = memory.pool.buffers
    for cls, layers in enumerate(exported.by_class(len(buffers))):
        kept = layers[0].shape[-2]
        first = max(start, exported.length - kept)
        slots = memory.entries(cls, row, first, exported.length).flatten().long()
        for rows, layer in zip(buffers, layers, strict=True):
            part = layer[..., first - exported.length + kept :, :].to(memory.device, non_blocking=True)
            rows.index_copy_(0, slots, part.flatten(0, -2))
    if memory.states is not None:
        place = memory.states.newest(row)
        for tensor, state in zip(memory.states.tensors, exported.states, strict=True):
            tensor[place].copy_(state, non_blocking=True)
