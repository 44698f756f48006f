"""The simulator: a trace through the engine's own loop, with a step-time model in place of a device.

Scheduler, admission, forecast and ledger are the service's; only two things are made up. The executor computes
nothing: it says how long the step would have taken, by which it moves the clock, and lets a request end where
the trace says. And where memory goes by pages or by runs, the ledger counts so (`allocations.py`). The
scheduler is told what a service is told: a prompt, and the most tokens that may come. With the `oracle` alone
that is the answer's true length.

Token ids: a prompt of a trace without prefixes begins with a token of its own; where blocks of prefixes are
known their ids fill them.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from lightkv.errors import LightKVError
from lightkv.ledger import TokenLedger

from .admission import ADMISSIONS, make_admission
from .allocations import ContiguousLedger, PagedLedger, make_ledger, page_of
from .engine import Engine, Holding
from .messages import Limits, StepPlan, StepResult, TokenEvent
from .request import Request
from .sampling_params import SamplingParams
from .scheduler import Scheduler
from .simulation_record import Distribution, Means, Timeline
from .simulation_result import Figures, Series, SimulationResult
from .step_time import StepTime, Work
from .traces import BLOCK, Trace, TraceRequest, at_once, faster, open_trace, poisson, summarise

VOCAB_SIZE = 2**31 - 1
END, MORE = 2, 1  # sampled: the last token of an answer, any other
QUEUE = 64  # requests given to the scheduler before their turn; the others wait as a few numbers each
SATURATION_REQUESTS = 20_000

Progress = Callable[[int], None]
"""Takes how many requests have ended."""


class InvalidSimulation(LightKVError, ValueError):
    """A setting outside what it can be, or a request of the trace that could never run."""


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class SimulationConfig:
    """Every setting of a simulation, from which the command line makes its options."""

    allocation: str = _setting(
        "token",
        "token; paged:16, paged:32, paged:64, paged:128 or paged:256; contiguous (prompt and --max-new "
        "reserved in one run).",
    )
    admission: str | None = _setting(
        None,
        f"Who is admitted by what: {', '.join(ADMISSIONS)}. Default: exact; sum for contiguous, which can do "
        "no other.",
    )
    capacity: int = _setting(120_000, "Tokens that the K/V pool holds.")
    max_num_seqs: int = _setting(256, "Requests that run at once.")
    prefill_chunk: int = _setting(2048, "Prompt tokens a step at most; 0: no limit.")
    max_new: int = _setting(4096, "The most output tokens of a request, which no trace tells.")
    requests: int | None = _setting(
        None, "Requests of the trace; a file begins again after its last. Default: all of a file, 2000 else."
    )
    load: float | None = _setting(
        None,
        "Arrivals at so many times what an oracle serves of this trace when all requests wait at the start, "
        "which is simulated first. Default: the trace's own times.",
    )
    rate: float | None = _setting(None, "Arrivals at so many requests a second; inf: all at the start.")
    saturation: float | None = _setting(
        None, "For --load: the requests a second that an oracle serves, where it is known already."
    )
    ttft_target: float = _setting(10.0, "Seconds to the first token at most, for goodput.")
    tpot_target: float = _setting(0.1, "Seconds between tokens at most (a request's mean), for goodput.")
    step_time: str = _setting(
        "",
        "A JSON file of a step-time model, or its parameters (base=0.007,per_kv=4e-8 …). Default: Llama-3-8B "
        "on an H200.",
    )
    skip_too_large: bool = _setting(False, "Leave out requests that could never fit, rather than stop.")
    seed: int = _setting(0, "Decides all that is drawn: arrivals, a workload's lengths, estimates.")

    def __post_init__(self) -> None:
        """Raises InvalidSimulation, InvalidAllocation."""
        page = page_of(self.allocation)
        if self.admission not in (None, *ADMISSIONS):
            known = ", ".join(ADMISSIONS)
            raise InvalidSimulation(f"--admission is {self.admission!r}; give one of {known}")
        if not page and self.admission not in (None, "sum"):
            raise InvalidSimulation(
                f"--admission is {self.admission!r}; a contiguous allocation reserves prompt and --max-new at "
                "once, which is sum: leave --admission out"
            )
        for name, least in (("capacity", 1), ("max_num_seqs", 1), ("prefill_chunk", 0), ("max_new", 1)):
            if getattr(self, name) < least:
                raise InvalidSimulation(f"{_flag(name)} is {getattr(self, name)}; give at least {least}")
        if self.requests is not None and self.requests < 1:
            raise InvalidSimulation(f"--requests is {self.requests}; give at least 1")
        for name in ("load", "rate", "saturation", "ttft_target", "tpot_target"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidSimulation(f"{_flag(name)} is {value}; give more than 0")
        if self.load is not None and self.rate is not None:
            raise InvalidSimulation("--load and --rate both say how fast requests come; give one")

    @property
    def counted(self) -> str:
        """The admission, named."""
        return self.admission or ("exact" if page_of(self.allocation) else "sum")

    @classmethod
    def help(cls, name: str) -> str:
        """The text that explains a setting."""
        return next(f.metadata["help"] for f in fields(cls) if f.name == name)


def simulate(trace_name: str, config: SimulationConfig, progress: Progress | None = None) -> SimulationResult:
    """Run a trace (`traces.open_trace`) to its end.

    Raises UnreadableTrace, InvalidStepTime, InvalidAllocation, OSError; InvalidSimulation for a request that
    could never run.
    """
    if config.load is not None and config.saturation is None:
        config = replace(config, saturation=saturation(trace_name, config, progress))
    trace = open_trace(trace_name, config.requests, config.seed)
    step_time = StepTime.parse(config.step_time)
    return _Simulation(trace, config, step_time, progress or (lambda done: None)).run()


def saturation(trace_name: str, config: SimulationConfig, progress: Progress | None = None) -> float:
    """Requests a second that an oracle serves, by token, when all of them wait at the start."""
    num = min(config.requests, SATURATION_REQUESTS) if config.requests else None
    full = replace(
        config, allocation="token", admission="oracle", rate=math.inf, load=None, saturation=None, requests=num
    )
    return simulate(trace_name, full, progress).figures.served_rate


class _Arrivals:
    """The requests of a trace in their order: those that have come, and those to come."""

    def __init__(self, requests: Iterator[TraceRequest], all_at_start: bool) -> None:
        self._requests = requests
        self._all_at_start = all_at_start
        self._come: deque[TraceRequest] = deque()
        self._next = next(requests, None)

    @property
    def num_waiting(self) -> int:
        """Of those that have come. Where all are there at the start they are not counted: they may be many."""
        return len(self._come)

    @property
    def exhausted(self) -> bool:
        return self._next is None and not self._come

    @property
    def next_time(self) -> float | None:
        """When the next one comes; None: none does."""
        return None if self._next is None else self._next.arrival

    def take(self, now: float) -> TraceRequest | None:
        """The first that has come by `now`."""
        if self._all_at_start:
            taken, self._next = self._next, next(self._requests, None)
            return taken
        while self._next is not None and self._next.arrival <= now:  # type: ignore[operator]
            self._come.append(self._next)
            self._next = next(self._requests, None)
        return self._come.popleft() if self._come else None


class _Device:
    """An executor that computes nothing: it moves the clock, and ends answers where the trace does.

    It writes down what the memory holds while a step runs.
    """

    fatal = False

    def __init__(self, simulation: "_Simulation", step_time: StepTime, max_num_seqs: int) -> None:
        self._simulation = simulation
        self._step_time = step_time
        self._left: list[list[int]] = [[0]] * (max_num_seqs + 1)  # by row: [tokens to come], its request's own
        self.outputs: dict[int, list[int]] = {}  # request → the same, while it lives
        self.empty_slots = 0  # over all steps and requests that got a token: of its pages, those without one
        self.all_slots = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """What would have been sampled, once it would have been."""
        for new in plan.new_rows:
            self._left[new.row] = self.outputs[new.seed]
        rows, starts, left = plan.rows, plan.starts, self._left
        tokens = []
        for i in plan.sample:
            own = left[rows[i]]
            own[0] -= 1
            tokens.append(MORE if own[0] else END)
        ledger = self._simulation.ledger
        if isinstance(ledger, PagedLedger | ContiguousLedger):
            self._count_slots(plan, ledger)
        num = plan.num_contexts
        decodes = len(rows) - num
        prompt = pairs = 0
        for start, count in zip(starts[:num], plan.counts, strict=False):
            prompt += count
            pairs += count * start + count * (count + 1) // 2
        kv = sum(starts) - sum(starts[:num]) + decodes
        self._simulation.pass_time(self._step_time.seconds(Work(decodes, kv, prompt, pairs)))
        return StepResult(plan.step, tokens, plan.num_free, 0)

    def check(self, edits: bytes, holding: Holding) -> None:
        """There is no memory to recount."""

    def _count_slots(self, plan: StepPlan, ledger: PagedLedger | ContiguousLedger) -> None:
        sampled = np.array(plan.sample, np.int64)
        lengths = (np.array(plan.starts, np.int64) + np.array(plan.counts, np.int64))[sampled]
        slots = int(ledger.slots([plan.rows[i] for i in plan.sample], lengths).sum())
        self.all_slots += slots
        self.empty_slots += slots - int(lengths.sum())


class _Live:
    """A request that has been sent and has not ended."""

    __slots__ = ("arrival", "first", "request")

    def __init__(self, arrival: float, request: Request) -> None:
        self.arrival = arrival
        self.first = 0.0  # when its first token came
        self.request = request


class _Simulation:
    """One run: the clock, the engine, and what is written down."""

    def __init__(
        self, trace: Trace, config: SimulationConfig, step_time: StepTime, progress: Progress
    ) -> None:
        self.config = config
        self.trace = trace
        self.step_time = step_time
        self._progress = progress
        self.clock = 0.0
        page = page_of(config.allocation)
        longest = config.capacity + 1
        self.ledger: TokenLedger = make_ledger(
            config.allocation, config.capacity, config.max_num_seqs, longest, config.max_new
        )
        admission = make_admission(config.counted, config.seed, slack=max(page - 1, 0))
        limits = Limits(config.max_num_seqs, longest, config.prefill_chunk, VOCAB_SIZE)
        self.scheduler = Scheduler(self.ledger, limits, admission=admission)
        self.device = _Device(self, step_time, config.max_num_seqs)
        self.engine = Engine(self.scheduler, self.device)
        self._live: dict[str, _Live] = {}
        self._params = SamplingParams(temperature=0.0, max_tokens=config.max_new)

        self._num_sent = self._num_finished = self._num_skipped = self._num_cut = 0
        self._num_met = self._num_preempted = self._num_prompt = 0
        self._ttft, self._tpot = Distribution(), Distribution()
        self._timeline = Timeline(5)
        self._means = Means(6)  # while loaded
        self._loaded = True
        self._loaded_output = 0
        self._max_running = self._max_waiting = 0

    def run(self) -> SimulationResult:
        """All of it."""
        self._arrivals, offered, saturated = self._arrange()
        while True:
            self._send()
            if self.engine.has_work:
                self._take(self.engine.step())
            elif (at := self._arrivals.next_time) is not None:
                self.pass_time(max(at - self.clock, 0.0))
            else:
                break
        self.engine.check()
        return self._result(offered, saturated)

    def pass_time(self, seconds: float) -> None:
        """The clock moves on; all that is held meanwhile is written down."""
        ledger, scheduler = self.ledger, self.scheduler
        padding = ledger.padding if isinstance(ledger, PagedLedger | ContiguousLedger) else 0
        held, cached = ledger.num_held, ledger.num_cached
        running, waiting = scheduler.num_running, scheduler.num_waiting + self._arrivals.num_waiting
        if self._loaded and self._arrivals.exhausted and not waiting:
            self._loaded = False
            self._loaded_output = scheduler.num_output_tokens
        if self._loaded:
            self._means.add(seconds, (held, held - padding, cached, padding, running, waiting))
        self._max_running = max(self._max_running, running)
        self._max_waiting = max(self._max_waiting, waiting)
        now, self.clock = self.clock, self.clock + seconds
        self._timeline.add(now, self.clock, (held - padding, padding, cached, running, waiting))

    def _arrange(self) -> tuple[_Arrivals, float, float]:
        """The arrivals, how many a second, and what is saturation."""
        config, trace = self.config, self.trace
        if config.rate == math.inf:
            return _Arrivals(at_once(trace), True), 0.0, config.saturation or 0.0
        summary = summarise(trace)
        rate, saturated = config.rate, config.saturation or 0.0
        if config.load is not None:
            rate = config.load * saturated
        if not summary.span:
            if rate is None:
                raise InvalidSimulation(
                    f"{self.trace.name} has no arrival times; give --load (of saturation) or --rate (a second)"
                )
            return _Arrivals(poisson(trace, rate, config.seed), False), rate, saturated
        own = summary.num / summary.span
        factor = 1.0 if rate is None else rate / own
        return _Arrivals(faster(trace, factor), False), own * factor, saturated

    def _send(self) -> None:
        """Give the scheduler those that have come, as far as it has to see them."""
        while self.scheduler.num_waiting < QUEUE:
            asked = self._arrivals.take(self.clock)
            if asked is None:
                return
            self._num_sent += 1
            self._send_one(self._num_sent, asked)

    def _send_one(self, number: int, asked: TraceRequest) -> None:
        config = self.config
        if asked.prompt + config.max_new - 1 > self.ledger.capacity:
            if not config.skip_too_large:
                raise InvalidSimulation(
                    f"request {number} of {self.trace.name} has {asked.prompt} prompt tokens and up to "
                    f"{config.max_new} new ones, of a pool of {self.ledger.capacity}; give a larger --capacity, "
                    "a smaller --max-new, or --skip-too-large to leave such requests out"
                )
            self._num_skipped += 1
            return
        output = min(asked.output, config.max_new)
        self._num_cut += output < asked.output
        self._num_prompt += asked.prompt
        if asked.blocks:
            ids = np.repeat(np.array(asked.blocks, np.int32) + 1, BLOCK)[: asked.prompt].tobytes()
            ids += bytes(4 * asked.prompt - len(ids))
        else:
            ids = number.to_bytes(4, "little") + bytes(4 * (asked.prompt - 1))
        params = self._params
        if config.admission == "oracle":
            params = SamplingParams(temperature=0.0, max_tokens=output)
        request = Request(str(number), ids, params, number, frozenset({END}))
        self.device.outputs[number] = [output]
        assert asked.arrival is not None
        self._live[request.id] = _Live(asked.arrival, request)
        self.engine.add(request)

    def _take(self, events: list[TokenEvent]) -> None:
        """What a step brought."""
        now = self.clock
        for event in events:
            if event.num_cached is not None:
                live = self._live[event.request_id]
                live.first = now
                self._ttft.add(now - live.arrival)
            if event.finish_reason is not None:
                live = self._live.pop(event.request_id)
                del self.device.outputs[live.request.seed]
                self._finish(live, len(live.request.output))
                self._num_finished += 1
                self._progress(self._num_finished)

    def _finish(self, live: _Live, num_output: int) -> None:
        between = 0.0
        if num_output > 1:
            between = (self.clock - live.first) / (num_output - 1)
            self._tpot.add(between)
        in_time = live.first - live.arrival <= self.config.ttft_target
        self._num_met += in_time and between <= self.config.tpot_target
        self._num_preempted += live.request.num_pauses > 0

    def _result(self, offered: float, saturated: float) -> SimulationResult:
        config, scheduler, capacity = self.config, self.scheduler, self.ledger.capacity
        means, ttft, tpot = self._means, self._ttft, self._tpot
        num, seconds = self._num_finished, self.clock
        mean_output = scheduler.num_output_tokens / num if num else 0.0
        loaded_rate = self._loaded_output / means.seconds if means.seconds else 0.0
        shares = [means.of(i) / capacity for i in range(4)]
        ttft_p50, ttft_p90, ttft_p99 = ttft.quantiles((0.5, 0.9, 0.99))
        tpot_p50, tpot_p90, tpot_p99 = tpot.quantiles((0.5, 0.9, 0.99))
        figures = Figures(
            num_requests=self._num_sent - self._num_skipped,
            num_finished=num,
            num_skipped=self._num_skipped,
            num_cut=self._num_cut,
            prompt_tokens=self._num_prompt,
            hit_tokens=scheduler.num_hit_tokens,
            output_tokens=scheduler.num_output_tokens,
            offered_rate=offered,
            saturation_rate=saturated,
            load=offered / saturated if saturated else 0.0,
            seconds=seconds,
            loaded_seconds=means.seconds,
            served_rate=loaded_rate / mean_output if mean_output else 0.0,
            output_rate=scheduler.num_output_tokens / seconds if seconds else 0.0,
            goodput=self._num_met / seconds if seconds else 0.0,
            met_share=self._num_met / num if num else 0.0,
            ttft_mean=ttft.mean, ttft_p50=ttft_p50, ttft_p90=ttft_p90, ttft_p99=ttft_p99, ttft_max=ttft.high,
            tpot_mean=tpot.mean, tpot_p50=tpot_p50, tpot_p90=tpot_p90, tpot_p99=tpot_p99, tpot_max=tpot.high,
            memory_held_share=shares[0],
            memory_used_share=shares[1],
            memory_cached_share=shares[2],
            memory_padding_share=shares[3],
            peak_held_share=scheduler.peak_held / capacity,
            last_page_waste_share=self.device.empty_slots / max(self.device.all_slots, 1),
            num_preemptions=scheduler.num_pauses,
            num_preempted=self._num_preempted,
            preempted_share=self._num_preempted / num if num else 0.0,
            recomputed_tokens=scheduler.num_recomputed_tokens,
            num_steps=scheduler.step,
            mean_running=means.of(4),
            mean_waiting=means.of(5),
            max_running=self._max_running,
            max_waiting=self._max_waiting,
        )  # fmt: skip
        used, padding, cached, running, waiting = self._timeline.means()
        series = Series(self._timeline.width, capacity, used, padding, cached, running, waiting)
        settings = {"trace": self.trace.name, **asdict(config), "admission": config.counted}
        return SimulationResult(
            settings, self.step_time.as_dict(), figures, series, ttft.curve(), tpot.curve()
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
