"""A request: one prompt on its way to one completion, and why one may be refused. Integers only, no torch.

Knows what was asked and what has come of it; when it runs is the scheduler's matter.
"""

from array import array

from lightkv.errors import LightKVError
from lightkv.ledger import Sequence
from lightkv.ledger.prefix_tree import TOKEN_BYTES, Namespace
from lightkv.router.sampling_params import SamplingParams


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
    its random numbers depend on. `priority`: the lower, the sooner it is admitted. `rank`: its place in the
    queue, which the scheduler gives it by priority and time. `expected`: the output
    tokens that admission counts it with, up to `max_tokens`. `finish_reason`: None while it lives, then "stop",
    "length", "abort" or "error". `flying`: steps under way that it is in.

    What is computed before it decodes is its context: the prompt, and after a pause the output so far.
    """

    __slots__ = (
        "arrival",
        "cached",
        "expected",
        "finish_reason",
        "flying",
        "id",
        "is_late",
        "kind",
        "max_tokens",
        "namespace",
        "num_computed",
        "num_hit",
        "num_preemptions",
        "num_prefill_tokens",
        "num_prompt",
        "output",
        "params",
        "prefill_ids",
        "priority",
        "prompt_ids",
        "queued",
        "rank",
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
        priority: int = 0,
    ) -> None:
        self.id = request_id
        self.prompt_ids = prompt_ids
        self.num_prompt = len(prompt_ids) // TOKEN_BYTES
        self.prefill_ids = prompt_ids
        self.num_prefill_tokens = self.num_prompt
        self.params = params
        self.kind = params.kind  # these two are asked for at every step
        self.max_tokens = params.max_tokens
        self.expected = params.max_tokens
        self.seed = seed
        self.stop_ids = stop_ids
        self.namespace = namespace
        self.priority = priority
        self.arrival = 0  # its number in the order of arrival; set when it is queued
        self.rank: float = priority
        self.queued: float | None = None  # when it came, in seconds; else set when it is queued
        self.is_late = False  # has it waited for so long that others go first?
        self.output = array("i")
        self.sequence: Sequence | None = None
        self.num_hit = 0  # tokens of the prompt found in the cache
        self.num_preemptions = 0
        self.num_computed = 0  # tokens that it had when it was last paused
        self.finish_reason: str | None = None
        self.cached = True  # once it has ended: do its tokens stay in the cache?
        self.flying = 0

    @property
    def max_slots(self) -> int:
        """Slots that it takes at most: the last token sampled is never written."""
        return self.num_prompt + self.max_tokens - 1

    @property
    def final(self) -> int:
        """Slots that it is expected to come to."""
        return self.num_prompt + self.expected - 1

    @property
    def remaining(self) -> int:
        """Slots expected still to come, while it runs."""
        assert self.sequence is not None
        return self.final - self.sequence.length

    @property
    def order(self) -> tuple[float, bool, int]:
        """Its place: the lower is admitted first, the highest is paused first."""
        return self.rank, self.is_late, self.arrival

    def tail_ids(self) -> bytes:
        """What it has generated since its context was computed, int32 bytes."""
        return self.output[self.num_prefill_tokens - self.num_prompt :].tobytes()

    def pause(self) -> None:
        """Its sequence has been closed: it will open another one, with what it has generated."""
        assert self.sequence is not None
        self.num_computed = self.sequence.length
        self.sequence = None
        self.num_preemptions += 1
        self.prefill_ids = self.prompt_ids + self.output.tobytes()
        self.num_prefill_tokens = self.num_prompt + len(self.output)
