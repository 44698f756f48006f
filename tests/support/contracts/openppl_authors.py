"""OpenPPL's MultiHeadCacheAttention by its authors' own torch code, out of a checkout of OpenPPL/ppl.pmx.

Run as a program, it records the outputs of a sample of the grid, which `make test` compares ours with:

    python -m tests.support.contracts.openppl_authors CHECKOUT
"""

import itertools
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .openppl_reference import Batch, Place, Setting

RECORDED = Path(__file__).with_suffix(".npz")
PAST, COUNTS = [7, 1, 4, 9], [1, 1, 5, 3]
MASKS = ("none", "2d", "padded", "3d")
DTYPES, BITS = (torch.float32, torch.float16), (0, 8)  # those that the authors' code has
Operator = Callable[..., Tensor]


def sample(device: str = "cpu") -> dict[str, Batch]:
    """Returns batches by name, which have the same numbers on every device.

    There is ALiBi or not, causality or not, every kind of mask, and 0 to 4 sequences that decode, of which the
    third and the fourth have several queries; types and quantisation alternate.
    """
    found = {}
    forms = itertools.product((False, True), (False, True), enumerate(MASKS), (0, 2, 3, 4))
    for number, (alibi, causal, (row, mask), decoding) in enumerate(forms):
        setting = Setting(
            DTYPES[(number + row) % 2],
            BITS[(number // 2 + row) % 2],
            is_alibi=alibi,
            is_causal=causal,
            mask=mask,
        )
        found[f"{setting}-{decoding}"] = Batch(PAST, COUNTS, decoding, setting, device, seed=number)
    return found


def load_operator(checkout: Path) -> Operator:
    """Returns the authors' operator."""
    sys.path.insert(0, str(checkout))
    try:
        module = import_module("torch_function.dynamic_batching.MultiHeadCacheAttention")
    finally:
        sys.path.pop(0)
    operator: Operator = module.multi_head_cache_attention
    return operator


def run(operator: Operator, batch: Batch, place: Place) -> tuple[Tensor, dict[str, Any]]:
    """Returns the authors' output, and the arguments of the call, whose cache and scales are written."""
    arguments = batch.arguments(place)
    numbers = {
        name: torch.tensor(arguments[name]) for name in ("decoding_batches", "max_seqlen", "max_kvlen")
    }
    return operator(**{**arguments, **numbers}), arguments


def recorded() -> dict[str, np.ndarray]:
    """Returns the authors' outputs of the sample, by name."""
    with np.load(RECORDED) as archive:
        return dict(archive)


if __name__ == "__main__":
    authors = load_operator(Path(sys.argv[1]))
    np.savez_compressed(
        RECORDED,
        **{name: run(authors, batch, Place())[0].numpy() for name, batch in sample().items()},
    )
