"""lightkv compared with Hugging Face `generate`: the same prompts, model, dtype and threads, in one run.

    python -m bench.features.generate --out bench/results/generate-cpu.json

The cases are a batch of 8 short prompts, one of 8 medium prompts, one of 32 prompts of mixed lengths, and one
prompt of 2,048 tokens, of which the first new token is timed; its tokens/s are those of the prompt. The sides
alternate. Both generate a fixed number of tokens and ignore the end token. Hugging Face gets one padded
batch, which is how `generate` serves several prompts; lightkv runs with its defaults, and its cache is emptied
before each run. The floor is what a decode step has to read: every weight once, over the bandwidth measured in
the same run. The processor, the bandwidth and the floor are stored beside the figures.
"""

import random
import time
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.common.report import Spread, alternate, parser, print_json, print_machine, print_table, refuse
from lightkv.router import LLM, EngineConfig, SamplingParams
from lightkv.router.model_files import DEFAULT_MODEL, resolve

PAD = 0
FIRST_TOKEN = "1 x 2048"  # the case of which only the first new token is generated


def cases(vocab_size: int) -> dict[str, list[list[int]]]:
    """Returns prompts of random ids, by case; no two share a prefix."""
    rng = random.Random(0)
    lengths = {
        "8 x 40": [rng.randint(36, 44) for _ in range(8)],
        "8 x 300": [rng.randint(270, 330) for _ in range(8)],
        "32 x 8..900": [round(8 * (900 / 8) ** rng.random()) for _ in range(32)],
        FIRST_TOKEN: [2048],
    }
    return {
        name: [[rng.randrange(100, vocab_size) for _ in range(n)] for n in sizes]
        for name, sizes in lengths.items()
    }


def run_lightkv(llm: LLM, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
    """Returns the seconds, and the generated ids."""
    ledger = llm.engine.scheduler.ledger
    ledger.evict(ledger.num_cached)
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    return time.perf_counter() - start, [output.outputs[0].token_ids for output in outputs]


def run_reference(
    model: PreTrainedModel, prompts: list[list[int]], new_tokens: int
) -> tuple[float, list[list[int]]]:
    """Returns the seconds, and the generated ids. The batch is padded on the left, as `generate` needs it."""
    width = max(map(len, prompts))
    start = time.perf_counter()
    ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        output = model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=PAD,
        )
    return time.perf_counter() - start, output[:, width:].tolist()


def read_bandwidth() -> float:
    """Returns the bytes a second that a sum over memory reads, the best of ten measurements."""
    data = torch.ones(64 * 2**20)
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    return data.nbytes / best


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Returns the share of prompts with the same text. Texts differ where two logits are nearly equal."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", default=DEFAULT_MODEL)
    arguments.add_argument("--new-tokens", type=int, default=64)
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()

    directory = resolve(options.model, print)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    lines: list[str] = []
    llm = LLM(EngineConfig(model=options.model, device="cpu", dtype="float32"), lines.append)
    print_machine()
    bandwidth = read_bandwidth()
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    layers = next((line for line in lines if "linear layers" in line), "no linear layers are packed")
    print(
        f"{layers}\nfloor of a decode step: {num_bytes / 1e6:.0f} MB of weights at {bandwidth / 1e9:.1f} GB/s: "
        f"{num_bytes / bandwidth * 1e3:.1f} ms; {options.new_tokens} new tokens each\n"
    )

    header = ["prompts", "lightkv, tokens/s", "transformers, tokens/s", "ratio", "same text"]
    rows: list[list[str]] = []
    results: dict[str, Any] = {
        "linear_layers": layers,
        "read_gb_per_s": bandwidth / 1e9,
        "floor_ms": num_bytes / bandwidth * 1e3,
    }
    for name, prompts in cases(model.config.vocab_size).items():
        new_tokens = 1 if name == FIRST_TOKEN else options.new_tokens
        run_lightkv(llm, prompts, min(new_tokens, 2))
        run_reference(model, prompts, min(new_tokens, 2))
        ours, theirs, ratios, agreed = [], [], [], 1.0
        sides = {
            "lightkv": partial(run_lightkv, llm, prompts, new_tokens),
            "transformers": partial(run_reference, model, prompts, new_tokens),
        }
        for round_idx, found in enumerate(alternate(options.rounds, sides)):
            (our_seconds, our_ids), (their_seconds, their_ids) = found.values()
            ours.append(our_seconds)
            theirs.append(their_seconds)
            ratios.append(theirs[-1] / ours[-1])
            print(f"{name}, round {round_idx + 1}: {ours[-1]:.1f} s, {theirs[-1]:.1f} s", flush=True)
            agreed = min(agreed, agreement(our_ids, their_ids))
        if agreed < 0.9:
            refuse(f"{name}: only {agreed:.0%} of the texts are equal to Hugging Face's")
        llm.check()
        num_tokens = len(prompts[0]) if name == FIRST_TOKEN else len(prompts) * new_tokens
        speed = [Spread.of([num_tokens / seconds for seconds in side]) for side in (ours, theirs)]
        ratio = Spread.of(ratios)
        rows.append([name, speed[0].text(".1f"), speed[1].text(".1f"), ratio.text(), f"{agreed:.0%}"])
        results[name] = {
            "lightkv_tokens_per_s": speed[0]._asdict(),
            "transformers_tokens_per_s": speed[1]._asdict(),
            "ratio": ratio._asdict(),
            "same_text": agreed,
        }
    print_table(header, rows)
    print_json("generate", results, options.out)


if __name__ == "__main__":
    main()
