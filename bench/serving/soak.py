"""A service under everything at once, for half an hour: are answers right, is no token lost, is memory flat?

    python -m bench.serving.soak --minutes 30 --out bench/results/soak-cpu.json
    python -m bench.serving.soak --minutes 3 -- --max-num-seqs 8

It starts `lightkv serve` (what follows `--` goes to that command) with quantile admission and a pool so small
that requests are paused and cached prefixes evicted. First it asks a number of greedy requests one after the
other; their answers are what is expected later. Then --clients clients send, at random: these requests again,
whole and as streams, some with log-probabilities; the same with the connection closed in the middle; sampled
requests of fresh random ids; and invalid requests (`soak_requests.py` says what each of them is). Every few
minutes the clients stop until nothing runs.

It ends without figures, and says why, unless

- every greedy answer is the expected one, and what came of an answer before its connection was closed is the
  beginning of the expected one. A request whose two likeliest tokens are once closer than 0.001 in the expected
  answer is not used: in another batch the sums are rounded otherwise, and such a tie may fall the other way;
- every sampled answer is complete, and every invalid request is refused with the status that it has to have;
- whenever nothing runs, no token is held, free and cached tokens make up the pool, the device's count has been
  compared with the ledger's, and the worker is the one that was started;
- requests were paused, and more tokens were computed than the pool holds;
- over the last half of the time the memory of every process is flat: the median of that half's last quarter is
  at most 2 % or 10 MiB above the median of its first quarter. A run of less than 20 minutes is not judged by
  this.
"""

import argparse
import asyncio
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import uvloop

from bench.common.report import parser, print_json, print_machine, print_table, refuse
from bench.serving.load_client import Endpoint, Reply, RequestFailed
from bench.serving.served import Memory, Server, ServerFailed, parse_with_serve
from bench.serving.soak_requests import (
    Answer,
    Call,
    Invalid,
    greedy_call,
    invalid_calls,
    read_answer,
    sampled_call,
)
from lightkv.router import EngineConfig
from lightkv.router.model_files import resolve

Load = Mapping[str, Any]

LEAST_MARGIN = 1e-3  # between the logarithms of two probabilities
LOGPROB_TOLERANCE = 1e-2
TRIES = 4  # requests drawn for each that is used
ANSWER_SECONDS = 600.0
REST_SECONDS = 60.0
SETTLE_SECONDS = 0.7  # the API process hears of the router's counts four times a second
SAMPLE_SECONDS = 5.0
MAX_FAILURES = 20  # after so many there is no point in going on
JUDGED_MINUTES = 20.0  # of a run whose memory has to be flat: before, new sizes of steps still come
FLAT_SHARE = 0.02
FLAT_BYTES = 10 * 2**20
MIB = 2**20


class Service(Protocol):
    """What the clients talk to: an `Endpoint`."""

    async def get(self, path: str) -> Any: ...

    async def request(
        self, method: str, path: str, body: bytes = b"", max_events: int | None = None
    ) -> Reply: ...


class Expected(NamedTuple):
    """A greedy request, and its answer by the idle service."""

    call: Call
    answer: Answer


class Sample(NamedTuple):
    """What every process held, so many seconds after the clients began."""

    seconds: float
    memory: dict[str, Memory]


class Growth(NamedTuple):
    """Resident bytes of a process: medians of the first and of the last quarter of a time."""

    first: float
    last: float

    @property
    def is_flat(self) -> bool:
        return self.last - self.first <= max(FLAT_SHARE * self.first, FLAT_BYTES)


# --------------------------------------------------------------------------------
# What is checked


def difference(expected: Answer, got: Answer, is_whole: bool) -> str | None:
    """How an answer differs from the expected one, or, if it is not whole, from its beginning."""
    if is_whole and (got.texts, got.reasons) != (expected.texts, expected.reasons):
        return f"{got.texts} {got.reasons} where {expected.texts} {expected.reasons} is expected"
    for idx, text in got.texts.items():
        if not expected.texts.get(idx, "").startswith(text):
            return f"choice {idx} begins {text!r} where {expected.texts.get(idx)!r} is expected"
    for idx, logprobs in got.logprobs.items():
        pairs = zip(logprobs, expected.logprobs.get(idx, logprobs), strict=False)
        if (error := max((abs(own - other) for own, other in pairs), default=0.0)) > LOGPROB_TOLERANCE:
            return f"a log-probability of choice {idx} is {error:.3g} from the expected one"
    return None


