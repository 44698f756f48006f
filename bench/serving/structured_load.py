"""Do clients of structured output and of lists, at full speed, harm 32 ordinary streams beside them?

    python -m bench.serving.structured_load --seconds 600 --out bench/results/structured-load.json
    python -m bench.serving.structured_load --seconds 60 --model DIR -- --max-num-seqs 64

It starts `lightkv serve` (options after `--` go to that command). In --rounds rounds, which share --seconds, it
runs three loads, a third of a round each: --streams streams alone, which answer one request after the other;
the same with --clients clients, which send ordinary requests as fast as they are answered; and the same with
clients whose requests have grammars and lists of tokens. Each grammar is new, or one of a few that come again:
small and large schemas, choices, regexes, structural tags with the model's special tokens, chains of references
at, below and beyond what is compiled, and grammars that take too long. The lists are `allowed_token_ids` of
half the vocabulary. With grammars and without, the clients ask for the same numbers of answers, of the same
number of tokens where a grammar does not end before, and as many hang up.

It reports for each load the lost streams, the longest gap between two pieces of a stream, what /health answered
and the statuses of the clients' requests; and the memory of every process before and after. It exits with the
reason, after the figures, unless no stream was lost, /health was 200 throughout, no gap beyond 0.5 s came with
grammars that did not come without, every process is back within 50 MB, and no token is held in the end.
"""

import argparse
import asyncio
import itertools
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvloop

from bench.common.report import parser, print_json, print_machine, print_table, refuse
from bench.serving.load_client import Endpoint, RequestFailed
from bench.serving.served import Memory, Server, ServerFailed, parse_with_serve
from bench.serving.workload import Ask
from lightkv.router import EngineConfig

Body = dict[str, Any]

ANSWER_SECONDS = 120.0
HEALTH_SECONDS = 0.25
REST_SECONDS = (
    90.0  # after which compiled grammars that no request holds are forgotten, and memory is returned
)
MAX_GAP_SECONDS = 0.5
MAX_GROWTH_BYTES = 50e6
COMPLETIONS = "/v1/completions"
ALONE, ORDINARY, GRAMMARS = LOADS = ("alone", "ordinary", "grammars")
NUM_TOKENS = 32  # of each answer of a client
EXPECTED = (
    200,
    400,
    429,
    503,
)  # of the clients' requests; 503 is a client that hung up, or a check that failed


@dataclass
class Part:
    """What happened under one of the loads, in all rounds."""

    gaps: list[float] = field(default_factory=list)  # the longest of each answer
    lost: list[str] = field(default_factory=list)
    num_answers: int = 0
    num_tokens: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    health: Counter[str] = field(default_factory=Counter)
    longest_health: float = 0.0

    def results(self) -> dict[str, Any]:
        """Returns the figures as they are stored."""
        gaps = sorted(self.gaps)
        return {
            "answers": self.num_answers,
            "tokens": self.num_tokens,
            "lost": self.lost,
            "longest_gap_s": gaps[-1] if gaps else 0.0,
            "p99_longest_gap_s": gaps[int(0.99 * (len(gaps) - 1))] if gaps else 0.0,
            "beyond_half_a_second": sum(gap > MAX_GAP_SECONDS for gap in gaps),
            "statuses": dict(self.statuses),
            "health": dict(self.health),
            "longest_health_s": self.longest_health,
        }


def chain(levels: int) -> str:
    """Returns a schema whose objects refer to each other, `levels` deep."""
    definitions: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]}
        for i in range(levels)
    }
    definitions[f"d{levels}"] = {"type": "integer"}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": definitions})


def schema(num: int, title: object) -> str:
    """Returns a schema of `num` fields."""
    names = [f"field_{i}" for i in range(num)]
    fields = {name: {"type": ["string", "null"], "maxLength": 20} for name in names}
    return json.dumps({"type": "object", "title": str(title), "properties": fields, "required": names[:5]})


def tags(num: int, title: object) -> Body:
    """Returns a structural tag whose marks are special tokens, where the model has them."""
    ends = ["<|im_end|>"]
    found = [
        {
            "type": "tag",
            "begin": f"<|im_start|>f{i}_{title}",
            "content": {"type": "json_schema", "json_schema": {"type": "object"}},
            "end": ends,
        }
        for i in range(num)
    ]
    form = {"type": "triggered_tags", "triggers": ["<|im_start|>"], "tags": found, "at_least_one": True}
    return {"type": "structural_tag", "format": form}


