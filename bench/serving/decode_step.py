"""Compares a decode step's wall time with the replay of its CUDA graph, on a model of a published shape.

    python -m bench.serving.decode_step --out bench/results/decode-step-h200.json
    python -m bench.serving.decode_step --shape llama-3-70b --layers 8
    python -m bench.serving.decode_step --shape qwen3-moe
    python -m bench.serving.decode_step --batch 256 --prompt 2048 --steps 30 --kv-dtype auto int8

The difference is what the host adds to a step: planning, counting, copying the tokens. The weights are random,
sampling is greedy, and all prompts have one length. The floor is what a step has to read (every weight but the
embedding's, of experts those that a batch is expected to choose, and the K/V of every token) over the read
bandwidth measured in this run. The time of the replay is
divided by the names of its kernels: attention, memory management, matrix products, and the rest (norms,
activations, sampling). What is missing from the sum is the time between kernels. With several `--kv-dtype`, the
same prompts decode over a pool of each, and "to first" is the ratio of a step's wall time to that of the first.

The tokens that all sequences together decode by graphs are compared with those of an engine without graphs: of
the choices that both make after the same tokens, 99 % have to be the same. Not all have to be, because random
weights often give two tokens nearly the same logit.
"""

import gc
import math
import random
import statistics
import time
from array import array
from itertools import product
from typing import Any

import torch
from transformers import PreTrainedModel

from bench.common.model_shapes import SHAPES, with_layers
from bench.common.random_model import random_model
from bench.common.report import Spread, parser, print_json, print_machine, print_table, refuse, save_json
from lightkv import KVSpec
from lightkv.router import EngineConfig, SamplingParams
from lightkv.router.engine.loop import LocalEngine, make_scheduler
from lightkv.router.engine.request import Request
from lightkv.router.model.build import assemble
from lightkv.router.model.cuda_graph import GraphKey
from lightkv.router.model.runner import ModelRunner
from lightkv.router.sampling_params import SamplerKind
from lightkv.triton_kernels.quantised.kv_format import KVFormat

REPLAY_ROUNDS = 3
REPLAYS = 10  # in each round
PROFILED = 5  # replays that are divided into parts
COMPARED = 8  # tokens of the last sequence, before steps are timed
TIMED = 20  # steps: the last ones, which are compared with the replays that follow
PREFILL_CHUNK = 8192
# Parts of the names of kernels, by purpose.
KERNELS = {
    "attention": ("decode_kernel", "_combine_kernel", "_plan_kernel"),
    "memory": ("_write_kv_kernel", "_alloc_few_kernel", "_alloc_many_kernel"),
    "products": ("gemm", "gemv", "nvjet", "cutlass", "cublas", "splitK"),
}


def output_tokens(batch: int, prompt: int, steps: int) -> int:
    """Returns the max_tokens with which the first of `batch` sequences outlives the prefill of the last one,
    COMPARED tokens of that one, and `steps` further steps."""
    num_prefills = math.ceil(batch * prompt / (PREFILL_CHUNK - batch))  # beside up to `batch` decodes
    return num_prefills + COMPARED + steps + 8  # those in flight


def make_engine(
    model: PreTrainedModel, batch: int, prompt: int, steps: int, graphs: bool, fuse: bool, kv_dtype: str
) -> tuple[LocalEngine, ModelRunner, list[Request]]:
    """Returns an engine in which `batch` sequences of `prompt` tokens decode, and its requests, each of which
    has at least COMPARED tokens and lasts for `steps` steps.

    It has steps in flight as `LLM` has, and room for the replays that follow.
    """
    num_tokens = output_tokens(batch, prompt, steps)
    max_model_len = prompt + num_tokens + 2 * (REPLAY_ROUNDS * REPLAYS + PROFILED)
    config = EngineConfig(
        device="cuda",
        max_num_seqs=batch,
        max_model_len=max_model_len,
        max_total_tokens=batch * max_model_len,
        prefill_chunk=PREFILL_CHUNK,
        itl_target=0.0,  # else the prompts are computed a few tokens at a time beside the first decodes
        cuda_graphs=graphs,
        fuse=fuse,
        kv_dtype=kv_dtype,
    )
    runner, info = assemble(model, config, lambda line: None)
    engine = LocalEngine(make_scheduler(info), runner)
    engine.capture_all()
    rng = random.Random(batch)
    requests = []
    for i in range(batch):
        ids = array("i", [rng.randrange(info.limits.vocab_size) for _ in range(prompt)]).tobytes()
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        requests.append(Request(str(i), ids, params, seed=i))
        engine.add(requests[-1])
    while min(len(request.output) for request in requests) < COMPARED:
        engine.step()
    return engine, runner, requests


