"""One simulated engine: the service's own, with a step-time model in place of a device.

Engine, scheduler, admission, forecast and ledger are the service's. Two parts are replaced: the device
computes nothing, takes for each step the time that it would take, and ends each answer where the trace says
(`timed_engine.py`); and the ledger may count pages or contiguous runs (`paged_ledger.py`). The scheduler knows
what a service knows: a prompt and, if it is stated, the most tokens that may come. Only with the `oracle`
admission is that the answer's true length.

Token ids: in a trace without prefixes each prompt begins with a token of its own; where the blocks of
prefixes are known, their ids fill the prompt.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from lightkv.layer_groups import LayerGroups
from lightkv.ledger import TokenLedger
from lightkv.router.engine.prefill_budget import PrefillBudget
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import Limits, TokenEvent
from lightkv.router.engine.step_time import StepTime
from lightkv.router.sampling_params import SamplingParams

from .admissions import make_simulated
from .arrivals import Numbered, prompt_ids
from .config import InvalidSimulation, SimulationConfig, groups_of, page_of
from .paged_ledger import PaddedLedger, make_ledger
from .record import Distribution, Means, Timeline
from .result import Figures, Series, SimulationResult
from .timed_engine import DEPTH, END, TimedEngine
from .trace_files import TraceRequest
from .traces import Trace

VOCAB_SIZE = 2**31 - 1
# The most requests in the scheduler's queue. The others wait outside it, where each takes a few numbers, and
# they pass no request.
QUEUE = 64


def settings_of(trace: Trace, config: SimulationConfig) -> dict[str, Any]:
    """Returns the settings that a result tells: those of replicas only where there are several."""
    settings = {"trace": trace.name, **asdict(config), "admission": config.counted}
    if config.rate == math.inf:
        settings["rate"] = "inf"  # JSON has no such number
    if config.replicas == 1:
        del settings["replicas"], settings["routing"]
    return settings


@dataclass
class _Live:
    """A request that was sent and has not ended. `first`: the time of its first token."""

    arrival: float
    request: Request
    first: float = 0.0


class Simulation:
    """One run: the clock, the engine, and the statistics. `all_at_start`: requests that it has not sent to the
    scheduler do not count as waiting. `is_closed`: whether no further request arrives."""

    def __init__(
        self, trace: Trace, config: SimulationConfig, step_time: StepTime, all_at_start: bool
    ) -> None:
        self.config = config
        self.trace = trace
        self.step_time = step_time
        self.clock = 0.0
        page = page_of(config.allocation)
        groups, num_slots = groups_of(config.layers), config.num_slots
        most = config.prefill_chunk or num_slots
        longest = groups.longest(num_slots, most) + 1
        self.ledger = self.make_ledger(num_slots, longest, groups)
        self._longest = groups.longest(self.ledger.capacity, most)  # tokens that a request may have
        admission = make_simulated(config.counted, config.seed, max(page - 1, 0), config.ttft_target)
        if config.patience is not None:
            admission = replace(admission, patience=config.patience)
        if config.reserve is not None:
            admission = replace(admission, reserve=config.reserve)
        self._queue = math.inf if admission.patience else QUEUE
        limits = Limits(
            config.max_num_seqs, longest, config.prefill_chunk, VOCAB_SIZE, itl_target=config.itl_target
        )
        self.scheduler = Scheduler(
            self.ledger,
            limits,
            DEPTH,
            admission,
            clock=lambda: self.clock,
            budget=PrefillBudget(limits, step_time),
        )
        self.engine = TimedEngine(self.scheduler, step_time)
        self.next_time = math.inf  # when the next step is planned or ends
        self._inbox: deque[Numbered] = deque()  # the requests that have arrived and are not sent
        self._inbox_tokens = 0  # of their prompts
        self._all_at_start = all_at_start
        self.is_closed = False
        self._live: dict[str, _Live] = {}
        self._draws = Random(config.seed)  # of which requests state their limit

        self._num_sent = self.num_finished = self._num_skipped = self._num_cut = 0
        self._num_met = self._num_preempted = self._num_prompt = 0
        self._num_preempted_stated = self._most_preemptions = 0
        self._broken: set[str] = set()  # the requests that were preempted although they were guaranteed
        self.ttft, self.tpot = Distribution(), Distribution()
        self.timeline = Timeline(6)
        self._means = Means(7)  # over the time in which requests waited
        self._loaded = True
        self._loaded_output = 0
        self._max_running = self._max_waiting = 0

    def make_ledger(self, num_slots: int, longest: int, groups: LayerGroups) -> TokenLedger:
        """Returns the ledger, of requests of up to `longest` tokens."""
        return make_ledger(self.config, num_slots, longest, groups)

    def put(self, number: int, asked: TraceRequest) -> None:
        """Takes a request that arrives now. `move_to` sends it to the scheduler."""
        self._inbox.append((number, asked))
        self._inbox_tokens += asked.prompt

    def move_to(self, at: float) -> None:
        """Moves the clock on: completes the steps that have ended by then, and plans those that are due."""
        self.pass_time(at)
        self._take(self.engine.complete_due(at))
        self._send()
        num_before = self.scheduler.num_preemptions
        self.next_time = self.engine.plan_due(at)
        if self.scheduler.num_preemptions > num_before:
            broken = [one.request for one in self._live.values() if one.request.num_preemptions]
            self._broken.update([one.id for one in broken if one.is_guaranteed and not one.sequence])
        if self.next_time == math.inf and self.engine.has_work:
            raise InvalidSimulation(
                f"{self.scheduler.num_running} requests run and no step can be made: "
                f"{self.ledger.num_held} slots are held of {self.ledger.capacity}; give a larger --capacity"
            )

    @property
    def has_room(self) -> bool:
        """Whether the scheduler may soon want more requests than have been put here."""
        return len(self._inbox) < self._queue

    @property
    def waiting_tokens(self) -> int:
        """The tokens that the requests so far have yet to compute before they decode."""
        tokens = self._inbox_tokens
        for live in self._live.values():
            request, sequence = live.request, live.request.sequence
            tokens += max(request.num_prefill_tokens - (sequence.length if sequence else 0), 0)
        return tokens

    def pass_time(self, until: float) -> None:
        """Moves the clock on, and notes what the ledger holds meanwhile."""
        now, seconds = self.clock, until - self.clock
        if not seconds:
            return
        self.clock = until
        ledger = self.ledger
        held, cached = ledger.num_held, ledger.num_cached
        padding = ledger.padding if isinstance(ledger, PaddedLedger) else 0
        scheduler, inbox = self.scheduler, self._inbox
        running = scheduler.num_running
        waiting = scheduler.num_waiting + (0 if self._all_at_start else len(inbox))
        guaranteed = scheduler.num_guaranteed
        if self._loaded and not waiting and not inbox and self.is_closed:
            self._loaded = False
            self._loaded_output = scheduler.num_output_tokens
        if self._loaded:
            self._means.add(seconds, (held, held - padding, cached, padding, running, waiting, guaranteed))
        self._max_running = max(self._max_running, running)
        self._max_waiting = max(self._max_waiting, waiting)
        promised = scheduler.guaranteed_peak()
        self.timeline.add(now, until, (held - padding, padding, cached, running, waiting, promised))

    def _send(self) -> None:
        """Adds the requests that have arrived, as many as the scheduler has to see."""
        while self._inbox and self.scheduler.num_waiting < self._queue:
            number, asked = self._inbox.popleft()
            self._inbox_tokens -= asked.prompt
            self._num_sent += 1
            self._send_one(number, asked)

    def _send_one(self, number: int, asked: TraceRequest) -> None:
        config = self.config
        # The service cuts a limit that the pool could never hold.
        max_new = min(config.max_new, self._longest + 1 - asked.prompt)
        if max_new < 1:
            if not config.skip_too_large:
                raise InvalidSimulation(
                    f"request {number} of {self.trace.name} has {asked.prompt} prompt tokens, of a pool of "
                    f"{self._longest}; give a larger --capacity, or --skip-too-large to leave such requests out"
                )
            self._num_skipped += 1
            return
        output = min(asked.output, max_new)
        self._num_cut += output < asked.output
        self._num_prompt += asked.prompt
        ids = prompt_ids(number, asked)
        is_stated, _ = self._draws.random() < config.stated, self._draws.random()  # as in published figures
        if config.admission == "oracle":
            max_new = output
        elif not is_stated:  # it may take all of the pool
            max_new = self._longest + 1 - asked.prompt
        params = SamplingParams(temperature=0.0, max_tokens=max_new)
        request = Request(str(number), ids, params, number, frozenset({END}))
        if config.states and asked.blocks:  # a later prompt can begin with all whole blocks
            request.boundary = asked.prompt // asked.block_tokens * asked.block_tokens
        request.states_length = is_stated
        self.engine.left[number] = [output]
        request.queued = asked.arrival or 0.0
        self._live[request.id] = _Live(request.queued, request)
        self.engine.add(request)

    def _take(self, events: Iterable[TokenEvent]) -> None:
        """Takes the events of a step."""
        now = self.clock
        for event in events:
            if event.num_cached is not None:
                live = self._live[event.request_id]
                live.first = now
                self.ttft.add(now - live.arrival)
            if event.finish_reason is not None:
                live = self._live.pop(event.request_id)
                del self.engine.left[live.request.seed]
                self._finish(live, len(live.request.output))
                self.num_finished += 1

    def _finish(self, live: _Live, num_output: int) -> None:
        request, between = live.request, 0.0
        if num_output > 1:
            between = (self.clock - live.first) / (num_output - 1)
            self.tpot.add(between)
        in_time = live.first - live.arrival <= self.config.ttft_target
        self._num_met += in_time and between <= self.config.tpot_target
        is_preempted = request.num_preemptions > 0
        self._most_preemptions = max(self._most_preemptions, request.num_preemptions)
        self._num_preempted += is_preempted
        self._num_preempted_stated += is_preempted and request.states_length

    def result(self, offered: float, saturated: float) -> SimulationResult:
        config, scheduler, capacity = self.config, self.scheduler, self.ledger.capacity
        means, ttft, tpot = self._means, self.ttft, self.tpot
        num, seconds = self.num_finished, self.clock
        mean_output = scheduler.num_output_tokens / num if num else 0.0
        loaded_rate = self._loaded_output / means.seconds if means.seconds else 0.0
        shares = [means.of(i) / capacity for i in range(4)]
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
            **ttft.summary("ttft"),
            **tpot.summary("tpot"),
            memory_held_share=shares[0],
            memory_used_share=shares[1],
            memory_cached_share=shares[2],
            memory_padding_share=shares[3],
            peak_held_share=scheduler.peak_held / capacity,
            num_preemptions=scheduler.num_preemptions,
            num_preempted=self._num_preempted,
            preempted_share=self._num_preempted / num if num else 0.0,
            num_preempted_guaranteed=len(self._broken),
            most_preemptions=self._most_preemptions,
            recomputed_tokens=scheduler.num_recomputed_tokens,
            num_steps=scheduler.step,
            mean_running=means.of(4),
            mean_waiting=means.of(5),
            mean_guaranteed=means.of(6),
            max_running=self._max_running,
            max_waiting=self._max_waiting,
            num_preempted_stated=self._num_preempted_stated,
        )
        series = Series(self.timeline.width, capacity, *self.timeline.means())
        settings = settings_of(self.trace, config)
        return SimulationResult(
            settings, self.step_time.as_dict(), figures, series, ttft.curve(), tpot.curve()
        )
