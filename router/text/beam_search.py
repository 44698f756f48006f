"""Beam search over the likeliest next tokens of each beam, which an engine finds a round at a time.

In a round every beam is a request of one token with the beam's text as its prompt. The engine's cache has all
of that text but its last token, since the beam's round before has left it there, and beams share what they have
in common. So beams are forks in the cache's tree of prefixes, counted, admitted and evicted like any others.
"""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from lightkv.router.engine.step import TokenLogprobs
from lightkv.router.sampling_params import (
    MAX_COUNT,
    MAX_LOGPROBS,
    InvalidParams,
    SamplingParams,
    check_ranges,
)

MAX_LENGTH_PENALTY = 100.0


class BeamParams(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a beam search. The fields are checked on creation.

    width: how many beams grow side by side.
    max_tokens: the most tokens of a beam.
    length_penalty: a finished beam's score is the sum of its log-probabilities divided by its number of tokens
        to this power, so that more than 0 favours long beams.
    ignore_eos: the model's own end tokens do not end a beam.
    """

    width: Annotated[int, Meta(ge=1, le=MAX_LOGPROBS)] = 4
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_COUNT)] = 256
    length_penalty: Annotated[float, Meta(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] = 1.0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Raises InvalidParams for a field out of range."""
        check_ranges(self)

    def round_params(self, num_ends: int) -> SamplingParams:
        """Returns the parameters of each request of a round, where `num_ends` tokens end a beam.

        So many of a beam's likeliest tokens hold enough that continue it. Raises InvalidParams.
        """
        if self.width + num_ends > MAX_LOGPROBS:
            most = MAX_LOGPROBS - num_ends
            allowed = f"at most {most} beams where {num_ends} tokens end an answer"
            raise InvalidParams("width", self.width, allowed)
        return SamplingParams(max_tokens=1, temperature=0.0, logprobs=self.width + num_ends, ignore_eos=True)


class Beam(NamedTuple):
    """One beam. `logprob`: the sum of its tokens' log-probabilities. `score`: that by its length.
    `finish_reason`: "stop" (its last token is an end token) or "length"."""

    token_ids: list[int]
    logprob: float
    score: float
    finish_reason: str = "length"


class BeamSearch:
    """The beams of one prompt, int32 bytes. `end_ids`: a beam ends with one of these tokens."""

    def __init__(self, prompt_ids: bytes, params: BeamParams, end_ids: frozenset[int]) -> None:
        self._prompt_ids = prompt_ids
        self._params = params
        self._end_ids = end_ids
        self._growing = [Beam([], 0.0, 0.0)]
        self.finished: list[Beam] = []  # the best first

    @property
    def prompts(self) -> list[bytes]:
        """The prompts of the next round's requests, int32 bytes; none once the search has ended."""
        return [self._prompt_ids + np.array(beam.token_ids, np.int32).tobytes() for beam in self._growing]

    def take(self, found: Sequence[TokenLogprobs]) -> None:
        """Adds a round: the likeliest tokens after each of `prompts`. Afterwards there are other prompts, or
        none."""
        width, most = self._params.width, self._params.max_tokens
        length = len(self._growing[0].token_ids) + 1
        grown = [
            (beam.logprob + logprob, beam_idx, token)
            for beam_idx, (beam, likeliest) in enumerate(zip(self._growing, found, strict=True))
            for token, logprob in zip(likeliest.top_ids, likeliest.top_logprobs, strict=True)
        ]
        grown.sort(key=lambda one: -one[0])
        growing: list[Beam] = []
        for rank, (logprob, beam_idx, token) in enumerate(grown):
            token_ids = [*self._growing[beam_idx].token_ids, token]
            is_end = token in self._end_ids
            beam = Beam(token_ids, logprob, self._score(logprob, length), "stop" if is_end else "length")
            if (is_end or length == most) and rank < width:
                self.finished.append(beam)
            if not is_end and len(growing) < width:
                growing.append(beam)
        self.finished = sorted(self.finished, key=lambda beam: -beam.score)[:width]
        # Too few are finished yet, or a growing one is better at its present length than the worst of them.
        improves = len(self.finished) < width or (growing and growing[0].score > self.finished[-1].score)
        self._growing = growing if length < most and improves else []

    def _score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self._params.length_penalty)
