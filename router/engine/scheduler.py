"""The scheduler: which requests run, and what the device does in the next step. Integers only, no torch.

    WAITING ── admitted: its sequence opens ──► RUNNING (prefill, then decode) ──► FINISHED
       ▲                                          │     (also after an abort or a failed step)
       └── preempted: its sequence is closed ◄────┘

A waiting request is admitted when the most tokens that it and all running requests are expected to hold
together fit the pool (`forecast.py`). Running requests are *guaranteed* or *provisional* (docs/admission.md).
The guaranteed ones fit the pool up to their `max_tokens`, and are never preempted. If the pool runs short, the
youngest provisional one is: what it has computed stays cached while there is room, and it keeps its place.

With a depth of two, the next step is planned while one is in flight, so that the device need not wait for the
host. The plan assumes that a request continues unless it reaches its length. If the step in flight ends it by a
stop token, its token of the next step is dropped, and its slots are freed after that, as admission counts.
"""

import math
import time
from collections import deque
from collections.abc import Callable

from lightkv.errors import CheckFailed
from lightkv.ledger import Sequence, TokenLedger

from .admission import Admission, Running, keep_branch, state_wait
from .forecast import Prefill
from .guarantees import Forecasts
from .plan_writer import Chunk, DecodeBatch, PlannedStep, PlanWriter
from .prefill_budget import PrefillBudget, StepBudget
from .request import Request, take_all
from .step import Limits, StepPlan, StepResult, TokenEvent, WaitsFor
from .waiting import WaitingQueue


