"""Writes the plan of a step once the scheduler has decided what it computes and the ledger has its slots.

Most of a step is the same as in the one before: the decodes. What is read of them in every step is kept in
columns (`Decodes`), so that a step costs little for a request that goes on. What the sampler needs of new
sequences is collected at admission (`NewRows`), and sent with the next plan.
"""

from collections import Counter
from typing import NamedTuple, TypeVar

import numpy as np
from msgspec.structs import replace

from lightkv.edits import Alloc, Edit, encode
from lightkv.ledger import Sequence, TokenLedger
from lightkv.ledger.prefix_tree import TOKEN_BYTES
from lightkv.ledger.shared_prefixes import BatchPrefixes
from lightkv.router.sampling_params import SamplerKind

from .request import Request
from .step import Limits, NewRow, StepPlan, TokenEvent

K = TypeVar("K")


class Chunk(NamedTuple):
    """The positions of a request's prefill that the next step computes."""

    request: Request
    start: int
    num_tokens: int
    edits: int = 0  # where another chunk of the request follows in the step, the edits before that one


class DecodeBatch(NamedTuple):
    """The requests that take a token in a step, in the order in which they began to decode, in columns.

    kind: the highest of their kinds. stop_ids: every token that ends one of them.
    """

    requests: list[Request]
    sequences: list[Sequence]
    rows: list[int]
    ids: list[str]
    kind: SamplerKind
    stop_ids: frozenset[int]

    def take(self, tokens: list[int], start: int, end: int) -> list[TokenEvent]:
        """Gives the requests from index `start` up to `end` their tokens, with which they go on. Returns the
        events. `tokens`: those of the whole batch."""
        for request, token in zip(self.requests[start:end], tokens[start:end], strict=True):
            request.output.append(token)
        return list(map(TokenEvent, self.ids[start:end], tokens[start:end]))

    def ending(self, tokens: list[int], rows: set[int]) -> list[int]:
        """Returns the indices of the requests in these `rows`, and of those that one of `tokens` may end."""
        found: set[int] = set()
        if rows:
            found.update([i for i, row in enumerate(self.rows) if row in rows])
        if not self.stop_ids.isdisjoint(tokens):
            found.update([i for i, token in enumerate(tokens) if token in self.stop_ids])
        return sorted(found)


class PlannedStep(NamedTuple):
    """A plan, the requests whose prefills it computes, those of them whose prefills end, and the decodes. It
    samples a token for each of the latter two, in this order."""

    plan: StepPlan
    prefills: list[Request]
    begun: list[Request]
    decodes: DecodeBatch

    @property
    def requests(self) -> list[Request]:
        """The requests of the step, in the order of the plan's batch."""
        return self.prefills + self.decodes.requests


class Decodes:
    """The requests that take a token in the next step, in columns by row, and the prefixes that they share."""

    def __init__(self, prefixes: BatchPrefixes) -> None:
        self.prefixes = prefixes
        self._requests: dict[int, Request] = {}
        self._sequences: dict[int, Sequence] = {}
        self._ids: dict[int, str] = {}
        self._kinds: Counter[SamplerKind] = Counter()
        self._stop_ids: Counter[frozenset[int]] = Counter()
        self._batch: DecodeBatch | None = None  # these requests, until one comes or goes

    def add(self, request: Request) -> None:
        """Adds a request whose prefill is computed."""
        sequence = request.open_sequence
        row = sequence.row
        self._requests[row] = request
        self._sequences[row] = sequence
        self._ids[row] = request.id
        self.prefixes.join(sequence)
        self._kinds[request.kind] += 1
        self._stop_ids[request.stop_ids] += 1
        self._batch = None

    def discard(self, row: int) -> None:
        """Removes the request in `row`, if there is one."""
        request = self._requests.pop(row, None)
        if request is None:
            return
        self.prefixes.leave(self._sequences.pop(row))
        del self._ids[row]
        _count_down(self._kinds, request.kind)
        _count_down(self._stop_ids, request.stop_ids)
        self._batch = None

    def batch(self) -> DecodeBatch:
        """Returns the requests as they are now: the same object for as long as none comes or goes."""
        if self._batch is None:
            self._batch = DecodeBatch(
                list(self._requests.values()),
                list(self._sequences.values()),
                list(self._requests),
                list(self._ids.values()),
                max(self._kinds, default=SamplerKind.GREEDY),
                frozenset().union(*self._stop_ids),
            )
        return self._batch


