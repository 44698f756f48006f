"""Runs transformers' `generate` with a cache, and compares what it returns."""

from typing import Any

import torch
from transformers import PreTrainedModel

OWN, OURS = "own attention", "lightkv's"
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}


def padded(prompts: list[list[int]], device: torch.device, extra: int = 0) -> dict[str, torch.Tensor]:
    """Returns the arguments of a model for prompts that are padded on the left, by `extra` columns at least."""
    width = max(map(len, prompts)) + extra
    ids = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {
        "input_ids": torch.tensor(ids, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }


def generate(model: PreTrainedModel, cache: Any, prompts: list[list[int]], **options: Any) -> Any:
    """Returns what transformers' `generate` returns for these prompts and this cache. Seeds sampling."""
    extra = options.pop("extra", 0)
    torch.manual_seed(1)
    return model.generate(  # type: ignore[operator]
        **padded(prompts, model.device, extra),
        past_key_values=cache,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **options,
    )


def assert_same(found: Any, expected: Any) -> None:
    """Asserts that two results of `generate` have the same tokens, and logits and scores to rounding."""
    assert torch.equal(found.sequences, expected.sequences)
    assert len(found.logits) == len(expected.logits)
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    if "sequences_scores" in expected:
        torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, rtol=1e-4, atol=1e-4)
