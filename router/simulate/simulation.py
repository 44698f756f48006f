"""One simulated engine: the service's own, with a step-time model in place of a device.

Engine, scheduler, admission, forecast and ledger are the service's. Two parts are replaced: the executor
computes nothing, moves the clock by the time that the step would take, and ends each answer where the trace
says; and the ledger may count pages or contiguous runs (`paged_ledger.py`). The scheduler knows what a
service knows: a prompt and, if it is stated, the most tokens that may come. Only with the `oracle` admission is
that the answer's true length.

Token ids: in a trace without prefixes each prompt begins with a token of its own; where the blocks of
prefixes are known, their ids fill the prompt.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from lightkv.router.engine.loop import LocalEngine
from lightkv.router.engine.prefill_budget import PrefillBudget
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import Captured, ExpectedMemory, Limits, StepPlan, StepResult, TokenEvent
from lightkv.router.engine.step_time import StepTime
from lightkv.router.sampling_params import SamplingParams

from .admissions import make_simulated
from .arrivals import Arrivals, Inbox, arrange, prompt_ids
from .config import InvalidSimulation, SimulationConfig, groups_of, page_of
from .paged_ledger import ContiguousLedger, PaddedLedger, PagedLedger, make_ledger
from .record import Distribution, Means, Overtaking, Timeline
from .result import Figures, Series, SimulationResult
from .trace_files import TraceRequest
from .traces import Trace

VOCAB_SIZE = 2**31 - 1
END, MORE = 2, 1  # sampled: the last token of an answer, any other
# The most requests in the scheduler's queue. The others wait outside it, where each takes a few numbers, and
# they pass no request.
QUEUE = 64
PROGRESS_EVERY = 100
WORDS = "simulating"  # what a progress bar says
LARGE_SHARE = 1 / 16  # of the tokens of the longest request that fits the pool; one with as many is large

Progress = Callable[[str, int], None]
"""Takes the name of the current phase, and how many of its requests have ended."""


def settings_of(trace: Trace, config: SimulationConfig) -> dict[str, Any]:
    """Returns the settings that a result tells: those of replicas only where there are several."""
    settings = {"trace": trace.name, **asdict(config), "admission": config.counted}
    if config.rate == math.inf:
        settings["rate"] = "inf"  # JSON has no such number
    if config.replicas == 1:
        del settings["replicas"], settings["routing"]
    return settings


class _Device:
    """An executor that computes nothing: it moves the clock, and ends answers where the trace does. It also
    counts the slots of each step, for the share of the last pages that is empty."""

    fatal = False

    def __init__(self, simulation: "Simulation", step_time: StepTime, max_num_seqs: int) -> None:
        self._simulation = simulation
        self._step_time = step_time
        # By row: a list of one number, the tokens to come, which is also in `outputs`.
        self._left: list[list[int]] = [[0]] * (max_num_seqs + 1)
        self.outputs: dict[int, list[int]] = {}  # number of a living request → its list
        # Summed over all steps and the requests that got a token: slots of their pages, and those without a
        # token.
        self.all_slots = self.empty_slots = 0

    def launch(self, plan: StepPlan) -> None:
        """Passes the time of the step, and notes what would have been sampled."""
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
            lengths = [starts[i] + plan.counts[i] for i in plan.sample]
            slots = ledger.slots([rows[i] for i in plan.sample], lengths)
            self.all_slots += slots
            self.empty_slots += slots - sum(lengths)
        self._simulation.pass_time(self._step_time.seconds(plan.work))
        self._result = StepResult(plan.step, tokens, plan.num_free, 0)

    def collect(self) -> StepResult:
        """Returns the result of the step that was launched last."""
        return self._result

    def capture(self) -> Captured:
        """Does nothing: there are no graphs."""
        return Captured(0.0, 0)

    def check(self, edits: bytes, expected: ExpectedMemory) -> None:
        """Does nothing: there is no memory."""


@dataclass
class _Live:
    """A request that was sent and has not ended. `first`: the time of its first token."""

    arrival: float
    request: Request
    first: float = 0.0


class Simulation:
    """One run: the clock, the engine, and the statistics."""

    def __init__(
        self,
        trace: Trace,
        config: SimulationConfig,
        step_time: StepTime,
        progress: Progress,
    ) -> None:
        self.config = config
        self.trace = trace
        self.step_time = step_time
        self._progress = progress
        self._what = WORDS if config.rate != math.inf else "measuring saturation"
        self.clock = 0.0
        page = page_of(config.allocation)
        groups, num_slots = groups_of(config.layers), config.num_slots
        most = config.prefill_chunk or num_slots
        longest = groups.longest(num_slots, most) + 1
        self.ledger = make_ledger(
            config.allocation, num_slots, config.max_num_seqs, longest, config.max_new, groups
        )
        self._longest = groups.longest(self.ledger.capacity, most)  # tokens that a request may have
        admission = make_simulated(config.counted, config.seed, max(page - 1, 0), config.ttft_target)
        if config.patience is not None:
            admission = replace(admission, patience=config.patience)
        if config.reserve is not None:
            admission = replace(admission, reserve=config.reserve)
        self._queue = math.inf if admission.patience or config.low_priority else QUEUE
        limits = Limits(
            config.max_num_seqs, longest, config.prefill_chunk, VOCAB_SIZE, itl_target=config.itl_target
        )
        self.scheduler = Scheduler(
            self.ledger,
            limits,
            admission=admission,
            clock=lambda: self.clock,
            budget=PrefillBudget(limits, step_time),
        )
        self.device = _Device(self, step_time, config.max_num_seqs)
        self.engine = LocalEngine(self.scheduler, self.device)
        self._arrivals: Arrivals | Inbox
        self._live: dict[str, _Live] = {}
        self._params = SamplingParams(temperature=0.0, max_tokens=config.max_new)
        self._draws = Random(config.seed)  # of which requests state their limit and have which priority

        self._num_sent = self._num_finished = self._num_skipped = self._num_cut = 0
        self._num_met = self._num_preempted = self._num_prompt = 0
        self._num_unstated = self._num_preempted_stated = 0
        self.ttft, self.tpot = Distribution(), Distribution()
        self._large_ttft_max = self._low_ttft_max = 0.0
        self._overtaking = Overtaking()
        self.timeline = Timeline(5)
        self._means = Means(6)  # over the time in which requests waited
        self._loaded = True
        self._loaded_output = 0
        self._max_running = self._max_waiting = 0

    def run(self) -> SimulationResult:
        """Runs all requests."""
        self._arrivals, offered, saturated = arrange(self.trace, self.config)
        self._arrivals.look(self.clock)
        while True:
            self.send()
            if self.launch():
                self.complete()
            elif (at := self._arrivals.next_time) is not None:
                self.pass_time(max(at - self.clock, 0.0))
            else:
                break
        self.engine.check()
        return self.result(offered, saturated)

    def follow(self, arrivals: Arrivals | Inbox) -> None:
        """Takes requests from `arrivals` from now on, for a caller that drives the steps itself."""
        self._arrivals = arrivals

    def launch(self) -> bool:
        """Plans the next step and moves the clock to its end. Returns False where no request lives."""
        if not self.engine.has_work:
            return False
        plan = self.engine.plan()
        if plan is None:
            raise InvalidSimulation(
                f"{self.scheduler.num_running} requests run and no step can be made: "
                f"{self.ledger.num_held} slots are held of {self.ledger.capacity}; give a larger --capacity"
            )
        self.device.launch(plan)
        return True

    def complete(self) -> None:
        """Completes the step that was launched last, and takes its events."""
        self._take(self.engine.complete(self.device.collect()))

    @property
    def waiting_tokens(self) -> int:
        """The tokens that the requests sent so far have yet to compute before they decode."""
        tokens = 0
        for live in self._live.values():
            request, sequence = live.request, live.request.sequence
            tokens += max(request.num_prefill_tokens - (sequence.length if sequence else 0), 0)
        return tokens

    def pass_time(self, seconds: float) -> None:
        """Moves the clock on, and notes what the ledger holds meanwhile."""
        ledger = self.ledger
        held, cached = ledger.num_held, ledger.num_cached
        padding = ledger.padding if isinstance(ledger, PaddedLedger) else 0
        scheduler, arrivals = self.scheduler, self._arrivals
        running, waiting = scheduler.num_running, scheduler.num_waiting + arrivals.num_waiting
        if self._loaded and not waiting and arrivals.exhausted:
            self._loaded = False
            self._loaded_output = scheduler.num_output_tokens
        if self._loaded:
            self._means.add(seconds, (held, held - padding, cached, padding, running, waiting))
        self._max_running = max(self._max_running, running)
        self._max_waiting = max(self._max_waiting, waiting)
        now, self.clock = self.clock, self.clock + seconds
        self.timeline.add(now, self.clock, (held - padding, padding, cached, running, waiting))
        arrivals.look(self.clock)

    def send(self) -> None:
        """Adds the requests that have arrived, as many as the scheduler has to see."""
        while self.scheduler.num_waiting < self._queue:
            taken = self._arrivals.take()
            if taken is None:
                return
            self._num_sent += 1
            self._send_one(*taken)

    def _send_one(self, number: int, asked: TraceRequest) -> None:
        config = self.config
        if asked.prompt + config.max_new - 1 > self._longest:
            if not config.skip_too_large:
                raise InvalidSimulation(
                    f"request {number} of {self.trace.name} has {asked.prompt} prompt tokens and up to "
                    f"{config.max_new} new ones, of a pool of {self._longest}; give a larger "
                    "--capacity, a smaller --max-new, or --skip-too-large to leave such requests out"
                )
            self._num_skipped += 1
            return
        output = min(asked.output, config.max_new)
        self._num_cut += output < asked.output
        self._num_prompt += asked.prompt
        ids = prompt_ids(number, asked)
        params = self._params
        is_stated = self._draws.random() < config.stated
        priority = int(self._draws.random() < config.low_priority)
        self._num_unstated += not is_stated
        if config.admission == "oracle":
            params = SamplingParams(temperature=0.0, max_tokens=output)
        elif not is_stated:  # it may take all of the pool
            params = SamplingParams(temperature=0.0, max_tokens=self._longest + 1 - asked.prompt)
        request = Request(str(number), ids, params, number, frozenset({END}), (), priority)
        request.states_length = is_stated
        self.device.outputs[number] = [output]
        assert asked.arrival is not None
        request.queued = asked.arrival
        self._live[request.id] = _Live(asked.arrival, request)
        self.engine.add(request)

    def _take(self, events: list[TokenEvent]) -> None:
        """Takes the events of a step."""
        now = self.clock
        for event in events:
            if event.num_cached is not None:
                live = self._live[event.request_id]
                live.first = now
                self._begin(live, now - live.arrival)
            if event.finish_reason is not None:
                live = self._live.pop(event.request_id)
                del self.device.outputs[live.request.seed]
                self._finish(live, len(live.request.output))
                self._num_finished += 1
                if not self._num_finished % PROGRESS_EVERY:
                    self._progress(self._what, self._num_finished)

    def _begin(self, live: _Live, seconds: float) -> None:
        """Notes the first token of a request, `seconds` after its arrival."""
        request = live.request
        self.ttft.add(seconds)
        self._overtaking.begin(request.arrival + 1)
        if request.num_prompt + self.device.outputs[request.seed][0] >= LARGE_SHARE * self._longest:
            self._large_ttft_max = max(self._large_ttft_max, seconds)
        if request.priority:
            self._low_ttft_max = max(self._low_ttft_max, seconds)

    def _finish(self, live: _Live, num_output: int) -> None:
        between = 0.0
        if num_output > 1:
            between = (self.clock - live.first) / (num_output - 1)
            self.tpot.add(between)
        in_time = live.first - live.arrival <= self.config.ttft_target
        self._num_met += in_time and between <= self.config.tpot_target
        self._num_preempted += live.request.num_preemptions > 0
        self._num_preempted_stated += live.request.num_preemptions > 0 and live.request.states_length

    def result(self, offered: float, saturated: float) -> SimulationResult:
        config, scheduler, capacity = self.config, self.scheduler, self.ledger.capacity
        means, ttft, tpot = self._means, self.ttft, self.tpot
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
            load=config.load or (offered / saturated if saturated else 0.0),
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
            num_preemptions=scheduler.num_preemptions,
            num_preempted=self._num_preempted,
            preempted_share=self._num_preempted / num if num else 0.0,
            recomputed_tokens=scheduler.num_recomputed_tokens,
            num_steps=scheduler.step,
            mean_running=means.of(4),
            mean_waiting=means.of(5),
            max_running=self._max_running,
            max_waiting=self._max_waiting,
            num_unstated=self._num_unstated,
            num_preempted_stated=self._num_preempted_stated,
            max_overtaken=self._overtaking.most,
            large_ttft_max=self._large_ttft_max,
            low_ttft_max=self._low_ttft_max,
        )  # fmt: skip
        used, padding, cached, running, waiting = self.timeline.means()
        series = Series(self.timeline.width, capacity, used, padding, cached, running, waiting)
        settings = settings_of(self.trace, config)
        return SimulationResult(
            settings, self.step_time.as_dict(), figures, series, ttft.curve(), tpot.curve()
        )
