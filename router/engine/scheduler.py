"""The scheduler: which requests run, and what the device does in the next step. Integers only, no torch.

    WAITING ── admitted: open ──► RUNNING (prefill, then decode) ──► FINISHED
       ▲                             │            a failed or aborted request goes there from anywhere
       └── paused: closed, cached ◄──┘

It owns the ledger's decisions, by priority and time of waiting (`_rank`): a request is admitted when the
exact peak of all that run, and it, fits the pool (`forecast.py`), so that nothing admitted is ever short of
a token. Where outputs are counted by an estimate instead, or not at all (`admission.Admission`), the pool may
run short: then the least urgent is paused, of these the youngest. What it has computed stays cached while it
can, and it keeps its place in the queue. With patience for an admission (`Admission.patience`), those that have
waited for longer let the others go first. `plan` emits what one step does; `consume` takes its result, or
`fail` its failure. It knows no text and no device.

With a depth of two the next step is planned while one is under way, so that a device need not wait for the
host. The plan then goes by what is certain: a request goes on unless it reaches its length. One that turns
out to have ended otherwise is in the next step all the same; its token there is dropped, and its tokens are
released when that step has landed. Admission counts with that one step more.
"""

import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from lightkv.edits import Alloc, encode
from lightkv.errors import CheckFailed
from lightkv.ledger import Sequence
from lightkv.ledger.prefix_tree import TOKEN_BYTES
from lightkv.ledger.shared_prefixes import BatchPrefixes
from lightkv.router.sampling_params import MAX_END_IDS, InvalidParams, SamplerKind

from .admission import Admission, Counting, Demand, peak_tokens
from .forecast import Forecast
from .ledger import Ledger
from .request import InvalidPrompt, NeverFits, Request
from .step import Limits, NewRow, StepPlan, StepResult, TokenEvent
from .waiting import WaitingQueue

SECONDS_PER_PRIORITY = 60.0


class _Batch(NamedTuple):
    """A plan that is with the executor, and whose requests its rows are."""

    plan: StepPlan
    requests: list[Request]


