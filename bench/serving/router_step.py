"""Measures the router's own time in a step, with 1,000 running and 10,000 queued requests and no device.

    python -m bench.serving.router_step --out bench/results/router-step.json

The worker is a stand-in that answers at once and counts slots as the ledger does. The time of a step is that of
the router process: planning and encoding the plan; decoding the result, comparing the counts and completing the
step; encoding the events for the API process. Queueing a request is measured by itself; as on a GPU, that finds
the cached tokens of its prompt, by which short prompts pass long ones. There are two loads, each with one and
with two steps in flight, and with all free tokens promised to the running requests:

    steady   every request decodes; the head of the queue has been refused, and no request ends
    churn    in every step one request ends, one that is more urgent than the queue is admitted, and the head of
             the queue is refused, by exact forecasts

Each load runs with prompts that share nothing and with prompts half of which is shared in families; the
latter also as if every shared prefix were worth reading together, which is the most that this choice can
cost. The floor is one pass over the batch that makes nothing but the bytes of its events.
"""

import argparse
import cProfile
import gc
import itertools
import pstats
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from bench.common.report import parser, print_json, print_machine, print_table, refuse
from lightkv.ledger import TokenLedger
from lightkv.ledger.shared_prefixes import PrefixSharing
from lightkv.router import SamplingParams, Scheduler
from lightkv.router.engine.loop import Engine
from lightkv.router.engine.prefill_budget import PrefillBudget
from lightkv.router.engine.request import Request
from lightkv.router.engine.step import Limits, StepPlan, StepResult, TokenEvent
from lightkv.router.engine.step_time import StepTime
from lightkv.router.service.messages import Events

T = TypeVar("T")

VOCAB_SIZE = 32_000
NUM_FAMILIES = 50  # of prompts that share a prefix
TIMES_LONGER = 16  # the prompts that wait, so that none of them fits
MAX_TOKENS = 2**30  # of the pool and of a step, until the load is set up
TARGET_US = 1000.0
PARTS = ("plan", "complete", "send")
WORTH_IT = PrefixSharing(max_members=16)
# Steps are bounded by time, as on a GPU, but any number of prompt tokens fits.
ANY_STEP = StepTime(base=0.01, per_decode=1e-6, per_kv=1e-9, prefill=0.0, per_prompt=0.0, per_pair=0.0)
ANY = PrefixSharing(max_members=16, min_tokens=1, min_saved=1, min_mean=0)

_encode = msgspec.msgpack.Encoder().encode
_decode_result = msgspec.msgpack.Decoder(StepResult).decode


class Load(NamedTuple):
    """`num_running` requests that decode, each with a prompt of `prompt` tokens, and `num_queued` that wait,
    with prompts of TIMES_LONGER as many.

    With `shared`, families of requests have that many tokens in common: a quarter of a family all of them,
    and the others three, two and one quarters of them, as in the turns of a chat. `churn`: one request ends
    in each step. `depth`: steps in flight. `sharing`: which shared prefixes are read together.
    """

    num_running: int
    num_queued: int
    prompt: int
    shared: int
    churn: bool
    depth: int
    sharing: PrefixSharing = WORTH_IT


