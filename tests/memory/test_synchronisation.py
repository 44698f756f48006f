"""No verb of a cache waits for the device, except the documented ones (`export`, `memory_map`, `check`)."""

from typing import get_args

import pytest
import torch

from lightkv import KVCache, KVSpec
from lightkv.edits import AllocPart, AllocStates, Edit, FreePart, ReadStates
from lightkv.memory.staging import upload

SPEC = KVSpec(num_layers=1, num_kv_heads=1, k_dim=1, v_dim=1, dtype=torch.float32)


def every_verb(cache: KVCache) -> None:
    """Calls every verb, so that they emit every kind of edit, and leaves the cache empty."""
    prompt = list(range(20))
    first = cache.open(prompt)
    cache.extend([first], [20])
    cache.publish(first)
    cache.confirm()
    second = cache.open([*prompt[:10], 99, 98])
    cache.extend([first, second], [1, 2])
    cache.kv_indices([first, second])
    third = cache.fork(second)
    cache.extend([first, second, third], [1, 3, 1])
    cache.shrink([second], [1])
    fourth = cache.fork(second)
    cache.close(third, cache=False)
    cache.extend([second], [1])
    fifth = cache.fork(second)
    cache.slots(fifth)
    cache.truncate(fourth, 11)
    cache.close(fourth, output_ids=[5, 6])
    cache.extend([fifth], [2])
    cache.close(second)
    cache.extend([fifth], [9])
    cache.release(fifth, 6, sink_tokens=2)
    cache.release(fifth, 2, sink_tokens=2)
    (kept,) = upload([torch.tensor([18, 15, 16]).numpy()], cache.memory.device)
    assert cache.keep(fifth, kept) > 0
    cache.positions(fifth)
    cache.extend([fifth], [1])
    cache.truncate(fifth, fifth.length - 1)
    for sequence in (first, fifth):
        cache.close(sequence)
    unread = cache.open([7, 7, 7])
    cache.extend([unread], [3])
    cache.publish(unread)
    cache.close(unread, cache=False)
    cache.retract()
    cache.evict(cache.num_cached)


def test_no_verb_waits_for_the_device(device: torch.device) -> None:
    cache = KVCache(SPEC, 200, max_sequences=8, max_entries=64, device=device)
    kinds: set[type] = set()
    cache.on_edits = lambda edits, kept: kinds.update(type(edit) for edit in edits)
    every_verb(cache)  # compiles the kernels
    assert kinds == set(get_args(Edit)) - {AllocPart, FreePart, AllocStates, ReadStates}
    cache.check()
    assert cache.num_free == cache.capacity


@pytest.mark.gpu
def test_no_verb_waits_for_the_gpu() -> None:
    cache = KVCache(SPEC, 200, max_sequences=8, max_entries=64, device="cuda")
    every_verb(cache)  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        every_verb(cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    cache.check()
    assert cache.num_free == cache.capacity
