"""The fields with which a request asks for a beam search, and what such a search does not heed."""

from pydantic import BaseModel, ConfigDict, Field

from lightkv.router.sampling_params import InvalidParams, SamplingParams
from lightkv.router.text.beam_search import BeamParams

# What the score of a beam does not depend on. Fields of sampling alone (temperature, top_p …) change nothing.
_NOT_WITH_BEAMS = (
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logprobs",
    "prompt_logprobs",
    "stop",
    "stop_token_ids",
)


class BeamFields(BaseModel):
    """How many answers are generated to return the best of them, one by one or as beams."""

    model_config = ConfigDict(strict=True, hide_input_in_errors=True)

    best_of: int | None = Field(
        None,
        description="Generate so many answers to each prompt, and return the n whose tokens are the likeliest "
        "on average; not in a stream.",
    )
    use_beam_search: bool | None = Field(
        None,
        description="Return the n best beams of a search with best_of (by default n) beams; not in a stream.",
    )
    length_penalty: float | None = Field(
        None, description="The power of a beam's length that its score is divided by; 1 by default."
    )

    def beam_params(self, params: SamplingParams, n: int, streams: bool, grammar_field: str) -> BeamParams:
        """Returns the parameters of the beam search that the request asks for. Raises InvalidParams, also for
        fields that a search does not heed.

        `params`: those of all answers. `n`: how many beams are returned. `grammar_field`: the field that says
        what the answer has to be.
        """
        if params.grammar is not None:
            allowed = "it without use_beam_search, which does not heed it"
            raise InvalidParams(grammar_field, "what the answer has to be", allowed)
        if streams:
            raise InvalidParams("use_beam_search", True, "it without stream: true")
        plain_params = SamplingParams(max_tokens=params.max_tokens)
        for field in _NOT_WITH_BEAMS:
            value = getattr(params, field)
            if value != getattr(plain_params, field):
                raise InvalidParams(field, value, "it without use_beam_search, which does not heed it")
        return BeamParams(
            width=self.best_of or n,
            num_returned=n,
            max_tokens=params.max_tokens,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            ignore_eos=params.ignore_eos,
        )
