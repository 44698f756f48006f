"""The engine: plans steps, compares the device's counts with the ledger's, and returns each request's tokens.

    plan ──► StepPlan ──► (a device carries it out) ──► StepResult ──► complete ──► TokenEvents
                                     └── error ──► fail ──► TokenEvents

`Engine` does no I/O: the router's process drives it over a worker, and `LocalEngine` over an executor in this
process, which is what `LLM`, the simulator and the benchmarks use.
"""

import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from lightkv.edits import encode
from lightkv.errors import LedgerMismatch, LightKVError
from lightkv.ledger import TokenLedger

from .admission import Admission
from .prefill_budget import PrefillBudget
from .request import Request
from .scheduler import Scheduler
from .step import Captured, ExpectedMemory, RunnerInfo, StepPlan, StepResult, TokenEvent, WaitsFor

# A plan waits for requests until PLAN_SECONDS before the step in flight ends by the model of step times, and no
# longer than MOST_WAIT. It takes about half of PLAN_SECONDS to plan, send and launch a step.
PLAN_SECONDS, MOST_WAIT = 0.004, 0.020
# The share of a step's time by the model that plans rely on. It is halved after a plan that came too late, down
# to LEAST_SHARE, and grows by a hundredth after each other. (The model does not know, say, of prefixes that are
# read once for many. Where the host is always late, the share stays so low that no plan waits.)
MOST_SHARE, LEAST_SHARE, SHARE_GROWTH = 0.9, 0.05, 1.01
CAPTURE_SHARE = 0.05  # of the time, in which graphs are captured while there are requests
_TOTALS = (
    *("num_steps", "prompt_tokens", "hit_tokens", "generated_tokens", "num_preemptions", "recomputed_tokens"),
    *("num_cut", "session_evicted_tokens", "session_over_share_tokens"),
)


class EngineDead(LightKVError):
    """The engine has met an error after which its counts or its device cannot be trusted."""


class EngineStats(msgspec.Struct, frozen=True):
    """The counts of an engine.

    Slots, of which a token takes one, or several where some layers see a window only: capacity, free, held,
    cached, forecast_peak (the most that the running requests are expected to come to hold), guaranteed_peak
    (the most that the guaranteed ones may come to hold, which are never preempted) and reached_peak (the
    most that were held so far). Tokens: waiting_tokens (of the prompts that wait, and of what preempted
    requests had generated) and session_tokens (cached or held, and protected by sessions). The numbers of
    requests, of the running ones that are guaranteed, of sessions that protect tokens, and of CUDA graphs
    that are still to be captured, are those of now. All others are totals: steps, prompt tokens and those
    of them found in the cache, generated tokens, preemptions, the tokens that were computed again after
    preemptions, the requests whose limits were cut to what the pool can hold, and the tokens of sessions
    that were evicted, or lost their protection because all sessions exceeded their share. waits_for: what
    the head of the queue waits for, as in `WaitsFor`. State slots, of models with recurrent layers: num_states,
    free_states, held_states (of running requests, with the snapshots that these read) and cached_states.
    """

    capacity: int = 0
    free: int = 0
    held: int = 0
    cached: int = 0
    forecast_peak: int = 0
    guaranteed_peak: int = 0
    reached_peak: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_guaranteed: int = 0
    num_cut: int = 0
    waits_for: WaitsFor = ""
    waiting_tokens: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    generated_tokens: int = 0
    num_preemptions: int = 0
    recomputed_tokens: int = 0
    num_sessions: int = 0
    session_tokens: int = 0
    session_evicted_tokens: int = 0
    session_over_share_tokens: int = 0
    num_missing_graphs: int = 0
    num_states: int = 0
    free_states: int = 0
    held_states: int = 0
    cached_states: int = 0

    def after(self, earlier: "EngineStats") -> "EngineStats":
        """Returns these counts with the totals of an earlier engine, and the higher peak of both."""
        totals = {name: getattr(earlier, name) + getattr(self, name) for name in _TOTALS}
        peak = max(earlier.reached_peak, self.reached_peak)
        return msgspec.structs.replace(self, reached_peak=peak, **totals)


