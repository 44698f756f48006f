"""Writes the answers of a plain completion as OpenAI's JSON objects: whole, and as chunks of a stream."""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain, islice
from typing import Any

import msgspec

from lightkv.router.engine.step import PromptLogprobs
from lightkv.router.text.detokenizer import REPLACEMENT, Detokenizer, Place
from lightkv.router.text.tokenizer import Tokenizer

from .extras import Extras, name_by_id, prompt_scores
from .generation import Answer, Generation, TextDelta, usage_of
from .pieces import Long, Object, Places, ScoredToken, Scores, encode, head_of, in_pieces, long_list


class CompletionWriter:
    """Writes the bodies of one plain completion. `extras`: what answers have beside their text."""

    divides_answers = False  # the text of an answer is written as it is

    def __init__(self, model: str, tokenizer: Tokenizer, extras: Extras | None = None) -> None:
        self.extras = extras or Extras()
        self._tokenizer = tokenizer
        self._head = head_of("cmpl", model)
        self._opened: set[int] = set()

    def whole(self, generation: Generation) -> Iterator[bytes]:
        """Yields the body of an answer that is not streamed."""
        scores = prompt_scores(generation)

        def choices() -> Iterator[bytes]:
            written = (self._choice(_all_of(one), scores.get(one.prompt_idx)) for one in generation.answers)
            return long_list(map(in_pieces, written))

        return in_pieces(self._body(Long(choices)) | {"usage": usage_of(generation)})

    def chunks(self, delta: TextDelta) -> list[Object]:
        """Returns the chunks of a stream for a delta."""
        scores = delta.answer.completion.prompt_logprobs if self.extras.echoes_logprobs else None
        return [self._body([self._choice(delta, scores)])]

    def usage_chunk(self, usage: Object) -> Object:
        """Returns the last chunk of a stream, which has the token counts."""
        return self._body([]) | {"usage": usage}

    def _body(self, choices: Any) -> Object:
        return {**self._head, "object": "text_completion", "choices": choices}

    def _choice(self, delta: TextDelta, prompt_scores: PromptLogprobs | None) -> Object:
        answer, text = delta.answer, delta.text
        opens = answer.index not in self._opened
        self._opened.add(answer.index)
        if self.extras.echoed and opens:
            text = self.extras.echoed[answer.prompt_idx].text + text
        logprobs = None
        if answer.has_logprobs:
            of_prompt = prompt_scores if opens and self.extras.echoes_logprobs else None
            logprobs = self._logprobs(answer, delta.scored or Scores(), of_prompt)
        choice: Object = {
            "index": answer.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }
        if self.extras.token_ids:
            choice["token_ids"] = list(delta.token_ids)
            if opens:
                choice["prompt_token_ids"] = self.extras.prompt_ids(answer.prompt_idx)
        if self.extras.prompt_logprobs:
            choice["prompt_logprobs"] = self.extras.scored_prompt(
                self._tokenizer, answer.prompt_idx, prompt_scores
            )
        return choice

    def _logprobs(self, answer: Answer, scored: Scores, prompt: PromptLogprobs | None) -> Object:
        """Returns lists of the tokens that are scored, which are `Long`. `prompt`: stands before them, and its
        first token has no log-probability."""
        found, first = [scored], list[ScoredToken]()
        short = found[0].short if prompt is None else None  # as in most chunks of a stream
        echoed = len(self.extras.echoed[answer.prompt_idx].text) if self.extras.echoed else 0
        if prompt is not None:
            prompt_ids = self.extras.prompts[answer.prompt_idx]
            found.insert(0, Scores.of_prompt(prompt_ids, prompt, self._places(answer.prompt_idx)))
            first_id = memoryview(prompt_ids).cast("i")[0]
            first = [ScoredToken(first_id, b"null", [], [], Place(-echoed, begins=True))]

        def all_of(write: Callable[[ScoredToken], bytes]) -> Any:
            if short is not None:
                return msgspec.Raw(b"[%b]" % b",".join(map(write, short)))

            def pieces() -> Iterator[bytes]:
                parts = chain([first] if first else [], *(scores.parts() for scores in found))
                return long_list([b",".join(map(write, part))] for part in parts)

            return Long(pieces)

        def encoded(token_id: int, begins: bool) -> bytes:
            return encode(self._name(token_id, begins))

        name = encoded if short is not None else cache(encoded)

        def likeliest(one: ScoredToken) -> bytes:
            if first and one is first[0]:
                return b"null"
            by_name = {name(one.token_id, one.place.begins): one.logprob}
            for other_id, logprob in zip(one.top_ids, one.top_logprobs, strict=True):
                if other_id != one.token_id:
                    other = name(other_id, one.place.begins)
                    by_name[encode(name_by_id(other_id)) if other in by_name else other] = logprob
            return b"{%b}" % b",".join([b"%b:%b" % entry for entry in by_name.items()])

        return {
            "tokens": all_of(lambda one: name(one.token_id, one.place.begins)),
            "token_logprobs": all_of(lambda one: one.logprob),
            "top_logprobs": all_of(likeliest),
            "text_offset": all_of(lambda one: b"%d" % (echoed + one.place.start)),
        }

    def _places(self, prompt_idx: int) -> Places:
        """Returns the places of an echoed prompt's tokens from the second on, counted back from the answer."""
        text, has_special = self.extras.echoed[prompt_idx]
        detokenizer = Detokenizer(self._tokenizer, not has_special)
        ids = memoryview(self.extras.prompts[prompt_idx]).cast("i")
        places = (detokenizer.push_placed(token_id)[1] for token_id in ids)
        before = (place._replace(start=min(place.start - len(text), 0)) for place in places)
        return Places(islice(before, 1, None))

    def _name(self, token_id: int, begins: bool) -> str:
        """Returns the name of a token: its text or, of a part of a character, its bytes as in OpenAI's API."""
        name = self.extras.token(self._tokenizer, token_id, begins)
        if REPLACEMENT not in name:
            return name
        piece = self._tokenizer.token_bytes(token_id, begins)
        try:
            piece.decode()
        except UnicodeDecodeError:
            return f"bytes:{repr(piece)[2:-1]}"
        return name


def _all_of(answer: Answer) -> TextDelta:
    completion = answer.completion
    return TextDelta(
        answer,
        completion.text,
        scored=answer.scored,
        finish_reason=completion.finish_reason,
        token_ids=completion.token_ids,
    )