def grammars(number: int, rng: random.Random) -> Body:
    """Returns the fields of a request with a grammar."""
    again = number % 7  # of the few that come again
    slow = {
        "type": "object",
        "properties": {f"x{i}": {"type": "string", "maxLength": i} for i in range(2000)},
    }
    makers: list[Callable[[], Body]] = [
        lambda: {"structured_outputs": {"json": schema(3, number)}},
        lambda: {"structured_outputs": {"json": schema(10, f"again {again}")}},
        lambda: {"structured_outputs": {"json": schema(300, number)}},
        lambda: {"structured_outputs": {"json": schema(60, number)}},
        lambda: {"structured_outputs": {"choice": [f"number {rng.randrange(10**9)}" for _ in range(1500)]}},
        lambda: {"structured_outputs": {"regex": f"[a-f]{{{1 + number % 50}}}-{number}"}},
        lambda: {"structural_tag": tags(3, number)},
        lambda: {"structural_tag": tags(150, number)},
        lambda: {
            "structured_outputs": {
                "json": chain(rng.choice((10, 200, 400, 500, 2_600))) + " " * (number % 97)
            }
        },
        lambda: {"structured_outputs": {"json": json.dumps({**slow, "title": number})}},
        lambda: {
            "structural_tag": {"format": {"type": "any_text", "excludes": [f"w{i}" for i in range(10)]}}
        },
        lambda: {"response_format": {"type": "json_object"}},
    ]
    return rng.choice(makers)()


