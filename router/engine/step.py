"""A step: the plan that the scheduler makes, the result that the device returns, and their contents.

Plain data without torch. In one process it is passed as it is; between processes msgspec encodes it to bytes.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from lightkv.edits import Alloc, Edit, decode
from lightkv.holdings import Holdings
from lightkv.layer_groups import ONE_GROUP, LayerGroups
from lightkv.ledger.shared_prefixes import PrefixSharing, SharedPrefix
from lightkv.memory_map import Counts, Owner
from lightkv.router.sampling_params import SamplerKind, SamplingParams

from .step_time import StepTime, Work


class Limits(msgspec.Struct, frozen=True):
    """How much may run at once.

    Attributes:
        max_num_seqs: requests.
        max_model_len: tokens of one request, prompt and output together.
        prefill_chunk: prompt tokens a step; with 0 no prompt is cut, unless an `itl_target` is given.
        vocab_size: token ids are below it.
        prefix_sharing: which prefixes that decodes share are worth reading together.
        itl_target: the seconds that a step with decodes and prompts may take, where the time of a step is known
            (`RunnerInfo.step_time`); 0 is no target, and None is chosen by `PrefillBudget`.
        session_share: the share of the pool that sessions protect at most.
    """

    max_num_seqs: int
    max_model_len: int
    prefill_chunk: int
    vocab_size: int
    prefix_sharing: PrefixSharing = PrefixSharing(max_members=1)
    itl_target: float | None = None
    session_share: float = 0.0

    @property
    def prefill_budget(self) -> int:
        """The most prompt tokens that one step computes."""
        return self.prefill_chunk or self.max_model_len

    @property
    def max_step_tokens(self) -> int:
        """The most tokens that one step computes."""
        return self.prefill_budget + self.max_num_seqs


class NewRow(msgspec.Struct, frozen=True):
    """What sampling needs of a sequence that begins in `row`; it is sent once.

    Attributes:
        prompt_idx: the index of the sequence's prompt in the plan's `prompts`, where a penalty looks at it.
        output_ids: what a preempted sequence had generated, int32 bytes, where a penalty or a grammar looks at
            it.
        last_ids: the last tokens before the first sampled one, int32 bytes, where bad words look at them.
        may_stop_at: none of `stop_ids` is sampled before this position (`SamplingParams.min_tokens`).
        grammar: the id of the compiled grammar of the sequence's text; None leaves it free.
    """

    row: int
    params: SamplingParams
    seed: int
    prompt_idx: int | None = None
    output_ids: bytes = b""
    last_ids: bytes = b""
    may_stop_at: int = 0
    stop_ids: list[int] = []
    grammar: int | None = None


class ScoredChunk(msgspec.Struct, frozen=True):
    """The tokens of a prompt whose log-probabilities a step computes.

    Attributes:
        part: the index into the batch of the chunk that computes the logits.
        first: the place in the chunk of the first of these logits; the others follow it.
        targets: the tokens that come after them, int32 bytes.
        num_top: how many of the likeliest tokens are returned with each.
    """

    part: int
    first: int
    targets: bytes
    num_top: int


class StepPlan(msgspec.Struct, frozen=True):
    """One step of the device: edits of the memory, a forward pass over a packed batch, and sampling.

        batch      prefill chunks       | decodes
        index      0 ... num_prefills-1 | num_prefills ... len(rows)-1
        tokens     counts[i] each       | one each
        their ids  token_ids, packed    | what their rows sampled last
        slots      by `edits`           | by `decode_alloc`, after the edits

    Attributes:
        edits: encoded (`lightkv.edits`).
        rows, starts, counts: the batch's i-th part computes positions [starts[i], starts[i] + counts[i]) of
            rows[i].
        token_ids: int32 bytes.
        sample: the indices into the batch whose last token's logits are sampled.
        logprobs: index into `sample` → how many of the likeliest tokens are returned with it.
        new_rows: the sequences that begin.
        prompts: for each prompt that a penalty looks at, its distinct token ids, ascending, int32 bytes. The
            answers to one prompt share an entry.
        num_free: the ledger's count of free slots once the step's slots are allocated.
        scored: the tokens of prompts whose log-probabilities are computed.
        prefixes: which decodes have their first tokens in the same slots, so that they are read once.
        pieces: where layers have states, the parts that another part of their row follows, by their index into
            the batch: after how many of the edits their row says which states they read and write. Of all
            others it says so after the last one.
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
    scored: list[ScoredChunk] = []
    pieces: dict[int, int] = {}

    @property
    def num_tokens(self) -> int:
        """The tokens in the batch."""
        return sum(self.counts)

    @property
    def work(self) -> Work:
        """What the step computes, for the step-time model."""
        num, starts = self.num_prefills, self.starts
        decodes = len(self.rows) - num
        prompt = pairs = 0
        for start, count in zip(starts[:num], self.counts, strict=False):
            prompt += count
            pairs += count * start + count * (count + 1) // 2
        return Work(decodes, sum(starts) - sum(starts[:num]) + decodes, prompt, pairs)

    @property
    def decode_alloc(self) -> Alloc | None:
        """The allocation of the decodes' slots; None where there are no decodes. A CUDA graph allocates
        itself."""
        first = self.num_prefills
        if first == len(self.rows):
            return None
        return Alloc(tuple(self.rows[first:]), tuple(self.starts[first:]), tuple(self.counts[first:]))

    def all_edits(self) -> list[Edit]:
        """Returns every edit of the step, that of the decodes included."""
        edits, alloc = decode(self.edits), self.decode_alloc
        return edits if alloc is None else [*edits, alloc]


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """The log-probability of a sampled token, and the likeliest ids with theirs, the likeliest first."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class PromptLogprobs(msgspec.Struct, frozen=True, gc=False):
    """The log-probabilities of n tokens of a prompt, and of the k likeliest tokens in the place of each.

    Attributes:
        logprobs: float32 bytes [n]; ranks: int32 bytes [n], 1 where the token is the likeliest.
        top_ids, top_logprobs: int32 and float32 bytes [n, k], the likeliest first.
    """

    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes

    def __len__(self) -> int:
        return len(self.logprobs) // 4

    @classmethod
    def joined(cls, parts: "Sequence[PromptLogprobs]") -> "PromptLogprobs":
        """Returns those of all parts, in order."""
        names = cls.__struct_fields__
        return cls(*(b"".join([getattr(part, name) for part in parts]) for name in names))

    def per_token(self) -> list[tuple[TokenLogprobs, int]]:
        """Returns each token's log-probabilities and its rank."""
        num = len(self)
        num_top = len(self.top_ids) // 4 // max(num, 1)
        ids = np.frombuffer(self.top_ids, np.int32).reshape(num, num_top)
        values = np.frombuffer(self.top_logprobs, np.float32).reshape(num, num_top)
        own, ranks = np.frombuffer(self.logprobs, np.float32), np.frombuffer(self.ranks, np.int32)
        rows = zip(own.tolist(), ids.tolist(), values.tolist(), ranks.tolist(), strict=True)
        return [(TokenLogprobs(logprob, top, likely), rank) for logprob, top, likely, rank in rows]


