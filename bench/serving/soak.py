"""Runs a service under a mixed load for half an hour: are answers right, are tokens lost, does memory grow?

    python -m bench.serving.soak --minutes 30 --out bench/results/soak-cpu.json
    python -m bench.serving.soak --minutes 3 -- --max-num-seqs 8
    python -m bench.serving.soak --model MODEL --kill-every 40

It starts `lightkv serve` (options after `--` go to that command) with its default admission and a pool so small
that requests are preempted and cached prefixes evicted. First it sends a number of greedy requests one after
the other, none of which hits what the others have cached; their answers are the expected ones. Then --clients
clients send, at random: these requests again, as one answer or as a stream, some with log-probabilities; the
same with the connection closed in the middle; sampled requests of new random ids; and invalid requests (see
`soak_requests.py`), by several API keys of which most have limits (`soak_keys.py`). Every few minutes the
clients stop until no request is running. With --kill-every the worker is killed at these intervals. A request
that fails for that is counted and not judged.

It exits without figures, and with the reason, unless

- every greedy answer is the expected one, and the part of an answer that arrived before its connection was
  closed is the beginning of the expected one. A request is not used if the two likeliest tokens of the
  expected answer are closer than 0.001 anywhere: in another batch the sums are rounded differently, so such a
  tie may change;
- every sampled answer is complete, and every invalid request is refused with the right status;
- whenever no request is running, no token is held, free and cached tokens make up the pool, the device's
  count has been compared with the ledger's, the worker was started again only after it was killed, and the
  figures of the API keys add up to the totals of /load and /metrics;
- requests were preempted, and more tokens were computed than the pool holds;
- over the second half of the time the memory of every process is flat: the median of that half's last quarter
  is at most 2 % or 10 MiB above the median of its first quarter. This is not checked in a run of less than 20
  minutes.
"""

import argparse
import asyncio
import math
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

import uvloop

from bench.common.report import parser, print_json, print_machine, print_table, refuse
from bench.serving.load_client import Reply, RequestFailed
from bench.serving.served import Memory, Server, ServerFailed, parse_with_serve
from bench.serving.soak_keys import Keys, unequal_sums
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

LEAST_MARGIN = 1e-3  # between the log-probabilities of the two likeliest tokens
LOGPROB_TOLERANCE = 1e-2
TRIES = 4  # requests drawn for each request that is used
ANSWER_SECONDS = 600.0
REST_SECONDS = 60.0
SETTLE_SECONDS = 0.7  # the API process gets the router's counts four times a second
SAMPLE_SECONDS = 5.0
POLL_SECONDS = 0.1  # while there is no worker
LEAST_KILL_SECONDS = 31.0  # the service gives up after three losses of its worker within a minute
MAX_FAILURES = 20  # the run stops after this many
JUDGED_MINUTES = 20.0  # of a run whose memory has to be flat: earlier, steps of new sizes still occur
FLAT_SHARE = 0.02
FLAT_BYTES = 10 * 2**20
MIB = 2**20


class Service(Protocol):
    """The service that the clients use: a `KeyedService`, or a fake one in tests."""

    async def get(self, path: str) -> Any: ...

    async def request(
        self, method: str, path: str, body: bytes = b"", max_events: int | None = None
    ) -> Reply: ...


class Expected(NamedTuple):
    """A greedy request, and the answer of the idle service."""

    call: Call
    answer: Answer


class Sample(NamedTuple):
    """The memory of every process, `seconds` after the clients began."""

    seconds: float
    memory: dict[str, Memory]


class Growth(NamedTuple):
    """Resident bytes of a process: the medians of the first and of the last quarter of a time span."""

    first: float
    last: float

    @property
    def is_flat(self) -> bool:
        return self.last - self.first <= max(FLAT_SHARE * self.first, FLAT_BYTES)


# --------------------------------------------------------------------------------
# Checks


