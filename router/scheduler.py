"""The scheduler: which requests run, and what the device does in the next step. Integers only, no torch.

    WAITING ── admitted: open ──► RUNNING (prefill, then decode) ──► FINISHED
                                                  a failed or aborted request goes there from anywhere

It owns the ledger's decisions, first come first served: a request is admitted when the exact peak of all
that run, and it, fits the pool (`admission.py`), so that nothing admitted is ever short of a token. `plan`
emits what one step does; `consume` takes its result, or `fail` its failure. It knows no text and no device.
"""

from array import array
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from lightkv.edits import encode
from lightkv.errors import CheckFailed, LightKVError
from lightkv.ledger import Sequence, TokenLedger
from lightkv.prefix_tree import TOKEN_BYTES, Namespace

from .admission import Demand, peak_tokens
from .messages import Limits, NewRow, StepPlan, StepResult, TokenLogprobs
from .sampling_params import SamplerKind, SamplingParams


class NeverFits(LightKVError):
    """A request that could not run even alone."""

    def __init__(self, prompt: int, max_tokens: int, limit: int, what: str, remedy: str) -> None:
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.limit = limit
        super().__init__(
            f"{prompt} prompt tokens and up to {max_tokens} new ones do not fit {what} of {limit} tokens; "
            f"shorten the prompt, lower max_tokens, or {remedy}"
        )


class InvalidPrompt(LightKVError, ValueError):
    """A prompt that is no line of this model's tokens."""


class Request:
    """One prompt on its way to one completion.

    `prompt_ids`: int32 bytes. `stop_ids`: sampling one of these ends it. `seed`: with the position, all that
    its random numbers depend on. `finish_reason`: None while it lives, then "stop", "length", "abort" or
    "error".
    """

    __slots__ = (
        "finish_reason",
        "id",
        "kind",
        "namespace",
        "num_hit",
        "num_prompt",
        "output",
        "params",
        "prompt_ids",
        "seed",
        "sequence",
        "stop_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_ids: bytes,
        params: SamplingParams,
        seed: int,
        stop_ids: frozenset[int] = frozenset(),
        namespace: Namespace = (),
    ) -> None:
        self.id = request_id
        self.prompt_ids = prompt_ids
        self.num_prompt = len(prompt_ids) // TOKEN_BYTES
        self.params = params
        self.kind = params.kind
        self.seed = seed
        self.stop_ids = stop_ids
        self.namespace = namespace
        self.output = array("i")
        self.sequence: Sequence | None = None
        self.num_hit = 0
        self.finish_reason: str | None = None

    @property
    def max_slots(self) -> int:
        """Slots that it takes at most: the last token sampled is never written."""
        return self.num_prompt + self.params.max_tokens - 1

    @property
    def remaining(self) -> int:
        """Slots still to come, while it runs."""
        assert self.sequence is not None
        return self.max_slots - self.sequence.length


class TokenEvent(NamedTuple):
    """What a step brought one request: a token, and its end if that was the last. An "error" has no token."""

    request_id: str
    token: int | None
    finish_reason: str | None
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class _Batch(NamedTuple):
    """A plan that is with the executor, and whose requests its rows are."""

    plan: StepPlan
    requests: list[Request]


