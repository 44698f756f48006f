"""Requests in real time through the service's scheduler, a ledger of any allocation, and one model runner.

The model computes every token, and an answer ends where the trace says, which the scheduler does not know. The
results are in the simulator's terms.
"""

import gc
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from bench.serving.stats import Targets
from bench.serving.workload import Replayed
from bench.trace.step_time import Point
from lightkv.errors import LightKVError
from lightkv.ledger import TokenLedger
from lightkv.router import SamplingParams
from lightkv.router.engine.loop import LocalEngine
from lightkv.router.engine.prefill_budget import PrefillBudget
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import Captured, ExpectedMemory, RunnerInfo, StepPlan, StepResult
from lightkv.router.engine.step_time import Work
from lightkv.router.model.runner import ModelRunner
from lightkv.router.simulate.admissions import make_simulated
from lightkv.router.simulate.config import SimulationConfig, page_of
from lightkv.router.simulate.paged_ledger import PaddedLedger, make_ledger
from lightkv.router.simulate.record import Distribution, Means

Results = dict[str, Any]

END = -1  # stands for the last token of an answer; no model samples it


class ReplayFailed(LightKVError):
    """The model could not compute a step."""


class Executor:
    """A runner whose answers end where the trace says, and whose free count is that of the ledger.

    The device allocates a slot for each token. A ledger by pages also counts the empty slots of its pages,
    and its capacity is a number of whole pages: these slots are free on the device and not in the plan.
    """

    def __init__(self, runner: ModelRunner, ledger: TokenLedger, capacity: int) -> None:
        self._runner = runner
        self._ledger = ledger
        self._left_out = capacity - ledger.capacity
        self._row_left: dict[int, list[int]] = {}
        self.left: dict[int, list[int]] = {}  # request → [tokens to come], while it lives
        self.work = Work(0, 0, 0, 0)
        self.held = self.padding = 0  # during the last step

    @property
    def fatal(self) -> bool:
        """Says whether the runner has to be made anew."""
        return self._runner.fatal

    def launch(self, plan: StepPlan) -> None:
        """Launches the step, and notes what it computes and what is held meanwhile."""
        self._plan = plan
        self.work = plan.work
        self.held, self.padding = self._ledger.num_held, padding_of(self._ledger)
        for new in plan.new_rows:
            self._row_left[new.row] = self.left[new.seed]
        self._runner.launch(plan)

    def collect(self) -> StepResult:
        """Returns the step's result, in which answers end where the trace says."""
        plan, result = self._plan, self._runner.collect()
        hidden = self.padding + self._left_out
        tokens = result.tokens
        for i, index in enumerate(plan.sample):
            left = self._row_left[plan.rows[index]]
            left[0] -= 1
            if not left[0]:
                tokens[i] = END
        return msgspec.structs.replace(result, tokens=tokens, num_free=result.num_free - hidden)

    def capture(self) -> Captured:
        """Captures a CUDA graph that is missing."""
        return self._runner.capture()

    def check(self, edits: bytes, expected: ExpectedMemory) -> None:
        """Recounts the runner's memory."""
        hidden = padding_of(self._ledger) + self._left_out
        self._runner.check(edits, expected._replace(num_free=expected.num_free + hidden))


def padding_of(ledger: TokenLedger) -> int:
    """Returns the slots that the ledger counts as held and that hold no token."""
    return ledger.padding if isinstance(ledger, PaddedLedger) else 0


