"""What an answer has beside its text where a request asks for it: token ids, and log-probabilities of the
prompt."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from lightkv.router.engine.step import PromptLogprobs
from lightkv.router.text.tokenizer import Tokenizer

from .generation import Answered
from .pieces import Long, encode, long_ids, long_list
from .scores import Scores

_ENTRY = b'"%d":{"logprob":%b,"rank":%d,"decoded_token":%b}'  # a PromptToken, by its id


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
        """Returns the log-probabilities of a prompt as a `Long` list of PromptTokens, whose first is null; None
        without any."""
        if found is None:
            return None
        return Long(lambda: long_list(_entries(tokenizer, self.prompts[prompt_idx], found)))


def _entries(tokenizer: Tokenizer, prompt: bytes, found: PromptLogprobs) -> Iterator[list[bytes]]:
    """Yields the JSON of PromptTokens, several at a time."""
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


def prompt_scores(generation: Answered) -> Mapping[int, PromptLogprobs]:
    """Returns the log-probabilities of each prompt that has them; one of its answers brought them."""
    found = [(answer.prompt_idx, answer.completion.prompt_logprobs) for answer in generation.all_answers]
    return {prompt_idx: scores for prompt_idx, scores in found if scores is not None}


def name_by_id(token_id: int) -> str:
    """Returns the name of a token that no other token has."""
    return f"token_id:{token_id}"
