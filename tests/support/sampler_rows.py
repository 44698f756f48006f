"""Makes samplers whose rows have given parameters, and draws from them."""

from typing import Any

import numpy as np
import torch

from lightkv.router.engine.step import NewRow
from lightkv.router.model.sampler import Sampler
from lightkv.router.sampling_params import SamplerKind, SamplingParams

VOCAB_SIZE = 97
GREEDY, RANDOM, EDITED = SamplerKind


def make_logits(num_rows: int, seed: int, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def int32_bytes(ids: Any) -> bytes:
    return np.asarray(ids, dtype=np.int32).tobytes()


def make_sampler(
    device: torch.device, *all_params: SamplingParams, vocab_size: int = VOCAB_SIZE, seed: int = 11
) -> Sampler:
    """Makes a sampler whose rows 1, 2, … have the given parameters, and the seeds `seed`, `seed` + 1, …"""
    sampler = Sampler(len(all_params) + 3, vocab_size, device)
    sampler.set_rows([NewRow(i + 1, params, seed + i) for i, params in enumerate(all_params)])
    return sampler


def draw(
    sampler: Sampler, logits: torch.Tensor, rows: list[int], positions: list[int], kind: SamplerKind
) -> list[int]:
    device = sampler.device
    sampled = sampler.sample(
        logits.to(device), torch.tensor(rows, device=device), torch.tensor(positions, device=device), kind
    )
    return sampled.tokens.tolist()