def texts_of(requests: list[Request]) -> list[list[int]]:
    """Returns the tokens that each request has so far."""
    return [list(request.output) for request in requests]


def same_choices(found: list[list[int]], expected: list[list[int]], last: int) -> float:
    """Returns the share of equal tokens among the `last` ones of each text, those that both sides chose after
    the same tokens.

    A text counts up to its first difference, and no further, since what follows continues another text. A
    difference before the `last` tokens counts as one.
    """
    same = made = 0
    for ours, theirs in zip(found, expected, strict=True):
        for idx, (token, other) in enumerate(zip(ours, theirs, strict=True)):
            counts = idx >= len(theirs) - last or token != other
            made += counts
            same += counts and token == other
            if token != other:
                break
    return same / made


def graph_of(runner: ModelRunner, batch: int) -> torch.cuda.CUDAGraph:
    """Returns the graph of the running batch.

    A replay allocates slots that the ledger does not count, so the engine cannot be used any more.
    """
    assert runner._graphs is not None
    key = GraphKey(SamplerKind.GREEDY)
    replayed, _ = next(graph for size, graph in runner._graphs._decodes.items() if size >= batch)._graphs[key]
    return replayed


def replay_ms(runner: ModelRunner, batch: int, times: int) -> float:
    """Measures the milliseconds of a replay: `times` replays back to back, the median of REPLAY_ROUNDS."""
    replayed, medians = graph_of(runner, batch), []
    for _ in range(REPLAY_ROUNDS):
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(times):
            replayed.replay()
        end.record()
        end.synchronize()
        medians.append(start.elapsed_time(end) / times)
    return statistics.median(medians)


def parts_of(runner: ModelRunner, batch: int, times: int) -> dict[str, float]:
    """Measures the milliseconds of a replay's kernels, by purpose."""
    replayed = graph_of(runner, batch)
    replayed.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(times):
            replayed.replay()
        torch.cuda.synchronize()
    parts = dict.fromkeys((*KERNELS, "other"), 0.0)
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    at = 0.0
    for event in sorted(kernels, key=lambda event: event.time_range.start):
        kind = next((kind for kind, names in KERNELS.items() if any(n in event.name for n in names)), "other")
        # A kernel that starts while another one still runs waits for it: that time belongs to the other.
        took = event.time_range.end - max(event.time_range.start, at)
        parts[kind] += max(took, 0.0) / 1e3 / times
        at = max(at, event.time_range.end)
    return parts


def weight_bytes(model: PreTrainedModel, batch: int) -> float:
    """Returns the bytes of weights that a step of `batch` tokens has to read.

    They leave out an embedding that is not the LM head too. Of a layer's experts those count that at least one
    token chooses, if tokens choose independently and evenly.
    """
    config = model.config.get_text_config()
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    share = 1.0
    if num_experts := getattr(config, "num_experts", 0):
        share = 1 - (1 - config.num_experts_per_tok / num_experts) ** batch
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter is not embedding or embedding is head:
            total += parameter.nbytes * (share if ".experts." in name else 1.0)
    return total


