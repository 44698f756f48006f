"""What an answer has beside its text where a request asks for it: token ids, and log-probabilities of the
prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightkv.router.engine.step import PromptLogprobs
from lightkv.router.text.tokenizer import Tokenizer

from .bodies import PromptToken, PromptTokens
from .generation import Answered

MIN_JSON_LOGPROB = -9999.0  # written for -inf, which JSON does not have, as in vLLM


@dataclass(frozen=True)
class Extras:
    """What a request asks for beside the text.

    token_ids: the ids of the prompt's tokens and of the answer's.
    ids_for_tokens: log-probabilities name a token by its id, as "token_id:5", and not by its text.
    prompt_logprobs: those of the prompt, in vLLM's form.
    echoes_logprobs: those of the prompt before those of the answer, in OpenAI's form.
    prompts: the prompts' tokens, int32 bytes each.
    """

    token_ids: bool = False
    ids_for_tokens: bool = False
    prompt_logprobs: bool = False
    echoes_logprobs: bool = False
    prompts: Sequence[bytes] = ()

    def prompt_ids(self, prompt_idx: int) -> list[int]:
        """Returns the tokens of a prompt."""
        return np.frombuffer(self.prompts[prompt_idx], np.int32).tolist()

    def token(self, tokenizer: Tokenizer, token_id: int) -> str:
        """Returns what stands for a token among log-probabilities."""
        return f"token_id:{token_id}" if self.ids_for_tokens else tokenizer.token_text(token_id)

    def scored_prompt(
        self, tokenizer: Tokenizer, prompt_idx: int, found: "Scores"
    ) -> list[PromptTokens | None] | None:
        """Returns the log-probabilities of a prompt, whose first token has none; None without any."""
        scores = found.get(prompt_idx)
        if scores is None:
            return None
        entries: list[PromptTokens | None] = [None]
        for token_id, (own, rank) in zip(self.prompt_ids(prompt_idx)[1:], scores.per_token(), strict=True):
            entry = {str(token_id): _entry(tokenizer, token_id, own.logprob, rank)}
            ranked = enumerate(zip(own.top_ids, own.top_logprobs, strict=True), 1)
            for other_rank, (other, logprob) in ranked:
                entry.setdefault(str(other), _entry(tokenizer, other, logprob, other_rank))
            entries.append(entry)
        return entries


Scores = Mapping[int, PromptLogprobs]  # of the prompts, by their numbers


def prompt_scores(generation: Answered) -> Scores:
    """Returns the log-probabilities of each prompt that has them; one of its answers brought them."""
    found = [(answer.prompt_idx, answer.completion.prompt_logprobs) for answer in generation.all_answers]
    return {prompt_idx: scores for prompt_idx, scores in found if scores is not None}


def finite(logprob: float) -> float:
    """Returns a number that JSON has."""
    return max(logprob, MIN_JSON_LOGPROB)


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int) -> PromptToken:
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}
