"""Runs transformers' `generate` with a cache and compares what it returns, or compares it call by call."""

from typing import Any, NamedTuple

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

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


class ModelCall(NamedTuple):
    """A call of the model in `generate`: its arguments without the cache, and the logits that it returned."""

    arguments: dict[str, Any]
    logits: torch.Tensor


class CacheCall(NamedTuple):
    """A call of a verb of the cache in `generate`, such as that which reorders the rows of beams."""

    verb: str
    argument: Any


class RecordedCache(DynamicCache):
    """transformers' own cache, which notes what changes it beside the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(config=model.config)
        self.calls: list[ModelCall | CacheCall] = []

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.calls.append(CacheCall("reorder_cache", beam_idx))
        super().reorder_cache(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        self.calls.append(CacheCall("crop", tokens_to_remove))
        super().crop(tokens_to_remove)


def record(model: PreTrainedModel, prompts: list[list[int]], **options: Any) -> list[ModelCall | CacheCall]:
    """Returns the calls that `generate` makes with transformers' own cache, in order, for its arguments."""
    cache = RecordedCache(model)

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        assert not args
        arguments = {name: value for name, value in kwargs.items() if value is not cache}
        cache.calls.append(ModelCall(arguments, output.logits.clone()))

    hook = model.register_forward_hook(note, with_kwargs=True)
    generate(model, cache, prompts, **options)
    hook.remove()
    return cache.calls


def replay(model: PreTrainedModel, cache: Cache, calls: list[ModelCall | CacheCall]) -> int:
    """Does with `cache` what was recorded, on the recorded tokens, and asserts that every call of the model
    returns the recorded logits to rounding. Returns how many rows of logits were compared."""
    compared = 0
    for call in calls:
        if isinstance(call, CacheCall):
            getattr(cache, call.verb)(call.argument)
            continue
        with torch.no_grad():
            found = model(**call.arguments, past_key_values=cache).logits
        torch.testing.assert_close(found, call.logits, rtol=1e-3, atol=1e-3)
        compared += found.shape[:2].numel()
    return compared
