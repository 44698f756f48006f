"""Runs one offline load on vLLM or on lightkv, with the engine's own default settings.

    python peer_bench.py vllm MODEL --out FILE
    python peer_bench.py lightkv MODEL --out FILE --set prefill_chunk=16384
    python peer_bench.py lightkv MODEL --batches --first-token --shared 2000 --set max_num_seqs=128
    python peer_bench.py vllm MODEL --batches --first-token --device-time 256 --pauses 0 0.02

It measures tokens per second, the time of a decode step and the time to the first token. The time of a step is
the difference between two runs, of 256 and of 128 new tokens, divided by 128. Both engines get the same random
prompts and decode greedily to the full length.

--shared N is the load of vLLM's issue #36010: N prompts at once of 370 to 373 tokens, of which the first 369
are the same, and answers of 10 tokens. It is measured beside as many prompts of these lengths that share
nothing, so that a cache finds nothing. Each run has another beginning, which is computed in it.

--device-time measures how long the device is busy in a step, by torch's profiler in the process that runs the
model: the difference between two runs, of 88 and of 24 new tokens after 64, divided by 64. With --pauses it is
measured again with pauses before each step, in which the card cools down, since a card that reaches its limit
of power lowers its clock. The clock and the power are sampled meanwhile.

This script is run by itself and imports nothing of `bench`: vLLM must not see the top folder of the project,
because it would take lightkv's `triton_kernels` for the package of that name that it looks for.
"""

import argparse
import ast
import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

FIRST_ID = 100  # many vocabularies keep special tokens below it
OUTPUTS = (128, 256)  # new tokens of the two runs from which the time of a step follows
SHARED, SHARED_OUTPUT = 369, 10  # tokens that prompts begin with, and new tokens
FIRST_TOKEN_RUNS = 7  # for each length of prompt, of which the first two warm up
WARM_UP_RUNS = 2
TRACED = (24, 88)  # new tokens of the two runs from which the device's time of a step follows
TRACED_PROMPT = 64
BUSY_WATTS = 250  # samples below it are of pauses

Prompts = list[list[int]]