def lost_tokens(before: Load, after: Load) -> list[str]:
    """What is wrong with the counts of a service in which nothing runs, `before` being earlier counts."""
    failures = []
    if after["num_running"] or after["num_waiting"] or after["held"]:
        failures.append(
            f"{after['held']} tokens are held by {after['num_running']} running and {after['num_waiting']} "
            f"waiting requests, {REST_SECONDS:g} s after the last answer"
        )
    if after["free"] + after["cached"] + after["held"] != after["capacity"]:
        failures.append(
            f"{after['free']} free, {after['cached']} cached and {after['held']} held tokens do not make up "
            f"{after['capacity']}"
        )
    if after["num_ledger_checks"] <= before["num_ledger_checks"]:
        failures.append(f"no step's counts were compared: still {after['num_ledger_checks']} comparisons")
    if after["num_worker_starts"] != before["num_worker_starts"]:
        failures.append(f"the worker was started {after['num_worker_starts']} times")
    return failures


def idle_pool(before: Load, after: Load) -> list[str]:
    """Why the pool was not under pressure between two counts."""
    failures = []
    if after["num_preemptions"] == before["num_preemptions"]:
        failures.append("no request was paused; give a smaller --max-total-tokens, or more --minutes")
    computed = _computed(after) - _computed(before)
    if computed <= after["capacity"]:
        failures.append(f"only {computed} tokens were computed, and the pool holds {after['capacity']}")
    return failures


def _computed(load: Load) -> int:
    return int(load["prompt_tokens"] - load["hit_tokens"] + load["generated_tokens"])


