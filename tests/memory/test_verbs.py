"""Every verb of the cache in random order, against an independent model (`support/cache_life.py`)."""

import pytest
import torch

from tests.support.cache_life import live
from tests.support.combinations import slow


@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3, 4)])
def test_all_verbs_in_any_order(seed: int) -> None:
    live(seed, 600, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(100, 110))
def test_all_verbs_in_any_order_for_long(seed: int) -> None:
    """A million steps in all."""
    live(seed, 100_000, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(2))
def test_all_verbs_in_any_order_on_a_gpu(seed: int) -> None:
    live(seed, 1500, torch.device("cuda"))