class Machine:
    """One runner that replays traces, one after another. Its memory is empty between them."""

    def __init__(self, runner: ModelRunner, info: RunnerInfo, max_new: int, targets: Targets) -> None:
        self.info = info
        self.points: list[Point] = []  # the steps of the last replay
        self._runner = runner
        self._max_new = max_new
        self._targets = targets
        self._step = 0  # goes on from replay to replay, since the graphs know by it what is loaded

    def replay(self, trace: Replayed, allocation: str, admission: str, seed: int) -> Results:
        """Runs every request from its arrival to its end. Raises ReplayFailed, LedgerMismatch, CheckFailed."""
        limits, capacity = self.info.limits, self.info.capacity
        config = SimulationConfig(allocation, max_num_seqs=limits.max_num_seqs, max_new=self._max_new)
        ledger = make_ledger(config, capacity, limits.max_model_len)
        ledger.step = self._step
        slack = max(page_of(allocation) - 1, 0)
        counted = make_simulated(admission, seed, slack, self._targets.ttft)
        executor = Executor(self._runner, ledger, capacity)
        begun = time.perf_counter()

        def now() -> float:
            return time.perf_counter() - begun

        budget = PrefillBudget(limits, self.info.step_time, self.info.graph_tokens)
        scheduler = Scheduler(ledger, limits, admission=counted, clock=now, budget=budget)
        engine = LocalEngine(scheduler, executor)
        engine.capture_all()
        params = SamplingParams(temperature=0, max_tokens=self._max_new)
        requests = [
            Request(str(idx), ids.tobytes(), params, idx, frozenset({END}))
            for idx, ids in enumerate(trace.prompts(limits.vocab_size, seed))
        ]
        for idx, request in enumerate(trace):
            executor.left[idx] = [request.output]
        record = Record(requests, trace, self._targets)
        self.points = []
        gc.collect()
        gc.freeze()
        sent = 0
        begun = time.perf_counter()
        while True:
            at = now()
            while sent < len(requests) and trace.requests[sent].arrival <= at:  # type: ignore[operator]
                requests[sent].queued = trace.requests[sent].arrival
                engine.add(requests[sent])
                sent += 1
            if engine.has_work:
                before = now()
                events = engine.step()
                after = now()
                self.points.append(Point(executor.work, after - before))
                num_waiting = engine.scheduler.num_waiting
                record.pass_time(
                    after, executor, engine.scheduler.num_running, num_waiting or sent < len(requests)
                )
                for event in events:
                    if event.error is not None:
                        raise ReplayFailed(event.error)
                    if event.num_cached is not None:
                        record.first(int(event.request_id), after)
                    if event.finish_reason is not None:
                        record.finish(int(event.request_id), after)
            elif sent < len(requests):
                time.sleep(max(trace.requests[sent].arrival - now(), 0.0))  # type: ignore[operator]
            else:
                break
        engine.check()
        found = record.results(engine, capacity)
        ledger.evict(ledger.num_cached)
        engine.check()
        self._step = ledger.step + 2
        return found


class Record:
    """What the requests of a replay got, in the simulator's terms (`router/simulate/result.py`)."""

    def __init__(self, requests: Sequence[Request], trace: Replayed, targets: Targets) -> None:
        self._requests = requests
        self._arrivals = [request.arrival or 0.0 for request in trace]
        self._targets = targets
        self._first = [0.0] * len(requests)
        self._ttft, self._tpot = Distribution(), Distribution()
        self._means = Means(3)  # held, padding and running, while requests wait
        self._num_met = self._num_finished = 0
        self._num_steps = 0
        self._last = 0.0

    def pass_time(self, now: float, executor: Executor, running: int, loaded: bool | int) -> None:
        """Notes the end of a step."""
        if loaded:
            self._means.add(now - self._last, (executor.held, executor.padding, running))
        self._num_steps += 1
        self._last = now

    def first(self, idx: int, now: float) -> None:
        """Notes a request's first token."""
        self._first[idx] = now
        self._ttft.add(now - self._arrivals[idx])

    def finish(self, idx: int, now: float) -> None:
        """Notes a request's last token."""
        first, num_output = self._first[idx], len(self._requests[idx].output)
        between = (now - first) / (num_output - 1) if num_output > 1 else 0.0
        if num_output > 1:
            self._tpot.add(between)
        in_time = first - self._arrivals[idx] <= self._targets.ttft
        self._num_met += in_time and between <= self._targets.tpot
        self._num_finished += 1

    def results(self, engine: LocalEngine, capacity: int) -> Results:
        """Returns the figures."""
        scheduler, num, seconds = engine.scheduler, self._num_finished, self._last
        num_preempted = sum(request.num_preemptions > 0 for request in self._requests)
        ttft, tpot = (own.quantiles((0.5, 0.99)) for own in (self._ttft, self._tpot))
        held, padding = self._means.of(0), self._means.of(1)
        return {
            "num_finished": num,
            "seconds": seconds,
            "output_tokens": scheduler.num_output_tokens,
            "output_rate": scheduler.num_output_tokens / seconds,
            "goodput": self._num_met / seconds,
            "met_share": self._num_met / num,
            "ttft_p50": ttft[0],
            "ttft_p99": ttft[1],
            "tpot_p50": tpot[0],
            "tpot_p99": tpot[1],
            "num_preemptions": scheduler.num_preemptions,
            "num_preempted": num_preempted,
            "recomputed_tokens": scheduler.num_recomputed_tokens,
            "hit_tokens": scheduler.num_hit_tokens,
            "memory_held_share": held / capacity,
            "memory_used_share": (held - padding) / capacity,
            "memory_padding_share": padding / capacity,
            "mean_running": self._means.of(2),
            "num_steps": self._num_steps,
        }
