"""Times the tokens of streams with a JSON schema, beside the same streams without one, and mixed with them.

    python -m bench.features.constrained_step --out bench/results/constrained-step-cpu.json
    python -m bench.features.constrained_step --shape llama-3-8b --out bench/results/constrained-step-h200.json

All streams of a batch decode together; a sample is the time from one step's tokens to the next step's. The
batches (none, one, half or all of the streams with the schema) are measured in turns. A run is refused if a
stream ends early, and says where the streams without the schema say something else beside others. `--shape`
runs random weights of a model's shape; grammars use the default model's tokenizer, whose tokens are then fewer
than the logits.
"""

import json
import random
import statistics
import time
from array import array
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.common.model_shapes import SHAPES
from bench.common.random_model import random_model
from bench.common.report import Spread, parser, print_json, print_machine, print_table, refuse
from bench.features.grammar import PERSON
from lightkv.router import SamplingParams
from lightkv.router.config import EngineConfig
from lightkv.router.engine.loop import LocalEngine, make_scheduler
from lightkv.router.engine.request import Request
from lightkv.router.model.build import assemble
from lightkv.router.model_files import resolve
from lightkv.router.sampling_params import Grammar
from lightkv.router.text.tokenizer import Tokenizer

SCHEMA = Grammar("json_schema", json.dumps({"type": "array", "items": PERSON, "minItems": 1000}))
SCHEMA_ID = 1
PROMPT = 16
WARM_UP = 4  # steps of a batch that are not counted


def load(shape: str | None, directory: Path) -> PreTrainedModel:
    """Returns the default model on the CPU, or random weights of a shape on the GPU."""
    if shape is None:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        return model
    torch.manual_seed(0)
    return random_model(SHAPES[shape], torch.device("cuda"), torch.bfloat16)


def run(
    engine: LocalEngine, streams: int, constrained: int, num_tokens: int, end_ids: frozenset[int], top: int
) -> tuple[list[float], list[list[int]]]:
    """Returns the milliseconds of each step in which all streams decode, and the tokens of every stream. The
    last `constrained` streams have the schema."""
    rng = random.Random(0)
    requests = []
    for i in range(streams):
        ids = array("i", [rng.randrange(top) for _ in range(PROMPT)]).tobytes()
        grammar = SCHEMA_ID if i >= streams - constrained else None
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=grammar is None)
        stop_ids = end_ids if grammar is not None else frozenset[int]()
        requests.append(Request(str(i), ids, params, i, stop_ids, grammar=grammar))
        engine.add(requests[-1])
    samples = []
    last: float | None = None
    while engine.has_work:
        events = engine.step()
        now = time.perf_counter()
        failed = next((event.error for event in events if event.finish_reason == "error"), None)
        if failed is not None:
            refuse(f"a stream ended in an error: {failed}")
        decodes = len(events) == streams and all(len(one.output) > WARM_UP for one in requests)
        if decodes and last is not None:
            samples.append(1e3 * (now - last))
        last = now if decodes else None
    return samples, [list(request.output) for request in requests]


def main() -> None:
    """Runs the benchmark from the command line."""
    options = parser(__doc__)
    options.add_argument("--shape", choices=sorted(SHAPES), help="a model's shape, for a GPU")
    options.add_argument("--streams", type=int, default=64)
    options.add_argument("--tokens", type=int, default=96, help="of each stream")
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args()
    directory = resolve(EngineConfig.model, print)
    tokenizer = Tokenizer(directory)
    model = load(args.shape, directory)
    room = PROMPT + args.tokens
    config = EngineConfig(
        device="cpu" if args.shape is None else "cuda",
        max_num_seqs=args.streams,
        max_model_len=room,
        max_total_tokens=args.streams * room,
        itl_target=0.0,
    )
    runner, info = assemble(model, config, print, directory=directory)
    engine = LocalEngine(make_scheduler(info), runner)
    engine.capture_all()
    print_machine()
    batches = sorted({0, 1, args.streams // 2, args.streams})
    samples: dict[int, list[float]] = {batch: [] for batch in batches}
    runner.grammars.compile(SCHEMA_ID, SCHEMA)
    for batch in batches:  # captures the graphs
        run(engine, args.streams, batch, WARM_UP + 4, tokenizer.eos_ids, tokenizer.vocab_size)
    expected: list[list[int]] = []
    for _ in range(args.rounds):
        for batch in batches:
            times, said = run(
                engine, args.streams, batch, args.tokens, tokenizer.eos_ids, tokenizer.vocab_size
            )
            expected = expected or said
            if any(len(tokens) != args.tokens for tokens in said):
                refuse("a stream ended before its last token")
            if said[: args.streams - batch] != expected[: args.streams - batch]:
                print(
                    f"{batch} streams with the schema: others say something else (bf16 may round otherwise)"
                )
            samples[batch] += times
    base = statistics.median(samples[0])
    results: list[dict[str, Any]] = []
    rows = []
    for batch, times in samples.items():
        spread = Spread.of(times)
        results.append({"constrained": batch, "step_ms": spread._asdict(), "ratio": spread.median / base})
        rows.append([f"{batch} of {args.streams}", spread.text(), f"{spread.median / base:.3f}"])
    print_table(("streams with a schema", "ms a step", "of none"), rows)
    document = {
        "shape": args.shape or EngineConfig.model,
        "streams": args.streams,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "batches": results,
    }
    print_json("constrained_step", document, args.out)


if __name__ == "__main__":
    main()
