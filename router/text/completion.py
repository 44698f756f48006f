"""The answers to a prompt: how they are planned for the engine, and how its tokens become text, up to a stop
string.

The engine knows stop tokens, not stop strings. Once `Completion.stopped` is set, the caller has to end its
request.
"""

import codecs
import secrets
from collections.abc import Collection, Sequence

from msgspec.structs import replace

from lightkv.router.engine.step import PromptLogprobs, TokenEvent, TokenLogprobs
from lightkv.router.sampling_params import SamplingParams

from .banned_words import with_banned_ids
from .tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are not UTF-8


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

    def begin(self, shown_ids: Collection[int] = frozenset()) -> "list[tuple[int, Completion]]":
        """Returns the seed and the text, still empty, of each answer to one prompt. `shown_ids`: as those of a
        Completion."""
        asked = self._asked
        seeds = [asked.seed] if asked.n == 1 else [asked.child_seed(index) for index in range(asked.n)]
        return [
            (
                secrets.randbits(63) if seed is None else seed,
                Completion(self._tokenizer, self.params, shown_ids),
            )
            for seed in seeds
        ]


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
        # `stop` is a tuple by now, also where one string was given.
        self._checker = StopChecker(params.stop, params.include_stop_str_in_output)

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


class Detokenizer:
    """Decodes a stream of tokens piece by piece, by default without special tokens other than `shown_ids`.

    The pieces joined equal `Tokenizer.decode` of all the tokens, and no piece ends within a character. A push
    costs the same however long the stream is. (A decoder that is not byte-level may rewrite a character because
    of bytes after it that are not UTF-8; text that was returned already stays.)
    """

    # A decoder that is not byte-level looks at neighbours: it drops the first space of a text, and turns byte
    # tokens into characters only when these are complete. So each token is decoded together with the tokens
    # that wait for their character and those shown last, and the text that was shown is cut off.
    _MAX_HELD = 16  # tokens without a certain text; a character has at most four bytes

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        shown_ids: Collection[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._shown_ids = shown_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = []
        self._context_text = ""
        self._held: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds `token_ids`. Returns the text that is certain now and was not returned before."""
        if not self._tokenizer.is_byte_level:
            return "".join(map(self._push_one, token_ids))
        if len(token_ids) == 1 and self._skips_special and not self._utf8.getstate()[0]:
            text = self._tokenizer.whole_text(token_ids[0])  # so it is with almost every token
            if text:
                return text
        return self._utf8.decode(b"".join(map(self._bytes, token_ids)))

    def finish(self) -> str:
        """Returns the rest of the text, after the last token."""
        if self._tokenizer.is_byte_level:
            return self._utf8.decode(b"", final=True)
        return self._show(self._decode(self._context + self._held))

    def _push_one(self, token_id: int) -> str:
        if self._is_skipped(token_id):
            return ""
        self._held.append(token_id)
        text = self._decode(self._context + self._held)
        is_certain = len(text) > len(self._context_text) and not text.endswith(REPLACEMENT)
        return self._show(text) if is_certain or len(self._held) > self._MAX_HELD else ""

    def _show(self, text: str) -> str:
        held_text = self._decode(self._held)
        # Bytes that are not UTF-8 may change the characters before them: then the new tokens stand alone.
        is_longer = text.startswith(self._context_text)
        shown = text[len(self._context_text) :] if is_longer else held_text
        self._context, self._context_text, self._held = self._held, held_text, []
        return shown

    def _is_skipped(self, token_id: int) -> bool:
        is_special = self._skips_special and token_id in self._tokenizer.special_ids
        return is_special and token_id not in self._shown_ids

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._tokenizer.special_ids and not self._is_skipped(token_id):
            return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        return self._tokenizer.token_bytes(token_id)

    def _decode(self, token_ids: list[int]) -> str:
        skips = self._skips_special and not self._shown_ids  # the others were left out before
        return self._tokenizer.decode(token_ids, skip_special_tokens=skips)


class StopChecker:
    """Cuts a stream of text at the first stop string, and holds back what might be the beginning of one.

    The first stop string is the one whose last character comes first, since the answer ends there; of several
    that end there it is the longest. So the result depends on the text alone, not on how it is cut into pieces.

    Attributes:
        hit: the stop string that was found, or None. Everything pushed after it is dropped.

    Args:
        stops: the stop strings; none may be empty.
        include_stop: the stop string itself is shown.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if not all(stops):
            raise ValueError("an empty stop string would end every text at once; leave it out")
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Adds `text`. Returns what can be shown now."""
        if not self._stops:
            return text
        if self.hit is not None:
            return ""
        num_searched = len(self._held)  # a stop string that ends there was skipped by `skip`
        text = self._held + text
        ends = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop, max(num_searched - len(stop) + 1, 0))) >= 0
        ]
        if ends:
            end, start, self.hit = min(ends)
            self._held = ""
            return text[: end if self._include_stop else start]
        return self._hold_back(text)

    def skip(self, text: str) -> str:
        """Like `push`, but stop strings that end in `text` are ignored; one may begin there."""
        if not self._stops:
            return text
        return "" if self.hit is not None else self._hold_back(self._held + text)

    def finish(self) -> str:
        """Returns what was held back: the text ended before it became a stop string."""
        text, self._held = self._held, ""
        return text

    def _hold_back(self, text: str) -> str:
        num_held = max((num_begun(text, stop) for stop in self._stops), default=0)
        shown = len(text) - num_held
        self._held = text[shown:]
        return text[:shown]


def num_begun(text: str, mark: str) -> int:
    """Returns the length of the longest end of `text` that is a beginning of `mark`, and not all of it."""
    tail = text[-(len(mark) - 1) :] if len(mark) > 1 else ""
    start = tail.find(mark[0])
    while start >= 0:
        if mark.startswith(tail[start:]):
            return len(tail) - start
        start = tail.find(mark[0], start + 1)
    return 0
