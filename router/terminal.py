"""Writes what the command line shows: progress and usage on stderr, answers on stdout."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.text import Text

_HEADING_CHARS = 76


Report = Callable[[str], None]
"""Is called with each line of progress."""


@contextmanager
def progress(console: Console, first: str) -> Iterator[Report]:
    """Shows the progress of slow work in the block: first the line `first`, then each line reported.

    In a terminal, a spinner turns beside the current line, and the earlier lines stay above it. Elsewhere (a
    pipe, a dumb terminal) each line is printed when it is reported.
    """
    if not console.is_terminal or console.is_dumb_terminal:
        say(console, first)
        yield lambda line: say(console, line)
        return
    lines = [first]
    with console.status(_one_line(first)) as status:

        def report(line: str) -> None:
            say(console, lines[-1])
            lines.append(line)
            status.update(_one_line(line))

        yield report
    say(console, lines[-1])


def say(console: Console, line: str) -> None:
    """Prints one line without markup, colours for numbers or wrapping."""
    console.print(Text(line, style="dim"), soft_wrap=True)


class OrderedAnswers:
    """Writes answers that grow at the same time to `out`, one after the other.

    The text of the first unfinished answer is written at once; that of later answers is kept for their turn.
    `headings`: one per answer, or a single empty one, which is left out.
    """

    def __init__(self, out: TextIO, headings: Sequence[str]) -> None:
        self._out = out
        self._headings = headings
        self._waiting = [""] * len(headings)
        self._ended = [False] * len(headings)
        self._live = 0
        self._last_char = ""  # of the live answer; empty until its text begins

    def add(self, answer_idx: int, text: str, ended: bool) -> None:
        """Adds text to an answer. `ended`: the answer has no further text."""
        self._waiting[answer_idx] += text
        self._ended[answer_idx] |= ended
        while self._live < len(self._headings):
            self._write_live()
            if not self._ended[self._live]:
                break
            self._end_line()
            self._live += 1
        self._out.flush()

    def interrupt(self) -> None:
        """Ends the output before the answers are complete, at the beginning of a line."""
        if self._last_char:
            self._end_line()
        self._out.flush()

    def _write_live(self) -> None:
        text, self._waiting[self._live] = self._waiting[self._live], ""
        if not self._last_char:
            heading = self._headings[self._live]
            text = f"{'' if self._live == 0 else chr(10)}{heading}\n\n{text}" if heading else text
        if text:
            self._last_char = text[-1]  # set first, since Ctrl-C may interrupt the write itself
            self._out.write(text)

    def _end_line(self) -> None:
        if self._last_char != "\n":
            self._out.write("\n")
        self._last_char = ""


def headings(prompts: Sequence[str], num_answers: int) -> list[str]:
    """Returns a Markdown heading for each answer to each prompt; a single answer has none."""
    if len(prompts) == num_answers == 1:
        return [""]
    lines = []
    for prompt in prompts:
        title = textwrap.shorten(prompt, _HEADING_CHARS, placeholder=" …")
        for index in range(num_answers):
            lines.append(f"## {title}" + (f" ({index + 1} of {num_answers})" if num_answers > 1 else ""))
    return lines


def usage(num_prompt: int, num_cached: int | None, num_new: int, seconds: float) -> str:
    """Returns one line of token counts and speed. `num_cached`: None if it is not known."""
    rate = num_new / seconds if seconds > 0 else 0.0
    cached = "" if num_cached is None else f" ({num_cached:,} cached)"
    return f"{num_prompt:,} prompt tokens{cached}, {num_new:,} new in {seconds:.1f} s ({rate:.1f} tokens/s)"


def _one_line(line: str) -> Text:
    return Text(line, no_wrap=True, overflow="ellipsis")