class Scheduler:
    """Plans steps over one ledger. `plan` and `consume` (or `fail`) alternate."""

    def __init__(self, ledger: TokenLedger, limits: Limits) -> None:
        self.ledger = ledger
        self.limits = limits
        self.step = 0
        self.peak_held = 0  # the most tokens held in any step
        self.num_prompt_tokens = 0  # of the requests admitted so far
        self.num_hit_tokens = 0  # of those, found in the cache
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._prefilling: list[Request] = []
        self._decoding: list[Request] = []
        self._new_rows: list[NewRow] = []
        self._flying: _Batch | None = None
        self._doomed: dict[str, str] = {}  # id → reason: to end when the flying step has landed
        self._reserved = 0  # Σ max_slots of what runs: when even this fits, nothing need be sorted
        self._blocked = False  # the head of the queue was refused, and nothing has ended since

    @property
    def num_waiting(self) -> int:
        """Requests not admitted yet."""
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
    def has_work(self) -> bool:
        """Is any request unfinished?"""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request. Raises as `validate` does, and ValueError for an id in use."""
        if request.id in self._requests:
            raise ValueError(f"a request {request.id!r} is running; give each its own id")
        self.validate(request)
        self._requests[request.id] = request
        self._waiting.append(request)

    def validate(self, request: Request) -> None:
        """Could it ever run? Raises NeverFits, InvalidPrompt, InvalidParams."""
        vocab_size = self.limits.vocab_size
        request.params.validate(vocab_size)
        ids = array("i", request.prompt_ids)
        if not ids:
            raise InvalidPrompt("the prompt is empty; give at least one token")
        low, high = min(ids), max(ids)
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
        if self._flying is not None and request in self._flying.requests:
            self._doomed[request_id] = reason
            return True
        if request.sequence is None:
            self._waiting.remove(request)
            self._blocked = False
        self._finish(request, reason)
        self._forget_finished()
        return True

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run (then nothing is waiting either)."""
        assert self._flying is None, "consume the last step first"
        ledger = self.ledger
        ledger.step = self.step
        budget = self.limits.prefill_budget
        contexts: list[tuple[Request, int, int]] = []
        for request in self._prefilling:
            budget -= self._chunk(request, budget, contexts)
        while budget and self._waiting and self._admit(self._waiting[0]):
            request = self._waiting.popleft()
            self._prefilling.append(request)
            budget -= self._chunk(request, budget, contexts)
        decoding = self._decoding
        decodes = [request.sequence for request in decoding]
        decode_starts = [sequence.length for sequence in decodes]  # type: ignore[union-attr]
        # Last, so that what was just opened is not evicted for it, and the batch's Take is the last edit.
        ledger.extend(decodes, [1] * len(decodes))  # type: ignore[arg-type]
        if not contexts and not decoding:
            return None

        requests = [request for request, _, _ in contexts] + decoding
        ends = [request.num_prompt for request, _, _ in contexts]
        sample = [i for i, (_, start, count) in enumerate(contexts) if start + count == ends[i]]
        sample.extend(range(len(contexts), len(requests)))
        kind = max((requests[index].kind for index in sample), default=SamplerKind.GREEDY)
        logprobs = {}
        if kind >= SamplerKind.EDITED:
            wanted = [requests[index].params.logprobs for index in sample]
            logprobs = {i: count for i, count in enumerate(wanted) if count is not None}
        plan = StepPlan(
            step=self.step,
            edits=encode(ledger.drain()),
            rows=[request.sequence.row for request in requests],  # type: ignore[union-attr]
            starts=[start for _, start, _ in contexts] + decode_starts,
            counts=[count for _, _, count in contexts] + [1] * len(decoding),
            num_contexts=len(contexts),
            token_ids=b"".join(
                request.prompt_ids[start * TOKEN_BYTES : (start + count) * TOKEN_BYTES]
                for request, start, count in contexts
            ),
            sample=sample,
            kind=kind,
            logprobs=logprobs,
            new_rows=self._new_rows,
            num_free=ledger.num_free,
        )
        self._new_rows = []
        self._flying = _Batch(plan, requests)
        self.step += 1
        self.peak_held = max(self.peak_held, ledger.num_held)
        return plan

    def consume(self, result: StepResult) -> list[TokenEvent]:
        """Take the step's tokens: what each request got, and who has finished."""
        batch = self._land(result.step)
        self.ledger.confirm(batch.plan.step)
        events = []
        num_contexts = batch.plan.num_contexts
        finished = bool(self._doomed)
        for i, (index, token) in enumerate(zip(batch.plan.sample, result.tokens, strict=True)):
            request = batch.requests[index]
            if index < num_contexts:
                self._prefilling.remove(request)
                self._decoding.append(request)
                self._blocked = False  # from now on it is counted exactly
            request.output.append(token)
            if request.id in self._doomed:
                continue
            if token in request.stop_ids:
                reason = "stop"
            elif len(request.output) == request.params.max_tokens:
                reason = "length"
            else:
                events.append(TokenEvent(request.id, token, None, result.logprobs.get(i)))
                continue
            finished = True
            self._finish(request, reason)
            events.append(TokenEvent(request.id, token, reason, result.logprobs.get(i)))
        for request_id, reason in self._doomed.items():
            self._finish(self._requests[request_id], reason)
        self._doomed.clear()
        if finished:
            self._forget_finished()
        return events

    def fail(self, error: str) -> list[TokenEvent]:
        """The step was not computed: its requests end in `error`, and nothing of it stays in the cache."""
        batch = self._land(None)
        events = []
        for request in batch.requests:
            self._finish(request, "error", cache=False)
            if request.id not in self._doomed:
                events.append(TokenEvent(request.id, None, "error", error=error))
        self._doomed.clear()
        self._forget_finished()
        self.ledger.retract()
        return events

    def demands(self) -> list[Demand]:
        """What each running request holds and will take."""
        demands = []
        for decoding, requests in ((False, self._prefilling), (True, self._decoding)):
            for request in requests:
                sequence = request.sequence
                assert sequence is not None
                path = sequence.node.up()
                demands.append(Demand(sequence.num_private, request.remaining, path, decoding))
        return demands

    def forecast_peak(self) -> int:
        """The most tokens that what runs now will hold at any time, if all use all they may."""
        return peak_tokens(self.demands())

    def check(self) -> None:
        """Recount the ledger, the reservations and the queues. Raises CheckFailed."""
        self.ledger.check()
        running = self._prefilling + self._decoding
        reserved = sum(request.max_slots for request in running)
        if reserved != self._reserved:
            raise CheckFailed(f"{self._reserved} slots reserved in the books, {reserved} by recount")
        if len(running) != self.ledger.num_open:
            raise CheckFailed(f"{len(running)} requests run, {self.ledger.num_open} sequences are open")
        if len(running) + len(self._waiting) != len(self._requests):
            known = len(self._requests)
            raise CheckFailed(f"{known} requests known, {len(running)} run, {len(self._waiting)} wait")
        if self.forecast_peak() > self.ledger.capacity:
            raise CheckFailed(
                f"a peak of {self.forecast_peak()} is forecast for {self.ledger.capacity} tokens"
            )

    def _admit(self, request: Request) -> bool:
        """Open the request's sequence if the peak of everything, with it, fits."""
        if self._blocked or self.num_running >= self.limits.max_num_seqs:
            return False
        ledger = self.ledger
        reserved = self._reserved + request.max_slots
        if reserved > ledger.capacity:
            match = ledger.match(request.prompt_ids, request.namespace)
            candidate = Demand(0, request.max_slots - match.num_tokens, match.path, False, match.tip)
            if peak_tokens([*self.demands(), candidate]) > ledger.capacity:
                self._blocked = True
                return False
        sequence = ledger.open(request.prompt_ids, request.namespace)
        request.sequence = sequence
        request.num_hit = sequence.num_hit
        self._reserved = reserved
        self.num_prompt_tokens += request.num_prompt
        self.num_hit_tokens += sequence.num_hit
        self._new_rows.append(
            NewRow(sequence.row, request.params, request.seed, request.prompt_ids, request.output.tobytes())
        )
        return True

    def _chunk(self, request: Request, budget: int, contexts: list[tuple[Request, int, int]]) -> int:
        """The request's next prompt tokens, as many as the budget allows. Returns how many."""
        sequence = request.sequence
        assert sequence is not None
        start = sequence.length
        count = min(request.num_prompt - start, budget)
        if count:
            self.ledger.extend([sequence], [count])
            self.ledger.publish(sequence)
            contexts.append((request, start, count))
        return count

    def _land(self, step: int | None) -> _Batch:
        batch = self._flying
        if batch is None or (step is not None and step != batch.plan.step):
            flying = None if batch is None else batch.plan.step
            raise ValueError(f"a result for step {step}, while step {flying} is under way")
        self._flying = None
        return batch

    def _finish(self, request: Request, reason: str, cache: bool = True) -> None:
        request.finish_reason = reason
        if request.sequence is not None:
            self.ledger.close(request.sequence, request.output.tobytes(), cache)
            self._reserved -= request.max_slots
            self._blocked = False
        del self._requests[request.id]

    def _forget_finished(self) -> None:
        self._prefilling = _living(self._prefilling)
        self._decoding = _living(self._decoding)


def _living(requests: Iterable[Request]) -> list[Request]:
    return [request for request in requests if request.finish_reason is None]