class Captures:
    """The CUDA graphs that the start has left out. They are captured between steps, for a small share of the
    time. `clock` returns seconds."""

    def __init__(self, num_missing: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_missing = num_missing
        self._clock = clock
        self._next = clock()  # when the next one may be captured while there are requests

    def is_due(self, is_idle: bool = False) -> bool:
        """Returns whether one is captured before the next step. `is_idle`: no request waits for that."""
        return self.num_missing > 0 and (is_idle or self._clock() >= self._next)

    def note(self, captured: Captured) -> None:
        """Notes that one was captured just now."""
        self.num_missing = captured.num_missing
        self._next = self._clock() + captured.seconds * (1 / CAPTURE_SHARE - 1)


class Engine:
    """Runs requests to their ends, with up to `scheduler.depth` steps in flight, whose results come in order.

    It is not thread-safe: one thread calls it. `num_missing_graphs`: as in `RunnerInfo`; what drives the engine
    captures them when `captures` says so.
    """

    def __init__(self, scheduler: Scheduler, num_missing_graphs: int = 0) -> None:
        self.scheduler = scheduler
        self.captures = Captures(num_missing_graphs)
        self._dead: str | None = None
        self._share = MOST_SHARE  # of the time of a step by the model, as `spare_seconds` says

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished or any step is in flight."""
        return self.scheduler.has_work

    @property
    def can_plan(self) -> bool:
        """Whether another step may be planned before the oldest one completes."""
        return self.scheduler.num_in_flight < self.scheduler.depth

    @property
    def spare_seconds(self) -> float:
        """How long after the newest step in flight has begun the next one may be planned, so that requests that
        come meanwhile get into it. The device does not wait for a step that is planned by then."""
        return min(self._share * self.scheduler.in_flight_seconds - PLAN_SECONDS, MOST_WAIT)

    @property
    def is_capture_due(self) -> bool:
        """Whether a CUDA graph is captured before the next step."""
        return self.captures.is_due(is_idle=not self.has_work)

    def add(self, *requests: Request) -> None:
        """Queues all of the requests, or none. Raises NeverFits, InvalidPrompt, InvalidParams, EngineDead."""
        self._require_alive()
        self.scheduler.add(*requests)

    def abort(self, request_id: str, reason: str = "abort") -> bool:
        """Ends a request early. Returns False if it has ended already."""
        return self.scheduler.abort(request_id, reason)

    def plan(self) -> StepPlan | None:
        """Returns the next step, or None where none can be planned before another completes. Raises
        EngineDead."""
        self._require_alive()
        return self.scheduler.plan()

    def complete(self, result: StepResult) -> list[TokenEvent]:
        """Completes the oldest step in flight with its result. Returns the events of each request.

        Raises LedgerMismatch if the device's counts differ from the ledger's; the engine is dead then. Raises
        ValueError for the result of another step.
        """
        plan = self.scheduler.oldest(result.step)
        if result.num_free != plan.num_free or result.flags:
            edits = str(plan.all_edits())
            mismatch = LedgerMismatch(plan.step, result.num_free, plan.num_free, result.flags, edits)
            self._dead = str(mismatch)
            self.scheduler.fail(self._dead)
            raise mismatch
        share = self._share / 2 if result.had_ended else self._share * SHARE_GROWTH
        self._share = min(max(share, LEAST_SHARE), MOST_SHARE)
        self.captures.num_missing = result.num_missing_graphs
        return self.scheduler.complete(result)

    def fail(self, error: str, fatal: bool = False) -> list[TokenEvent]:
        """Notes that the oldest step in flight was not computed: its requests, and those of the steps behind
        it, end in "error". After a `fatal` error the engine is dead."""
        if fatal:
            self._dead = error
        return self.scheduler.fail(error)

    def evict_cached(self) -> int:
        """Evicts every cached token that no request holds, those of sessions included. Returns their number."""
        ledger = self.scheduler.ledger
        num_tokens = ledger.num_cached
        ledger.evict(num_tokens)
        return num_tokens

    def check(self) -> None:
        """Recounts the ledger, the forecast and the queues. Raises CheckFailed, EngineDead."""
        self._require_alive()
        self.scheduler.check()

    def sync_memory(self) -> tuple[bytes, ExpectedMemory]:
        """Returns the edits that no step has carried yet, and what the memory holds once they are applied."""
        ledger = self.scheduler.ledger
        return encode(ledger.drain()), ExpectedMemory(ledger.num_free, ledger.holdings())

    def stats(self) -> EngineStats:
        """Returns the counts as they stand."""
        scheduler, ledger = self.scheduler, self.scheduler.ledger
        sessions, states = ledger.sessions.counts, ledger.states
        return EngineStats(
            capacity=ledger.capacity,
            free=ledger.num_free,
            held=ledger.num_held,
            cached=ledger.num_cached,
            forecast_peak=scheduler.forecast_peak(),
            guaranteed_peak=scheduler.guaranteed_peak(),
            reached_peak=scheduler.peak_held,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_guaranteed=scheduler.num_guaranteed,
            num_cut=scheduler.num_cut,
            waits_for=scheduler.waits_for if scheduler.waiting else "",
            waiting_tokens=scheduler.waiting.num_tokens,
            num_steps=scheduler.step,
            prompt_tokens=scheduler.num_prompt_tokens,
            hit_tokens=scheduler.num_hit_tokens,
            generated_tokens=scheduler.num_output_tokens,
            num_preemptions=scheduler.num_preemptions,
            recomputed_tokens=scheduler.num_recomputed_tokens,
            num_sessions=sessions.num_sessions,
            session_tokens=sessions.protected,
            session_evicted_tokens=sessions.evicted,
            session_over_share_tokens=sessions.over_limit,
            num_missing_graphs=self.captures.num_missing,
            num_states=states.capacity,
            free_states=states.num_free,
            held_states=states.num_held,
            cached_states=states.num_cached,
        )

    def _require_alive(self) -> None:
        if self._dead is not None:
            raise EngineDead(f"the engine has stopped: {self._dead}; make a new one")


class Executor(Protocol):
    """Carries out plans in order. When `fatal` is set after an error, the executor has to be made anew."""

    fatal: bool

    def launch(self, plan: StepPlan) -> None:
        """Starts a step behind those in flight. After an error the step is not in flight."""

    def collect(self) -> StepResult:
        """Waits for the oldest step in flight and returns its result. After an error that step is gone."""

    def capture(self) -> Captured:
        """Captures a CUDA graph that is missing. Asked for where a result says that some are."""

    def check(self, edits: bytes, expected: ExpectedMemory) -> None:
        """Applies the edits that no step has carried, and recounts the memory. Raises CheckFailed."""


class LocalEngine(Engine):
    """An engine that drives an executor in this process."""

    def __init__(self, scheduler: Scheduler, executor: Executor, num_missing_graphs: int = 0) -> None:
        super().__init__(scheduler, num_missing_graphs)
        self.executor = executor
        self._undelivered: list[TokenEvent] = []  # of a call that was interrupted
        self._interrupt: BaseException | None = None

    @property
    def has_work(self) -> bool:
        """Is any request unfinished, any step in flight, or any event to be returned?"""
        return super().has_work or bool(self._undelivered)

    def step(self) -> list[TokenEvent]:
        """Launches the steps that can be planned, and completes the oldest one in flight.

        Returns what each request got. The requests of a step that fails end in "error". A KeyboardInterrupt
        fails the step that it interrupts and is raised once the counts are right; the next call returns the
        events. Raises LedgerMismatch if the device's counts differ from the ledger's, and EngineDead in every
        later call.
        """
        events = self._take_undelivered()
        if self.captures.is_due():
            self.captures.note(self.executor.capture())
        refused: BaseException | None = None
        while refused is None and (plan := self.plan()) is not None:
            try:
                self.executor.launch(plan)
            except BaseException as error:
                refused = error
        if self.scheduler.num_in_flight > (refused is not None):  # a step that was refused is the newest
            events += self._collect()
        if refused is not None:
            events += self._fail(refused)
        return self._deliver(events)

    def capture_all(self) -> None:
        """Captures every CUDA graph that is missing now, instead of between steps."""
        while (captured := self.executor.capture()).num_missing:
            pass
        self.captures.note(captured)

    def settle(self) -> list[TokenEvent]:
        """Completes every step in flight without planning another. Returns what each request got."""
        events = self._take_undelivered()
        while self.scheduler.num_in_flight and self._dead is None:
            events += self._collect()
        return self._deliver(events)

    def check(self) -> None:
        """Recounts everything, the executor's memory included. For between steps. Raises CheckFailed,
        EngineDead."""
        super().check()
        self.executor.check(*self.sync_memory())

    def _collect(self) -> list[TokenEvent]:
        """Completes the oldest step in flight, or fails it."""
        try:
            result = self.executor.collect()
        except BaseException as error:
            return self._fail(error)
        return self.complete(result)

    def _fail(self, error: BaseException) -> list[TokenEvent]:
        """Fails the oldest step in flight. `_deliver` raises what is not an Exception."""
        if not isinstance(error, Exception):
            self._interrupt = error
        return self.fail(f"{type(error).__name__}: {error}", self.executor.fatal)

    def _take_undelivered(self) -> list[TokenEvent]:
        events, self._undelivered = self._undelivered, []
        return events

    def _deliver(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Returns the events, or keeps them and raises the interrupt that came meanwhile."""
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            self._undelivered = events
            raise interrupt
        return events


def make_scheduler(
    info: RunnerInfo, admission: Admission | None = None, max_in_flight: int | None = None
) -> Scheduler:
    """Returns a scheduler over an empty ledger. `max_in_flight`: None is what suits the runner."""
    limits = info.limits
    max_protected = int(limits.session_share * info.capacity)
    rows, groups, num_states = limits.max_num_seqs, info.groups, info.num_states
    ledger = TokenLedger(info.capacity, rows, limits.max_model_len, max_protected, groups, num_states)
    budget = PrefillBudget(limits, info.step_time, info.graph_tokens)
    return Scheduler(ledger, limits, max_in_flight or info.max_in_flight, admission, budget=budget)
