"""What layer groups cost and save on a GPU: decode steps and held bytes of models that mix windows with layers
that see everything, with groups and with every layer holding every token, as before.

    python -m bench.memory.layer_groups --out bench/results/layer-groups.json

Both kinds of memory take turns on one model of random weights, which is a published shape, most of them with
fewer layers. A step is the wall time of the engine's step, with two in flight; held bytes are those of the
requests once their prompts are computed. `--capacity` counts how many requests of 32k tokens, all of which
state their length, run at once in the bytes of three that hold every token. The greedy answers of both have to
be the same but for rounding: the share of the tokens that are equal is told.
"""

import gc
import random
import statistics
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import torch
from transformers import Gemma3TextConfig, GptOssConfig, PretrainedConfig, PreTrainedModel

from bench.common.random_model import random_model
from bench.common.report import parser, print_json, print_machine, print_table, save_json
from lightkv.integrations.model.model_shape import ModelShape
from lightkv.router import EngineConfig, SamplingParams
from lightkv.router.engine.loop import LocalEngine, make_scheduler
from lightkv.router.engine.request import Request
from lightkv.router.engine.step import RunnerInfo
from lightkv.router.model.build import assemble

ROUNDS = 2  # of both kinds of memory
WARM, TIMED = 12, 40  # steps of a round

CAPACITY_PROMPT, CAPACITY_TOKENS, CAPACITY_REQUESTS = 32_000, 400, 24

SHAPES: dict[str, PretrainedConfig] = {
    "gemma-3-270m": Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 3,
        max_position_embeddings=32768,
    ),
    # Gemma-3 12B has 48 layers, one in six of which sees everything.
    "gemma-3": Gemma3TextConfig(
        vocab_size=262208,
        hidden_size=3840,
        intermediate_size=15360,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        sliding_window=1024,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 2,
        max_position_embeddings=131072,
    ),
    # gpt-oss 20B has 24 layers, every other of which sees 128 tokens.
    "gpt-oss": GptOssConfig(
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=8,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 4,
    ),
}


class Reading(NamedTuple):
    """One round of one kind of memory: the median step in ms, bytes that the requests held once their prompts
    were computed, the most tokens of a request of 32k that fit 40 GB, and the answers."""

    step_ms: float
    held_bytes: int
    answers: list[list[int]]
    info: RunnerInfo


@contextmanager
def one_group() -> Iterator[None]:
    """Has every layer hold every token while the block runs."""
    with patch.object(ModelShape, "lifetimes", None):
        yield


def measure(model: PreTrainedModel, batch: int, prompt: int) -> Reading:
    """Runs `batch` requests of `prompt` tokens."""
    num_tokens = WARM + TIMED + 24 + batch * prompt // 4096
    length = prompt + num_tokens + 8
    config = EngineConfig(
        device="cuda",
        max_num_seqs=batch,
        max_model_len=length,
        max_total_tokens=batch * length,
        prefill_chunk=8192,
        itl_target=0.0,
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
    engine.add(*requests)
    while min(len(request.output) for request in requests) < WARM:
        engine.step()
    held = engine.stats().held * info.pool_bytes // (info.capacity + 1)
    times = []
    for _ in range(TIMED):
        begun = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begun)
    while engine.has_work:
        engine.step()
    engine.check()
    answers = [list(request.output) for request in requests]
    del engine, runner
    gc.collect()
    torch.cuda.empty_cache()
    return Reading(statistics.median(times) * 1e3, held, answers, info)


