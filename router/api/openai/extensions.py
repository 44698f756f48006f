"""Fields of requests beyond OpenAI's own, named as in vLLM, and the types of their texts."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from lightkv.router.sampling_params import InvalidParams, SamplingParams
from lightkv.router.text.beam_search import BeamParams
from lightkv.token_set import TokenSet

from .extras import Extras


def mended(text: str) -> str:
    """Replaces half surrogate pairs, which JSON can carry and UTF-8 cannot, by U+FFFD (as
    `Tokenizer.encode`)."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _mended_values(value: Any) -> Any:
    """Mends all texts of plain data, which an answer repeats."""
    try:
        msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.loads(mended(json.dumps(value, ensure_ascii=False)))
    return value


Text = Annotated[str, AfterValidator(mended)]
Object = Annotated[dict[str, Any], AfterValidator(_mended_values)]
# fail_fast: a list of a million wrong items is one error, not a million.
Ids = Annotated[list[int], Field(fail_fast=True)]
# A list of token ids that becomes a set at once: lists of a whole vocabulary are never kept.
TokenIdSet = Annotated[list[int], Field(fail_fast=True), AfterValidator(TokenSet.of)]
Texts = Annotated[list[Text], Field(fail_fast=True)]


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


class AnswerFields(BaseModel):
    """Which tokens may be sampled, and what is returned beside the text."""

    model_config = ConfigDict(strict=True, hide_input_in_errors=True)

    bad_words: Texts | None = Field(None, description="Texts that an answer never has.")
    allowed_token_ids: TokenIdSet | None = Field(None, description="Only these tokens are sampled.")
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
    early_stopping: bool | Literal["never"] | None = Field(
        None, description="End the beam search once enough beams have finished; off by default."
    )
    prompt_logprobs: int | None = Field(
        None,
        description="How many of the likeliest tokens to return in the place of each token of the prompt, 0 to "
        "20, with the token's own log-probability; not in a stream.",
    )
    return_token_ids: bool | None = Field(
        None, description="Return the ids of the tokens of prompt and answer."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Name the tokens of log-probabilities by their ids, as token_id:5."
    )

    def extras(self) -> Extras:
        """Returns what the answer has beside its text, without the prompts."""
        return Extras(
            token_ids=self.return_token_ids is True,
            ids_for_tokens=self.return_tokens_as_token_ids is True,
            prompt_logprobs=self.prompt_logprobs is not None,
        )

    def num_generated(self, n: int, streams: bool) -> int:
        """Returns how many answers to each prompt are generated, of which `n` are returned. Raises
        InvalidParams."""
        if self.best_of is None:
            return n
        if self.best_of < n:
            raise InvalidParams("best_of", self.best_of, f"n, which is {n}, or more")
        if self.use_beam_search:
            return n  # it is the number of beams
        if streams and self.best_of > n:
            raise InvalidParams("best_of", self.best_of, f"n, which is {n}, in a stream")
        return self.best_of

    def beams(self, params: SamplingParams, n: int, streams: bool) -> BeamParams | None:
        """Returns the parameters of the beam search that the request asks for, or None.

        `params` are those of the request. Raises InvalidParams, also for fields that a search does not heed.
        """
        if not self.use_beam_search:
            for field, value, plain in (
                ("length_penalty", self.length_penalty, (None, 1)),
                ("early_stopping", self.early_stopping, (None, False)),
            ):
                if value not in plain:
                    raise InvalidParams(field, value, "it together with use_beam_search: true")
            return None
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
            early_stopping=self.early_stopping or False,
            ignore_eos=params.ignore_eos,
        )

    def check_stream(self, streams: bool) -> None:
        """Raises InvalidParams if the fields do not go with a stream."""
        if streams and self.prompt_logprobs is not None:
            raise InvalidParams("prompt_logprobs", self.prompt_logprobs, "it without stream: true")


class TemplateFields(BaseModel):
    """How a chat becomes a text."""

    model_config = ConfigDict(strict=True, hide_input_in_errors=True)

    chat_template: Text | None = Field(
        None,
        description="A template in place of the model's own; needs a service started with "
        "--trust-request-chat-template.",
    )
    documents: list[dict[str, Any]] | None = Field(
        None,
        fail_fast=True,
        description="Texts that the answer may use, as objects, for a chat template that has a place for them.",
    )
    continue_final_message: bool | None = Field(
        None, description="The answer continues the last message, whatever its role."
    )
    add_generation_prompt: bool | None = Field(
        None, description="Begin an assistant's message; on by default, but for continue_final_message."
    )

    @property
    def begins_answer(self) -> bool:
        """Whether the text ends with the words that begin an assistant's answer. Raises InvalidParams."""
        if not self.continue_final_message:
            return self.add_generation_prompt is not False
        if self.add_generation_prompt:
            allowed = "it without add_generation_prompt: the answer continues the last message"
            raise InvalidParams("continue_final_message", True, allowed)
        return False


class SuffixField(BaseModel):
    """What stands after the answer."""

    model_config = ConfigDict(strict=True, hide_input_in_errors=True)

    suffix: Text | None = Field(
        None, description="The text after the answer, for models with tokens for it; prompts are texts then."
    )

    def check_suffix(self, prompts: Sequence[str | list[int]], num_kept: int | None) -> None:
        """Raises InvalidParams if the suffix does not go with the prompts."""
        if self.suffix and not all(isinstance(prompt, str) for prompt in prompts):
            raise InvalidParams("suffix", self.suffix, "it with prompts that are texts")
        if self.suffix and num_kept is not None:
            raise InvalidParams("suffix", self.suffix, "it without truncate_prompt_tokens")
