"""Every typed message that crosses from scheduling to the device and back, and on to whoever asked: plain
data, no torch.

In one process they are passed as they are; between processes msgspec encodes them to bytes.
"""

from typing import NamedTuple

import msgspec

from lightkv.ledger.shared_prefixes import PrefixSharing, SharedPrefix
from lightkv.memory_map import Counts, Owner
from lightkv.router.sampling_params import SamplerKind, SamplingParams


class Limits(msgspec.Struct, frozen=True):
    """How much may run at once: `max_num_seqs` requests, of `max_model_len` tokens each (prompt and output),
    and `prefill_chunk` prompt tokens a step (0: no prompt is ever cut). Token ids are below `vocab_size`.
    `grouping`: which prefixes that decodes share are worth reading together."""

    max_num_seqs: int
    max_model_len: int
    prefill_chunk: int
    vocab_size: int
    grouping: PrefixSharing = PrefixSharing(max_members=1)

    @property
    def prefill_budget(self) -> int:
        """Prompt tokens that one step computes at most."""
        return self.prefill_chunk or self.max_model_len

    @property
    def max_step_tokens(self) -> int:
        """Tokens that one step computes at most."""
        return self.prefill_budget + self.max_num_seqs


class NewRow(msgspec.Struct, frozen=True):
    """A sequence begins in `row`: what its sampling needs, once.

    Only parameters that penalise repetition need the next two. `prompt_idx`: which of the plan's `prompts` is
    its own. `output_ids`: what a resumed sequence has generated, int32 bytes. Until the position `may_stop_at`
    none of `stop_ids` is sampled (`SamplingParams.min_tokens`).
    """

    row: int
    params: SamplingParams
    seed: int
    prompt_idx: int | None = None
    output_ids: bytes = b""
    may_stop_at: int = 0
    stop_ids: list[int] = []


class StepPlan(msgspec.Struct, frozen=True):
    """One step of the device: edits, then a forward pass over a packed batch, then sampling.

    The batch is `rows[i]`, positions `starts[i]` to `starts[i] + counts[i]`: prefill chunks first
    (`num_prefills` of them, their ids packed in `token_ids`, int32 bytes), then the decodes, one token each,
    whose id is the token their row sampled last. `edits` (encoded, `lightkv.edits`) already give these
    positions their slots. In a step of decodes alone the last edit is exactly the Take of the batch, so that
    a CUDA graph may do it in place of the applier.

    `new_rows`: the sequences that begin. `prompts`: of each prompt that their penalties look at, the distinct
    token ids, ascending, int32 bytes; answers to one prompt share an entry.

    `sample`: indices into the batch whose last token's logits are sampled. `logprobs`: index into `sample` →
    how many of the likeliest tokens are wanted with it. `num_free`: what the ledger counts once the edits are
    applied. `prefixes`: which decodes have their first tokens in the same slots, so that these are read once.
    """

    step: int
    edits: bytes
    rows: list[int]
    starts: list[int]
    counts: list[int]
    num_prefills: int
    token_ids: bytes
    sample: list[int]
    kind: SamplerKind
    logprobs: dict[int, int]
    new_rows: list[NewRow]
    num_free: int
    prefixes: list[SharedPrefix] = []
    prompts: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        """Tokens in the batch."""
        return sum(self.counts)


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """The sampled token's log-probability, and the likeliest ids with theirs, the likeliest first."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class TokenEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a step brought one request: a token, and its end if that was the last.

    `finish_reason`: "stop", "length", "error" (its step failed), "lost" (its worker died) or "abort"; the
    latter three have no token, and say why in `error`. `num_cached`: with the first token, tokens of the
    prompt found in the cache.
    """

    request_id: str
    token: int | None
    finish_reason: str | None = None
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    num_cached: int | None = None


class StepResult(msgspec.Struct, frozen=True):
    """What came of a plan: `tokens[i]` was sampled for the batch's `sample[i]`; the device's own counts."""

    step: int
    tokens: list[int]
    num_free: int
    flags: int
    logprobs: dict[int, TokenLogprobs] = {}  # by index into `tokens`, where asked for


class ExpectedMemory(NamedTuple):
    """What the ledger says the memory holds: the free count, and the ranges (row, start, end) that one
    sequence alone has."""

    num_free: int
    private: list[tuple[int, int, int]]


class SlotOwners(msgspec.Struct, frozen=True):
    """Whose the slots are, which the ledger knows and the memory does not.

    `segments`: of each that is held, by its id, the label (`lightkv.memory_map`). `private`: the ranges (row,
    start, end) that one sequence alone has.
    """

    segments: dict[int, int]
    private: list[tuple[int, int, int]]


class PoolMap(msgspec.Struct, frozen=True):
    """What the pool's slots were used for between two steps. The counts are of all slots, the cells a sample.

    `cells`: the label (`lightkv.memory_map`) of every `slots_per_cell`-th slot, from slot 1 on: 0 free, 1
    cached, 2 shared by several sequences, or 3 + the row that alone holds it. `owners`: all rows that alone
    hold tokens, the row with the most first; the worker leaves them out and the router adds them.
    """

    capacity: int
    num_free: int
    num_cached: int
    num_shared: int
    num_own: int
    longest_free_run: int
    slots_per_cell: int
    cells: list[int]
    owners: list[Owner] = []

    @property
    def counts(self) -> Counts:
        """How many slots are used for what."""
        return Counts(
            capacity=self.capacity,
            num_free=self.num_free,
            num_cached=self.num_cached,
            num_shared=self.num_shared,
            num_own=self.num_own,
            longest_free_run=self.longest_free_run,
        )


class RunnerInfo(msgspec.Struct, frozen=True):
    """What a model runner came to, once it is ready: what the scheduler needs, and what people are told."""

    architecture: str
    device: str
    dtype: str
    attention_backend: str
    cuda_graphs: bool
    capacity: int
    bytes_per_token: int
    pool_bytes: int
    pool_reason: str
    limits: Limits
