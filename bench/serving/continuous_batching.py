"""Runs Hugging Face transformers' continuous batching (`generate_batch`) as a peer of the service.

Each way of setting it up runs in a process of its own (`bench/common/child.py`), so that it has the whole
device and a crash leaves the other ways alone.

The name of the attention has its prefix "paged|". transformers changes a name without the prefix for the run
and restores it at the end; a run that fails then goes on for a moment with the plain attention, whose error
about the width of a mask hides the real one. SDPA and eager attention are dense: each query of a step is
multiplied with every key that the step reads, and masked. The cost of a step grows with the square of its
requests, so some ways limit the number of requests. Flash attention needs a package of its own; without it
the way is recorded as failed, with the error.
"""

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from math import ceil
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from bench.common.child import ChildFailed, ask, serve
from bench.serving.workload import Ask
from lightkv.router import EngineConfig
from lightkv.router.model.sizes import pick_device
from lightkv.router.model_files import resolve

Batches = dict[int, list[list[Ask]]]

BLOCK_TOKENS = 256  # transformers' own default
SPARE = 1.5  # times the blocks that all requests need: with less than 15 % free it admits one at a time


class Way(NamedTuple):
    """An attention of transformers, and the settings that differ from `ContinuousBatchingConfig`'s defaults.

    The number of blocks is set for each batch, because a mask is as wide as the cache. 8,192 tokens per batch
    is what transformers would choose itself.
    """

    attention: str
    settings: dict[str, Any]


WAYS = {
    "flash-3": Way("flash_attention_3", {"max_batch_tokens": 8192}),
    "flash-2": Way("flash_attention_2", {"max_batch_tokens": 8192}),
    "sdpa-128": Way("paged|sdpa", {"max_requests_per_batch": 128, "max_batch_tokens": 1024}),
    "sdpa-64": Way("paged|sdpa", {"max_requests_per_batch": 64, "max_batch_tokens": 1024}),
    "sdpa": Way("paged|sdpa", {"max_batch_tokens": 8192}),
    "sdpa-graphs": Way(
        "paged|sdpa",
        {
            "max_requests_per_batch": 128,
            "max_batch_tokens": 1024,
            "use_cuda_graph": True,
            "kv_padding_interval_size": 4096,
        },
    ),
    "eager": Way("paged|eager", {"max_requests_per_batch": 64, "max_batch_tokens": 1024}),
}
DEFAULT_WAYS = ("flash-3", "flash-2", "sdpa-128", "sdpa-64", "sdpa")


class Answered(NamedTuple):
    """The result of one batch: seconds, and the token ids of each answer, in order."""

    seconds: float
    tokens: list[list[int]]


class Run(NamedTuple):
    """The results of one way: the batches of each size (the first one warms up), and the error if it failed."""

    batches: dict[int, list[Answered]]
    error: str | None


def run_way(name: str, config: EngineConfig, batches: Batches, seconds: float) -> Run:
    """Runs every batch in a child process with the way `name`, for at most `seconds`."""
    request = {
        "directory": str(resolve(config.model, print)),
        "device": str(pick_device(config.device)),
        "dtype": config.dtype,
        "way": name,
        "batches": [[list(own) for own in batch] for many in batches.values() for batch in many],
        "sizes": [num for num, many in batches.items() for _ in many],
    }
    found: dict[int, list[Answered]] = {}
    try:
        for size, answered in zip(request["sizes"], ask(__spec__.name, request, seconds), strict=False):
            found.setdefault(size, []).append(Answered(*answered))
    except ChildFailed as error:
        return Run(found, str(error))
    return Run(found, None)


# --------------------------------------------------------------------------------
# In the child


def batching_config(way: Way, num_blocks: int) -> ContinuousBatchingConfig:
    """Returns the settings of a way for `num_blocks` blocks.

    Newer releases replace the attention by flash attention if they find it; this is switched off.
    """
    settings = {"num_blocks": num_blocks, **way.settings}
    if any(field.name == "auto_switch_to_flash" for field in fields(ContinuousBatchingConfig)):
        settings["auto_switch_to_flash"] = False
    return ContinuousBatchingConfig(**settings)


class Incomplete(Exception):
    """Raised when an answer is not complete."""


class ContinuousBatching:
    """Runs `generate_batch` of one model, greedily and to the full lengths.

    transformers sizes its memory by the first batch after the start or a `reset`.
    """

    def __init__(self, directory: str, device: str, dtype: str, way: Way) -> None:
        if dtype == "auto" and device == "cpu":
            dtype = "float32"
        self._way = way
        self._model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, device_map=device, attn_implementation=way.attention
        ).eval()

    def run(self, asks: Sequence[Ask]) -> Answered:
        """Answers requests whose answers have one length. Raises Incomplete, and what transformers raises."""
        (num_output,) = {ask.num_output for ask in asks}
        longest = max(len(ask.prompt_ids) for ask in asks) + num_output
        blocks = (ceil(longest / BLOCK_TOKENS) + 1) * len(asks)
        wanted = GenerationConfig(max_new_tokens=num_output, do_sample=False, eos_token_id=-1, pad_token_id=0)
        begun = time.perf_counter()
        outputs = self._model.generate_batch(
            [ask.prompt_ids for ask in asks],
            generation_config=wanted,
            continuous_batching_config=batching_config(self._way, ceil(blocks * SPARE)),
            persistent_manager=True,
        )
        seconds = time.perf_counter() - begun
        tokens = [output.generated_tokens for output in outputs.values()]
        if [len(own) for own in tokens] != [num_output] * len(asks):
            errors = {str(output.error) for output in outputs.values() if output.error is not None}
            came = sum(map(len, tokens))
            reason = "; ".join(sorted(errors)) or "no reason is given"
            raise Incomplete(f"{came} of {num_output * len(asks)} tokens were generated: {reason}")
        return Answered(seconds, tokens)

    def reset(self) -> None:
        """Frees the memory."""
        self._model.destroy_cached_continuous_batching_manager()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _answer(request: dict[str, Any]) -> Iterator[Answered]:
    way = WAYS[request["way"]]
    peer = ContinuousBatching(request["directory"], request["device"], request["dtype"], way)
    before = None
    for size, batch in zip(request["sizes"], request["batches"], strict=True):
        if before not in (None, size):
            peer.reset()
        before = size
        yield peer.run([Ask(*own) for own in batch])


if __name__ == "__main__":
    serve(_answer)
