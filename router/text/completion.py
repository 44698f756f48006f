"""Turns the tokens of one request into the text of its answer, and ends it at a stop string.

The engine knows stop tokens, not stop strings. Once `stopped` is set, the caller has to end its request.
"""

from collections.abc import Collection

from lightkv.router.engine.step import PromptLogprobs, TokenEvent, TokenLogprobs
from lightkv.router.sampling_params import SamplingParams

from .detokenizer import Detokenizer, StopChecker
from .tokenizer import Tokenizer


class Completion:
    """One answer as it grows. `shown_ids`: special tokens that are part of the text in any case.

    Attributes:
        text: what may be shown. It never ends in half a character, or in what may become a stop string.
        finish_reason: None while the answer grows; then "stop", "length", "abort" or "error".
        prompt_logprobs: those of the prompt, if the request asks for them and its first token has come.
        stopped: a stop string ended the answer, and the engine still runs the request.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, shown_ids: Collection[int] = frozenset()
    ) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: PromptLogprobs | None = None
        self.finish_reason: str | None = None
        self.stopped = False
        self._pieces: list[str] = []
        self._min_tokens = params.min_tokens
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, shown_ids)
        self._checker = StopChecker(params.stops, params.include_stop_str_in_output)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    def push(self, event: TokenEvent) -> str:
        """Adds one event of the request. Returns the text that this adds to the answer."""
        if self.finish_reason is not None:
            return ""
        added = ""
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        if event.token is not None:
            self.token_ids.append(event.token)
            if event.logprobs is not None:
                self.logprobs.append(event.logprobs)
            if event.finish_reason != "stop":  # a stop token is not part of the text
                added = self._check(self._detokenizer.push((event.token,)))
        if self._checker.hit is None and event.finish_reason is not None:
            added += self._check(self._detokenizer.finish())
            if self._checker.hit is None:
                added += self._checker.finish()
        if self._checker.hit is not None:
            self.finish_reason = "stop"
            self.stopped = event.finish_reason is None
        else:
            self.finish_reason = event.finish_reason
        self._pieces.append(added)
        return added

    def _check(self, text: str) -> str:
        """Returns the text that may be shown now. No stop string ends within the first `min_tokens` tokens."""
        may_end = len(self.token_ids) > self._min_tokens
        return self._checker.push(text) if may_end else self._checker.skip(text)