class Scheduler:
    """Plans steps over one ledger. Up to `depth` plans are under way; their results come in order.

    `admission`: how requests are counted; None counts each with all it may have, which never pauses. `clock`:
    seconds, by which waiting is measured.
    """

    def __init__(
        self,
        ledger: Ledger,
        limits: Limits,
        depth: int = 1,
        admission: Admission | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if depth not in (1, 2):
            raise ValueError(f"a depth of {depth}; give 1, or 2 to plan a step while one is under way")
        self.ledger = ledger
        self.limits = limits
        self.depth = depth
        self.peak_held = 0  # the most tokens held in any step
        self.num_prompt_tokens = 0  # of the requests admitted so far
        self.num_hit_tokens = 0  # of those, found in the cache
        self.num_output_tokens = 0  # sampled for requests that had not ended
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0  # computed before a pause, and again after it
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        self._prefilling: list[Request] = []  # the most urgent first
        self._decoding: list[Request] = []
        self._leaving: list[Request] = []  # ended, and in a step that has not landed
        self._new_rows: list[NewRow] = []
        self._seen_prompts: dict[bytes, int] = {}  # prompts that new rows penalise → index in the next plan
        self._flying: deque[_Batch] = deque()
        self._failed = False  # a step has failed, and another is still under way
        self._forecast = Forecast(ledger, lag=depth - 1)
        self._prefixes = BatchPrefixes(ledger, limits.grouping)
        self._admission = admission or Admission()
        self._clock = clock
        self._waiting = WaitingQueue(self._admission.patience)
        self._blocked = False  # the head of the queue was refused, and nothing has ended since

    @property
    def step(self) -> int:
        """Steps planned so far, and the number of the next one."""
        return self.ledger.step

    @property
    def num_waiting(self) -> int:
        """Requests not admitted yet, or paused."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests admitted and not finished."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_prefilling(self) -> int:
        """Requests admitted whose prompt is not computed yet."""
        return len(self._prefilling)

    @property
    def num_in_flight(self) -> int:
        """Steps planned whose result has not come."""
        return len(self._flying)

    @property
    def landing(self) -> StepPlan:
        """The oldest step under way: the one whose result comes next."""
        return self._flying[0].plan

    @property
    def has_work(self) -> bool:
        """Is any request unfinished, or any step under way?"""
        return bool(self._requests or self._flying)

    def add(self, request: Request) -> None:
        """Queue a request. Raises as `validate` does, and ValueError for an id in use."""
        if request.id in self._requests:
            raise ValueError(f"a request {request.id!r} is running; give each its own id")
        self.validate(request)
        self._requests[request.id] = request
        request.arrival = self._arrivals
        self._arrivals += 1
        if request.queued is None:
            request.queued = self._clock()
        request.rank = self._rank(request.priority, request.queued)
        self._queue(request)

    def _rank(self, priority: int, queued: float) -> float:
        """A request's place among the others: the lower is admitted first.

        Waiting counts: one unit of priority is worth `SECONDS_PER_PRIORITY` of it, so that a stream of more
        urgent requests cannot hold one up for ever. Where admission has patience, only priority counts: there
        requests that have waited for too long are the ones that give way.
        """
        if self._admission.patience is not None:
            return priority
        return queued + priority * SECONDS_PER_PRIORITY

    def validate(self, request: Request) -> None:
        """Could it ever run? Raises NeverFits, InvalidPrompt, InvalidParams."""
        vocab_size = self.limits.vocab_size
        request.params.validate(vocab_size)
        if request.params.min_tokens and len(request.stop_ids) > MAX_END_IDS:
            allowed = f"0 where {len(request.stop_ids)} tokens end the answer; {MAX_END_IDS} can be held back"
            raise InvalidParams("min_tokens", request.params.min_tokens, allowed)
        ids = np.frombuffer(request.prompt_ids, np.int32)
        if not len(ids):
            raise InvalidPrompt("the prompt is empty; give at least one token")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab_size:
            raise InvalidPrompt(
                f"the prompt has token ids from {low} to {high}; the model's go from 0 to {vocab_size - 1}"
            )
        prompt, new = request.num_prompt, request.params.max_tokens
        if prompt + new > self.limits.max_model_len:
            raise NeverFits(
                prompt, new, self.limits.max_model_len, "the context", "start with a longer --max-model-len"
            )
        if request.max_slots > self.ledger.capacity:
            raise NeverFits(
                prompt, new, self.ledger.capacity, "the pool", "start with a larger --max-total-tokens"
            )

    def abort(self, request_id: str, reason: str = "abort") -> bool:
        """End a request early; its computed tokens stay cached. False when there is none such (any more).

        `reason` is its finish reason: "stop" for one whose text met a stop string. No event tells of it.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request, reason)
        self._sweep()
        return True

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do before another result comes."""
        if len(self._flying) == self.depth:
            raise ValueError(f"{self.depth} steps are under way; consume the first")
        if self._failed:
            return None
        if self._admission.patience is not None and self._waiting.defer(self._clock()):
            self._blocked = False  # there may be another head of the queue
        ledger = self.ledger
        decoding, sequences = self._next_decodes()
        growth = ledger.growth(sequences)
        while self._admission.may_run_short and self._is_short(growth, bool(decoding)):
            if self._flying:  # what is under way has to land first: then one can be paused
                return None
            self._pause(max(self._prefilling + self._decoding, key=_order))
            decoding, sequences = self._next_decodes()
            growth = ledger.growth(sequences)
        contexts = self._plan_contexts(growth)
        if not contexts and not decoding:
            return None
        # Last, so that what was just opened is not evicted for it, and the batch's Take is the last edit.
        ledger.extend(sequences, [1] * len(decoding))
        edits = ledger.drain()
        take = edits[-1] if decoding else None
        assert take is None or isinstance(take, Alloc)

        requests = [request for request, _, _ in contexts] + decoding
        sample = [i for i, (r, start, count) in enumerate(contexts) if start + count == r.num_prefill_tokens]
        done = [contexts[i][0] for i in sample]
        sample.extend(range(len(contexts), len(requests)))
        kind = max([requests[index].kind for index in sample], default=SamplerKind.GREEDY)
        logprobs = {}
        if kind >= SamplerKind.EDITED:
            wanted = [requests[index].params.logprobs for index in sample]
            logprobs = {i: count for i, count in enumerate(wanted) if count is not None}
        plan = StepPlan(
            step=self.step,
            edits=encode(edits),
            rows=[*(request.sequence.row for request, _, _ in contexts), *(take.rows if take else ())],  # type: ignore[union-attr]
            starts=[*(start for _, start, _ in contexts), *(take.starts if take else ())],
            counts=[count for _, _, count in contexts] + [1] * len(decoding),
            num_prefills=len(contexts),
            token_ids=b"".join(
                request.prefill_ids[start * TOKEN_BYTES : (start + count) * TOKEN_BYTES]
                for request, start, count in contexts
            ),
            sample=sample,
            kind=kind,
            logprobs=logprobs,
            new_rows=self._new_rows,
            num_free=ledger.num_free,
            prefixes=self._prefixes.of(sequences),
            prompts=[distinct_ids(prompt_ids, self.limits.vocab_size) for prompt_ids in self._seen_prompts],
        )
        self._new_rows, self._seen_prompts = [], {}
        ledger.step += 1
        if done:  # from now on they are counted exactly
            self._prefilling = [r for r in self._prefilling if r.sequence.length < r.num_prefill_tokens]  # type: ignore[union-attr]
            self._decoding.extend(done)
            for request in done:
                self._forecast.decode(request.sequence, request.remaining)  # type: ignore[arg-type]
            self._blocked = False
        for request in requests:
            request.flying += 1
        self._flying.append(_Batch(plan, requests))
        self.peak_held = max(self.peak_held, ledger.num_held)
        return plan

    def consume(self, result: StepResult) -> list[TokenEvent]:
        """Take the oldest step's tokens: what each request got, and who has finished."""
        batch = self._land(result.step)
        events = []
        if not self._failed:
            self.ledger.confirm(batch.plan.step)
            requests, logprobs = batch.requests, result.logprobs
            for i, (index, token) in enumerate(zip(batch.plan.sample, result.tokens, strict=True)):
                request = requests[index]
                if request.finish_reason is not None:
                    continue
                request.output.append(token)
                count = len(request.output)
                ends = token in request.stop_ids or count == request.max_tokens
                if not ends and count > 1 and not logprobs:  # most of them
                    events.append(TokenEvent(request.id, token))
                    continue
                reason = None
                if ends:
                    reason = "stop" if token in request.stop_ids else "length"
                    self._end(request, reason)
                num_cached = request.num_hit if count == 1 else None
                events.append(TokenEvent(request.id, token, reason, logprobs.get(i), None, num_cached))
            self.num_output_tokens += len(events)
        self._sweep()
        return events

    def fail(self, error: str) -> list[TokenEvent]:
        """The oldest step was not computed: the requests of every step under way end in "error", and nothing of
        these steps stays in the cache. What later ones bring is dropped."""
        requests = {request.id: request for batch in self._flying for request in batch.requests}
        self._failed = True
        self._land(None)
        events = []
        for request in requests.values():
            if request.finish_reason is None:
                self._end(request, "error")
                events.append(TokenEvent(request.id, None, "error", error=error))
            request.cached = False
        self._sweep()
        return events

    @property
    def late_at(self) -> float:
        """After when another request will have waited for too long; infinity where none will."""
        return self._waiting.late_at

    def steady_steps(self) -> int:
        """How many of the next steps will be a token for each that decodes, and nothing else: unless one of
        these ends, one is aborted, another is added, or one has waited for too long (`late_at`)."""
        if not self._decoding or self._flying or self._prefilling or self._leaving or self._failed:
            return 0
        if self._waiting and not self._blocked and self.ledger.num_open < self.limits.max_num_seqs:
            return 0
        steps = min([request.expected - len(request.output) for request in self._decoding])
        sequences = [request.sequence for request in self._decoding]
        while steps > 0 and self.ledger.growth(sequences, steps) > self.ledger.num_available:  # type: ignore[arg-type]
            steps //= 2
        return max(steps, 0)

    def repeat(self, count: int, token: int) -> None:
        """Take `count` of these steps at once, in each of which every request gets `token`. It all is then as
        after as many plans and results, whose edits are gone. Raises ValueError for more than there are."""
        if count > self.steady_steps():
            raise ValueError(f"{count} steps at once; {self.steady_steps()} are alike")
        decoding = self._decoding
        self.ledger.extend([request.sequence for request in decoding], [count] * len(decoding))  # type: ignore[misc]
        self.ledger.drain()
        self.ledger.step += count
        tokens = array("i", [token]) * count
        for request in decoding:
            request.output += tokens
        self.num_output_tokens += count * len(decoding)
        self.peak_held = max(self.peak_held, self.ledger.num_held)

    def demands(self) -> list[Demand]:
        """What each request that holds tokens holds and will take."""
        demands = []
        for decoding, requests in (
            (False, self._prefilling),
            (True, self._decoding),
            (True, self._leaving),
        ):
            for request in requests:
                sequence = request.sequence
                assert sequence is not None
                remaining = 0 if request.finish_reason is not None else request.remaining
                demands.append(Demand(sequence.num_private, remaining, sequence.node.up(), decoding))
        return demands

    def forecast_peak(self) -> int:
        """The most tokens that what runs will hold at any time, if all use all that is expected of them."""
        return self._forecast.peak()

    def check(self) -> None:
        """Recount the ledger, the forecast and the queues. Raises CheckFailed."""
        self.ledger.check()
        running = self._prefilling + self._decoding
        holding = running + self._leaving
        forecast, recount = self.forecast_peak(), peak_tokens(self.demands(), lag=self.depth - 1)
        if forecast != recount:
            raise CheckFailed(f"a peak of {forecast} tokens is forecast, {recount} by recount")
        if len(holding) != self.ledger.num_open:
            raise CheckFailed(
                f"{len(holding)} requests hold tokens, {self.ledger.num_open} sequences are open"
            )
        self._waiting.check()
        waiting, known = self.num_waiting, len(self._requests)
        if len(running) + waiting != known:
            raise CheckFailed(f"{known} requests known, {len(running)} run, {waiting} wait")
        if not self._admission.may_run_short and forecast > self.ledger.capacity:
            raise CheckFailed(f"a peak of {forecast} is forecast for {self.ledger.capacity} tokens")

    def _queue(self, request: Request) -> None:
        head = self._waiting.head
        if head is not None and request.order < head.order:
            self._blocked = False  # there is another head of the queue
        self._waiting.push(request)

    def _next_decodes(self) -> tuple[list[Request], list[Sequence]]:
        """Who takes a token in the next step: what is under way brings each of its decodes one token more, and
        those that it ends are left out. Where one has outlived its estimate, it gets another."""
        decoding = [r for r in self._decoding if len(r.output) + r.flying < r.expected]
        if self._admission.estimates is not None and len(decoding) < len(self._decoding):
            self._estimate_anew()
            decoding = [r for r in self._decoding if len(r.output) + r.flying < r.expected]
        return decoding, [request.sequence for request in decoding]  # type: ignore[misc]

    def _estimate_anew(self) -> None:
        for request in self._decoding:
            generated = len(request.output) + request.flying
            if request.expected <= generated < request.max_tokens:
                assert request.sequence is not None
                request.expected = self._admission.expected(generated, request.max_tokens)
                self._forecast.decode(request.sequence, request.remaining)

    def _is_short(self, growth: int, decodes: bool) -> bool:
        """Is there no room for the `growth` of what decodes, or, where nothing does, for any prompt?"""
        room = self.ledger.num_available - growth
        return room < 0 or (not room and not decodes and bool(self._prefilling))

    def _pause(self, request: Request) -> None:
        """Close a request that is in no step, and queue it again."""
        assert request.sequence is not None
        self._forecast.drop(request.sequence)
        self.ledger.close(request.sequence, request.tail_ids())
        request.pause()
        self._prefilling = [r for r in self._prefilling if r is not request]
        self._decoding = [r for r in self._decoding if r is not request]
        self._queue(request)
        self._blocked = False
        self.num_preemptions += 1

    def _plan_contexts(self, growth: int) -> list[tuple[Request, int, int]]:
        """The prompt tokens of the next step: request, start, count. The most urgent come first, be they
        admitted or not; admits while there is budget and room beside the `growth` of the decodes."""
        budget = self.limits.prefill_budget
        contexts: list[tuple[Request, int, int]] = []
        idx = 0
        while (count := min(budget, self.ledger.num_available - growth)) > 0:
            head = self._waiting.head
            admitted = self._prefilling[idx] if idx < len(self._prefilling) else None
            if head is not None and (admitted is None or head.order < admitted.order) and self._admit(head):
                self._waiting.pop()
                self._prefilling.insert(idx, head)
            elif admitted is None:
                break
            budget -= self._chunk(self._prefilling[idx], count, contexts)
            idx += 1
        return contexts

    def _admit(self, request: Request) -> bool:
        """Open the request's sequence if the peak of everything, with it, fits. Alone it always does."""
        ledger = self.ledger
        if self._blocked or ledger.num_open >= self.limits.max_num_seqs:
            return False
        if not len(request.output) < request.expected < request.max_tokens:  # an estimate stands
            request.expected = self._admission.expected(len(request.output), request.max_tokens)
        if ledger.num_open and not self._fits(request):
            self._blocked = True
            return False
        sequence = ledger.open(request.prefill_ids, request.namespace)
        request.sequence = sequence
        self._forecast.admit(sequence, request.final)
        if request.num_preemptions:
            self.num_recomputed_tokens += max(request.num_computed - sequence.num_hit, 0)
        else:
            request.num_hit = sequence.num_hit
            self.num_prompt_tokens += request.num_prompt
            self.num_hit_tokens += sequence.num_hit
        self._new_rows.append(self.new_row(request, sequence.row))
        return True

    def new_row(self, request: Request, row: int) -> NewRow:
        """What sampling needs of a request. Token ids travel only where sampling looks at them."""
        params = request.params
        row_settings = NewRow(row, params, request.seed)
        if params.penalised:
            prompt_idx = self._seen_prompts.setdefault(request.prompt_ids, len(self._seen_prompts))
            row_settings = replace(row_settings, prompt_idx=prompt_idx, output_ids=request.output.tobytes())
        if len(request.output) < params.min_tokens:
            stop_ids = sorted(one for one in request.stop_ids if one < self.limits.vocab_size)
            may_stop_at = request.num_prompt + params.min_tokens
            row_settings = replace(row_settings, may_stop_at=may_stop_at, stop_ids=stop_ids)
        return row_settings

    def _fits(self, request: Request) -> bool:
        """By what admission counts: would all that run, and this one, fit the pool?"""
        ledger, counting = self.ledger, self._admission.counting
        limit = self._admission.limit(ledger.capacity, ledger.num_open + 1)
        if counting is Counting.SUM:
            return self._forecast.total + request.final <= limit
        match = ledger.match(request.prefill_ids, request.namespace)
        if counting is Counting.PEAK:
            return self._forecast.fits(request.final, match, limit)
        shared, tip = 0, match.tip  # of what it hits, what others hold already
        for segment in match.path:
            if segment.holders:
                shared += tip or segment.length
            tip = 0
        held = ledger.num_held + request.num_prefill_tokens - shared
        for other in self._prefilling:
            assert other.sequence is not None
            held += other.num_prefill_tokens - other.sequence.length
        held += ledger.growth([other.sequence for other in self._decoding])  # type: ignore[misc]
        # What is held has its last pages counted; what is still to be computed has not.
        return held + 1 <= self._admission.limit(ledger.capacity, len(self._prefilling) + 1)

    def _chunk(self, request: Request, budget: int, contexts: list[tuple[Request, int, int]]) -> int:
        """The request's next context tokens, at most `budget`. Returns how many."""
        sequence = request.sequence
        assert sequence is not None
        start = sequence.length
        count = min(request.num_prefill_tokens - start, budget)
        self.ledger.extend([sequence], [count])
        self.ledger.publish(sequence)
        contexts.append((request, start, count))
        return count

    def _land(self, step: int | None) -> _Batch:
        if not self._flying or step not in (None, self._flying[0].plan.step):
            flying = [batch.plan.step for batch in self._flying]
            raise ValueError(f"a result for step {step}, while steps {flying} are under way")
        batch = self._flying.popleft()
        for request in batch.requests:
            request.flying -= 1
        return batch

    def _end(self, request: Request, reason: str) -> None:
        """It ends; what it holds is released by `_sweep`, once no step has it."""
        request.finish_reason = reason
        del self._requests[request.id]
        if self._admission.estimates is not None and reason in ("stop", "length"):
            self._admission.estimates.observe(len(request.output))
        if request.sequence is None:
            self._waiting.forget()
            self._blocked = False
        else:
            if request.flying:
                self._forecast.rest(request.sequence)
            self._leaving.append(request)

    def _sweep(self) -> None:
        """Release what has ended and is in no step; after a failure, also what its steps published."""
        if self._leaving:
            self._prefilling = [r for r in self._prefilling if r.finish_reason is None]
            self._decoding = [r for r in self._decoding if r.finish_reason is None]
            staying = []
            for request in self._leaving:
                if request.flying:
                    staying.append(request)
                    continue
                assert request.sequence is not None
                self._forecast.drop(request.sequence)
                self.ledger.close(request.sequence, request.tail_ids(), request.cached)
                self._blocked = False
            self._leaving = staying
        if self._failed and not self._flying:
            self._failed = False
            self.ledger.retract()


def distinct_ids(prompt_ids: bytes, vocab_size: int) -> bytes:
    """The token ids in a prompt, each once and ascending; both int32 bytes."""
    is_seen = np.zeros(vocab_size, dtype=bool)
    is_seen[np.frombuffer(prompt_ids, dtype=np.int32)] = True
    return np.flatnonzero(is_seen).astype(np.int32).tobytes()


def _order(request: Request) -> tuple[float, bool, int]:
    return request.order
