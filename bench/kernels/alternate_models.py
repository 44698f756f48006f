"""The rows of `alternate.py` that time models: eager steps, `generate` of transformers, and steps of the 8B
shape by graphs. All weights are random.

This file is loaded in the process of each tree. It uses what both have.
"""

import time
import zlib
from array import array
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.common.model_shapes import LLAMA_3_8B, with_layers
from bench.serving import decode_step, prompt_step
from lightkv.integrations.cached_model import CachedModel
from lightkv.integrations.hf_cache import LightKVCache
from lightkv.router.model.token_buckets import MOST_TOKENS

SMALL = LlamaConfig(
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=16,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=4096,
)
ROWS, PROMPT = 8, 64  # of the small model's batch
STEPS = 20  # timed in a turn
WARM_UP = 3  # steps of a turn that are not
DECODES = {1: (512, 16), 32: (512, 16), 256: (256, 5)}  # by batch: prompt tokens, and most turns of a row
PROMPTS = ("512", "2048", "4096", "700+32x2048")  # two trees share a GPU's memory
ROOM = "4096+32x2048"  # of a pool for all of them at the same time

Measure = Callable[[], list[float]]


def rows(device: torch.device) -> dict[str, Callable[[], dict[str, Measure]]]:
    """Returns what makes the sides of each row, by `part: row`. A CPU has no graphs, so only the small model's.

    A side returns the microseconds of each step; of `generate` those of a token.
    """
    found: dict[str, Callable[[], dict[str, Measure]]] = {
        "models: an eager step": partial(_eager, device),
        "models: generate": partial(_generate, device),
    }
    if device.type == "cuda":
        found |= {f"models: 8B, decode of {batch}": partial(_decode, batch) for batch in DECODES}
        found["models: 8B, prompts"] = _prompts
    return found


def _small(device: torch.device) -> LlamaForCausalLM:
    """Returns a model of random weights; on a CPU, where nothing is timed, with two layers."""
    is_gpu = device.type == "cuda"
    with device:
        model = LlamaForCausalLM(SMALL if is_gpu else with_layers(SMALL, 2)).eval()
    return model.to(torch.bfloat16) if is_gpu else model


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _times(step: Callable[[], Any], count: int, device: torch.device) -> list[float]:
    """Returns the µs of `count` steps, from the call until the device has finished."""
    times = []
    for _ in range(WARM_UP + count):
        _wait(device)
        begin = time.perf_counter()
        step()
        _wait(device)
        times.append((time.perf_counter() - begin) * 1e6)
    return times[WARM_UP:]


def _eager(device: torch.device) -> dict[str, Measure]:
    """Returns a step of decode, and one of prompts, as `CachedModel` runs them."""
    lm = CachedModel(_small(device), 2 * ROWS * SMALL.max_position_embeddings, max_sequences=2 * ROWS)
    sequences = [lm.prefill(list(range(7 * i, 7 * i + PROMPT)))[0] for i in range(ROWS)]
    fresh = [lm.cache.open([900 + i]) for i in range(ROWS)]

    def decode() -> None:
        lm.decode(sequences, [7] * ROWS)

    def prompts() -> None:
        lm.forward(fresh, [list(range(PROMPT))] * ROWS)
        lm.cache.shrink(fresh, [PROMPT] * ROWS)

    return {
        name: partial(_times, step, STEPS, device)
        for name, step in (("decode", decode), ("prompts", prompts))
    }


def _generate(device: torch.device) -> dict[str, Measure]:
    """Returns `generate` with lightkv's cache."""
    ids = torch.arange(ROWS * PROMPT, device=device).view(ROWS, PROMPT)
    model = _small(device)
    kept = LightKVCache(model, 4096)

    def run() -> list[float]:
        times = []
        for _ in range(2):
            kept.reset()
            kept.kv.evict(kept.kv.num_cached)
            _wait(device)
            begin = time.perf_counter()
            model.generate(
                ids, past_key_values=kept, max_new_tokens=STEPS, do_sample=False, eos_token_id=None,
                pad_token_id=0,
            )  # fmt: skip
            _wait(device)
            times.append((time.perf_counter() - begin) * 1e6 / STEPS)
        return times[1:]

    return {"own attention": run}


@cache
def _large() -> Any:
    return decode_step.random_model(LLAMA_3_8B, torch.device("cuda"), torch.bfloat16)


class _Steps:
    """The engine's steps of decode: from one result to the next, by its graph.

    `checksum`: of the greedy tokens that all requests had before the first step that is timed.
    """

    def __init__(self, batch: int) -> None:
        prompt, turns = DECODES[batch]
        steps = turns * (WARM_UP + STEPS)
        self._engine, _, requests = decode_step.make_engine(
            _large(), batch, prompt, steps, True, True, "auto"
        )
        self._left = turns
        tokens = [token for request in requests for token in request.output]
        self.checksum = float(zlib.crc32(array("i", tokens).tobytes()))

    def __call__(self) -> list[float]:
        """Returns the µs of each step of a turn. Raises RuntimeError if the requests may end during it."""
        if not self._left:
            raise RuntimeError("the row has room for no further turn; give fewer --times")
        self._left -= 1
        times = []
        for _ in range(WARM_UP + STEPS):
            begin = time.perf_counter()
            self._engine.step()
            times.append((time.perf_counter() - begin) * 1e6)
        self._engine.settle()
        return times[WARM_UP:]


def _decode(batch: int) -> dict[str, Measure]:
    return {"step": _Steps(batch)}


@torch.inference_mode()
def _prompts() -> dict[str, Measure]:
    """Returns the steps with prompts: by graphs of their very size, and above the largest bucket eagerly.

    The engine's graphs are of sizes that it chooses by measuring at start, which differ from one start to the
    next, and would be compared instead of the trees.
    """
    cases = [prompt_step.Case.of(text) for text in PROMPTS]
    runner = prompt_step.make_runner(_large(), [prompt_step.Case.of(ROOM)])
    sides = {}
    for case in cases:
        step = prompt_step.Step(runner, case, LLAMA_3_8B.vocab_size)
        has_graph = case.num_tokens <= MOST_TOKENS
        run = prompt_step.exact_graph(runner, case).replay if has_graph else runner._run
        sides[f"{case.text()}, {'graph' if has_graph else 'eager'}"] = partial(_prompt_times, step, run)
    return sides


@torch.inference_mode()
def _prompt_times(step: Any, run: Any) -> list[float]:
    return [wall * 1e3 for wall, _ in step.times(run, 8)]
