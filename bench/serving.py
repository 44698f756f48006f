"""A service under load: how soon the first token comes, how evenly the others, how many a second.

    python -m bench.serving --concurrency 1 8 --in-process --out bench/results/serving-cpu.json
    python -m bench.serving --url http://127.0.0.1:8000 --rate 4 --trace AzureLLMInferenceTrace_conv.csv
    python -m bench.serving --model DIRECTORY --max-total-tokens 262144 --concurrency 1 32 256 --transformers

Without --url it starts `lightkv serve` itself (what follows `--` goes to that command) and takes it down again;
with --url it measures any server that knows OpenAI's completions, `ignore_eos` and `stream_options`. A closed
loop has a number of clients, each of which asks again as soon as it is answered; an open loop has requests that
come at random times, whatever is under way. Prompts are random ids, answers greedy and of a given length. All
is measured at the client, from the moment it connects: the time to the first piece (TTFT), between one piece
and the next, of a token after the first, and to the end.

Of lightkv it also tells the router's own time in a step and the processor time of its processes, and it makes
sure that no token is held at the end. The peers get as many prompts at once as a closed loop has clients, the
same ones as the service, which is measured so, too:

    --in-process     `LLM.generate`, alternated with the service. On a GPU both have to fit: give
                     --max-total-tokens.
    --transformers   Hugging Face transformers' continuous batching with its own defaults, after the service has
                     ended, so that it has the whole device. Its start and its first batch are not counted.
"""

import argparse
import random
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import numpy as np
import uvloop

from bench.load_client import Answer, Endpoint, RequestFailed, closed_loop, open_loop
from bench.peers import ContinuousBatching, InProcess, PeerFailed, free_memory
from bench.report import Spread, parser, print_json, print_machine, refuse
from bench.served import Server, ServerFailed
from bench.serving_figures import load_pyplot, plot, print_levels, print_peers
from bench.workload import Ask, Lengths, choose, fill, mixed, poisson, read_trace, scale
from lightkv.errors import LightKVError
from lightkv.router import EngineConfig
from lightkv.router.weights import load_config, resolve

Results = dict[str, Any]

SETTLE_SECONDS = 0.7  # the API process hears of the router's counts four times a second


class Traffic(NamedTuple):
    """`level` clients, or with `is_open` as many requests a second."""

    level: float
    is_open: bool

    @property
    def name(self) -> str:
        return f"{self.level:g} a second" if self.is_open else f"{self.level:g} clients"


class Target(NamedTuple):
    """A server, the name of its model, how many token ids that has, and the processes if they are ours."""

    endpoint: Endpoint
    model: str
    vocab_size: int
    server: Server | None

    def run(self, traffic: Traffic, asks: Sequence[Ask], seed: int = 0) -> list[Answer]:
        """Every request answered. Raises RequestFailed."""
        if traffic.is_open:
            arrivals = poisson(traffic.level, len(asks), random.Random(seed))
            return uvloop.run(open_loop(self.endpoint, self.model, asks, arrivals))
        return uvloop.run(closed_loop(self.endpoint, self.model, asks, int(traffic.level)))

    def batch(self, asks: Sequence[Ask]) -> tuple[float, list[str]]:
        """Seconds for requests that are sent all at once, and their texts, sorted."""
        answers = self.run(Traffic(len(asks), False), asks)
        return span(answers), sorted(answer.text for answer in answers)

    def counts(self) -> Results | None:
        """lightkv's own, once they are told; None of another server."""
        time.sleep(SETTLE_SECONDS)
        try:
            found: Results = uvloop.run(self.endpoint.get("/load"))
        except RequestFailed:
            return None
        return found if "router_seconds" in found else None

    def cpu_seconds(self) -> dict[str, float]:
        """Of this process, the client's, and of ours that serve."""
        return {"client": time.process_time()} | (self.server.cpu_seconds() if self.server else {})


# --------------------------------------------------------------------------------
# What is measured


def span(answers: Sequence[Answer]) -> float:
    """Seconds from the first request to the last answer's end."""
    return max(answer.ended for answer in answers) - min(answer.sent for answer in answers)


