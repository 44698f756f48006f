"""POST /v1/completions: the body of a plain completion, and how it is answered."""

from dataclasses import replace
from typing import Annotated, ClassVar

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from lightkv.router.api.answers.completion_writer import CompletionWriter
from lightkv.router.api.answers.extras import Echo
from lightkv.router.sampling_params import InvalidParams
from lightkv.router.text.completion import AnswerForm

from .generation import Desk, GenerationRequest, Ids, Texts
from .prompts import PromptReader
from .refused import COMPLETIONS


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    refused: ClassVar = COMPLETIONS
    own_max_tokens: ClassVar[int | None] = 16  # OpenAI's for plain completions

    prompt: str | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)] = Field(
        description="A text, its token ids, or a list of either."
    )
    suffix: str | None = Field(
        None, description="The text after the answer, for models with tokens for it; prompts are texts then."
    )
    logprobs: int | None = Field(
        None, description="How many of the likeliest tokens to return with each token, 0 to 20."
    )
    echo: bool | None = Field(
        None, description="Repeat the prompt before each answer; with max_tokens 0 it is all."
    )
    add_special_tokens: bool | None = Field(
        None, description="Add the tokenizer's special tokens to the prompt; on by default."
    )

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or its token ids."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]

    @property
    def answers_nothing(self) -> bool:
        """Whether the answer is the prompt alone: `echo` with a `max_tokens` of 0."""
        return bool(self.echo) and super().stated_max_tokens == 0

    @property
    def stated_max_tokens(self) -> int | None:
        """The most tokens of an answer, if the request says. One is computed where none is shown."""
        return 1 if self.answers_nothing else super().stated_max_tokens

    @property
    def echoes_logprobs(self) -> bool:
        """Whether the log-probabilities of the prompt stand before those of the answer."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def prompt_scores(self) -> int | None:
        if not self.echoes_logprobs:
            return self.prompt_logprobs
        return max(self.prompt_logprobs or 0, self.logprobs or 0)

    def check_prompts(self) -> None:
        """Raises InvalidParams if fields do not go with the prompts."""
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompts):
            raise InvalidParams("suffix", self.suffix, "it with prompts that are texts")
        if self.echoes_logprobs and self.stream and (self.n or 1) > 1:
            raise InvalidParams("echo", self.echo, "it without logprobs in a stream of several answers")


class Completions:
    """Answers plain completions."""

    def __init__(self, desk: Desk, prompts: PromptReader) -> None:
        self._desk = desk
        self._prompts = prompts

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """POST /v1/completions: continue one or several prompts."""
        body.check_prompts()
        texts = body.prompts
        accepted = self._desk.accept(body, request, body.logprobs, len(texts))
        context = accepted.context
        made = []
        for prompt in texts:  # a prompt that is too long is refused before the next one is tokenised
            if body.suffix:
                prompt_ids = await self._prompts.ids_between(str(prompt), body.suffix, context)
            elif isinstance(prompt, str):
                prompt_ids = await self._prompts.ids_of_text(
                    prompt, body.add_special_tokens is not False, context
                )
            else:
                prompt_ids = await self._prompts.ids_of_ids(prompt, context)
            accepted.check_fits(prompt_ids.size)
            made.append(prompt_ids)
        echoed: list[Echo] = []
        if body.echo:
            for text, prompt_ids in zip(texts, made, strict=True):
                if isinstance(text, str):
                    echoed.append(Echo(text))
                else:
                    echoed.append(Echo(await self._prompts.closed_text_of(prompt_ids), has_special=True))
        prompts = [prompt_ids.tobytes() for prompt_ids in made]
        spec = replace(
            accepted.spec,
            prompts=prompts,
            form=AnswerForm(continues=True, is_echoed=body.echo is True),
        )
        extras = replace(
            accepted.extras,
            echoes_logprobs=body.echoes_logprobs,
            prompts=prompts,
            echoed=echoed,
            num_repeats=body.n or 1,
        )
        writer = CompletionWriter(accepted.model, self._prompts.tokenizer, extras)
        asked = replace(accepted, spec=spec, extras=extras)
        return await self._desk.answer(asked, writer, body, request)