class Engine(Protocol):
    """An engine with a loaded model. `version`: the release that runs."""

    version: str

    def settle(self) -> None:
        """Does what the start has put off, so that all later steps are alike."""

    def generate(self, prompts: Prompts, num_output: int) -> tuple[float, list[list[int]]]:
        """Decodes `num_output` tokens after each prompt. Returns the seconds and the new token ids."""

    def in_worker(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns what `function(worker, part, verb, *args)` returns in the process that runs the model. The
        worker's attribute `part` has the method `verb`, which starts a step."""


class Vllm:
    """`vllm.LLM`."""

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        import vllm

        self.version = vllm.__version__
        self._sampling_params = vllm.SamplingParams
        settings = {"gpu_memory_utilization": 0.9, **settings}
        self._llm = vllm.LLM(model=model, skip_tokenizer_init=True, **settings)

    def settle(self) -> None:
        pass  # vLLM's start puts nothing off

    def generate(self, prompts: Prompts, num_output: int) -> tuple[float, list[list[int]]]:
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        params = self._sampling_params(
            temperature=0, max_tokens=num_output, ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return seconds, [list(output.outputs[0].token_ids) for output in outputs]

    def in_worker(self, function: Callable[..., Any], *args: Any) -> Any:
        # The environment has to allow it (VLLM_ALLOW_INSECURE_SERIALIZATION=1).
        return self._llm.collective_rpc(function, args=("model_runner", "execute_model", *args))[0]


class Lightkv:
    """`lightkv.router.LLM`."""

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        import lightkv
        from lightkv.router import LLM, EngineConfig, SamplingParams

        self.version = lightkv.__version__
        self._sampling_params = SamplingParams
        config = EngineConfig(model=model, **settings)
        self._llm = LLM(config, report=lambda line: print("   ", line, flush=True))

    def settle(self) -> None:
        self._llm.engine.capture_all()

    def generate(self, prompts: Prompts, num_output: int) -> tuple[float, list[list[int]]]:
        params = self._sampling_params(temperature=0, max_tokens=num_output, ignore_eos=True)
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params)
        seconds = time.perf_counter() - start
        return seconds, [output.outputs[0].token_ids for output in outputs]

    def in_worker(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self._llm.engine, "executor", "launch", *args)


ENGINES: dict[str, Callable[[str, dict[str, Any]], Engine]] = {"vllm": Vllm, "lightkv": Lightkv}


class Load:
    """Random prompts. Each call uses another seed, so that no prompt is found in a prefix cache."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._seed = 0

    def prompts(self, batch: int, length: int) -> Prompts:
        """Returns `batch` prompts of `length` token ids, which no earlier call has returned."""
        self._seed += 1
        rng = random.Random(self._seed)
        return [[rng.randrange(FIRST_ID, self._vocab_size) for _ in range(length)] for _ in range(batch)]

    def nearly_alike(self, batch: int, num_shared: int) -> Prompts:
        """Returns `batch` new prompts of SHARED and 1 to 4 more tokens, of which the first `num_shared` are the
        same."""
        made = self.prompts(batch, SHARED + 4)
        return [made[0][:num_shared] + ids[num_shared : SHARED + 1 + i % 4] for i, ids in enumerate(made)]


def measure_batch(engine: Engine, load: Load, batch: int, length: int, rounds: int) -> dict[str, Any]:
    """Measures milliseconds of a step and tokens per second. Exits if an answer has a wrong length."""
    _, texts = engine.generate(load.prompts(batch, length), 32)  # warms up
    few, many = OUTPUTS
    seconds: dict[int, list[float]] = {few: [], many: []}
    for _ in range(rounds):
        for num_output, found in seconds.items():
            took, tokens = engine.generate(load.prompts(batch, length), num_output)
            if [len(ids) for ids in tokens] != [num_output] * batch:
                raise SystemExit(f"no figures: an answer does not have {num_output} tokens")
            found.append(took)
    pairs = zip(seconds[few], seconds[many], strict=True)
    steps = [(longer - shorter) / (many - few) * 1e3 for shorter, longer in pairs]
    return {
        "seconds": seconds,
        "step_ms": steps,
        "tokens_per_s": [batch * few / took for took in seconds[few]],
        "first_tokens": [ids[0] for ids in texts],
    }


def measure_first_token(engine: Engine, load: Load, length: int) -> list[float]:
    """Measures the milliseconds to the one new token of a prompt of `length` tokens."""
    times = [engine.generate(load.prompts(1, length), 1)[0] * 1e3 for _ in range(FIRST_TOKEN_RUNS)]
    return times[WARM_UP_RUNS:]


def measure_shared(engine: Engine, load: Load, batch: int, rounds: int) -> dict[str, list[float]]:
    """Measures the seconds of `batch` prompts that begin alike, and of as many that share nothing, in turn."""
    found: dict[str, list[float]] = {"shared_s": [], "unshared_s": []}
    for run in range(1 + rounds):  # the first one warms up
        for name, num_shared in (("shared_s", SHARED), ("unshared_s", 0)):
            took, tokens = engine.generate(load.nearly_alike(batch, num_shared), SHARED_OUTPUT)
            if [len(ids) for ids in tokens] != [SHARED_OUTPUT] * batch:
                raise SystemExit(f"no figures: an answer does not have {SHARED_OUTPUT} tokens")
            if run:
                found[name].append(took)
    return found


def start_trace(worker: Any, part: str, verb: str, pause: float) -> None:
    """Traces the device from now on, with a pause of so many seconds before each step."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    runner = getattr(worker, part)
    start = runner.peer_bench_start = getattr(runner, verb)

    def start_late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(pause)
        return start(*args, **kwargs)

    if pause:
        setattr(runner, verb, start_late)
    torch.cuda.synchronize()
    runner.peer_bench_trace = profile(activities=[ProfilerActivity.CUDA])
    runner.peer_bench_trace.__enter__()


def end_trace(worker: Any, part: str, verb: str) -> float:
    """Ends what `start_trace` began. Returns the milliseconds in which a kernel ran."""
    import torch

    torch.cuda.synchronize()
    runner = getattr(worker, part)
    setattr(runner, verb, runner.peer_bench_start)
    runner.peer_bench_trace.__exit__(None, None, None)
    events = runner.peer_bench_trace.profiler.kineto_results.events()
    on_device = [one for one in events if str(one.device_type()).endswith("CUDA")]
    busy = end = 0
    for begin, duration in sorted((one.start_ns(), one.duration_ns()) for one in on_device):
        busy += max(0, begin + duration - max(begin, end))  # kernels may overlap
        end = max(end, begin + duration)
    return busy / 1e6


def measure_device(engine: Engine, load: Load, batch: int, pause: float) -> dict[str, float]:
    """Measures the milliseconds of a step in which the device is busy, and its clock and power meanwhile."""
    engine.generate(load.prompts(batch, TRACED_PROMPT), 32)
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw.instant", "--format=csv,noheader,nounits"]
    busy = []
    for num_output in TRACED:
        prompts = load.prompts(batch, TRACED_PROMPT)
        engine.in_worker(start_trace, pause)
        with subprocess.Popen([*query, "-lms", "20"], stdout=subprocess.PIPE, text=True) as sampling:
            engine.generate(prompts, num_output)
            sampling.terminate()
            printed = sampling.communicate()[0].splitlines()
        busy.append(engine.in_worker(end_trace))
    samples = [
        tuple(map(float, line.split(","))) for line in printed if line.count(",") == 1 and "N/A" not in line
    ]
    samples = [one for one in samples if one[1] > BUSY_WATTS] or samples
    found = {"step_ms": (busy[1] - busy[0]) / (TRACED[1] - TRACED[0])}
    for name, values in zip(("clock_mhz", "watts"), zip(*samples, strict=True), strict=False):
        found[name] = statistics.median(values)  # none where nvidia-smi says nothing
    return found


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """Parses NAME=VALUE pairs. A value that is no Python literal is a string."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            settings[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            settings[name] = value
    return settings


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("engine", choices=ENGINES)
    made.add_argument("model", help="directory of a checkpoint")
    made.add_argument("--out", type=Path, help="write the results to this file, as JSON")
    made.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the engine")
    made.add_argument("--batches", type=int, nargs="*", default=[1, 32, 256])
    made.add_argument("--prompt", type=int, default=512, help="tokens of each prompt of a batch")
    made.add_argument("--first-token", type=int, nargs="*", default=[512, 2048, 8192], metavar="PROMPT",
                      help="lengths of the prompts whose time to the first token is measured")  # fmt: skip
    made.add_argument("--shared", type=int, default=0, metavar="N", help="prompts that begin alike; 0: none")
    made.add_argument("--device-time", type=int, nargs="*", default=[], metavar="BATCH",
                      help="batches whose steps are traced on the device")  # fmt: skip
    made.add_argument("--pauses", type=float, nargs="*", default=[0.0], metavar="SECONDS",
                      help="pauses before each of these steps; each is measured")  # fmt: skip
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--vocab-size", type=int, default=128256)
    options = made.parse_args()
    settings = parse_settings(options.set)
    start = time.perf_counter()
    engine = ENGINES[options.engine](options.model, settings)
    results: dict[str, Any] = {
        "engine": options.engine,
        "version": engine.version,
        "settings": settings,
        "start_seconds": time.perf_counter() - start,
        "batches": {},
        "first_token_ms": {},
    }
    print(
        f"== {options.engine} {engine.version} {settings}: started in {results['start_seconds']:.1f} s",
        flush=True,
    )
    engine.settle()
    load = Load(options.vocab_size)

    def save() -> None:
        if options.out:
            options.out.write_text(json.dumps(results) + "\n")

    save()
    for batch in options.batches:
        found = measure_batch(engine, load, batch, options.prompt, options.rounds)
        results["batches"][batch] = found
        steps = [round(milliseconds, 3) for milliseconds in found["step_ms"]]
        print(f"batch {batch:4d}: {statistics.median(found['tokens_per_s']):9.1f} tokens/s, "
              f"step {statistics.median(steps):.3f} ms {steps}", flush=True)  # fmt: skip
        save()
    for length in options.first_token:
        times = results["first_token_ms"][length] = measure_first_token(engine, load, length)
        print(f"prompt {length:5d}: first token in {statistics.median(times):.2f} ms "
              f"{[round(milliseconds, 2) for milliseconds in times]}", flush=True)  # fmt: skip
        save()
    for batch in options.device_time:
        for pause in options.pauses:
            found = measure_device(engine, load, batch, pause)
            results.setdefault("device", {})[f"batch {batch}, pauses of {pause:g} s"] = found
            figures = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
            print(f"batch {batch:4d}: on the device, pauses of {pause:g} s: {figures}", flush=True)
            save()
    if options.shared:
        results |= measure_shared(engine, load, options.shared, options.rounds)
        shared, unshared = (statistics.median(results[name]) for name in ("shared_s", "unshared_s"))
        print(f"{options.shared} prompts: {shared:.2f} s where they begin alike, {unshared:.2f} s where not, "
              f"{unshared / shared:.2f} times as long", flush=True)  # fmt: skip
        save()


if __name__ == "__main__":
    main()