def _count_down(counts: Counter[K], key: K) -> None:
    """Counts one less of `key`, which is gone at zero."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


class PlanWriter:
    """The plans of the steps over one ledger, whose step number goes up with each."""

    def __init__(self, ledger: TokenLedger, limits: Limits) -> None:
        self._ledger = ledger
        self._new_rows = NewRows(limits.vocab_size)
        self._edits: list[Edit] = []  # those that were drained before the step was written
        self.decodes = Decodes(BatchPrefixes(ledger, limits.prefix_sharing))

    def introduce(self, request: Request) -> None:
        """Notes that the request's sequence was opened: the next plan says how its row is sampled."""
        self._new_rows.add(request, request.open_sequence.row)

    def chunks(self, request: Request, start: int, count: int) -> list[Chunk]:
        """Allocates and publishes `count` tokens of a request's prefill from `start` on, in pieces that end
        where a state is kept, or fewer where the next step has to keep it. Returns the pieces."""
        sequence, chunks, end = request.open_sequence, list[Chunk](), start + count
        while start < end and (part := self._ledger.piece(sequence, end - start)):
            if chunks:
                chunks[-1] = chunks[-1]._replace(edits=self._drain())
            self._ledger.extend([sequence], [part])
            if not request.is_apart:
                self._ledger.publish(sequence)
            chunks.append(Chunk(request, start, part))
            start += part
        return chunks

    def _drain(self, decode_alloc: Alloc | None = None) -> int:
        """Takes the ledger's edits. Returns how many the next step has so far."""
        # The allocation of the decodes' slots travels as the batch itself (`StepPlan.decode_alloc`).
        self._edits += [edit for edit in self._ledger.drain() if edit is not decode_alloc]
        return len(self._edits)

    def write(self, chunks: list[Chunk], decodes: DecodeBatch, decode_alloc: Alloc) -> PlannedStep:
        """Plans the step of these chunks and decodes, whose slots the ledger has allocated."""
        ledger = self._ledger
        self._drain(decode_alloc)
        edits, self._edits = self._edits, []
        pieces = {i: chunk.edits for i, chunk in enumerate(chunks) if chunk.edits}
        sample = [
            i for i, chunk in enumerate(chunks) if i not in pieces and not chunk.request.num_prefill_left
        ]
        begun = [chunks[i].request for i in sample]
        sample.extend(range(len(chunks), len(chunks) + len(decodes.rows)))
        kind = max([request.kind for request in begun], default=SamplerKind.GREEDY)
        kind = max(kind, decodes.kind)
        logprobs = {}
        if kind >= SamplerKind.EDITED:
            wanted = [request.params.logprobs for request in begun + decodes.requests]
            logprobs = {i: count for i, count in enumerate(wanted) if count is not None}
        new_rows, prompts = self._new_rows.drain()
        plan = StepPlan(
            step=ledger.step,
            edits=encode(edits),
            rows=[*(chunk.request.open_sequence.row for chunk in chunks), *decode_alloc.rows],
            starts=[*(chunk.start for chunk in chunks), *decode_alloc.starts],
            counts=[*(chunk.num_tokens for chunk in chunks), *decode_alloc.counts],
            num_prefills=len(chunks),
            token_ids=b"".join(
                request.prefill_ids[start * TOKEN_BYTES : (start + count) * TOKEN_BYTES]
                for request, start, count, _ in chunks
            ),
            sample=sample,
            kind=kind,
            logprobs=logprobs,
            new_rows=new_rows,
            num_free=ledger.num_free,
            prefixes=self.decodes.prefixes.find(),
            prompts=prompts,
            scored=[
                scored
                for part, (request, start, count, _) in enumerate(chunks)
                if request.is_scored and (scored := request.score(part, start, count)) is not None
            ],
            pieces=pieces,
        )
        ledger.step += 1
        return PlannedStep(plan, [chunk.request for chunk in chunks], begun, decodes)


class NewRows:
    """The rows that the next plan introduces, and the prompts that their penalties look at.

    `vocab_size`: token ids are below it.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: list[NewRow] = []
        self._prompts: dict[bytes, int] = {}  # prompt → its index in the next plan's `prompts`

    def add(self, request: Request, row: int) -> None:
        """Introduces `request` in `row`. Token ids are sent only if the request's sampling reads them."""
        params = request.params
        new = NewRow(row, params, request.seed, grammar=request.grammar)
        if params.penalised:
            prompt_idx = self._prompts.setdefault(request.prompt_ids, len(self._prompts))
            new = replace(new, prompt_idx=prompt_idx)
        if params.penalised or request.grammar is not None:
            new = replace(new, output_ids=request.output.tobytes())
        if num_last := max(map(len, params.bad_words_ids), default=1) - 1:
            new = replace(new, last_ids=request.prefill_ids[-num_last * TOKEN_BYTES :])
        if len(request.output) < params.min_tokens:
            stop_ids = sorted(one for one in request.stop_ids if one < self._vocab_size)
            new = replace(new, may_stop_at=request.num_prompt + params.min_tokens, stop_ids=stop_ids)
        self._rows.append(new)

    def drain(self) -> tuple[list[NewRow], list[bytes]]:
        """Returns the rows and the prompts of `StepPlan` that were added since the last call."""
        rows, prompts = self._rows, [distinct_ids(ids, self._vocab_size) for ids in self._prompts]
        self._rows, self._prompts = [], {}
        return rows, prompts


def distinct_ids(prompt_ids: bytes, vocab_size: int) -> bytes:
    """Returns the token ids of a prompt, each once and ascending; both are int32 bytes."""
    is_seen = np.zeros(vocab_size, dtype=bool)
    is_seen[np.frombuffer(prompt_ids, dtype=np.int32)] = True
    return np.flatnonzero(is_seen).astype(np.int32).tobytes()
