"""Loads, prompts and decodes models of published shapes with few layers: what runs, how fast, what is fused.

    python -m bench.features.published_shapes --out bench/results/published-shapes.json
    python -m bench.features.published_shapes --shapes qwen3-0.6b gemma-3-1b

A model has random weights in bfloat16, its full width and vocabulary, and a few layers (`LAYERS`, or as many
as its pattern of layers needs). "decode" is the wall time of the engine's step at batch 1 and 32 after prompts
of 512, "first token" that of a prompt of 2,048, each a median. "torch" is the share of PyTorch's own kernels,
matrix products aside, in the time of those kernels that every layer launches in a step of 32: what is not
fused. The figures have the lines that loading reported, too. A shape that does not run is told with its error.
"""

import gc
import random
import statistics
import time
from array import array
from collections import Counter, defaultdict
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedConfig

from bench.common.model_shapes import with_layers
from bench.common.published_shapes import PUBLISHED
from bench.common.random_model import random_model
from bench.common.report import parser, print_json, print_machine, print_table, save_json
from lightkv.router import EngineConfig, SamplingParams
from lightkv.router.engine.loop import LocalEngine, make_scheduler
from lightkv.router.engine.request import Request
from lightkv.router.model.build import assemble

LAYERS = 4
BATCHES = 1, 32
PROMPT, LONG_PROMPT = 512, 2048
WARM, TIMED, PROFILED, FIRST_TOKENS = 6, 24, 5, 5
TORCH_KERNELS = "at::native", "elementwise", "CatArray"  # parts of the names of kernels that fuse nothing


class Reading(NamedTuple):
    """Medians in milliseconds: of a decode step at each batch size, and of a first token. `torch_share`: of the
    time of the kernels of all layers, and `torch_us`: the time of each in a step. `lines`: what loading
    reported."""

    decode_ms: dict[int, float]
    first_token_ms: float
    torch_share: float
    torch_us: dict[str, float]
    seconds: float
    lines: list[str]


def measure(config: PreTrainedConfig, device: torch.device) -> Reading:
    """Makes a model of this shape, and runs it."""
    begun, lines = time.perf_counter(), list[str]()
    torch.manual_seed(0)
    model = random_model(config, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    length = LONG_PROMPT + 64
    engine_config = EngineConfig(
        device=str(device), max_num_seqs=max(BATCHES), max_model_len=length, max_total_tokens=40_000,
        itl_target=0.0,
    )  # fmt: skip
    runner, info = assemble(model, engine_config, lines.append)
    seconds = time.perf_counter() - begun
    engine = LocalEngine(make_scheduler(info), runner)
    engine.capture_all()
    rng = random.Random(0)

    def request(name: str, prompt: int, num_tokens: int) -> Request:
        ids = array("i", [rng.randrange(info.limits.vocab_size) for _ in range(prompt)]).tobytes()
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        return Request(name, ids, params, seed=0)

    firsts = []
    for i in range(FIRST_TOKENS):
        begun, one = time.perf_counter(), request(f"first {i}", LONG_PROMPT, 1)
        engine.add(one)
        while engine.has_work:
            engine.step()
        firsts.append(time.perf_counter() - begun)
    decode_ms, share, torch_us = {}, 0.0, dict[str, float]()
    for batch in BATCHES:
        num_tokens = WARM + TIMED + PROFILED + 8 + batch
        requests = [request(f"{batch} {i}", PROMPT, num_tokens) for i in range(batch)]
        engine.add(*requests)
        while min(len(one.output) for one in requests) < WARM:
            engine.step()
        times = []
        for _ in range(TIMED):
            begun = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - begun)
        decode_ms[batch] = statistics.median(times) * 1e3
        if device.type == "cuda":
            share, torch_us = torch_kernels(engine, config.num_hidden_layers)
        while engine.has_work:
            engine.step()
    engine.check()
    return Reading(decode_ms, statistics.median(firsts) * 1e3, share, torch_us, seconds, lines)


def torch_kernels(engine: LocalEngine, num_layers: int) -> tuple[float, dict[str, float]]:
    """Returns the share of PyTorch's own kernels, products aside, in the time of those that every layer has,
    and how many microseconds each takes in a step."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(PROFILED):
            engine.step()
        torch.cuda.synchronize()
    spent: dict[str, float] = defaultdict(float)
    launches: Counter[str] = Counter()
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name] += event.device_time / PROFILED
            launches[event.name] += 1
    of_layers = {name: us for name, us in spent.items() if launches[name] >= PROFILED * num_layers}
    own = {name: us for name, us in of_layers.items() if any(part in name for part in TORCH_KERNELS)}
    return sum(own.values()) / max(sum(of_layers.values()), 1e-9), own


def shortened(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the shape with `LAYERS` layers, or as many as have every type of layer."""
    types = getattr(config, "layer_types", None) or ["full_attention"]
    num = max(LAYERS, *(types.index(one) + 1 for one in set(types)))
    return with_layers(config, num)


def main() -> None:
    options_parser = parser(__doc__)
    options_parser.add_argument("--shapes", nargs="+", choices=PUBLISHED, default=list(PUBLISHED))
    options_parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = options_parser.parse_args()
    print_machine()
    rows, results = [], dict[str, object]()
    for shape in options.shapes:
        config = shortened(PUBLISHED[shape])
        try:
            one = measure(config, torch.device(options.device))
        except Exception as error:  # the others are measured all the same
            rows.append(
                [shape, str(config.num_hidden_layers), f"{type(error).__name__}: {error}"[:60], "", "", ""]
            )
            results[shape] = {"error": f"{type(error).__name__}: {error}"}
        else:
            decode = " / ".join(f"{ms:.3f}" for ms in one.decode_ms.values())
            rows.append(
                [shape, str(config.num_hidden_layers), decode, f"{one.first_token_ms:.2f}",
                 f"{one.torch_share:.1%}", f"{one.seconds:.0f}"]
            )  # fmt: skip
            results[shape] = {"num_layers": config.num_hidden_layers, **one._asdict()}
        print(*rows[-1], flush=True)
        save_json("published_shapes", {"results": results}, options.out)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    print_table(
        ["shape", "layers", "decode at 1 / 32, ms", "first token of 2,048, ms", "torch", "load, s"], rows
    )
    print_json("published_shapes", {"results": results}, options.out)


if __name__ == "__main__":
    main()