def summary(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds; None of nothing."""
    if not seconds:
        return None
    values = np.asarray(seconds) * 1e3
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {"mean": float(values.mean()), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def summarise(answers: Sequence[Answer]) -> Results:
    """What the clients of one load saw."""
    seconds = span(answers)
    num_output = sum(answer.num_output for answer in answers)
    num_prompt = sum(answer.num_prompt for answer in answers)
    return {
        "requests": len(answers),
        "seconds": seconds,
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "requests_per_s": len(answers) / seconds,
        "output_tokens_per_s": num_output / seconds,
        "total_tokens_per_s": (num_output + num_prompt) / seconds,
        "tokens_per_piece": num_output / sum(len(answer.arrivals) for answer in answers),
        "ttft_ms": summary([answer.ttft for answer in answers]),
        "between_pieces_ms": summary([gap for answer in answers for gap in answer.gaps]),
        "per_token_ms": summary([seconds for answer in answers for seconds in answer.per_token]),
        "end_to_end_ms": summary([answer.latency for answer in answers]),
    }


def measure(target: Target, traffic: Traffic, asks: Sequence[Ask], seed: int) -> Results:
    """One load, seen from outside and, where it is lightkv, by its own counts."""
    before, cpu_before = target.counts(), target.cpu_seconds()
    results = summarise(target.run(traffic, asks, seed))
    cpu_after, after = target.cpu_seconds(), target.counts()
    cpu = {role: cpu_after[role] - used for role, used in cpu_before.items() if role in cpu_after}
    results["cores"] = {role: used / results["seconds"] for role, used in cpu.items()}
    if "router" in cpu and "api" in cpu:
        # The share of a core that serving takes beside the model, were there 100 tokens a second.
        results["host_core_at_100_tokens_per_s"] = (
            (cpu["router"] + cpu["api"]) / results["output_tokens"] * 100
        )
    if before is not None and after is not None:
        if after["held"] or after["free"] + after["cached"] != after["capacity"]:
            refuse(f"{traffic.name}: {after['held']} tokens are held after all was answered: {after}")
        steps = after["num_steps"] - before["num_steps"]
        results["steps"] = steps
        results["router_us_per_step"] = (after["router_seconds"] - before["router_seconds"]) / steps * 1e6
    return results


# --------------------------------------------------------------------------------
# What is asked


def lengths_of(options: argparse.Namespace, num: int, rng: random.Random) -> list[Lengths]:
    """Of `num` requests: a trace's where there is one, else --prompt and --output."""
    if options.trace is not None:
        return choose(scale(read_trace(options.trace), options.max_prompt, options.max_output), num, rng)
    shortest, longest = options.prompt
    return mixed(shortest, longest, options.output, num, rng)


def batches(options: argparse.Namespace, vocab_size: int) -> dict[int, list[list[Ask]]]:
    """By their size: a batch to warm up, and one a round. New prompts each, so that no cache has them."""
    rng = random.Random(options.seed + 1)
    return {
        num: [fill(lengths_of(options, num, rng), vocab_size, rng) for _ in range(1 + options.rounds)]
        for num in options.concurrency
    }


def warm_up(target: Target, options: argparse.Namespace, traffic: Traffic, rng: random.Random) -> None:
    """Prompts as long as those that are measured, all at once, and a few tokens each."""
    num = 8 if traffic.is_open else int(traffic.level)
    lengths = [Lengths(prompt, min(output, 4)) for prompt, output in lengths_of(options, num, rng)]
    target.batch(fill(lengths, target.vocab_size, rng))


# --------------------------------------------------------------------------------
# The peers


class Rounds(NamedTuple):
    """Tokens a second of each side, a figure a round, for batches of one size; and the share of texts that the
    service and `LLM.generate` have in common."""

    http: list[float]
    in_process: list[float]
    transformers: list[float]
    same_text: list[float]

    def results(self) -> Results:
        found: Results = {"http_tokens_per_s": Spread.of(self.http)._asdict()}
        for name, peer in (("in_process", self.in_process), ("transformers", self.transformers)):
            if peer:
                ratios = [ours / theirs for ours, theirs in zip(self.http, peer, strict=True)]
                found[f"{name}_tokens_per_s"] = Spread.of(peer)._asdict()
                found[f"http_over_{name}"] = Spread.of(ratios)._asdict()
        if self.same_text:
            found["same_text"] = min(self.same_text)
        return found


def run_batches(target: Target, in_process: InProcess | None, asked: Sequence[Sequence[Ask]]) -> Rounds:
    """The service and, alternated with it, `LLM.generate`."""
    rounds = Rounds([], [], [], [])
    for round_idx, asks in enumerate(asked):
        num_tokens = sum(ask.num_output for ask in asks)
        in_process_first = in_process is not None and round_idx % 2
        if in_process is not None and in_process_first:
            seconds, own = in_process.run(asks)
        http_seconds, texts = target.batch(asks)
        if in_process is not None and not in_process_first:
            seconds, own = in_process.run(asks)
        if not round_idx:
            continue  # to warm up
        rounds.http.append(num_tokens / http_seconds)
        if in_process is not None:
            rounds.in_process.append(num_tokens / seconds)
            same = sum(a == b for a, b in zip(texts, sorted(own), strict=True)) / len(asks)
            rounds.same_text.append(same)
            if same < 0.9 and in_process.llm.info.dtype == "float32":
                refuse(f"{len(asks)} at once: only {same:.0%} of the texts are those of LLM.generate")
    return rounds


def run_transformers(
    config: EngineConfig, asked: dict[int, list[list[Ask]]], rounds: dict[int, Rounds]
) -> str:
    """Adds their figures to `rounds`. Returns why there are none, or nothing."""
    try:
        peer = ContinuousBatching(config)
        for num, batches in asked.items():
            for batch_idx, asks in enumerate(batches):
                seconds = peer.run(asks)
                if batch_idx:
                    rounds[num].transformers.append(sum(ask.num_output for ask in asks) / seconds)
            peer.reset()
    except PeerFailed as error:
        for found in rounds.values():
            found.transformers.clear()
        return str(error)
    return ""


# --------------------------------------------------------------------------------
# The command line


def span_of_lengths(text: str) -> tuple[int, int]:
    """`128`, or `16:512` for any length between."""
    shortest, _, longest = text.partition(":")
    pair = int(shortest), int(longest or shortest)
    if not 1 <= pair[0] <= pair[1]:
        raise ValueError(text)
    return pair


def positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError(text)
    return number


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What was typed, checked. Ends where it contradicts itself."""
    made = parser(__doc__)
    made.add_argument("--url", help="root of a server that runs already; without it, one is started")
    made.add_argument("--api-key", help="the key of the server at --url")
    made.add_argument("--vocab-size", type=int, help="of the model at --url (default 32000)")
    made.add_argument("--concurrency", type=int, nargs="+", default=[], help="closed loops (default 1 8 32)")
    made.add_argument("--rate", type=positive, nargs="+", default=[], help="open loops, requests a second")
    made.add_argument("--requests", type=int, help="of each load (default 4 a client, at least 16; open: 64)")
    made.add_argument("--prompt", type=span_of_lengths, default=(128, 128), help="tokens, as 128 or 16:512")
    made.add_argument("--output", type=int, default=64, help="tokens of every answer")
    made.add_argument("--trace", type=Path, help="lengths from an Azure, ShareGPT or Mooncake trace instead")
    made.add_argument(
        "--max-prompt", type=int, help="scale the trace's prompts: the longest has so many tokens"
    )
    made.add_argument("--max-output", type=int, help="scale its answers likewise")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--timeout", type=positive, default=600.0, help="seconds for one answer")
    made.add_argument("--in-process", action="store_true", help="compare with LLM.generate")
    made.add_argument("--transformers", action="store_true", help="compare with transformers")
    made.add_argument("--rounds", type=int, default=3, help="of these comparisons")
    made.add_argument("--plot", type=Path, help="draw the figures into this file, a PNG")
    engine = made.add_argument_group("the engine, where one is started")
    kinds = get_type_hints(EngineConfig)
    for field in fields(EngineConfig):
        flag = "--" + field.name.replace("_", "-")
        if kinds[field.name] is bool:
            engine.add_argument(
                flag, action=argparse.BooleanOptionalAction, help=EngineConfig.help(field.name)
            )
        else:
            kind = next((k for k in get_args(kinds[field.name]) if k is not type(None)), kinds[field.name])
            engine.add_argument(flag, type=kind, help=EngineConfig.help(field.name).replace("%", "%%"))
    made.add_argument("serve", nargs="*", metavar="-- OPTION", help="further options of lightkv serve")
    options = made.parse_args(argv)
    if not options.concurrency and not options.rate:
        options.concurrency = [1, 8, 32]
    if options.url and (options.in_process or options.transformers):
        made.error("--in-process and --transformers compare with a server of our own; leave out --url")
    if options.transformers and options.trace:
        made.error("--transformers takes answers of one length; leave out --trace")
    return options


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """Raises InvalidConfig."""
    given = {field.name: getattr(options, field.name) for field in fields(EngineConfig)}
    return EngineConfig(**{name: value for name, value in given.items() if value is not None})


def settings_of(options: argparse.Namespace) -> Results:
    """What was typed and bears on the figures; files by their names."""
    hidden = {"api_key", "out", "plot", *(field.name for field in fields(EngineConfig))}
    settings = {key: value for key, value in vars(options).items() if key not in hidden}
    settings["trace"] = options.trace.name if options.trace else None
    return settings | ({} if options.url else {"engine": asdict(engine_config(options))})


def serve_arguments(config: EngineConfig, more: Sequence[str]) -> list[str]:
    """What `lightkv serve` is to be told."""
    given = [config.model]
    for field in fields(EngineConfig):
        value, flag = getattr(config, field.name), field.name.replace("_", "-")
        if field.name == "model" or value == field.default:
            continue
        if isinstance(value, bool):
            given.append(f"--{'' if value else 'no-'}{flag}")
        else:
            given += [f"--{flag}", str(value)]
    return [*given, *more]


def reach(options: argparse.Namespace, config: EngineConfig, stack: ExitStack) -> Target:
    """The server at --url, or one that ends with `stack`."""
    server = None
    vocab_size = options.vocab_size or 32_000
    if options.url is None:
        vocab_size = load_config(resolve(config.model, print)).get_text_config().vocab_size
        server = stack.enter_context(Server(serve_arguments(config, options.serve)))
    endpoint = Endpoint(options.url or server.url, options.api_key, options.timeout)  # type: ignore[union-attr]
    model = uvloop.run(endpoint.get("/v1/models"))["data"][0]["id"]
    return Target(endpoint, model, vocab_size, server)


def run(options: argparse.Namespace) -> Results:
    """Every load, then the peers."""
    config = engine_config(options)
    levels: dict[str, Results] = {}
    rounds: dict[int, Rounds] = {}
    asked: dict[int, list[list[Ask]]] = {}
    with ExitStack() as stack:
        target = reach(options, config, stack)
        traffics = [Traffic(num, False) for num in options.concurrency]
        traffics += [Traffic(rate, True) for rate in options.rate]
        rng = random.Random(options.seed)
        for traffic in traffics:
            num = options.requests or (64 if traffic.is_open else max(16, 4 * int(traffic.level)))
            warm_up(target, options, traffic, rng)
            asks = fill(lengths_of(options, num, rng), target.vocab_size, rng)
            found = measure(target, traffic, asks, options.seed)
            levels[traffic.name] = {"level": traffic.level, "is_open": traffic.is_open, **found}
            print(f"{traffic.name}: {num} requests in {found['seconds']:.1f} s", flush=True)
        if options.in_process or options.transformers:
            asked = batches(options, target.vocab_size)
            in_process = InProcess(config) if options.in_process else None
            for num, own in asked.items():
                rounds[num] = run_batches(target, in_process, own)
                print(f"{num} at once: {len(own) - 1} rounds", flush=True)
            del in_process
    results: Results = {"loads": levels}
    if options.transformers:
        free_memory()
        if reason := run_transformers(config, asked, rounds):
            results["transformers_unavailable"] = reason
            print(f"transformers' continuous batching has no figures here: {reason}")
    if rounds:
        results["at_once"] = {num: found.results() for num, found in rounds.items()}
    return results


def main() -> None:
    options = arguments()
    pyplot = load_pyplot() if options.plot else None
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server ends with this process
    print_machine()
    try:
        results = run(options)
    except (RequestFailed, ServerFailed, LightKVError, ValueError, OSError) as error:
        refuse(str(error))
        raise
    print_levels(results["loads"])
    if "at_once" in results:
        print_peers(results["at_once"])
    if pyplot is not None:
        plot(pyplot, results["loads"], options.plot)
    print_json("serving", {"settings": settings_of(options), **results}, options.out)


if __name__ == "__main__":
    main()