# What the head of the queue waits for: one of `max_num_seqs` rows, a state, prompt tokens of a step, slots that
# are expected to be free, slots up to its limit; "": none has been refused.
WaitsFor = Literal["", "rows", "states", "prefill", "slots", "guarantee"]


class TokenEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a step brought to one request: a token and, with its last token, its end.

    Attributes:
        finish_reason: "stop", "length", "invalid" (no text of its grammar can go on), "error" (the step
            failed), "lost" (the worker died) or "abort". The last four come without a token, and `error` says
            why.
        num_cached: comes with the first token: how many of the prompt's tokens were found in the cache.
        waited: comes with the first token where a router sends it: the seconds that the request was queued.
        num_interruptions: comes with the first token after a preemption: how often the request was preempted.
        prompt_logprobs: come with the first token, where the request asks for them: of the prompt's tokens
            from the second on.
    """

    request_id: str
    token: int | None
    finish_reason: str | None = None
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    num_cached: int | None = None
    prompt_logprobs: PromptLogprobs | None = None
    waited: float | None = None
    num_interruptions: int = 0


class StepResult(msgspec.Struct, frozen=True):
    """What a step sampled, and the device's own counts after it.

    Attributes:
        tokens: `tokens[i]` was sampled for `StepPlan.sample[i]`.
        num_free, flags: the allocator's free slots and error flags
            (`lightkv.triton_kernels.layout.slot_flags`).
        logprobs: by index into `tokens`, where the plan asked for them.
        scored: one for each of the plan's `scored`.
        errors: by index into `tokens`, why a request cannot go on; only this request ends.
        had_ended: whether the device had ended the step before the next one was launched, and waited for that.
        num_missing_graphs: how many CUDA graphs are still to be captured.
    """

    step: int
    tokens: list[int]
    num_free: int
    flags: int
    logprobs: dict[int, TokenLogprobs] = {}
    scored: list[PromptLogprobs] = []
    errors: dict[int, str] = {}
    had_ended: bool = False
    num_missing_graphs: int = 0


class Captured(msgspec.Struct, frozen=True):
    """A capture of a CUDA graph: the seconds that it took, and how many graphs are still missing."""

    seconds: float
    num_missing: int


class ExpectedMemory(NamedTuple):
    """What the memory holds by the ledger's account: how many slots are free, and what rows and segments
    hold."""

    num_free: int
    holdings: Holdings


class StateMap(msgspec.Struct, frozen=True):
    """How many state slots are free, cached (snapshots), and private to a running request, and the bytes of
    all of them."""

    num_free: int
    num_cached: int
    num_own: int
    num_bytes: int


class PoolMap(msgspec.Struct, frozen=True):
    """What the pool's slots were used for between two steps. The counts are of all slots, the cells a sample.

    `cells`: the label (`lightkv.memory_map`) of every `slots_per_cell`-th slot, from slot 1 on: 0 free, 1
    cached, 2 shared by several sequences, or 3 + the row that alone holds it. `owners`: all rows that alone
    hold tokens, the row with the most first; the worker leaves them out and the router adds them. `num_bytes`:
    of all slots. `states`: those of recurrent layers; None where no layer has any.
    """

    capacity: int
    num_free: int
    num_cached: int
    num_shared: int
    num_own: int
    longest_free_run: int
    slots_per_cell: int
    cells: list[int]
    num_bytes: int
    states: StateMap | None = None
    owners: list[Owner] = []

    @property
    def counts(self) -> Counts:
        """How many slots are used for what."""
        used = self.num_cached, self.num_shared, self.num_own
        return Counts(self.capacity, self.num_free, *used, self.longest_free_run)


class RunnerInfo(msgspec.Struct, frozen=True):
    """The properties of a model runner that is ready, for the scheduler and for display. `step_time`: what its
    steps take; None where that was not measured. `graph_tokens`: the tokens of its CUDA graphs for steps with
    prompts, ascending, to which smaller steps are padded; empty without graphs. `num_missing_graphs`: how many
    graphs are captured between steps, after the start. `kv_dtype` and `skipped_layers`
    are as the configuration gives them; `kv_type` is the name of what K and V are stored as. `num_ranks`: the
    processes that run the model together; bytes are those of one of them. `groups`: how its layers share slots;
    `capacity` is in slots, and `longest` says how many tokens fit whatever a request hits; None: as many.
    `left_out`: the modules of a model of several modalities that texts do not need, which are not loaded, with
    the bytes that their weights would take. `unfused`: how many layers run transformers' own code, by what of
    them does and why. `num_states`: the slots of states of recurrent layers, of `bytes_per_state` each."""

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
    step_time: StepTime | None = None
    graph_tokens: tuple[int, ...] = ()
    num_missing_graphs: int = 0
    kv_dtype: str = "auto"
    skipped_layers: tuple[int, ...] = ()
    num_ranks: int = 1
    groups: LayerGroups = ONE_GROUP
    longest: int | None = None
    left_out: dict[str, int] = {}
    unfused: dict[str, int] = {}
    num_states: int = 0
    bytes_per_state: int = 0

    @property
    def kv_type(self) -> str:
        """The name of the format of K and V in the pool: that of `kv_dtype`, or the computed type."""
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def max_in_flight(self) -> int:
        """The steps to have in flight: with two, a GPU has its next step queued while it runs one."""
        return 2 if self.cuda_graphs else 1
