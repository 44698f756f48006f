"""Those whom the service is measured against: the same model in this process, by lightkv and by transformers.

Each takes a batch of requests and answers them all at once, greedily and to their full lengths. Knows no HTTP.
"""

import gc
import time
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from bench.workload import Ask
from lightkv.router import LLM, EngineConfig, SamplingParams
from lightkv.router.weights import resolve


class PeerFailed(Exception):
    """A peer that cannot run here, or did not answer in full."""


class InProcess:
    """`LLM.generate`. Raises what `LLM` does."""

    def __init__(self, config: EngineConfig) -> None:
        self.llm = LLM(config)

    def run(self, asks: Sequence[Ask]) -> tuple[float, list[str]]:
        """Seconds, and the texts."""
        params = [SamplingParams(temperature=0, max_tokens=ask.num_output, ignore_eos=True) for ask in asks]
        begun = time.perf_counter()
        outputs = self.llm.generate([ask.prompt_ids for ask in asks], params)
        seconds = time.perf_counter() - begun
        self.llm.check()
        return seconds, [output.outputs[0].text for output in outputs]


class ContinuousBatching:
    """transformers' `generate_batch`, all as it is by default, in the type that lightkv would take.

    It sizes its memory by the batch that it sees first: one of these for each size of batch. Raises PeerFailed.
    """

    def __init__(self, config: EngineConfig) -> None:
        device = "cuda" if config.device == "auto" and torch.cuda.is_available() else config.device
        device = "cpu" if device == "auto" else device
        dtype = "float32" if config.dtype == "auto" and device == "cpu" else config.dtype
        directory = resolve(config.model, print)
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, device_map=device).eval()

    def run(self, asks: Sequence[Ask]) -> float:
        """Seconds for requests with answers of one length."""
        (num_output,) = {ask.num_output for ask in asks}
        wanted = GenerationConfig(max_new_tokens=num_output, do_sample=False, eos_token_id=-1, pad_token_id=0)
        begun = time.perf_counter()
        try:
            outputs = self._model.generate_batch(
                [ask.prompt_ids for ask in asks], generation_config=wanted, persistent_manager=True
            )
        except Exception as error:  # whatever it meets on this device
            raise PeerFailed(f"{type(error).__name__}: {error}") from error
        seconds = time.perf_counter() - begun
        counts = [len(output.generated_tokens) for output in outputs.values()]
        if counts != [num_output] * len(asks):
            errors = {str(output.error) for output in outputs.values() if output.error is not None}
            reason = "; ".join(sorted(errors)) or "its log says why"
            raise PeerFailed(f"{sum(counts)} of {num_output * len(asks)} tokens came back ({reason})")
        return seconds

    def reset(self) -> None:
        """Let go of the memory; the next batch sizes it anew."""
        self._model.destroy_cached_continuous_batching_manager()
        free_memory()


def free_memory() -> None:
    """Give back what nothing refers to any more, the device's too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