class Router:
    """An engine under a load, and the nanoseconds of each part of its steps."""

    def __init__(self, load: Load, steps: int) -> None:
        self.load = load
        self.times: dict[str, list[int]] = {part: [] for part in PARTS}
        self.queue_times: list[int] = []
        self.profiler: cProfile.Profile | None = None
        self.profiled = ""
        self._in_flight: deque[bytes] = deque()
        # With churn a request lasts as many steps as there are requests, and each is one step older.
        self._max_tokens = load.num_running if load.churn else 2 * steps
        self.engine = self._running()
        self.scheduler = self.engine.scheduler
        for _ in range(load.num_queued - load.churn):
            self._queue(self._request(TIMES_LONGER * load.prompt, self._max_tokens))
        self._arrive()

    def step(self) -> None:
        """Takes one step of the router: sends plans, and completes the oldest step."""
        while self.scheduler.num_in_flight < self.load.depth:
            plan, _ = self._timed("plan", self._plan)
            result = StepResult(plan.step, [10] * len(plan.sample), plan.num_free, 0)
            self._in_flight.append(_encode(result))
        data = self._in_flight.popleft()
        events = self._timed("complete", lambda: self.engine.complete(_decode_result(data)))
        self._timed("send", lambda: _encode(Events(events)))
        self._arrive()

    def measure(self, steps: int) -> None:
        """Forgets earlier measurements, and takes `steps`."""
        for times in self.times.values():
            times.clear()
        for _ in range(steps):
            self.step()

    def _running(self) -> Engine:
        """Returns an engine in which all requests run, in a pool of just the size that the forecast needs."""
        room = 2 * self.load.prompt if self.load.churn else 0
        roomy = self._started(MAX_TOKENS).scheduler
        engine = self._started(roomy.forecast_peak() + room)  # the same requests, and no token to spare
        if engine.scheduler.num_running != roomy.num_running:
            refuse(
                f"{engine.scheduler.num_running} of {roomy.num_running} requests run in a pool of their size"
            )
        engine.scheduler.check()
        return engine

    def _started(self, capacity: int) -> Engine:
        """Returns an engine with this many tokens, which has completed its first step of all requests."""
        self._rng = np.random.default_rng(0)
        self._number = 0
        self._in_flight.clear()
        load = self.load
        limits = Limits(2 * load.num_running, MAX_TOKENS, MAX_TOKENS, VOCAB_SIZE, load.sharing)
        ledger = TokenLedger(capacity, limits.max_num_seqs, limits.max_model_len)
        scheduler = Scheduler(ledger, limits, load.depth, budget=PrefillBudget(limits, ANY_STEP))
        for i in range(load.num_running):
            age = i if load.churn else 0
            scheduler.add(self._request(load.prompt + age, self._max_tokens - age))
        engine = Engine(scheduler)
        for _ in range(load.depth):
            plan = engine.plan()
            assert plan is not None
            result = StepResult(plan.step, [10] * len(plan.sample), plan.num_free, 0)
            self._in_flight.append(_encode(result))
        engine.complete(_decode_result(self._in_flight.popleft()))
        return engine

    def _arrive(self) -> None:
        """Queues an urgent request for each that was admitted."""
        while self.scheduler.num_waiting < self.load.num_queued:
            request = self._request(self.load.prompt, self._max_tokens)
            request.priority = -1000
            self._queue(request)

    def _queue(self, request: Request) -> None:
        begun = time.perf_counter_ns()
        self.scheduler.add(request)
        self.queue_times.append(time.perf_counter_ns() - begun)

    def _request(self, prompt: int, max_tokens: int) -> Request:
        self._number += 1
        family, member = self._number % NUM_FAMILIES, self._number // NUM_FAMILIES
        ids = self._rng.integers(NUM_FAMILIES, VOCAB_SIZE, prompt, np.int32)
        ids[: self.load.shared * (1 + member % 4) // 4] = family
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return Request(f"{self._number:032x}", ids.tobytes(), params, seed=self._number)

    def _plan(self) -> tuple[StepPlan, bytes]:
        plan = self.engine.plan()
        assert plan is not None
        return plan, _encode(plan)

    def _timed(self, part: str, function: Callable[[], T]) -> T:
        if part == self.profiled and self.profiler is not None:
            self.profiler.enable()
        begun = time.perf_counter_ns()
        made = function()
        self.times[part].append(time.perf_counter_ns() - begun)
        if part == self.profiled and self.profiler is not None:
            self.profiler.disable()
        return made


def floor_us(num_running: int) -> float:
    """Median µs to build and encode the events of one step."""
    times = []
    for _ in range(200):
        begun = time.perf_counter_ns()
        _encode(Events([TokenEvent("0" * 32, 10) for _ in range(num_running)]))
        times.append(time.perf_counter_ns() - begun)
    return float(np.median(times)) / 1e3


def spread_us(times: list[int]) -> dict[str, float]:
    """Median and 99th percentile, nanoseconds to µs."""
    median, p99 = np.percentile(times, [50, 99]) / 1e3
    return {"median": float(median), "p99": float(p99)}


def measure(load: Load, steps: int, profile: bool) -> dict[str, dict[str, float]]:
    """µs of each part and of the whole. Ends without a figure where the load was not what it claims to be."""
    router = Router(load, 3 * steps)
    router.measure(steps)  # until what ends is evicted as fast as it is cached
    admitted = router.scheduler.num_prompt_tokens
    router.measure(steps)
    scheduler = router.scheduler
    num_admitted = (scheduler.num_prompt_tokens - admitted) / load.prompt / steps
    if abs(scheduler.num_running - load.num_running) > 0.02 * load.num_running:
        refuse(f"{scheduler.num_running} requests ran, not {load.num_running}")
    if abs(num_admitted - load.churn) > 0.02:
        refuse(f"{num_admitted:.2f} requests were admitted a step, not {int(load.churn)}")
    whole = [sum(parts) for parts in zip(*router.times.values(), strict=False)]
    results = {part: spread_us(times) for part, times in router.times.items()}
    results |= {"whole": spread_us(whole), "queue": spread_us(router.queue_times)}
    if profile:
        router.profiled = max(PARTS, key=lambda part: results[part]["median"])
        router.profiler = cProfile.Profile()
        router.measure(steps // 2)
        print(f"\n{name_of(load)}: {steps // 2} times {router.profiled}, profiled")
        pstats.Stats(router.profiler).sort_stats("tottime").print_stats(12)
    for _ in range(load.depth):  # completes what is in flight, then recounts everything
        if router._in_flight:
            router.engine.complete(_decode_result(router._in_flight.popleft()))
    scheduler.check()
    return results


def name_of(load: Load) -> str:
    shared = ", shared" if load.shared else ""
    grouped = ", grouped" if load.sharing == ANY else ""
    return f"{'churn' if load.churn else 'steady'}, depth {load.depth}{shared}{grouped}"


def arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--running", type=int, default=1000)
    made.add_argument("--queued", type=int, default=10_000)
    made.add_argument("--prompt", type=int, default=64, help="prompt tokens of a request")
    made.add_argument("--steps", type=int, default=400)
    made.add_argument("--profile", action="store_true", help="print where the slowest part's time goes")
    return made.parse_args()


def main() -> None:
    options = arguments()
    gc.freeze()  # the router process has no torch, whose objects would be gone through again and again here
    print_machine()
    floor = floor_us(options.running)
    print(
        f"floor, to encode the events of {options.running} tokens: {floor:.0f} µs; target {TARGET_US:.0f} µs\n"
    )
    rows, results = [], {}
    half = options.prompt // 2
    prompts = ((0, WORTH_IT), (half, WORTH_IT), (half, ANY))
    for (shared, sharing), churn, depth in itertools.product(prompts, (False, True), (1, 2)):
        load = Load(options.running, options.queued, options.prompt, shared, churn, depth, sharing)
        found = measure(load, options.steps, options.profile)
        cells = [f"{found[part]['median']:.0f}" for part in (*PARTS, "whole")]
        rows.append(
            [name_of(load), *cells, f"{found['whole']['p99']:.0f}", f"{found['queue']['median']:.1f}"]
        )
        results[name_of(load)] = found
    print_table(["load", "plan µs", "complete µs", "send µs", "whole µs", "p99 µs", "queue one µs"], rows)
    settings = {key: getattr(options, key) for key in ("running", "queued", "prompt", "steps")}
    print_json(
        "router_step",
        {"settings": settings, "floor_us": floor, "target_us": TARGET_US, "loads": results},
        options.out,
    )


if __name__ == "__main__":
    main()