def growth(samples: Sequence[Sample]) -> dict[str, Growth]:
    """Of each process over the last half of the samples."""
    half = samples[len(samples) // 2 :]
    quarter = max(len(half) // 4, 1)

    def median(part: Sequence[Sample], role: str) -> float:
        return statistics.median(sample.memory[role].resident for sample in part)

    return {
        role: Growth(median(half[:quarter], role), median(half[-quarter:], role)) for role in half[-1].memory
    }


# --------------------------------------------------------------------------------
# The clients


async def expect(service: Service, model: str, num: int, rng: random.Random) -> list[Expected]:
    """`num` greedy requests and the answers of a service that does nothing else. Raises RequestFailed."""
    found: list[Expected] = []
    for _ in range(TRIES * num):
        call = greedy_call(rng, model)
        more = {} if call.is_penalised else call.logprobs
        answer = read_answer(await service.request("POST", call.path, call.encode(**more)))
        if min(answer.margins, default=LEAST_MARGIN) >= LEAST_MARGIN:
            found.append(Expected(call, answer))
        if len(found) == num:
            return found
    raise RequestFailed(f"only {len(found)} of {TRIES * num} greedy requests have no near tie")


class Clients:
    """Clients that each send one request after the other. `counts`: requests by kind; `failures`: what was
    wrong, the first MAX_FAILURES of it."""

    def __init__(
        self, service: Service, model: str, vocab_size: int, expected: list[Expected], invalid: list[Invalid]
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self._service = service
        self._model = model
        self._vocab_size = vocab_size
        self._expected = expected
        self._invalid = invalid
        # What a client does, and how often.
        self._kinds: dict[Callable[[random.Random], Any], int] = {
            self._whole: 30,
            self._stream: 30,
            self._cut_stream: 10,
            self._cut_whole: 5,
            self._sampled: 15,
            self._refused: 10,
        }

    async def run(self, num: int, seconds: float, seed: int) -> None:
        """`num` clients, none of which begins a request after `seconds`."""
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._client(random.Random(f"{seed} {idx}"), end) for idx in range(num)))

    async def _client(self, rng: random.Random, end: float) -> None:
        while time.monotonic() < end and len(self.failures) < MAX_FAILURES:
            (send,) = rng.choices(list(self._kinds), list(self._kinds.values()))
            try:
                await send(rng)
            except (RequestFailed, ValueError, KeyError) as error:  # the last two: no answer of this API
                self._fail(f"{send.__name__[1:]}: {type(error).__name__}: {error}")

    async def _whole(self, rng: random.Random) -> None:
        expected, more = self._draw(rng)
        self._compare("whole", expected, await self._post(expected.call, **more))

    async def _stream(self, rng: random.Random) -> None:
        expected, more = self._draw(rng)
        reply = await self._post(expected.call, stream=True, **more)
        if reply.status == 200 and reply.events[-1:] != [b"[DONE]"]:
            raise RequestFailed(f"a stream ends in {reply.events[-1:]}")
        self._compare("streams", expected, reply)

    async def _cut_stream(self, rng: random.Random) -> None:
        expected, more = self._draw(rng)
        body = expected.call.encode(stream=True, **more)
        reply = await self._service.request("POST", expected.call.path, body, rng.randint(1, 12))
        self._compare("streams that were cut off", expected, reply, is_whole=False)

    async def _cut_whole(self, rng: random.Random) -> None:
        expected, more = self._draw(rng)
        self.counts["answers that were not waited for"] += 1
        try:
            async with asyncio.timeout(rng.uniform(0.0, 2.0)):
                reply = await self._post(expected.call, **more)
        except TimeoutError:
            return
        self._compare("whole", expected, reply)

    async def _sampled(self, rng: random.Random) -> None:
        call = sampled_call(rng, self._model, self._vocab_size)
        answer = read_answer(await self._post(call, stream=rng.random() < 0.5))
        self.counts["sampled"] += 1
        if answer.reasons != dict.fromkeys(range(call.body.get("n", 1)), "length"):
            self._fail(f"a sampled answer of {call.body['max_tokens']} tokens ended in {answer.reasons}")

    async def _refused(self, rng: random.Random) -> None:
        request = rng.choice(self._invalid)
        reply = await self._service.request("POST", request.path, request.body)
        self.counts["invalid"] += 1
        if reply.status != request.status:
            self._fail(f"invalid ({request.name}): status {reply.status} where {request.status} is expected")

    def _draw(self, rng: random.Random) -> tuple[Expected, dict[str, Any]]:
        expected = rng.choice(self._expected)
        with_logprobs = not expected.call.is_penalised and rng.random() < 0.3
        return expected, expected.call.logprobs if with_logprobs else {}

    async def _post(self, call: Call, **more: Any) -> Reply:
        return await self._service.request("POST", call.path, call.encode(**more))

    def _compare(self, kind: str, expected: Expected, reply: Reply, is_whole: bool = True) -> None:
        self.counts[kind] += 1
        wrong = difference(expected.answer, read_answer(reply), is_whole)
        if wrong is not None:
            self._fail(f"{kind}: {wrong} ({expected.call.body})")

    def _fail(self, reason: str) -> None:
        if len(self.failures) < MAX_FAILURES:
            self.failures.append(reason)
            print(reason, flush=True)


async def at_rest(service: Service) -> Load:
    """The counts once nothing runs, or after REST_SECONDS as they are. Raises RequestFailed."""
    end = time.monotonic() + REST_SECONDS
    while True:
        await asyncio.sleep(SETTLE_SECONDS)
        load: Load = await service.get("/load")
        if not (load["num_running"] or load["num_waiting"] or load["held"]) or time.monotonic() > end:
            return load


# --------------------------------------------------------------------------------
# The run


class Outcome(NamedTuple):
    """What a run found. `ended`: the service's counts after it; `failures`: what was wrong."""

    counts: Counter[str]
    ended: Load
    num_rests: int
    samples: list[Sample]
    failures: list[str]


async def soak(
    service: Service, options: argparse.Namespace, vocab_size: int, memory: Callable[[], dict[str, Memory]]
) -> Outcome:
    """Everything at once for `options.minutes`, with rests in between. Raises RequestFailed."""
    served = (await service.get("/v1/models"))["data"][0]
    rng = random.Random(options.seed)
    expected = await expect(service, served["id"], options.prompts, rng)
    print(f"{len(expected)} greedy answers are known; {options.clients} clients begin", flush=True)
    invalid = invalid_calls(served["id"], vocab_size, served["max_model_len"])
    clients = Clients(service, served["id"], vocab_size, expected, invalid)
    begun = earlier = await at_rest(service)
    start = time.monotonic()
    samples = [Sample(0.0, memory())]

    async def watch() -> None:
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            samples.append(Sample(time.monotonic() - start, memory()))

    watching = asyncio.create_task(watch())
    num_rests = 0
    failures = clients.failures
    try:
        while (left := start + options.minutes * 60 - time.monotonic()) > 0 and not failures:
            await clients.run(options.clients, min(left, options.rest_every * 60), rng.randrange(2**32))
            rested = await at_rest(service)
            failures += lost_tokens(earlier, rested)
            earlier = rested
            num_rests += 1
            held = ", ".join(f"{role} {own.resident / MIB:.0f}" for role, own in memory().items())
            print(
                f"{(time.monotonic() - start) / 60:5.1f} min: {clients.counts.total()} requests, "
                f"{rested['num_preemptions']} pauses, {len(failures)} failures; MiB: {held}",
                flush=True,
            )
    finally:
        watching.cancel()
    samples.append(Sample(time.monotonic() - start, memory()))
    if not failures:
        failures += idle_pool(begun, earlier)
    if options.minutes >= JUDGED_MINUTES:
        failures += [
            f"the {role}'s memory grew from {own.first / MIB:.1f} to {own.last / MIB:.1f} MiB in the last half"
            for role, own in growth(samples).items()
            if not own.is_flat
        ]
    return Outcome(clients.counts, earlier, num_rests, samples, failures)


# --------------------------------------------------------------------------------
# What is reported


def memory_results(samples: Sequence[Sample]) -> dict[str, Any]:
    """MiB of each process: resident at the beginning, at half-time, at the end and at most, the two medians of
    the last half, and what it held in proportion at the end."""
    grown = growth(samples)
    begin, middle, end = samples[0], samples[len(samples) // 2], samples[-1]
    return {
        role: {
            "begin": begin.memory[role].resident / MIB,
            "middle": middle.memory[role].resident / MIB,
            "end": end.memory[role].resident / MIB,
            "highest": max(sample.memory[role].resident for sample in samples) / MIB,
            "last_half_first_quarter": grown[role].first / MIB,
            "last_half_last_quarter": grown[role].last / MIB,
            "proportional_end": end.memory[role].proportional / MIB,
        }
        for role in end.memory
    }


def results_of(outcome: Outcome, options: argparse.Namespace) -> dict[str, Any]:
    """All figures, with a line of the memory every half minute or so."""
    thinned = outcome.samples[:: max(round(30 / SAMPLE_SECONDS), 1)]
    return {
        "settings": {name: value for name, value in vars(options).items() if name != "out"},
        "seconds": outcome.samples[-1].seconds,
        "requests": dict(outcome.counts),
        "rests": outcome.num_rests,
        "load": dict(outcome.ended),
        "memory_is_judged": options.minutes >= JUDGED_MINUTES,
        "memory_mib": memory_results(outcome.samples),
        "memory_mib_over_time": [
            [
                round(sample.seconds),
                {role: round(own.resident / MIB, 1) for role, own in sample.memory.items()},
            ]
            for sample in thinned
        ],
    }


def print_tables(results: Mapping[str, Any]) -> None:
    """Requests by kind, and the memory of each process."""
    print_table(["requests", ""], [[kind, str(num)] for kind, num in results["requests"].items()])
    print()
    columns = list(next(iter(results["memory_mib"].values())))
    header = ["MiB", *(column.replace("_", " ") for column in columns)]
    rows = [
        [role, *(f"{own[column]:.1f}" for column in columns)] for role, own in results["memory_mib"].items()
    ]
    print_table(header, rows)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What was typed."""
    made = parser(__doc__)
    made.add_argument("--model", default=EngineConfig.model)
    made.add_argument("--device", default="cpu")
    made.add_argument("--minutes", type=float, default=30.0)
    made.add_argument("--clients", type=int, default=16)
    made.add_argument("--prompts", type=int, default=40, help="greedy requests whose answers are compared")
    made.add_argument("--rest-every", type=float, default=3.0, help="minutes")
    made.add_argument(
        "--max-total-tokens", type=int, default=1536, help="of the pool; few, so that it is full"
    )
    made.add_argument("--admission", default="quantile")
    made.add_argument("--seed", type=int, default=0)
    return parse_with_serve(made, argv)


def main() -> None:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is taken down
    print_machine()
    from lightkv.router.model.model_config import load_config

    text = load_config(Path(resolve(options.model, print))).get_text_config()
    command = ["--model", options.model, "--device", options.device, "--admission", options.admission]
    command += ["--max-total-tokens", str(options.max_total_tokens), *options.serve]
    try:
        with Server(command) as server:
            held = ", ".join(f"{role} {own.resident / MIB:.0f}" for role, own in server.memory().items())
            print(f"before the first request, MiB: {held}", flush=True)
            endpoint = Endpoint(server.url, None, ANSWER_SECONDS)
            outcome = uvloop.run(soak(endpoint, options, text.vocab_size, server.memory))
    except (RequestFailed, ServerFailed) as error:
        refuse(str(error))
    results = results_of(outcome, options)
    print_tables(results)
    if outcome.failures:
        refuse("\n".join(outcome.failures))
    print_json("soak", results, options.out)


if __name__ == "__main__":
    main()
