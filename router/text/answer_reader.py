"""Divides an answer, as it arrives, into reasoning, content and tool calls."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lightkv.router.text.tool_calls.families import THINK_BEGIN, THINK_END
from lightkv.router.text.tool_calls.source import (
    Arguments,
    CallBegins,
    Content,
    Part,
    Reader,
    Reasoning,
    Source,
    Steps,
)

from .detokenizer import StopChecker


class CallReader(NamedTuple):
    """How calls are read. `begin`: the text that each begins with."""

    begin: str
    read: Callable[[Source], Steps[None]]


def think(source: Source, is_inside: bool, calls: CallReader | None = None) -> Steps[None]:
    """Reads reasoning up to </think>, and content after it. `is_inside`: the prompt or the model's habit has
    opened the reasoning; otherwise it begins with <think>, or there is none. `calls`: a call that begins in the
    reasoning, and is not followed by </think>, belongs to the content."""
    space = yield from source.take_space()
    is_opened = yield from source.skip(THINK_BEGIN)
    if is_opened or is_inside:
        yield from source.take_space()
        begin = "" if calls is None else calls.begin
        mark = yield from source.pass_until(Reasoning, THINK_END, *filter(None, [begin]))
        if calls is not None and mark == begin:
            yield from _read_after(source, calls)
        yield from source.take_space()
    elif space:
        yield Content(space)
    yield from source.pass_until(Content)


def _read_after(source: Source, calls: CallReader) -> Steps[None]:
    """Reads what follows the beginning of a call in reasoning: up to the end of the reasoning, or nothing if
    there is no such end and the call is one."""
    num_searched = 0
    while (end := source.text.find(THINK_END, num_searched)) < 0 and not source.ended:
        num_searched = max(len(source.text) - len(THINK_END), 0)
        yield None
    text = calls.begin + source.take(len(source.text) if end < 0 else end)
    if end >= 0:
        source.take(len(THINK_END))
    elif _has_call(text, calls):
        source.give_back(text)
        return
    yield Reasoning(text)


def _has_call(text: str, calls: CallReader) -> bool:
    reader = Reader(calls.read)
    return any(isinstance(part, CallBegins) for part in (*reader.push(text), *reader.finish()))


class AnswerReader:
    """Reads one answer, up to a stop string in its content.

    White space between parts of different kinds belongs to the format, and is left out.

    Args:
        stages: the generators that read the text. The first gets the whole text, and each other one the content
            that the one before it leaves.
        max_calls: calls after so many are left out; None keeps all.
        stops: looks for stop strings in the content; none are looked for in reasoning and in calls.
    """

    def __init__(
        self,
        stages: Sequence[Callable[[Source], Steps[None]]],
        max_calls: int | None = None,
        stops: StopChecker | None = None,
    ) -> None:
        self._readers = [Reader(stage) for stage in stages]
        self._max_calls = max_calls
        self._stops = StopChecker(()) if stops is None else stops
        self._held: Part | None = None  # white space, which is shown if more of the same kind follows
        self._num_calls = 0

    def push(self, text: str, may_end: bool = True) -> list[Part]:
        """Adds text. Returns what is certain now and was not returned before. `may_end`: whether a stop string
        may end in it."""
        return self._kept(self._searched(self._read(0, [Content(text)] if text else []), may_end))

    def finish(self, may_end: bool = True) -> list[Part]:
        """Returns the rest, after the last text."""
        parts: list[Part] = []
        for number, reader in enumerate(self._readers):
            parts += self._read(number + 1, reader.finish())
        parts = self._searched(parts, may_end)
        if held := self._stops.finish():
            parts.append(Content(held))
        parts = self._kept(parts)
        if isinstance(self._held, Content) and not self._num_calls:
            parts.append(self._held)
        self._held = None
        return parts

    def _read(self, number: int, parts: list[Part]) -> list[Part]:
        """Sends content through the readers from `number` on."""
        for reader in self._readers[number:]:
            read: list[Part] = []
            for part in parts:
                read += reader.push(part.text) if isinstance(part, Content) else [part]
            parts = read
        return parts

    def _searched(self, parts: list[Part], may_end: bool) -> list[Part]:
        """Returns the parts before a stop string, without the end of the content that may become one."""
        found: list[Part] = []
        for part in parts:
            if self._stops.hit is not None:
                break
            if isinstance(part, Content):
                text = self._stops.push(part.text) if may_end else self._stops.skip(part.text)
                part = Content(text)
            elif held := self._stops.finish():  # the content ends here, and a stop string does, too
                found.append(Content(held))
            if not isinstance(part, Content) or part.text:
                found.append(part)
        return found

    def _kept(self, parts: list[Part]) -> list[Part]:
        """Returns the parts without the white space between kinds, and without calls that are too many."""
        kept: list[Part] = []
        for part in parts:
            if isinstance(part, Content | Reasoning):
                self._keep_text(part, kept)
                continue
            self._held = None
            self._num_calls += isinstance(part, CallBegins)
            if self._max_calls is None or self._num_calls <= self._max_calls:
                kept.append(part)
        return kept

    def _keep_text(self, part: Content | Reasoning, kept: list[Part]) -> None:
        make = type(part)
        before = self._held.text if isinstance(self._held, make) else ""
        text = before + part.text
        shown = text.rstrip()
        self._held = make(text[len(shown) :]) if len(shown) < len(text) else None
        if shown:
            kept.append(make(shown))


def joined(parts: Sequence[Part]) -> tuple[str, str, list[tuple[str, str]]]:
    """Returns the reasoning, the content, and the name and arguments of each call."""
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    content = "".join(part.text for part in parts if isinstance(part, Content))
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CallBegins):
            calls.append((part.name, ""))
        elif isinstance(part, Arguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return reasoning, content, calls
