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


class Answers:
    """Writes answers to `out`: a single one as it grows, and several at the end, in order.

    `headings`: one per answer, or a single empty one, which is left out.
    """

    def __init__(self, out: TextIO, headings: Sequence[str]) -> None:
        self._out = out
        self._headings = headings
        self._texts = [""] * len(headings)

    def add(self, answer_idx: int, text: str) -> None:
        """Adds text to an answer."""
        self._texts[answer_idx] += text  # first, since Ctrl-C may interrupt the write itself
        if self._headings == [""]:
            self._out.write(text)
            self._out.flush()

    def end(self) -> None:
        """Writes what is not written, each answer up to the beginning of a line."""
        for number, (heading, text) in enumerate(zip(self._headings, self._texts, strict=True)):
            if heading:
                self._out.write(f"{chr(10) if number else ''}{heading}\n\n{text}")
            self._out.write("" if text.endswith("\n") else "\n")
        self._out.flush()


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
