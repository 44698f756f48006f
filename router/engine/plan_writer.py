"""Writes the plan of a step once the scheduler has decided what it computes and the ledger has its slots."""

from typing import NamedTuple

from lightkv.edits import Alloc, encode
from lightkv.ledger import Sequence
from lightkv.ledger.prefix_tree import TOKEN_BYTES
from lightkv.ledger.shared_prefixes import BatchPrefixes
from lightkv.router.sampling_params import SamplerKind

from .ledger import Ledger
from .new_rows import NewRows
from .request import Request
from .step import Limits, StepPlan


class Chunk(NamedTuple):
    """The positions of a request's prefill that the next step computes."""

    request: Request
    start: int
    num_tokens: int


class PlanWriter:
    """The plans of the steps over one ledger, whose step number goes up with each."""

    def __init__(self, ledger: Ledger, limits: Limits) -> None:
        self._ledger = ledger
        self._new_rows = NewRows(limits.vocab_size)
        self._prefixes = BatchPrefixes(ledger, limits.prefix_sharing)

    def introduce(self, request: Request) -> None:
        """Notes that the request's sequence was opened: the next plan says how its row is sampled."""
        assert request.sequence is not None
        self._new_rows.add(request, request.sequence.row)

    def write(
        self, chunks: list[Chunk], decoding: list[Request], sequences: list[Sequence], decode_alloc: Alloc
    ) -> StepPlan:
        """Returns the plan of these chunks and decodes, whose slots the ledger has allocated."""
        ledger = self._ledger
        # The allocation of the decodes' slots travels as the batch itself (`StepPlan.decode_alloc`).
        edits = [edit for edit in ledger.drain() if edit is not decode_alloc]
        sample = [i for i, chunk in enumerate(chunks) if not chunk.request.num_prefill_left]
        sampled = [chunks[i].request for i in sample] + decoding
        sample.extend(range(len(chunks), len(chunks) + len(decoding)))
        kind = max([request.kind for request in sampled], default=SamplerKind.GREEDY)
        logprobs = {}
        if kind >= SamplerKind.EDITED:
            wanted = [request.params.logprobs for request in sampled]
            logprobs = {i: count for i, count in enumerate(wanted) if count is not None}
        new_rows, prompts = self._new_rows.drain()
        plan = StepPlan(
            step=ledger.step,
            edits=encode(edits),
            rows=[*(chunk.request.sequence.row for chunk in chunks), *decode_alloc.rows],  # type: ignore[union-attr]
            starts=[*(chunk.start for chunk in chunks), *decode_alloc.starts],
            counts=[*(chunk.num_tokens for chunk in chunks), *decode_alloc.counts],
            num_prefills=len(chunks),
            token_ids=b"".join(
                request.prefill_ids[start * TOKEN_BYTES : (start + count) * TOKEN_BYTES]
                for request, start, count in chunks
            ),
            sample=sample,
            kind=kind,
            logprobs=logprobs,
            new_rows=new_rows,
            num_free=ledger.num_free,
            prefixes=self._prefixes.of(sequences),
            prompts=prompts,
            scored=[
                scored
                for part, (request, start, count) in enumerate(chunks)
                if request.is_scored and (scored := request.score(part, start, count)) is not None
            ],
        )
        ledger.step += 1
        return plan
