"""The events, with the names and the order of fields that vLLM's have, so that its consumers decode them.

vLLM's structs have further fields, all of which default to None and are left out where they do. An event is a
map with its type under "type", a batch an array.
"""

import msgspec

MEDIUM = "GPU"  # what vLLM calls the memory that a request is computed from, on any device
DATA_PARALLEL_RANK = 0  # each replica has one router


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Consecutive blocks are in the cache, the first of them behind `parent_block_hash` (None: it is the first
    of a prompt). `extra_keys`: None, or for each block what beside its tokens decides who can hit it."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """These blocks are not in the cache any more."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """No block is in the cache."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events in their order, and the time in seconds since the epoch."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


def size(event: KVEvent) -> int:
    """Returns how many numbers an event holds, which its encoding grows with."""
    if isinstance(event, BlockStored):
        return len(event.token_ids) + len(event.block_hashes)
    return len(event.block_hashes) if isinstance(event, BlockRemoved) else 1
