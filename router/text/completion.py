"""The answers to a prompt: how they are planned for the engine, and how its tokens become text, or the parts of
an answer that is divided, up to a stop string.

The engine knows stop tokens, not stop strings. Once `Completion.stopped` is set, the caller has to end its
request.
"""

import secrets
from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from lightkv.ledger.prefix_tree import TOKEN_BYTES
from lightkv.router.engine.step import PromptLogprobs, TokenEvent
from lightkv.router.sampling_params import SamplingParams
from lightkv.router.text.tool_calls.source import Part

from .answer_reader import AnswerReader
from .banned_words import with_banned_ids
from .detokenizer import MAX_BEFORE, Before, Detokenizer, Place, StopChecker
from .tokenizer import Tokenizer


class AnswerForm(NamedTuple):
    """How the tokens of an answer become what the client gets.

    continues: the answer continues the text of its prompt. Else it begins a text, as a new message does.
    is_echoed: the client gets the text of the prompt with the answer, as `closed_text` makes it.
    shown_ids: special tokens that are part of the text in any case.
    new_reader: makes the reader that divides an answer; None where all of an answer is content.
    """

    continues: bool = False
    is_echoed: bool = False
    shown_ids: Collection[int] = frozenset()
    new_reader: Callable[[StopChecker], AnswerReader] | None = None


NEW_TEXT = AnswerForm()


class AnswerPlan:
    """How the answers to each prompt of a request are generated, in a process of one's own or by the service.

    `params`: those of the request. Raises InvalidParams for words to avoid that are too many tokens.

    Attributes:
        params: those of the first answer to each prompt, with the tokens of the words to avoid; the others have
            their `of_others`.
        stop_ids: the tokens that end an answer.
    """

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self._asked = params
        self._tokenizer = tokenizer
        if params.n != 1:
            params = replace(params, n=1)
        self.params = with_banned_ids(params, tokenizer) if params.bad_words else params
        self.stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self.stop_ids |= tokenizer.eos_ids

    def begin(self, prompt_ids: bytes, form: AnswerForm) -> "list[tuple[int, Completion]]":
        """Returns the seed and the text, still empty, of each answer to one prompt, int32 bytes."""
        asked = self._asked
        seeds = [asked.seed] if asked.n == 1 else [asked.child_seed(index) for index in range(asked.n)]
        return [
            (
                secrets.randbits(63) if seed is None else seed,
                Completion(self._tokenizer, self.params, form, prompt_ids),
            )
            for seed in seeds
        ]


class Completion:
    """One answer as it grows. `prompt_ids`: what it answers, int32 bytes.

    Attributes:
        text: what may be shown, or all text of an answer that is divided. It never ends in half a character, or
            in what may become a stop string.
        parts: those of an answer that is divided.
        finish_reason: None while the answer grows; then "stop", "length", "abort" or "error".
        place: that of the newest token, if it belongs to the text and has log-probabilities.
        prompt_logprobs: those of the prompt, if the request asks for them and its first token has come.
        stopped: a stop string ended the answer, and the engine still runs the request.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        form: AnswerForm = NEW_TEXT,
        prompt_ids: bytes = b"",
    ) -> None:
        self.token_ids: list[int] = []
        self.parts: list[Part] = []
        self.place: Place | None = None
        self.prompt_logprobs: PromptLogprobs | None = None
        self.finish_reason: str | None = None
        self.stopped = False
        self._pieces: list[str] = []
        self._min_tokens = params.min_tokens
        last = prompt_ids[-MAX_BEFORE * TOKEN_BYTES :] if form.continues else b""
        before = Before(np.frombuffer(last, np.int32).tolist(), form.is_echoed)
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, form.shown_ids, before)
        # `stop` is a tuple by now, also where one string was given.
        self._checker = StopChecker(params.stop, params.include_stop_str_in_output)
        self._reader = None if form.new_reader is None else form.new_reader(self._checker)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    @property
    def stop_string(self) -> str | None:
        """The stop string that the text has reached, if any."""
        return self._checker.hit

    def push(self, event: TokenEvent) -> str:
        """Adds one event of the request. Returns the text that this adds to the answer."""
        if self.finish_reason is not None:
            return ""
        added, self.place = "", None
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        if event.token is not None:
            self.token_ids.append(event.token)
            if event.finish_reason != "stop":  # a stop token is not part of the text
                if event.logprobs is None:
                    text = self._detokenizer.push((event.token,))
                else:
                    text, self.place = self._detokenizer.push_placed(event.token)
                added = self._check(text)
        if event.finish_reason is not None or self._checker.hit is not None:
            added += self._end(event.finish_reason)
        self._pieces.append(added)
        return added

    def _check(self, text: str) -> str:
        """Returns the text that may be shown now. No stop string ends within the first `min_tokens` tokens."""
        may_end = len(self.token_ids) > self._min_tokens
        if self._reader is not None:
            self.parts += self._reader.push(text, may_end)
            return text
        return self._checker.push(text) if may_end else self._checker.skip(text)

    def _end(self, reason: str | None) -> str:
        """Ends the answer, by a stop string unless the engine has a `reason`. Returns the rest of the text."""
        rest = "" if reason is None else self._check(self._detokenizer.finish())
        if self._reader is None:
            rest += self._checker.finish()
        else:
            self.parts += self._reader.finish(len(self.token_ids) > self._min_tokens)
        has_stopped = self._checker.hit is not None
        self.finish_reason = "stop" if has_stopped else reason
        self.stopped = has_stopped and reason is None
        return rest
