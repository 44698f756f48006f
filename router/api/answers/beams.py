"""Answers by beam search: rounds of requests to the router, each of one token a beam."""

import asyncio
from copy import copy
from dataclasses import replace

from starlette.types import Receive

from lightkv.ledger.prefix_tree import TOKEN_BYTES
from lightkv.router.engine.step import TokenEvent
from lightkv.router.text.beam_search import Beam, BeamParams, BeamSearch
from lightkv.router.text.completion import Completion

from .generation import (
    Answer,
    Backend,
    BeamAnswers,
    Generation,
    GenerationLost,
    GenerationSpec,
    closed_with_client,
)

_AT_ONCE = 256  # tokens of a beam, which are read before other tasks run


async def search_beams(
    backend: Backend, spec: GenerationSpec, params: BeamParams, receive: Receive
) -> BeamAnswers:
    """Returns the best beams of each prompt of `spec`, whose own parameters say only how a text is shown. The
    search ends early if the client disconnects.

    Raises InvalidParams, RequestRefused, GenerationFailed and GenerationLost, after which nothing runs.
    """
    end_ids = frozenset() if params.ignore_eos else backend.tokenizer.eos_ids
    one_token = params.round_params(len(end_ids))
    searches = [BeamSearch(prompt_ids, params, end_ids) for prompt_ids in spec.prompts]
    first: Generation | None = None  # that of the first round, with one answer to each prompt
    while growing := [search for search in searches if search.prompts]:
        counts = [len(search.prompts) for search in growing]
        prompts = [prompt for search in growing for prompt in search.prompts]
        generation = await backend.generate(
            replace(spec, prompts=prompts, params=one_token, states_length=True, shows_logprobs=True)
        )
        async with closed_with_client(receive, generation):
            async for _ in generation.deltas():
                pass
        if not all(len(answer.scored) for answer in generation.answers):
            raise GenerationLost("its client has disconnected")
        first = first or generation
        scored = iter(generation.answers)
        for search, count in zip(growing, counts, strict=True):
            search.take([next(scored).scored.first for _ in range(count)])
    assert first is not None
    answers = [
        await _answer(backend, beam, spec, first.answers[prompt_idx])
        for prompt_idx, search in enumerate(searches)
        for beam in search.best
    ]
    answers = [replace(answer, index=index) for index, answer in enumerate(answers)]
    num_prompt = sum(map(len, spec.prompts)) // TOKEN_BYTES
    return BeamAnswers(answers, num_prompt, first.num_cached_tokens, first.num_hit_tokens)


async def _answer(backend: Backend, beam: Beam, spec: GenerationSpec, first: Answer) -> Answer:
    """Returns a beam as an answer that is complete. `first`: that of the first round to its prompt, whose times
    it has."""
    completion = Completion(backend.tokenizer, spec.params, spec.form, spec.prompts[first.prompt_idx])
    last = len(beam.token_ids) - 1
    for place, token in enumerate(beam.token_ids):
        if place % _AT_ONCE == 0:
            await asyncio.sleep(0)
        completion.push(TokenEvent("", token, beam.finish_reason if place == last else None))
    clock = copy(first.clock)
    clock.ended = None  # until the request has ended
    return Answer(0, first.prompt_idx, completion, clock, False, first.num_cached)