def difference(expected: Answer, got: Answer, is_whole: bool) -> str | None:
    """Describes how an answer differs from the expected one, or from its beginning; None if it does not."""
    if is_whole and (got.texts, got.reasons) != (expected.texts, expected.reasons):
        return f"{got.texts} {got.reasons} where {expected.texts} {expected.reasons} is expected"
    for idx, text in got.texts.items():
        if not expected.texts.get(idx, "").startswith(text):
            return f"choice {idx} begins {text!r} where {expected.texts.get(idx)!r} is expected"
    for idx, logprobs in got.logprobs.items():
        pairs = zip(logprobs, expected.logprobs.get(idx, logprobs), strict=False)
        if (error := max((abs(own - other) for own, other in pairs), default=0.0)) > LOGPROB_TOLERANCE:
            return f"a log-probability of choice {idx} differs by {error:.3g} from the expected one"
    return None


def lost_tokens(before: Load, after: Load) -> list[str]:
    """Lists what is wrong with the counts of an idle service. `before`: its earlier counts."""
    failures = []
    if after["num_running"] or after["num_waiting"] or after["held"]:
        failures.append(
            f"{after['held']} tokens are held by {after['num_running']} running and {after['num_waiting']} "
            f"waiting requests, {REST_SECONDS:g} s after the last answer"
        )
    if after["free"] + after["cached"] + after["held"] != after["capacity"]:
        failures.append(
            f"{after['free']} free, {after['cached']} cached and {after['held']} held tokens do not add up to "
            f"{after['capacity']}"
        )
    if after["num_ledger_checks"] <= before["num_ledger_checks"]:
        failures.append(f"no step's counts were compared: still {after['num_ledger_checks']} comparisons")
    if after["num_worker_starts"] != before["num_worker_starts"]:
        failures.append(f"the worker was started {after['num_worker_starts']} times")
    return failures


def idle_pool(before: Load, after: Load) -> list[str]:
    """Lists the reasons why the pool was not under pressure between two counts."""
    failures = []
    if after["num_preemptions"] == before["num_preemptions"]:
        failures.append("no request was preempted; give a smaller --max-total-tokens, or more --minutes")
    computed = _computed(after) - _computed(before)
    if computed <= after["capacity"]:
        failures.append(f"only {computed} tokens were computed, and the pool holds {after['capacity']}")
    return failures


def _computed(load: Load) -> int:
    return int(load["prompt_tokens"] - load["hit_tokens"] + load["generated_tokens"])


def growth(samples: Sequence[Sample]) -> dict[str, Growth]:
    """Returns the growth of each process over the second half of the samples."""
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
    """Draws `num` greedy requests and gets their answers from the idle service. Raises RequestFailed."""
    found: list[Expected] = []
    for number in range(TRIES * num):
        call = greedy_call(rng, model)
        more = {"cache_salt": str(number)} | ({} if call.is_penalised else call.logprobs)
        answer = read_answer(await service.request("POST", call.path, call.encode(**more)))
        if min(answer.margins, default=LEAST_MARGIN) >= LEAST_MARGIN:
            found.append(Expected(call, answer))
        if len(found) == num:
            return found
    raise RequestFailed(f"only {len(found)} of {TRIES * num} greedy requests have no near tie")