def read_bandwidth() -> float:
    """Measures the bytes per second that a reduction over 8 GiB reads, as the median of twenty."""
    data = torch.ones(2**31, dtype=torch.float32, device="cuda")
    times = []
    for _ in range(23):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        data.sum()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return data.nbytes / statistics.median(times[3:]) * 1e3


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256])
    arguments.add_argument("--prompt", type=int, default=512)
    arguments.add_argument("--steps", type=int, default=100)
    arguments.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    arguments.add_argument("--layers", type=int, help="fewer than the shape has (llama-3-70b has 80)")
    arguments.add_argument("--no-fuse", action="store_true", help="run the layers as transformers wrote them")
    arguments.add_argument("--kv-dtype", nargs="+", default=["auto"], help="how K and V are stored")
    options = arguments.parse_args()
    if options.steps < TIMED:
        refuse(f"--steps is {options.steps}; the last {TIMED} steps are timed, so give at least {TIMED}")

    print_machine()
    bandwidth = read_bandwidth()
    torch.manual_seed(0)
    shape = SHAPES[options.shape]
    layers = options.layers or shape.num_hidden_layers
    model = random_model(with_layers(shape, layers), torch.device("cuda"), torch.bfloat16)
    heads, dim = shape.num_key_value_heads, shape.head_dim
    read = ", ".join(f"{weight_bytes(model, batch) / 1e9:.2f} GB at batch {batch}" for batch in options.batch)
    print(f"{options.shape}, {layers} layers; read bandwidth {bandwidth / 1e12:.2f} TB/s; weights: {read}\n")

    settings = {"shape": options.shape, "prompt": options.prompt, "steps": options.steps, "layers": layers,
                "fuse": not options.no_fuse, "read_TB_per_s": bandwidth / 1e12}  # fmt: skip
    rows: list[list[str]] = []
    results: dict[str, Any] = {}
    first: dict[int, float] = {}  # of each batch, the wall time with the first format
    for batch, kv_dtype in product(options.batch, options.kv_dtype):
        name = str(batch) if kv_dtype == "auto" else f"{batch} {kv_dtype}"
        case = model, batch, options.prompt, options.steps
        engine, runner, requests = make_engine(*case, False, not options.no_fuse, kv_dtype)
        expected = texts_of(requests)
        del engine, runner
        gc.collect()
        torch.cuda.empty_cache()
        engine, runner, requests = make_engine(*case, True, not options.no_fuse, kv_dtype)
        same = same_choices(texts_of(requests), expected, COMPARED - 1)  # its first is the prompts' step's
        if same < 0.99:
            refuse(f"batch {name}: {same:.2%} of the graph's choices are the eager path's, 99 % are required")
        times = []
        for _ in range(options.steps):
            start = time.perf_counter()
            engine.step()
            times.append((time.perf_counter() - start) * 1e3)
        engine.settle()
        engine.check()
        if engine.stats().num_running != batch:
            refuse(f"batch {name}: only {engine.stats().num_running} sequences lasted")
        output = sum(len(request.output) for request in requests) - batch * TIMED // 2
        tokens = batch * options.prompt + output  # in the middle of the steps that are timed
        spec = KVSpec(layers, heads, dim, dim, torch.bfloat16, KVFormat.parse(kv_dtype))
        floor = (weight_bytes(model, batch) + tokens * spec.bytes_per_token) / bandwidth * 1e3
        wall, replay = Spread.of(times[-TIMED:]), replay_ms(runner, batch, REPLAYS)
        parts = parts_of(runner, batch, PROFILED)
        ratio = wall.median / replay
        to_first = wall.median / first.setdefault(batch, wall.median)
        rows.append(
            [name, f"{floor:.2f}", f"{replay:.3f}", wall.text(".3f"), f"{to_first:.3f}", f"{ratio:.3f}",
             f"{(wall.median - replay) * 1e3:.0f}", f"{batch / wall.median * 1e3:,.0f}",
             *(f"{part:.2f} ({part / replay:.0%})" for part in parts.values())]
        )  # fmt: skip
        results[name] = {
            "kv_dtype": kv_dtype,
            "tokens_per_sequence": tokens / batch,
            "kv_bytes_per_token": spec.bytes_per_token,
            "floor_ms": floor,
            "replay_ms": replay,
            "wall_ms": wall._asdict(),
            "ratio": ratio,
            "wall_to_first": to_first,
            "parts_ms": parts,
            "same_choices_as_eager": same,
            "tokens_per_s": batch / wall.median * 1e3,
        }
        save_json("decode_step", {"settings": settings, "batches": results}, options.out)
        del engine, runner, requests
        gc.collect()
        torch.cuda.empty_cache()
    header = [
        "batch",
        "floor ms",
        "replay ms",
        "step wall ms",
        "to first",
        "ratio",
        "host µs",
        "tokens/s",
        *KERNELS,
        "other",
    ]
    print_table(header, rows)
    print_json("decode_step", {"settings": settings, "batches": results}, options.out)


if __name__ == "__main__":
    main()
