"""Compares OpenPPL's MultiHeadCacheAttention with the reference of its contract, step by step."""

import itertools
from typing import Any

import torch
from torch import Tensor

from lightkv.contracts.openppl import multi_head_cache_attention

from .openppl_reference import Batch, Place, Setting

PAST, COUNTS = [7, 1, 4, 9], [1, 1, 5, 3]
PLACES = [Place(layout, page) for layout in range(4) for page in (0, 1, 16, 128)]
MASKS = ("none", "2d", "padded", "3d")
GRID = [
    Setting(dtype, bits, is_alibi=alibi, is_causal=causal, mask=mask)
    for dtype, bits, alibi, causal, mask in itertools.product(
        (torch.float32, torch.float16), (0, 8, 4), (False, True), (False, True), MASKS
    )
]
TOLERANCE = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


def same_bytes(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether both are equal to the bit, NaN too."""
    if a is None or b is None:
        return a is b
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check(batch: Batch, places: list[Place], backend: str | None = None, slack: float = 1.0) -> Tensor:
    """Runs a step with the cache laid out in each of the places: the output and all of the cache have to be the
    reference's, and the outputs equal to the bit."""
    expected, stored, scales = batch.result()
    first: Tensor | None = None
    for place in places:
        arguments = batch.arguments(place)
        out = multi_head_cache_attention(**arguments, backend=backend)
        assert out.dtype == batch.q.dtype
        assert out.shape == batch.q.shape
        starts, num_slots = batch.slots(place)
        wanted = batch.filled(place, num_slots, starts, stored, scales)
        assert same_bytes(arguments["cache"], wanted[0]), place
        assert same_bytes(arguments["scale"], wanted[1]), place
        limits = {name: slack * limit for name, limit in TOLERANCE[batch.q.dtype].items()}
        torch.testing.assert_close(out.double(), expected, **limits)
        first = out if first is None else first
        assert same_bytes(out, first), place
    assert first is not None
    return first


def steps_of_two_sequences(setting: Setting, place: Place, device: str = "cpu", slack: float = 1.0) -> None:
    """A prefill of 4 and of 8 tokens, more of both, and a step that decodes, in both layers; each step finds
    what the last one wrote."""
    tokens: dict[int, Any] = {}
    for past, counts in (([0, 0], [4, 8]), ([4, 8], [8, 4]), ([12, 12], [1, 1])):
        for layer_idx in range(2):
            batch = Batch(past, counts, 2 if counts == [1, 1] else 0, setting, device)
            if layer_idx in tokens:
                batch.stored, batch.scales = tokens[layer_idx]
            check(batch, [Place(place.layout, place.page, 2, layer_idx)], slack=slack)
            tokens[layer_idx] = batch.result()[1:]