def lists(vocab_size: int) -> Body:
    """Returns the fields of a request that lists half of the vocabulary."""
    return {"allowed_token_ids": list(range(vocab_size // 2))}


def size(number: int) -> Body:
    """Returns the fields that say how much a client's request asks for: the same with a grammar and without."""
    return {"n": (1, 4, 1, 16, 1)[number % 5], "min_tokens": NUM_TOKENS, "max_tokens": NUM_TOKENS}


class Load:
    """The streams and the clients of one run. `vocab_size`: token ids are below it."""

    def __init__(self, endpoint: Endpoint, options: argparse.Namespace, model: str, vocab_size: int) -> None:
        self._endpoint = endpoint
        self._options = options
        self._model = model
        self._vocab_size = vocab_size
        self._rng = random.Random(options.seed)
        self._numbers = itertools.count()

    async def run(self, part: Part, seconds: float, name: str) -> None:
        """Runs one of `LOADS` for so long, and adds what happens to `part`."""
        end = time.monotonic() + seconds
        work = [self._stream(part, end) for _ in range(self._options.streams)]
        if name != ALONE:
            bodies = self._bodies(name == GRAMMARS)
            work += [self._client(part, end, bodies) for _ in range(self._options.clients)]
        await asyncio.gather(*work, self._watch_health(part, end))

    def _prompt(self) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(self._rng.randrange(8, 64))]

    async def _stream(self, found: Part, end: float) -> None:
        while time.monotonic() < end:
            ask = Ask(self._prompt(), self._options.tokens)
            try:
                answer = await self._endpoint.complete(self._model, ask)
            except RequestFailed as error:
                found.lost.append(str(error)[:300])
                await asyncio.sleep(1.0)  # a service that is down is not asked again at once
                continue
            found.num_answers += 1
            found.num_tokens += answer.num_output
            found.gaps.append(max(answer.gaps, default=0.0))

    async def _client(self, found: Part, end: float, bodies: Iterator[Body]) -> None:
        while time.monotonic() < end:
            asked = {"prompt": self._prompt(), "model": self._model, **next(bodies)}
            hangs_up = asked.pop("hangs_up", False)
            request = self._endpoint.request("POST", COMPLETIONS, json.dumps(asked).encode())
            try:
                reply = await (asyncio.wait_for(request, 0.01) if hangs_up else request)
                found.statuses[str(reply.status)] += 1
            except TimeoutError:
                found.statuses["hung up"] += 1
            except RequestFailed as error:
                found.statuses[f"failed: {str(error)[:60]}"] += 1
                await asyncio.sleep(1.0)

    async def _watch_health(self, found: Part, end: float) -> None:
        while time.monotonic() < end:
            begun = time.monotonic()
            try:
                status = str((await self._endpoint.request("GET", "/health")).status)
            except RequestFailed as error:
                status = str(error)[:80]
            found.health[status] += 1
            found.longest_health = max(found.longest_health, time.monotonic() - begun)
            await asyncio.sleep(HEALTH_SECONDS)

    def _bodies(self, with_grammars: bool) -> Iterator[Body]:
        """Yields the clients' requests without their prompts."""
        for idx in itertools.count():
            fields: Body = {}
            if with_grammars:
                number = next(self._numbers)
                is_list = not self._options.without_lists and number % 8 == 0
                fields = lists(self._vocab_size) if is_list else grammars(number, self._rng)
            yield {**fields, **size(idx), "hangs_up": idx % 11 == 0}


async def rest(endpoint: Endpoint, seconds: float) -> dict[str, Any]:
    """Waits until nothing runs, and then so long. Returns /load."""
    while True:
        load: dict[str, Any] = await endpoint.get("/load")
        if not load["num_running"] and not load["num_waiting"]:
            break
        await asyncio.sleep(0.2)
    await asyncio.sleep(seconds)
    return dict(await endpoint.get("/load"))


async def measure(
    endpoint: Endpoint, options: argparse.Namespace, memory: Callable[[], dict[str, Memory]]
) -> dict[str, Any]:
    """Runs all rounds. Returns the results as they are stored."""
    model = (await endpoint.get("/v1/models"))["data"][0]["id"]
    info = await endpoint.get("/server_info")
    load = Load(endpoint, options, model, info["runner"]["limits"]["vocab_size"])
    for name in LOADS:  # every process has done everything once before its memory is read
        await load.run(Part(), options.warm_up, name)
    await rest(endpoint, options.rest)
    before = memory()
    parts = {name: Part() for name in LOADS}
    for _ in range(options.rounds):
        for name, part in parts.items():
            await load.run(part, options.seconds / options.rounds / len(LOADS), name)
            await rest(endpoint, min(2.0, options.rest))
    state = await rest(endpoint, options.rest)
    after = memory()
    return {
        "loads": {name: part.results() for name, part in parts.items()},
        "memory": {
            role: {"before": before[role].resident, "after": after[role].resident}
            for role in before
            if role in after
        },
        "restarts": state["num_worker_starts"] - 1,
        "held": state["held"],
        "is_exact": state["free"] + state["cached"] == state["capacity"],
        "settings": {
            name: getattr(options, name)
            for name in (
                "model",
                "seconds",
                "rounds",
                "streams",
                "clients",
                "tokens",
                "without_lists",
                "serve",
            )
        },
    }


def failures(results: dict[str, Any]) -> list[str]:
    """Returns which of the conditions do not hold."""
    wrong = []
    for name, part in results["loads"].items():
        if part["lost"]:
            wrong.append(f"{name}: {len(part['lost'])} streams were lost, the first: {part['lost'][0]}")
        if not part["answers"]:
            wrong.append(f"{name}: no stream was answered")
        if set(part["health"]) != {"200"}:
            wrong.append(f"{name}: /health answered {part['health']}")
        if others := set(part["statuses"]) - {*map(str, EXPECTED), "hung up"}:
            wrong.append(f"{name}: clients got {', '.join(sorted(others))}")
    alone, ordinary, with_grammars = (results["loads"][name]["longest_gap_s"] for name in LOADS)
    if with_grammars > max(MAX_GAP_SECONDS, alone, ordinary):
        wrong.append(
            f"the longest gap was {with_grammars:.2f} s with grammars, {ordinary:.2f} s with ordinary clients "
            f"and {alone:.2f} s alone"
        )
    for role, own in results["memory"].items():
        if own["after"] - own["before"] > MAX_GROWTH_BYTES:
            wrong.append(f"the {role} grew by {(own['after'] - own['before']) / 1e6:.0f} MB")
    if results["restarts"] or results["held"] or not results["is_exact"]:
        counts = {name: results[name] for name in ("restarts", "held", "is_exact")}
        wrong.append(f"the counts in the end: {counts}")
    return wrong


def print_tables(results: dict[str, Any]) -> None:
    rows = [
        [
            name,
            str(part["answers"]),
            str(part["tokens"]),
            str(len(part["lost"])),
            f"{part['longest_gap_s']:.3f}",
            f"{part['p99_longest_gap_s']:.3f}",
            str(part["beyond_half_a_second"]),
            f"{part['longest_health_s']:.3f}",
        ]
        for name, part in results["loads"].items()
    ]
    header = ("load", "answers", "tokens", "lost", "longest gap s", "p99", "beyond 0.5 s", "/health s")
    print_table(header, rows)
    for name, part in results["loads"].items():
        print(f"{name}: /health {part['health']}; the clients' requests {part['statuses']}")
    rows = [
        [role, f"{own['before'] / 1e6:.0f}", f"{own['after'] / 1e6:.0f}"]
        for role, own in results["memory"].items()
    ]
    print_table(("MB", "before", "after"), rows)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--model", default=EngineConfig.model)
    made.add_argument("--device", default="cpu")
    made.add_argument("--seconds", type=float, default=600.0, help="of all loads and rounds together")
    made.add_argument("--rounds", type=int, default=2, help="in which the loads take turns")
    made.add_argument("--warm-up", type=float, default=10.0, help="seconds of each load before the figures")
    made.add_argument("--rest", type=float, default=REST_SECONDS, help="seconds before memory is read")
    made.add_argument("--streams", type=int, default=32)
    made.add_argument("--tokens", type=int, default=64, help="of each answer of a stream")
    made.add_argument("--clients", type=int, default=4)
    made.add_argument("--without-lists", action="store_true", help="send no lists of token ids")
    made.add_argument("--seed", type=int, default=0)
    return parse_with_serve(made, argv)


def main() -> None:
    """Runs the benchmark from the command line."""
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is stopped too
    print_machine()
    command = ["--model", options.model, "--device", options.device, *options.serve]
    try:
        with Server(command) as server:
            endpoint = Endpoint(server.url, None, ANSWER_SECONDS)
            results = uvloop.run(measure(endpoint, options, server.memory))
    except (RequestFailed, ServerFailed) as error:
        refuse(str(error))
    print_tables(results)
    wrong = failures(results)
    print_json("structured_load", {**results, "failures": wrong}, options.out)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
