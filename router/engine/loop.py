"""The engine: a scheduler and an executor, one step at a time.

Both `LLM` (in process) and the router process run this loop. It knows no text, no device and no process: an
executor is whatever turns a `StepPlan` into a `StepResult`.
"""

from typing import NamedTuple, Protocol

from lightkv.edits import decode, encode
from lightkv.errors import LedgerMismatch, LightKVError

from .request import Request
from .scheduler import Scheduler
from .step import ExpectedMemory, StepPlan, StepResult, TokenEvent


class Executor(Protocol):
    """Carries out plans, in order. When `fatal` is set after an error, it has lost track: make a new one."""

    fatal: bool

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""

    def check(self, edits: bytes, holding: ExpectedMemory) -> None:
        """Apply the edits that no step has carried yet, and recount the memory. Raises CheckFailed."""


class EngineDead(LightKVError):
    """The engine met an error after which its books or its device cannot be trusted."""


class Stats(NamedTuple):
    """What the memory holds, in tokens, and what it has been good for."""

    capacity: int
    free: int
    held: int
    cached: int
    num_running: int
    num_waiting: int
    forecast_peak: int
    reached_peak: int
    prompt_tokens: int
    hit_tokens: int
    num_steps: int
    num_preemptions: int


class Engine:
    """Runs requests to their ends. Not thread-safe: one thread steps it."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._dead: str | None = None

    @property
    def has_work(self) -> bool:
        """Is any request unfinished?"""
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue a request. Raises NeverFits, InvalidPrompt, InvalidParams, EngineDead."""
        self._require_alive()
        self.scheduler.add(request)

    def abort(self, request_id: str, reason: str = "abort") -> bool:
        """End a request early; False when it has ended already."""
        return self.scheduler.abort(request_id, reason)

    def step(self) -> list[TokenEvent]:
        """Run one step. Returns what each request got; a failed step ends its requests in "error".

        Raises LedgerMismatch when the device's books are not the ledger's, and EngineDead ever after.
        """
        self._require_alive()
        plan = self.scheduler.plan()
        if plan is None:
            return []
        try:
            result = self.executor.execute(plan)
        except BaseException as error:  # Ctrl-C as well: the step is lost, and the books have to say so
            message = f"{type(error).__name__}: {error}"
            if self.executor.fatal:
                self._dead = message
            events = self.scheduler.fail(message)
            if not isinstance(error, Exception):
                raise
            return events
        if result.num_free != plan.num_free or result.flags:
            edits = str(decode(plan.edits))
            mismatch = LedgerMismatch(plan.step, result.num_free, plan.num_free, result.flags, edits)
            self._dead = str(mismatch)
            self.scheduler.fail(self._dead)
            raise mismatch
        return self.scheduler.consume(result)

    def stats(self) -> Stats:
        """The counts as they stand."""
        scheduler, ledger = self.scheduler, self.scheduler.ledger
        return Stats(
            capacity=ledger.capacity,
            free=ledger.num_free,
            held=ledger.num_held,
            cached=ledger.num_cached,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            forecast_peak=scheduler.forecast_peak(),
            reached_peak=scheduler.peak_held,
            prompt_tokens=scheduler.num_prompt_tokens,
            hit_tokens=scheduler.num_hit_tokens,
            num_steps=scheduler.step,
            num_preemptions=scheduler.num_preemptions,
        )

    def check(self) -> None:
        """Recount every book, those of the executor's memory too. Between steps. Raises CheckFailed."""
        self._require_alive()
        self.scheduler.check()
        ledger = self.scheduler.ledger
        self.executor.check(encode(ledger.drain()), ExpectedMemory(ledger.num_free, ledger.private_ranges()))

    def _require_alive(self) -> None:
        if self._dead is not None:
            raise EngineDead(f"the engine has stopped: {self._dead}; make a new one")
