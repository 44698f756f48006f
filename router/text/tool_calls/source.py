"""The text of an answer as it arrives, and the generators that read it.

A format is read by one generator, from the first character to the last. It yields what it has found, and None
where it needs more text. What it finds depends on the text alone, not on how the text is cut into pieces.
"""

import re
from collections.abc import Callable, Generator
from typing import NamedTuple, TypeVar

from lightkv.router.text.detokenizer import num_begun

R = TypeVar("R")


class Content(NamedTuple):
    """Text of the answer itself."""

    text: str


class Reasoning(NamedTuple):
    """Text that the model wrote before its answer."""

    text: str


class CallBegins(NamedTuple):
    """A call of the function `name` begins; its arguments follow."""

    name: str


class Arguments(NamedTuple):
    """More text of the arguments (a JSON object) of the call that began last."""

    text: str


Part = Content | Reasoning | CallBegins | Arguments
Steps = Generator[Part | None, None, R]


class Source:
    """The text that has arrived and was not read yet. `ended`: no more will arrive.

    The methods are generators, which end with their result: `found = yield from source.starts_with("[")`.
    """

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        self._num_plain = 0  # so many of the first characters hold no mark, as is known

    def take(self, num_chars: int) -> str:
        """Removes the first characters and returns them."""
        taken, self.text = self.text[:num_chars], self.text[num_chars:]
        self._num_plain = max(self._num_plain - num_chars, 0)
        return taken

    def give_back(self, text: str) -> None:
        """Puts text back that was taken."""
        self.text = text + self.text
        if self._num_plain:
            self._num_plain += len(text)

    def note_plain(self, num_chars: int) -> None:
        """Notes that the first characters are no call. They are not searched again, so that the time to read a
        text grows with its length alone, whatever stands in it."""
        self._num_plain = max(self._num_plain, num_chars)

    def take_space(self) -> Steps[str]:
        """Removes the white space that comes first and returns it."""
        space = ""
        while True:
            rest = self.text.lstrip()
            space += self.take(len(self.text) - len(rest))
            if self.text or self.ended:
                return space
            yield None

    def starts_with(self, mark: str) -> Steps[bool]:
        """Returns whether `mark` comes first."""
        while len(self.text) < len(mark) and mark.startswith(self.text) and not self.ended:
            yield None
        return self.text.startswith(mark)

    def skip(self, mark: str) -> Steps[bool]:
        """Removes `mark` if it comes first. Returns whether it did."""
        found = yield from self.starts_with(mark)
        if found:
            self.take(len(mark))
        return found

    def match(self, pattern: re.Pattern[str], max_chars: int) -> Steps[re.Match[str] | None]:
        """Removes what `pattern` matches and returns the match, or None if it does not come first.

        `max_chars`: the most characters that it can match, with one that it looks ahead.
        """
        while True:
            found = pattern.match(self.text)
            if found is not None:
                self.take(found.end())
                return found
            if self.ended or len(self.text) > max_chars:
                return None
            yield None

    def pass_until(self, make: type[Content] | type[Reasoning], *marks: str) -> Steps[str | None]:
        """Yields the text before the first of `marks` as parts made by `make`, and removes the mark.

        Returns the mark, or None if the text ends without one.
        """
        while True:
            found = min(
                ((start, mark) for mark in marks if (start := self.text.find(mark, self._num_plain)) >= 0),
                default=None,
            )
            if found is not None:
                start, mark = found
                if start:
                    yield make(self.take(start))
                self.take(len(mark))
                return mark
            num_held = 0 if self.ended else max((num_begun(self.text, mark) for mark in marks), default=0)
            if len(self.text) > num_held:
                yield make(self.take(len(self.text) - num_held))
            if self.ended:
                return None
            yield None


class Reader:
    """Reads one answer. `read`: the generator's function, which gets the source."""

    def __init__(self, read: Callable[[Source], Steps[None]]) -> None:
        self._source = Source()
        self._steps = read(self._source)

    def push(self, text: str) -> list[Part]:
        """Adds text. Returns what is certain now and was not returned before."""
        self._source.text += text
        return self._run()

    def finish(self) -> list[Part]:
        """Returns the rest, after the last text."""
        self._source.ended = True
        return self._run()

    def _run(self) -> list[Part]:
        parts: list[Part] = []
        for part in self._steps:
            if part is None:
                break
            parts.append(part)
        return parts
