"""What an answer has beside its text where a request asks for it: token ids, and log-probabilities of the
prompt. Also how much of it the answers to one request may have together."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from lightkv.ledger.prefix_tree import TOKEN_BYTES
from lightkv.router.engine.request import MAX_SCORES
from lightkv.router.engine.step import PromptLogprobs
from lightkv.router.sampling_params import InvalidParams
from lightkv.router.text.tokenizer import Tokenizer

from .generation import Generation, GenerationSpec
from .pieces import Long, Scores, encode, long_ids, long_list

# Most limits are for one prompt or one answer. This one, and MAX_SCORES, are for what a client multiplies:
# prompts, answers to each, their tokens, and what answers repeat of prompts.
MAX_ANSWER_BYTES = 256 * 2**20  # of JSON, where a log-probability and a token count with these bytes:
SCORE_BYTES, ID_BYTES = 64, 8
_KEPT_BYTES = 8  # of a log-probability while its answer is made and written
_ENTRY = b'"%d":{"logprob":%b,"rank":%d,"decoded_token":%b}'  # a token, by its id


class Echo(NamedTuple):
    """The text of a prompt, which stands before its answers. `has_special`: it has the prompt's special
    tokens."""

    text: str
    has_special: bool = False


@dataclass(frozen=True)
class Extras:
    """What a request asks for beside the text.

    token_ids: the ids of the prompt's tokens and of the answer's.
    ids_for_tokens: log-probabilities name a token by its id, as "token_id:5", and not by its text.
    prompt_logprobs: those of the prompt, in vLLM's form.
    echoes_logprobs: those of the prompt before those of the answer, in OpenAI's form.
    prompts: the prompts' tokens, int32 bytes each.
    echoed: the prompts as they stand before the answers, or none.
    num_repeats: how many answers to a prompt repeat what is asked for of it.
    """

    token_ids: bool = False
    ids_for_tokens: bool = False
    prompt_logprobs: bool = False
    echoes_logprobs: bool = False
    prompts: Sequence[bytes] = ()
    echoed: Sequence[Echo] = ()
    num_repeats: int = 1

    def prompt_ids(self, prompt_idx: int) -> Any:
        """Returns the tokens of a prompt as a `Long` list."""
        return long_ids(self.prompts[prompt_idx])

    def token(self, tokenizer: Tokenizer, token_id: int, begins: bool = False) -> str:
        """Returns what stands for a token among log-probabilities. `begins`: the text begins with it."""
        return name_by_id(token_id) if self.ids_for_tokens else tokenizer.token_text(token_id, begins)

    def scored_prompt(self, tokenizer: Tokenizer, prompt_idx: int, found: PromptLogprobs | None) -> Any:
        """Returns the log-probabilities of a prompt as a `Long` list of the tokens in each place, the first of
        which is null; None without any."""
        if found is None:
            return None
        return Long(lambda: long_list(_entries(tokenizer, self.prompts[prompt_idx], found)))


def _entries(tokenizer: Tokenizer, prompt: bytes, found: PromptLogprobs) -> Iterator[list[bytes]]:
    """Yields the JSON of a prompt's places, several at a time: its own token first, and then the likeliest."""
    text = cache(lambda token_id: encode(tokenizer.token_text(token_id)))
    ranks = iter(memoryview(found.ranks).cast("i"))
    yield [b"null"]
    for part in Scores.of_prompt(prompt, found).parts():
        entries = []
        for one, rank in zip(part, ranks, strict=False):
            tokens = [_ENTRY % (one.token_id, one.logprob, rank, text(one.token_id))]
            ranked = enumerate(zip(one.top_ids, one.top_logprobs, strict=True), 1)
            tokens += [
                _ENTRY % (other, number, other_rank, text(other))
                for other_rank, (other, number) in ranked
                if other != one.token_id
            ]
            entries.append(b"{%b}" % b",".join(tokens))
        yield [b",".join(entries)]


def prompt_scores(generation: Generation) -> Mapping[int, PromptLogprobs]:
    """Returns the log-probabilities of each prompt that has them; one of its answers brought them."""
    found = [(answer.prompt_idx, answer.completion.prompt_logprobs) for answer in generation.answers]
    return {prompt_idx: scores for prompt_idx, scores in found if scores is not None}


def name_by_id(token_id: int) -> str:
    """Returns the name of a token that no other token has."""
    return f"token_id:{token_id}"


def kept_bytes(spec: GenerationSpec) -> int:
    """Returns the bytes of the prompts' log-probabilities, which are kept until the answer is written."""
    top = spec.params.prompt_logprobs
    return 0 if top is None else _KEPT_BYTES * (top + 1) * _num_tokens(spec)


def most_tokens(spec: GenerationSpec, extras: Extras, least: int) -> int:
    """Returns how many tokens each answer of `spec` may have, so that all of them keep the limits.

    `extras`: what the answers have beside their tokens. `least`: how many tokens each answer needs. Raises
    InvalidParams if there is no room for so many.
    """
    params = spec.params
    num_answers = len(spec.prompts) * params.n
    num_repeated = _num_tokens(spec) * extras.num_repeats
    num_scores = num_repeated * ((params.prompt_logprobs or 0) + 1)
    num_scores *= extras.prompt_logprobs + extras.echoes_logprobs
    num_bytes = sum(len(echo.text.encode()) for echo in extras.echoed) * extras.num_repeats
    num_bytes += num_scores * SCORE_BYTES + num_repeated * extras.token_ids * ID_BYTES
    token_scores = params.logprobs + 1 if params.logprobs is not None else 0
    token_bytes = token_scores * SCORE_BYTES + (1 + extras.token_ids) * ID_BYTES
    what = f"{num_answers} answers of {least} tokens to {len(spec.prompts)} prompts have"
    total = num_scores + num_answers * least * token_scores
    if total > MAX_SCORES:
        field = "prompt_logprobs" if extras.prompt_logprobs else "logprobs"
        allowed = (
            f"fewer, or fewer or shorter prompts and answers: {what} {total} log-probabilities, and "
            f"{MAX_SCORES} are allowed in one request"
        )
        raise InvalidParams(field, getattr(params, field), allowed)
    total = num_bytes + num_answers * least * token_bytes
    if total > MAX_ANSWER_BYTES:
        allowed = (
            f"fewer, or fewer or shorter prompts: {what} some {total} bytes, and {MAX_ANSWER_BYTES} are "
            "allowed in one request"
        )
        raise InvalidParams("n", params.n, allowed)
    most = (MAX_ANSWER_BYTES - num_bytes) // (num_answers * token_bytes)
    if token_scores:
        most = min(most, (MAX_SCORES - num_scores) // (num_answers * token_scores))
    return most


def _num_tokens(spec: GenerationSpec) -> int:
    """Returns the number of tokens of all prompts."""
    return sum(map(len, spec.prompts)) // TOKEN_BYTES