class Clients:
    """Clients that each send one request after the other.

    `counts`: the number of requests by kind. `failures`: the first MAX_FAILURES failures.
    `num_kills`: how often `kill` has killed the worker. `is_down`: whether no other one has begun since.
    """

    def __init__(
        self, service: Service, model: str, vocab_size: int, expected: list[Expected], invalid: list[Invalid]
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.num_kills = 0
        self.is_down = False
        self._service = service
        self._model = model
        self._vocab_size = vocab_size
        self._expected = expected
        self._invalid = invalid
        # What a client does, and its weight in the draw.
        self._kinds: dict[Callable[[random.Random], Any], int] = {
            self._whole: 30,
            self._stream: 30,
            self._cut_stream: 10,
            self._cut_whole: 5,
            self._sampled: 15,
            self._refused: 10,
        }

    async def run(self, num: int, seconds: float, seed: int) -> None:
        """Runs `num` clients, which begin no request after `seconds`."""
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._client(random.Random(f"{seed} {idx}"), end) for idx in range(num)))

    async def kill(self, server: Server, every: float, end: float) -> None:
        """Kills the worker `every` seconds after the one before it was replaced, until `end`."""
        while time.monotonic() + every < end and not self.failures:
            await asyncio.sleep(every)
            before = load = await self._service.get("/load")
            self.num_kills += 1
            self.is_down = True
            os.kill(server.pids()["worker"], signal.SIGKILL)
            failed_at = time.monotonic() + ANSWER_SECONDS
            while load["num_worker_starts"] == before["num_worker_starts"] or load["state"] != "ready":
                if time.monotonic() > failed_at:
                    return self._fail(f"no worker within {ANSWER_SECONDS:g} s after one was killed: {load}")
                await asyncio.sleep(POLL_SECONDS)
                load = await self._service.get("/load")
            self.is_down = False

    async def _client(self, rng: random.Random, end: float) -> None:
        while time.monotonic() < end and len(self.failures) < MAX_FAILURES:
            (send,) = rng.choices(list(self._kinds), list(self._kinds.values()))
            was_down, num_kills = self.is_down, self.num_kills
            try:
                await send(rng)
            except (
                RequestFailed,
                ValueError,
                KeyError,
            ) as error:  # the last two: the answer has another form
                if was_down or num_kills < self.num_kills:
                    self.counts["ended by a kill"] += 1
                    while self.is_down and time.monotonic() < end:
                        await asyncio.sleep(POLL_SECONDS)
                    continue
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
            raise RequestFailed(f"{request.name}: status {reply.status} where {request.status} is expected")

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
    """Waits until no request is running, at most REST_SECONDS, and returns the counts. Raises RequestFailed."""
    end = time.monotonic() + REST_SECONDS
    while True:
        await asyncio.sleep(SETTLE_SECONDS)
        load: Load = await service.get("/load")
        if not (load["num_running"] or load["num_waiting"] or load["held"]) or time.monotonic() > end:
            return load


# --------------------------------------------------------------------------------
# The run


class Outcome(NamedTuple):
    """The results of a run. `ended`: the service's counts at its end. `failures`: what was wrong."""

    counts: Counter[str]
    ended: Load
    num_rests: int
    num_kills: int
    samples: list[Sample]
    failures: list[str]


async def soak(service: Service, options: argparse.Namespace, vocab_size: int, server: Server) -> Outcome:
    """Runs the clients for `options.minutes`, with rests in between. Raises RequestFailed."""
    served = (await service.get("/v1/models"))["data"][0]
    rng = random.Random(options.seed)
    expected = await expect(service, served["id"], options.prompts, rng)
    print(f"{len(expected)} greedy answers are known; {options.clients} clients begin", flush=True)
    invalid = invalid_calls(served["id"], vocab_size, served["max_model_len"])
    clients = Clients(service, served["id"], vocab_size, expected, invalid)
    begun = earlier = await at_rest(service)
    start = time.monotonic()
    samples = [Sample(0.0, server.memory())]

    async def watch() -> None:
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            if not clients.is_down:
                samples.append(Sample(time.monotonic() - start, server.memory()))

    watching = asyncio.create_task(watch())
    num_rests = 0
    failures = clients.failures
    try:
        while (left := start + options.minutes * 60 - time.monotonic()) > 0 and not failures:
            seconds, num_kills = min(left, options.rest_every * 60), clients.num_kills
            end = time.monotonic() + seconds
            await asyncio.gather(
                clients.run(options.clients, seconds, rng.randrange(2**32)),
                clients.kill(server, options.kill_every or math.inf, end),
            )
            rested = await at_rest(service)
            num_starts = earlier["num_worker_starts"] + clients.num_kills - num_kills
            failures += lost_tokens({**earlier, "num_worker_starts": num_starts}, rested)
            failures += unequal_sums(rested, (await service.request("GET", "/metrics")).body.decode())
            earlier = rested
            num_rests += 1
            held = ", ".join(f"{role} {own.resident / MIB:.0f}" for role, own in server.memory().items())
            print(
                f"{(time.monotonic() - start) / 60:5.1f} min: {clients.counts.total()} requests, "
                f"{rested['num_preemptions']} preemptions, {len(failures)} failures; MiB: {held}",
                flush=True,
            )
    finally:
        watching.cancel()
    samples.append(Sample(time.monotonic() - start, server.memory()))
    if not failures:
        failures += idle_pool(begun, earlier)
    if options.minutes >= JUDGED_MINUTES:
        failures += [
            f"{role}: memory grew from {own.first / MIB:.1f} to {own.last / MIB:.1f} MiB in the second half"
            for role, own in growth(samples).items()
            if not own.is_flat
        ]
    return Outcome(clients.counts, earlier, num_rests, clients.num_kills, samples, failures)


