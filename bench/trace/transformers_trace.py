"""Replays a trace in real time with Hugging Face transformers' continuous batching, for `trace_replay.py`.

Each request goes to the generation manager at its arrival time, with the length of its answer. The manager
has blocks for as many tokens as lightkv's pool, and records when each token was generated. A request that it
preempts loses these records: it is counted, and its latencies are those of the tokens after. A request that
is unfinished when the time is up is cut and counts as late; its tokens do not count. It runs in a process of
its own (`bench/common/child.py`), and its warm-up does not count.
"""

import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from bench.common.child import ask, serve
from bench.common.model_shapes import LLAMA_3_8B, with_layers
from bench.common.random_model import random_model
from bench.serving.continuous_batching import BLOCK_TOKENS, WAYS, batching_config
from lightkv.router.model_files import resolve
from lightkv.router.simulate.record import Distribution

Results = dict[str, Any]

START_SECONDS = 120.0  # to load the model and to warm up
WARM_UP = 4  # requests


class ManagerStopped(Exception):
    """Raised when the manager's thread has ended, or a request has failed."""


def replay_transformers(request: Results) -> Results:
    """Replays `request`, which `trace_replay.run` makes, in a child process. Raises ChildFailed."""
    (found,) = ask(__spec__.name, request, request["seconds"] + START_SECONDS)
    own: Results = found
    return own


# --------------------------------------------------------------------------------
# In the child


def load(request: Results) -> PreTrainedModel:
    """Loads the model with the way's attention."""
    attention = WAYS[request["way"]].attention
    device = torch.device(request["device"])
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if request["model"] is None:
        torch.manual_seed(0)
        model = random_model(with_layers(LLAMA_3_8B, request["layers"]), device, dtype)
        model.set_attn_implementation(attention)
        return model
    directory = resolve(request["model"], lambda line: None)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation=attention)
    return model.to(device).eval()


class Manager:
    """The generation manager of transformers for one model. Requests are identified by numbers."""

    def __init__(self, model: PreTrainedModel, way: str, capacity: int) -> None:
        wanted = GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._manager = model.init_continuous_batching(
            generation_config=wanted,
            continuous_batching_config=batching_config(WAYS[way], capacity // BLOCK_TOKENS),
        )
        self._manager.start()

    def add(self, number: int, prompt: list[int], num_output: int) -> None:
        self._manager.add_request(
            prompt, request_id=str(number), max_new_tokens=num_output, record_timestamps=True
        )

    def get(self, seconds: float) -> tuple[int, list[float]] | None:
        """Waits for a request to end. Returns its number and the times of its tokens, or None after `seconds`.

        Raises ManagerStopped, also if a request failed.
        """
        result = self._manager.get_result(timeout=max(seconds, 1e-3))
        if result is None:
            if not self._manager.is_running():
                raise ManagerStopped("transformers' generation thread has ended")
            return None
        if result.error is not None:
            raise ManagerStopped(str(result.error))
        return int(result.request_id), list(result.timestamps or ())


def replay(manager: Manager, request: Results) -> Results:
    """Sends every request at its arrival time, and measures for `request["seconds"]` at most."""
    prompts, outputs, arrivals = request["prompts"], request["outputs"], request["arrivals"]
    ttft_target, tpot_target = request["targets"]
    ttft, tpot = Distribution(), Distribution()
    num_met = num_preempted = output_tokens = finished = sent = 0
    begun = time.perf_counter()
    last = 0.0
    while finished < len(prompts):
        at = time.perf_counter() - begun
        if at > request["seconds"]:
            last = at
            break
        while sent < len(prompts) and arrivals[sent] <= at:
            manager.add(sent, prompts[sent], outputs[sent])
            sent += 1
        wait = arrivals[sent] - at if sent < len(prompts) else 1.0
        found = manager.get(min(wait, request["seconds"] - at))
        if found is None:
            continue
        number, stamps = found
        finished += 1
        output_tokens += outputs[number]
        num_preempted += len(stamps) < outputs[number]
        stamps = stamps or [time.perf_counter()]
        first, last = stamps[0] - begun, stamps[-1] - begun
        between = (last - first) / (len(stamps) - 1) if len(stamps) > 1 else 0.0
        ttft.add(first - arrivals[number])
        if len(stamps) > 1:
            tpot.add(between)
        num_met += first - arrivals[number] <= ttft_target and between <= tpot_target
    first_tokens, between_tokens = (own.quantiles((0.5, 0.99)) for own in (ttft, tpot))
    return {
        "num_finished": finished,
        "num_cut": len(prompts) - finished,
        "seconds": last,
        "output_tokens": output_tokens,
        "output_rate": output_tokens / last,
        "goodput": num_met / last,
        "met_share": num_met / len(prompts),
        "ttft_p50": first_tokens[0],
        "ttft_p99": first_tokens[1],
        "tpot_p50": between_tokens[0],
        "tpot_p99": between_tokens[1],
        "num_preempted": num_preempted,
    }


def _answer(request: Results) -> Iterator[Results]:
    manager = Manager(load(request), request["way"], request["capacity"])
    for number in range(WARM_UP):
        manager.add(number, request["prompts"][number % len(request["prompts"])], 8)
    for _ in range(WARM_UP):
        while manager.get(1.0) is None:
            pass
    yield replay(manager, request)


if __name__ == "__main__":
    serve(_answer)
