"""Measures what a service gives in its first seconds, while graphs are captured, beside what it gives later.

    python -m bench.serving.first_seconds --model DIRECTORY --out bench/results/first-seconds-h200.json
    python -m bench.serving.first_seconds --url http://127.0.0.1:8000 --model NAME

Without --url it starts `lightkv serve` on the model and reports how long that took; options after `--` go to
that command. Clients of a closed loop begin as soon as the service is ready, for --seconds. Once no graph is
missing (with another server: after a pause), they begin again, for --steady. The floor is the later rate. Each
piece of an answer counts as a token. Prompts are random ids, and answers are greedy.
"""

import argparse
import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any

from bench.common.report import parser, print_json, print_machine, print_table
from bench.serving.load_client import Answer, Endpoint, RequestFailed, closed_loop
from bench.serving.served import Server, parse_with_serve
from bench.serving.workload import Ask

PAUSE_SECONDS = 10.0  # for a server that does not say what is missing
MOST_WAIT = 120.0  # seconds for the last graph
FIGURES = ("tokens_per_second", "between_tokens_p99_ms", "longest_between_tokens_ms", "first_token_p50_ms")


def asks(options: argparse.Namespace, seconds: float, seed: int) -> Iterator[Ask]:
    """Yields requests until the time is over."""
    rng, end = random.Random(seed), time.perf_counter() + seconds
    while time.perf_counter() < end:
        yield Ask([rng.randrange(10, options.vocab_size) for _ in range(options.prompt)], options.output)


def figures(answers: list[Answer], begun: float, seconds: float) -> dict[str, Any]:
    """Returns the tokens of each whole second and of all, and the longest times between pieces of an answer."""
    arrivals = [at - begun for answer in answers for at in answer.arrivals]
    gaps = sorted(gap for answer in answers for gap in answer.gaps)
    by_second = [sum(second <= at < second + 1 for at in arrivals) for second in range(int(seconds))]
    return {
        "tokens_per_second": sum(by_second) / int(seconds),
        "by_second": by_second,
        "between_tokens_p99_ms": 1e3 * gaps[int(0.99 * len(gaps))],
        "longest_between_tokens_ms": 1e3 * gaps[-1],
        "first_token_p50_ms": 1e3 * sorted(answer.ttft for answer in answers)[len(answers) // 2],
    }


async def measure(endpoint: Endpoint, model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of both loads, and when the last graph was captured."""
    found: dict[str, Any] = {}
    ready = time.perf_counter()
    for part, (name, seconds) in enumerate((("first", options.seconds), ("later", options.steady))):
        begun = time.perf_counter()
        answers = await closed_loop(endpoint, model, asks(options, seconds, part), options.clients)
        found[name] = figures(answers, begun, seconds)
        if not part:
            try:
                while (await endpoint.get("/load"))["num_missing_graphs"]:
                    if time.perf_counter() - ready > MOST_WAIT:
                        raise SystemExit(f"graphs are still missing after {MOST_WAIT:g} s")
                    await asyncio.sleep(0.2)
                found["graphs_seconds"] = time.perf_counter() - ready
            except (RequestFailed, KeyError):
                await asyncio.sleep(PAUSE_SECONDS)
    found["first_over_later"] = found["first"]["tokens_per_second"] / found["later"]["tokens_per_second"]
    return found


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--url", help="a service that has become ready just now; None starts one")
    made.add_argument(
        "--model", required=True, help="directory of a checkpoint, or a model's name with --url"
    )
    made.add_argument("--clients", type=int, default=32)
    made.add_argument("--prompt", type=int, default=512)
    made.add_argument("--output", type=int, default=128)
    made.add_argument("--seconds", type=float, default=30.0)
    made.add_argument("--steady", type=float, default=15.0)
    made.add_argument("--vocab-size", type=int, default=128256)
    options = parse_with_serve(made, None)
    print_machine()
    results: dict[str, Any] = {"settings": {name: str(value) for name, value in vars(options).items()}}
    if options.url:
        results |= asyncio.run(measure(Endpoint(options.url, None, 300.0), options.model, options))
    else:
        begun = time.perf_counter()
        with Server([options.model, "--served-model-name", "m", *options.serve]) as server:
            results["start_seconds"] = time.perf_counter() - begun
            results |= asyncio.run(measure(Endpoint(server.url, None, 300.0), "m", options))
    rows = [[name, *(f"{results[name][figure]:,.0f}" for figure in FIGURES)] for name in ("first", "later")]
    print_table(["", "tokens/s", "between tokens p99, ms", "longest, ms", "first token p50, ms"], rows)
    print(f"the first {options.seconds:g} s: {results['first_over_later']:.3f} of the later rate")
    print_json("first_seconds", results, options.out)


if __name__ == "__main__":
    main()