def capacity(model: PreTrainedModel) -> tuple[int, int]:
    """Returns how many requests of 32k tokens ran at once, and how many preemptions there were."""
    length = CAPACITY_PROMPT + CAPACITY_TOKENS
    config = EngineConfig(
        device="cuda",
        max_num_seqs=CAPACITY_REQUESTS,
        max_model_len=length,
        max_total_tokens=3 * length,
        prefill_chunk=8192,
        itl_target=0.0,
        cuda_graphs=False,
    )
    runner, info = assemble(model, config, lambda line: None)
    engine = LocalEngine(make_scheduler(info), runner)
    engine.capture_all()
    rng = random.Random(0)
    for i in range(CAPACITY_REQUESTS):
        ids = array("i", [rng.randrange(info.limits.vocab_size) for _ in range(CAPACITY_PROMPT)]).tobytes()
        params = SamplingParams(temperature=0, max_tokens=CAPACITY_TOKENS, ignore_eos=True)
        engine.add(Request(str(i), ids, params, seed=i))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.stats().num_running)
        if engine.stats().num_waiting == 0 or engine.stats().num_preemptions:
            break
    while engine.has_work:
        engine.step()
    engine.check()
    found = most, engine.stats().num_preemptions
    del engine, runner
    gc.collect()
    torch.cuda.empty_cache()
    return found


def equal_share(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Returns the share of tokens that are equal up to each answer's first difference."""
    same = total = 0
    for one, other in zip(ours, theirs, strict=True):
        first = next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
        same, total = same + first, total + len(one)
    return same / total


def main() -> None:
    options_parser = parser(__doc__)
    options_parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    options_parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 256])
    options_parser.add_argument("--prompt", type=int, default=2048)
    options_parser.add_argument("--capacity", action="store_true", help="also count requests of 32k tokens")
    options = options_parser.parse_args()
    print_machine()
    settings = {"prompt": options.prompt, "rounds": ROUNDS, "timed_steps": TIMED}
    rows, results = [], {}
    for shape in options.shapes:
        torch.manual_seed(0)
        model = random_model(SHAPES[shape], torch.device("cuda"), torch.bfloat16)
        for batch in options.batches:
            found: dict[str, list[Reading]] = {"one group": [], "groups": []}
            for _ in range(ROUNDS):
                with one_group():
                    found["one group"].append(measure(model, batch, options.prompt))
                found["groups"].append(measure(model, batch, options.prompt))
            steps = {kind: min(one.step_ms for one in readings) for kind, readings in found.items()}
            before, after = found["one group"][0], found["groups"][0]
            groups, ratio = after.info.groups, steps["groups"] / steps["one group"]
            slot = after.info.pool_bytes / (after.info.capacity + 1)
            held = {
                2**n: groups.slots(2**n) * slot / (2**n * before.info.bytes_per_token) for n in (11, 13, 15)
            }
            share = equal_share(after.answers, before.answers)
            rows.append(
                [shape, str(batch), f"{steps['one group']:.3f}", f"{steps['groups']:.3f}", f"{ratio:.3f}",
                 f"{after.held_bytes / before.held_bytes:.3f}", *(f"{one:.3f}" for one in held.values()),
                 f"{share:.3f}"]
            )  # fmt: skip
            results[f"{shape}, batch {batch}"] = {
                "step_ms": {kind: [one.step_ms for one in readings] for kind, readings in found.items()},
                "step_ratio": ratio,
                "held_ratio": after.held_bytes / before.held_bytes,
                "held_ratio_of_lengths": held,
                "classes": list(map(str, groups.classes)),
                "equal_tokens": share,
            }
            save_json("layer_groups", {"settings": settings, "results": results}, options.out)
        if options.capacity:
            with one_group():
                before_most, _ = capacity(model)
            most, preemptions = capacity(model)
            results[f"{shape}, capacity"] = {
                "requests_at_once": {"one group": before_most, "groups": most},
                "ratio": most / before_most,
                "preemptions": preemptions,
            }
            print(
                f"{shape}: {before_most} requests of 32k at once, with groups {most}; {preemptions} preempted"
            )
        del model
        gc.collect()
        torch.cuda.empty_cache()
    print_table(
        ["shape", "batch", "one group ms", "groups ms", "ratio", "held", "at 2k", "at 8k", "at 32k", "equal"],
        rows,
    )
    print_json("layer_groups", {"settings": settings, "results": results}, options.out)


if __name__ == "__main__":
    main()
