"""From sampled tokens to one answer: its text so far, its stop strings, its end.

Knows text and events; knows no engine and no torch. Whoever drives it ends the request in the engine once
`stopped` is set: the engine itself knows stop tokens, not stop strings.
"""

from lightkv.router.engine.step import TokenEvent, TokenLogprobs
from lightkv.router.sampling_params import SamplingParams

from .tokenizer import Detokenizer, StopChecker, Tokenizer


class Completion:
    """One answer as it grows.

    `text` is what may be shown: never half a character, nor the beginning of what may become a stop string.
    `finish_reason`: None while it grows; "stop", "length", "abort" or "error". `stopped`: it ended here, on a
    stop string, and the engine is to be told.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stopped = False
        self._pieces: list[str] = []
        self._min_tokens = params.min_tokens
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._checker = StopChecker(params.stops, params.include_stop_str_in_output)

    @property
    def text(self) -> str:
        """All the text so far."""
        return "".join(self._pieces)

    def push(self, event: TokenEvent) -> str:
        """Take one event of the request. Returns the text that it adds."""
        if self.finish_reason is not None:
            return ""
        added = ""
        if event.token is not None:
            self.token_ids.append(event.token)
            if event.logprobs is not None:
                self.logprobs.append(event.logprobs)
            if event.finish_reason != "stop":  # a stop token is no part of the text
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
        """The part of `text` that may be shown. In the text of the first `min_tokens` no stop string ends."""
        may_end = len(self.token_ids) > self._min_tokens
        return self._checker.push(text) if may_end else self._checker.skip(text)
