"""Stop strings in a text that arrives piece by piece."""

from collections.abc import Sequence


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