class Scheduler:
    """Plans steps over one ledger. Up to `depth` plans are in flight; their results come in order.

    `admission`: how requests are counted; None counts each with its `max_tokens`, so that none is ever
    preempted. `clock`: returns seconds, by which waiting is measured. `budget`: how many prompt tokens a step
    takes; None is `limits.prefill_budget` in every step.
    """

    def __init__(
        self,
        ledger: TokenLedger,
        limits: Limits,
        depth: int = 1,
        admission: Admission | None = None,
        clock: Callable[[], float] = time.monotonic,
        budget: PrefillBudget | None = None,
    ) -> None:
        if depth not in (1, 2):
            raise ValueError(f"a depth of {depth}; give 1, or 2 to plan a step while one is in flight")
        self.ledger = ledger
        self.limits = limits
        self.depth = depth
        self.peak_held = 0  # the most slots held in any step
        self.num_prompt_tokens = 0  # of the requests admitted so far
        self.num_hit_tokens = 0  # those of them that were found in the cache
        self.num_output_tokens = 0  # sampled for requests that had not ended
        self.num_cut = 0  # the requests whose limits were cut to what the pool can hold
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0  # computed before a preemption, and again after it
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        self._prefilling: list[Request] = []  # the most urgent first
        self._decoding: dict[int, Request] = {}  # by row, in the order in which they began to decode
        self._finishing: list[Request] = []  # ended, but part of a step in flight
        self._plans = PlanWriter(ledger, limits)
        self._decodes = self._plans.decodes  # those of `_decoding` that take further tokens
        self._in_flight: deque[PlannedStep] = deque()
        self._failed = False  # a step has failed, and another is still in flight
        self._forecasts = Forecasts(ledger, lag=depth - 1)
        self._num_groups = ledger.groups.num_groups  # slots of a token that all layers see
        self._has_states = ledger.states.capacity > 0
        self._admission = admission or Admission()
        self._clock = clock
        self._budget = budget or PrefillBudget(limits)
        self.waiting = WaitingQueue(self._admission.patience, ledger if self._budget.step_time else None)
        self._retry_at = 0.0  # the head of the queue was refused, and does not fit before this step
        self._refused: Request | None = None  # the last that did not fit; it may be admitted by now
        self.waits_for: WaitsFor = ""

    @property
    def step(self) -> int:
        """The number of steps planned so far, which is the number of the next one."""
        return self.ledger.step

    @property
    def num_waiting(self) -> int:
        """The requests that are not admitted yet, or preempted."""
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        """The requests that are admitted and not finished."""
        return self.num_prefilling + len(self._decoding)

    @property
    def num_guaranteed(self) -> int:
        """Those of the running requests that are never preempted."""
        return sum(request.is_guaranteed for request in self._running())

    @property
    def num_prefilling(self) -> int:
        """The admitted requests whose prefill is not computed yet."""
        return len(self._prefilling)

    @property
    def num_in_flight(self) -> int:
        """The number of steps that are planned and not completed."""
        return len(self._in_flight)

    def oldest(self, step: int) -> StepPlan:
        """Returns the oldest step in flight, which is number `step`. Raises ValueError for any other."""
        in_flight = [batch.plan for batch in self._in_flight]
        if not in_flight or step != in_flight[0].step:
            steps = [plan.step for plan in in_flight]
            raise ValueError(f"a result for step {step}, while the steps {steps} are in flight")
        return in_flight[0]

    @property
    def in_flight_seconds(self) -> float:
        """What the newest step in flight takes by the model; 0 where prompts are left, or nothing is known."""
        model = self._budget.step_time
        if model is None or not self._in_flight or self.waiting or self._prefilling:
            return 0.0
        return model.seconds(self._in_flight[-1].plan.work)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished or any step is in flight."""
        return bool(self._requests or self._in_flight)

    def add(self, *requests: Request) -> None:
        """Queues all of the requests, or none. Raises as `Request.validate` does, and ValueError for an id in
        use."""
        names = [request.id for request in requests]
        if len(set(names)) < len(names) or not self._requests.keys().isdisjoint(names):
            raise ValueError(f"one of the requests {names} is running, or given twice; give each its own id")
        self.num_cut += take_all(requests, self.limits, self.ledger.capacity, self.ledger.groups)
        for request in requests:
            self._requests[request.id] = request
            request.arrival = self._arrivals
            self._arrivals += 1
            if request.queued == math.inf:
                request.queued = self._clock()
            request.can_be_guaranteed = self._admission.can_guarantee(request)
            self._queue(request)

    def abort(self, request_id: str, reason: str = "abort") -> bool:
        """Ends a request early; its computed tokens stay cached. Returns False where no such request lives.

        `reason` becomes its finish reason: "stop" for a request whose text met a stop string. No event follows.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request, reason)
        self._release_finished()
        return True

    def plan(self) -> StepPlan | None:
        """Returns the next step, or None where none can be planned before another completes."""
        if len(self._in_flight) == self.depth or self._failed:
            return None
        if self._admission.patience is not None and self.waiting.defer(self._clock()):
            self._retry_at = 0  # there may be another head of the queue
        # Before the step is looked at, which has to compute the chunks of guaranteed requests.
        if self._forecasts.guarantee(self._prefills):
            self._retry_at = 0  # the head of the queue may be the next one to be guaranteed
        decodes = self._next_decodes()
        while self._forecasts.num_provisional and self._is_short(decodes.sequences):
            if self._in_flight:  # a request in a step in flight cannot be preempted
                return None
            self._preempt(max([r for r in self._running() if not r.is_guaranteed], key=lambda r: r.seniority))
            decodes = self._next_decodes()
        # The decodes' slots are allocated last, so that no prefix that is hit is evicted for them; but first
        # where they also release some, which chunks may need.
        sequences, ones = decodes.sequences, [1] * len(decodes.rows)
        early_alloc = None if self._num_groups == 1 else self.ledger.extend(sequences, ones)
        chunks = self._plan_prefills(sequences, self.ledger.growth(sequences) if early_alloc is None else 0)
        if not chunks and not sequences:
            return None
        decode_alloc = early_alloc or self.ledger.extend(sequences, ones)
        planned = self._plans.write(chunks, decodes, decode_alloc)
        if chunks:
            for request in planned.begun:
                self._decoding[request.open_sequence.row] = request
                self._decodes.add(request)
            self._prefilling = [request for request in self._prefilling if request.num_prefill_left]
            self._retry_at = 0  # in the next step the head of the queue may hit what this one computes
        self._in_flight.append(planned)
        self.peak_held = max(self.peak_held, self.ledger.num_held)
        return planned.plan

    def complete(self, result: StepResult) -> list[TokenEvent]:
        """Completes the oldest step in flight with its tokens. Returns the events of each request. Raises
        ValueError for the result of another step."""
        self.oldest(result.step)
        step = self._in_flight.popleft()
        events = [] if self._failed else self._take_tokens(step, result)
        self._release_finished()
        return events

    def _take_tokens(self, step: PlannedStep, result: StepResult) -> list[TokenEvent]:
        """Gives each request of a computed step its token. Returns the events."""
        self.ledger.confirm(step.plan.step)
        for scored, found in zip(step.plan.scored, result.scored, strict=True):
            step.prefills[scored.part].prompt_logprobs.append(found)
        decodes, num_begun = step.decodes, len(step.begun)
        if len(result.tokens) != num_begun + len(decodes.rows):
            raise ValueError(f"{len(result.tokens)} tokens for {num_begun + len(decodes.rows)} requests")
        events: list[TokenEvent] = []
        for i, request in enumerate(step.begun):
            self._take_token(request, i, result, events)
        tokens, at = result.tokens[num_begun:], 0
        is_plain = not result.logprobs and not result.errors  # as in most steps: most requests go on
        looked_at = decodes.ending(tokens, self._forecasts.all.ended()) if is_plain else range(len(tokens))
        for i in [*looked_at, len(tokens)]:
            events += decodes.take(tokens, at, i)
            self.num_output_tokens += i - at
            if i < len(tokens):
                self._take_token(decodes.requests[i], num_begun + i, result, events)
            at = i + 1
        return events

    def _take_token(self, request: Request, i: int, result: StepResult, events: list[TokenEvent]) -> None:
        """Gives a request the token at index `i` of a result, unless it has ended. Adds its event."""
        is_wrong = bool(result.errors) and i in result.errors
        request.is_traced &= not is_wrong
        if request.finish_reason is not None:
            request.unseen.append(result.tokens[i])
            return
        if is_wrong:
            self._end(request, "invalid")
            events.append(TokenEvent(request.id, None, "invalid", error=result.errors[i]))
            return
        token, reason = result.tokens[i], None
        request.output.append(token)
        self.num_output_tokens += 1
        is_first = len(request.output) == 1
        if token in request.stop_ids or len(request.output) == request.max_tokens:
            reason = "stop" if token in request.stop_ids else "length"
            self._end(request, reason)
        cached, scores = (request.num_hit, request.take_scores()) if is_first else (None, None)
        known = result.logprobs.get(i), None, cached, scores, None, request.num_preemptions
        events.append(TokenEvent(request.id, token, reason, *known))

    def fail(self, error: str) -> list[TokenEvent]:
        """Ends the requests of every step in flight in "error", since the oldest step was not computed.

        Nothing that these steps computed stays in the cache, and the results of the later ones are dropped.
        """
        if not self._in_flight:
            raise ValueError("no step is in flight")
        requests = {request.id: request for step in self._in_flight for request in step.requests}
        self._in_flight.popleft()
        self._failed = True
        events = []
        for request in requests.values():
            if request.finish_reason is None:
                self._end(request, "error")
                events.append(TokenEvent(request.id, None, "error", error=error))
            request.cached = False
        self._release_finished()
        return events

    def forecast_peak(self) -> int:
        """Returns the most slots that the running requests will hold, if all reach their expected length."""
        return self._forecasts.all.peak(self._prefills())

    def guaranteed_peak(self) -> int:
        """Returns the same of the guaranteed requests, if all reach their limits: at most the capacity."""
        return self._forecasts.guaranteed.peak(self._prefills())

    def check(self) -> None:
        """Recounts the ledger, the forecast and the queues. Raises CheckFailed."""
        self.ledger.check()
        holding, num_running = self._running() + self._finishing, self.num_running
        self._forecasts.check(self._prefills(), holding)
        if len(holding) != (num_open := self.ledger.num_open):
            raise CheckFailed(f"{len(holding)} requests hold tokens, {num_open} sequences are open")
        self.waiting.check()
        if num_running + self.num_waiting != (known := len(self._requests)):
            raise CheckFailed(f"{known} requests are known, {num_running} run, {self.num_waiting} wait")

    def _running(self) -> list[Request]:
        return [*self._prefilling, *self._decoding.values()]

    # ------------------------------------------------------------------ the queue

    def _queue(self, request: Request) -> None:
        self.waiting.push(request)
        if self.waiting.head is request:
            self._retry_at = 0  # there is another head of the queue

    def _admit(self, request: Request, budget: StepBudget, room: int, idx: int) -> bool:
        """Opens the request's sequence if admission allows it, as it always does if no other request runs. Its
        place among the prefills is `idx`; `budget` and `room` are what the step can still compute and hold."""
        ledger = self.ledger
        passed = self.waiting.passed_by(request)  # it must not lack what the request takes
        if self.step < self._retry_at:
            return False
        if ledger.num_open + len(passed) >= self.limits.max_num_seqs:
            self.waits_for = "rows"
            return False
        running = Running(
            ledger, self._forecasts, self._prefilling, self._decoding.values(), budget, room, idx
        )
        if self._num_groups > 1 or self._has_states:  # also while it waits, since what it would hit passes
            keep_branch(running, request)
        if self._has_states and (why := state_wait(ledger, request, len(passed))):
            self.waits_for = why
            return False
        if not budget.can_begin(request.num_prefill_tokens):
            self.waits_for = "prefill"
            return False  # it is admitted in a step that computes a part of it
        if not len(request.output) < request.expected < request.max_tokens:  # else its estimate still stands
            request.expected = self._admission.expected(request, len(request.output))
        if passed and not self._admission.has_room(running, request, *passed):
            return False
        wait, is_guaranteed = self._admission.decide(running, request, not passed)
        if wait:
            self._retry_at, self._refused = self.step + wait, request
            self.waits_for = self._admission.waits_for(request)
            return False
        request.is_guaranteed = is_guaranteed
        sequence = ledger.open(request.prefill_ids, request.namespace, request.session, request.keep_at)
        request.sequence = sequence
        self._forecasts.admit(request)
        if request.num_preemptions:
            self.num_recomputed_tokens += max(request.num_computed - sequence.num_hit, 0)
        else:
            request.num_hit = sequence.num_hit
            request.waited = self._clock() - request.queued
            self.num_prompt_tokens += request.num_prompt
            self.num_hit_tokens += sequence.num_hit
        self._plans.introduce(request)
        return True

    def _prefills(self) -> list[Prefill]:
        """Returns the sequences in prefill, and when the rest of each is computed, before the next step."""
        windows = self._budget.windows([request.num_prefill_left for request in self._prefilling])
        return [Prefill(r.open_sequence, one) for r, one in zip(self._prefilling, windows, strict=True)]

    # ------------------------------------------------------------------ the parts of a step

    def _next_decodes(self) -> DecodeBatch:
        """Returns the requests that take a token in the next step, once outlived estimates are made anew."""
        ended = self._forecasts.all.ended()
        if ended and self._forecasts.num_estimated:
            for request in [request for row, request in self._decoding.items() if row in ended]:
                generated = request.open_sequence.length + 1 - request.num_prompt  # also those in flight
                if request.expected <= generated < request.max_tokens:
                    request.expected = self._admission.expected(request, generated)
                    self._forecasts.expect(request)
            ended = self._forecasts.all.ended()
        for row in ended:
            self._decodes.discard(row)  # it may be of a request that has ended already
        return self._decodes.batch()

    def _is_short(self, decodes: list[Sequence]) -> bool:
        """Returns whether slots are too few for the next tokens of the `decodes` and for prefills."""
        available, most = self.ledger.num_available, len(decodes) * self._num_groups
        if self._num_groups > 1 and not self._is_too_little(available - most, decodes):
            return False  # as not even a slot in each group for each token would make it
        return self._is_too_little(available - self.ledger.growth(decodes), decodes)

    def _is_too_little(self, room: int, decodes: list[Sequence]) -> bool:
        """Returns whether `room` beside the `decodes` is too little: without decodes for any prefill, else for
        the chunks of the guaranteed requests, which have to be computed as they are forecast."""
        first = [] if decodes else self._prefilling[:1]
        if room < 0 or any(self._fitting(request, room) < 1 for request in first):
            return True
        if room >= self.limits.prefill_budget * self._num_groups:
            return False
        num = max([i for i, request in enumerate(self._prefilling, 1) if request.is_guaranteed], default=0)
        budget = self._step_budget(decodes)
        for request in self._prefilling[:num]:  # those before a guaranteed one must not delay it
            sequence = request.open_sequence
            count = budget.tokens(sequence.length, request.num_prefill_left)
            budget.add(sequence.length, count)
            room -= self.ledger.growth([sequence], count)
        return room < 0

    def _preempt(self, request: Request) -> None:
        """Closes the sequence of a request that is in no step in flight, and queues the request again."""
        self._forget(request)
        self._forecasts.drop(request)
        self.ledger.close(request.open_sequence, request.tail_ids(), request.cached)
        request.preempt()
        self._forecasts.interrupt(request)
        self._queue(request)
        self._retry_at = 0
        self.num_preemptions += 1

    def _forget(self, request: Request) -> None:
        """Notes that the request runs no more. Its sequence is still open."""
        self._forecasts.leave(request)
        row = request.open_sequence.row
        if self._decoding.pop(row, None) is None:
            self._prefilling = [r for r in self._prefilling if r is not request]
        self._decodes.discard(row)

    def _plan_prefills(self, decodes: list[Sequence], growth: int) -> list[Chunk]:
        """Returns the prefill chunks of the next step, those of the most urgent requests first.

        Admits waiting requests while there is budget beside the `decodes`, and room beside their `growth`.
        """
        if not self._prefilling and not self.waiting:
            return []
        budget, chunks, idx = self._step_budget(decodes), list[Chunk](), 0
        while (room := self.ledger.num_available - growth) > 0 or self._num_groups > 1:
            nexts = self.waiting.nexts
            admitted = self._prefilling[idx] if idx < len(self._prefilling) else None
            if nexts and admitted is not None and admitted.place <= nexts[-1].order:
                nexts = []
            if new := next((one for one in nexts if self._admit(one, budget, room, idx)), None):
                self._prefilling.insert(idx, self.waiting.pop(new))
                room = self.ledger.num_available - growth  # what it has hit is not available any more
            elif admitted is None:
                break
            request = self._prefilling[idx]
            start = request.open_sequence.length
            count = min(budget.tokens(start, request.num_prefill_left), self._fitting(request, room))
            if count <= 0:
                break
            chunks += self._plans.chunks(request, start, count)
            request.chunk_step = self.step
            if not request.num_prefill_left:  # the forecast knows in which step it takes each further token
                self._forecasts.decode(request, begin=self.step + 1)
            budget.add(start, request.open_sequence.length - start)
            idx += 1
        return chunks

    def _fitting(self, request: Request, room: int) -> int:
        """Returns how many tokens a running request can be extended by with `room` slots that are available."""
        num_groups = self._num_groups
        if num_groups > 1:  # it may release some
            room += num_groups - self.ledger.growth([request.open_sequence])
        return room // num_groups

    def _step_budget(self, decodes: list[Sequence]) -> StepBudget:
        """Returns the budget of a step with these decodes. A long prompt, which delays itself, counts twice."""
        kv = sum([sequence.length for sequence in decodes]) + len(decodes) if self._budget.step_time else 0
        may_admit = self.ledger.num_open < self.limits.max_num_seqs and self.waiting.head is not self._refused
        waiting = self.waiting.num_tokens if may_admit else 0
        waiting += sum([request.num_prefill_left for request in self._prefilling])
        longest = max([request.num_prefill_new for request in self._prefilling], default=0)
        return self._budget.of_step(len(decodes), kv, max(waiting, 2 * longest))

    # ------------------------------------------------------------------ the end of steps and requests

    def _end(self, request: Request, reason: str) -> None:
        """Ends a request. `_release_finished` frees what it holds once no step in flight contains it."""
        request.finish_reason = reason
        del self._requests[request.id]
        if reason in ("stop", "length"):
            self._admission.observe(request)
        self._retry_at = 0  # another head of the queue, or less that is forecast
        if request.sequence is None:
            self.waiting.forget(request)
            self._forecasts.leave(request)
        else:
            if self._is_in_flight(request):
                self._forecasts.rest(request, request.newest_step + 1)
            self._forget(request)
            self._finishing.append(request)

    def _is_in_flight(self, request: Request) -> bool:
        """Returns whether a running request is in a step in flight."""
        return bool(self._in_flight) and request.newest_step >= self._in_flight[0].plan.step

    def _release_finished(self) -> None:
        """Closes the sequences of ended requests that are in no step in flight. After a failure, and once
        nothing is in flight, removes what the failed steps published."""
        if self._finishing:
            staying = []
            for request in self._finishing:
                if self._is_in_flight(request):
                    staying.append(request)
                    continue
                self._forecasts.drop(request)
                self.ledger.close(request.open_sequence, request.tail_ids(), request.cached)
                self._retry_at = 0
            self._finishing = staying
        if self._failed and not self._in_flight:
            self._failed = False
            self.ledger.retract()