# --------------------------------------------------------------------------------
# The report


def memory_results(samples: Sequence[Sample]) -> dict[str, Any]:
    """Returns the MiB of each process.

    Resident memory at the beginning, in the middle, at the end and at its highest; the two medians of the
    second half; and the proportional share at the end.
    """
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
    """Returns all figures, with the memory about every half minute."""
    thinned = outcome.samples[:: max(round(30 / SAMPLE_SECONDS), 1)]
    return {
        "settings": {name: value for name, value in vars(options).items() if name != "out"},
        "seconds": outcome.samples[-1].seconds,
        "requests": dict(outcome.counts),
        "rests": outcome.num_rests,
        "kills": outcome.num_kills,
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
    """Prints the requests by kind, what each key has used, and the memory of each process."""
    print_table(["requests", ""], [[kind, str(num)] for kind, num in results["requests"].items()])
    print()
    by_key = results["load"]["by_key"]
    figures = list(next(iter(by_key.values())))
    rows = [[name, *(str(used[figure]) for figure in figures)] for name, used in by_key.items()]
    print_table(["key", *(figure.replace("_", " ") for figure in figures)], rows)
    print("refused by limits:", results["refused_by_limits"])
    print()
    columns = list(next(iter(results["memory_mib"].values())))
    header = ["MiB", *(column.replace("_", " ") for column in columns)]
    rows = [
        [role, *(f"{own[column]:.1f}" for column in columns)] for role, own in results["memory_mib"].items()
    ]
    print_table(header, rows)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    made = parser(__doc__)
    made.add_argument("--model", default=EngineConfig.model)
    made.add_argument("--device", default="cpu")
    made.add_argument("--minutes", type=float, default=30.0)
    made.add_argument("--clients", type=int, default=16)
    made.add_argument("--prompts", type=int, default=40, help="greedy requests whose answers are compared")
    made.add_argument("--rest-every", type=float, default=3.0, help="minutes")
    made.add_argument("--kill-every", type=float, default=0.0, help="seconds; at least 31, or 0 for no kills")
    made.add_argument(
        "--max-total-tokens", type=int, default=1536, help="tokens of the pool; small, so that it gets full"
    )
    made.add_argument("--keys", type=int, default=4, help="API keys; the first has no limits")
    made.add_argument("--admission", default="guaranteed")
    made.add_argument("--seed", type=int, default=0)
    return parse_with_serve(made, argv)


def main() -> None:
    options = arguments()
    if 0 < options.kill_every < LEAST_KILL_SECONDS:
        refuse(f"--kill-every is {options.kill_every:g}; give 0, or at least {LEAST_KILL_SECONDS:g} seconds")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is stopped too
    print_machine()
    from lightkv.router.model.model_config import load_config

    text = load_config(Path(resolve(options.model, print))).get_text_config()
    command = ["--model", options.model, "--device", options.device, "--admission", options.admission]
    command += ["--max-total-tokens", str(options.max_total_tokens), *options.serve]
    folder = TemporaryDirectory()
    keys = Keys(Path(folder.name), options.keys)
    try:
        with Server([*command, "--api-key-file", str(keys.file)]) as server:
            held = ", ".join(f"{role} {own.resident / MIB:.0f}" for role, own in server.memory().items())
            print(f"before the first request, MiB: {held}", flush=True)
            service = keys.service(server.url, ANSWER_SECONDS)
            outcome = uvloop.run(soak(service, options, text.vocab_size, server))
    except (RequestFailed, ServerFailed) as error:
        refuse(str(error))
    results = results_of(outcome, options) | {"refused_by_limits": dict(keys.counts)}
    print_tables(results)
    if outcome.failures:
        refuse("\n".join(outcome.failures))
    print_json("soak", results, options.out)


if __name__ == "__main__":
    main()
