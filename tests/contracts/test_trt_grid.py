"""TensorRT-LLM's contract against torch's scaled_dot_product_attention: layouts, block sizes, types of the
cache, masks, windows, numbers of heads and mixed batches."""

import itertools
from typing import Any

import pytest
import torch

from lightkv.contracts.tensorrt_llm import CacheType
from tests.support.contracts.trt_batch import FP8, Batch, ForeignManager, close_to

BLOCKS: dict[str, dict[str, Any]] = {
    "token": {"tokens_per_block": None, "cache_type": CacheType.PER_TOKEN},
    "6": {"tokens_per_block": 6},
    "2, as many as heads": {"tokens_per_block": 2},
    "16": {"tokens_per_block": 16},
    "run": {"tokens_per_block": None, "cache_type": CacheType.LINEAR},
}
BATCHES: dict[str, tuple[list[int], list[int], int]] = {  # queries, cached tokens, contexts
    "prompts": ([11, 1, 6], [0, 0, 0], 3),
    "chunks": ([5, 9], [13, 2], 2),
    "decodes": ([1, 1, 1], [20, 7, 1], 0),
    "mixed": ([11, 5, 1, 1], [0, 13, 20, 7], 2),
}
HEADS = {"MHA": (2, 2), "GQA": (8, 2), "MQA": (4, 1)}
TYPES = {"float16": torch.float16, "int8": torch.int8, "fp8": FP8}
MANAGERS = ("HND", "NHD", "older")
GRID = list(itertools.product(MANAGERS, BLOCKS, TYPES, ("causal", "full"), (0, 4), HEADS, BATCHES))
SAMPLE = GRID[::53]  # every pair of choices is in it, as a test checks


def by_torch(batch: Batch, mask: str, window: int) -> torch.Tensor:
    """The attention of each sequence by torch, `[num_q_tokens, num_heads * head_dim]`, float64."""
    out, begin = [], 0
    for number, (count, length) in enumerate(zip(batch.q_lens, batch.lengths, strict=True)):
        q = batch.q[0][begin : begin + count].unflatten(1, (batch.num_heads, -1)).double()
        begin += count
        k, v = (side[number, :length].double() for side in batch.dense[0])
        seen = torch.ones(count, length, dtype=torch.bool, device=q.device)
        if mask == "causal":
            seen = seen.tril(length - count)
        if window:
            seen = seen.triu(length - count - window + 1)
        attended = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=seen, enable_gqa=True
        )
        out.append(attended.transpose(0, 1).flatten(1))
    return torch.cat(out)


def check(device: torch.device, choice: tuple[Any, ...]) -> None:
    manager, blocks, type_name, mask, window, heads, batch_name = choice
    q_lens, cached, num_contexts = BATCHES[batch_name]
    num_heads, num_kv_heads = HEADS[heads]
    scale = 1.0 if type_name == "float16" else 0.04
    batch = Batch(
        device,
        q_lens,
        cached,
        num_contexts,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        cache_dtype=TYPES[type_name],
        scale=scale,
        kv_layout="NHD" if manager == "NHD" else "HND",
        **BLOCKS[blocks],
    )
    arguments: dict[str, Any] = {"attention_mask": mask, "attention_window_size": window or None}
    if scale != 1.0:
        arguments["kv_scale_quant_orig"] = torch.full((1,), scale, device=device)
    if manager == "older":
        batch.metadata.kv_cache_manager = ForeignManager(batch)
    batch.metadata.prepare()
    k, v = batch.new_keys()
    out = batch.backend().forward(batch.q[0], k, v, batch.metadata, **arguments)
    # Kernels compute in 16 bits over 8-bit K/V.
    limit = 1e-2 if device.type == "cuda" and scale != 1.0 else 2e-3
    close_to(out, by_torch(batch, mask, window), atol=limit, rtol=limit)


@pytest.mark.parametrize("choice", SAMPLE, ids=str)
def test_a_sample_of_the_grid(choice: tuple[Any, ...], device: torch.device) -> None:
    check(device, choice)


def test_the_sample_has_every_pair_of_choices() -> None:
    for first, second in itertools.combinations(range(len(GRID[0])), 2):
        pairs = {(one[first], one[second]) for one in GRID}
        assert {(one[first], one[second]) for one in SAMPLE} == pairs


@pytest.mark.slow
@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_the_grid(manager: str, blocks: str, device: torch.device) -> None:
    for choice in GRID:
        if choice[:2] == (manager, blocks):
            check(device, choice)
