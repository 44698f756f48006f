"""A text that grows: it is decoded from tokens piece by piece, and searched for stop strings."""

import codecs
from collections.abc import Collection, Sequence
from typing import NamedTuple

from .tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are not UTF-8
MAX_BEFORE = 32  # tokens of a prompt, of which a few have a text
_MAX_CHARACTER = 4  # bytes of a character, and so tokens of one


class Before(NamedTuple):
    """What stands before a text that continues another one.

    `token_ids`: the last of its tokens, `MAX_BEFORE` at most. `is_shown`: its `closed_text` is shown before the
    text, and not all of it.
    """

    token_ids: Sequence[int] = ()
    is_shown: bool = False


NOTHING = Before()


class Place(NamedTuple):
    """The place of a token in a text. `start`: the characters before it. `begins`: no token with a text stands
    before it. `is_hidden`: it is a special token that the text leaves out."""

    start: int
    begins: bool = False
    is_hidden: bool = False


class Detokenizer:
    """Decodes a stream of tokens piece by piece, by default without special tokens other than `shown_ids`.

    The pieces joined equal `Tokenizer.decode` of all the tokens, less what stands `before` them, and no piece
    ends within a character. A character that the last tokens before begin belongs to the text if they end it.
    A push costs the same however long the stream is. (A decoder that is not byte-level may rewrite a character
    because of bytes after it that are not UTF-8; text that was returned already stays.)
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
        before: Before = NOTHING,
    ) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._shown_ids = shown_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = []
        self._context_text = ""
        self._held: list[int] = []
        self._num_chars = 0  # of the text that `push_placed` returned
        self._begins = True
        self._unshown = ""  # what the text leaves out at its beginning
        if before.token_ids:
            self._continue(before)

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds `token_ids`. Returns the text that is certain now and was not returned before."""
        if not self._tokenizer.is_byte_level:
            text = "".join(map(self._push_one, token_ids))
        elif len(token_ids) == 1 and self._skips_special and not self._utf8.getstate()[0]:
            text = self._tokenizer.whole_text(token_ids[0]) or ""  # so it is with almost every token
            if text:
                return text
            text = self._utf8.decode(self._bytes(token_ids[0]))
        else:
            text = self._utf8.decode(b"".join(map(self._bytes, token_ids)))
        return self._without_unshown(text) if self._unshown else text

    def push_placed(self, token_id: int) -> tuple[str, Place]:
        """Adds one token, as `push`. Returns also its place, if all tokens before it were added here."""
        begins, is_hidden = self._begins, self._is_skipped(token_id)
        text = self.push((token_id,))
        own = "" if is_hidden else self._tokenizer.token_text(token_id, begins)
        before = self._num_chars
        self._num_chars += len(text)
        self._begins = begins and is_hidden
        return text, Place(max(before, self._num_chars - len(own)), begins, is_hidden)

    def finish(self) -> str:
        """Returns the rest of the text, after the last token."""
        if self._tokenizer.is_byte_level:
            text = self._utf8.decode(b"", final=True)
        else:
            text = self._show(self._decode(self._context + self._held))
        return self._without_unshown(text) if self._unshown else text

    def _continue(self, before: Before) -> None:
        """Takes the state in which the tokens before leave a decoder."""
        ids = [token_id for token_id in before.token_ids if not self._is_skipped(token_id)]
        self._begins = not ids
        last = [self._bytes(token_id) for token_id in ids[-_MAX_CHARACTER:]]
        num_open = _num_open(last)
        if self._tokenizer.is_byte_level:
            self._utf8.decode(b"".join(last))
        else:
            closed, self._held = ids[: len(ids) - num_open], ids[len(ids) - num_open :]
            for start in reversed(range(len(closed))):  # as few tokens as have a text by themselves
                self._context = closed[start:]
                self._context_text = self._decode(self._context)
                if self._context_text and not self._context_text.startswith(REPLACEMENT):
                    break
        if num_open and not before.is_shown:
            self._unshown = REPLACEMENT * (1 if self._tokenizer.is_byte_level else num_open)

    def _without_unshown(self, text: str) -> str:
        """Leaves out what was begun before, unless it has become a character."""
        if text:
            text, self._unshown = text.removeprefix(self._unshown), ""
        return text

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
        return b"" if self._is_skipped(token_id) else _any_bytes(self._tokenizer, token_id)

    def _decode(self, token_ids: list[int]) -> str:
        skips = self._skips_special and not self._shown_ids  # the others were left out before
        return self._tokenizer.decode(token_ids, skip_special_tokens=skips)


def closed_text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Returns the text of tokens, special ones included, without the bytes of a character that is not complete
    at their end."""
    num_open = _num_open([_any_bytes(tokenizer, token_id) for token_id in token_ids[-_MAX_CHARACTER:]])
    if num_open and tokenizer.is_byte_level:  # a token may end one character and begin another
        return tokenizer.decode(token_ids, False)[:-1]
    return tokenizer.decode(token_ids[: len(token_ids) - num_open], False)


def _num_open(pieces: Sequence[bytes]) -> int:
    """Returns how many of the last bytes begin a character that is not complete."""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    utf8.decode(b"".join(pieces))
    return len(utf8.getstate()[0])


def _any_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Returns the bytes of a token, also of a special one."""
    if token_id in tokenizer.special_ids:
        return tokenizer.decode([token_id], skip_special_tokens=False).encode()
    return tokenizer.token_bytes(token_id)


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
