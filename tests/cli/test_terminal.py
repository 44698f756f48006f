"""Tests of the command line's output: answers in order, progress with and without a terminal."""

import io

import pytest
from rich.console import Console

from lightkv.router.terminal import Answers, headings, progress, usage


def test_a_single_answer_is_written_as_it_comes_and_ends_its_line() -> None:
    out = io.StringIO()
    answers = Answers(out, headings(["Hi?"], 1))
    answers.add(0, "Hel")
    assert out.getvalue() == "Hel"
    answers.add(0, "lo")
    answers.end()
    assert out.getvalue() == "Hello\n"


@pytest.mark.parametrize(("text", "expected"), [("", "\n"), ("half", "half\n"), ("line\n", "line\n")])
def test_the_end_of_a_line_is_not_doubled(text: str, expected: str) -> None:
    out = io.StringIO()
    answers = Answers(out, [""])
    answers.add(0, text)
    answers.end()
    assert out.getvalue() == expected


def test_several_answers_are_written_in_order_however_they_grow() -> None:
    out = io.StringIO()
    answers = Answers(out, ["## a", "## b", "## c"])
    answers.add(2, "three")
    answers.add(1, "tw")
    answers.add(0, "one\n")
    answers.add(1, "o")
    answers.end()
    assert out.getvalue() == "## a\n\none\n\n## b\n\ntwo\n\n## c\n\nthree\n"


def test_headings_name_the_prompt_and_number_its_answers() -> None:
    assert headings(["a\nb"], 2) == ["## a b (1 of 2)", "## a b (2 of 2)"]
    long, short = headings(["word " * 100, "x"], 1)
    assert len(long) < 80
    assert long.endswith(" …")
    assert short == "## x"


def test_usage_line() -> None:
    assert usage(1234, None, 50, 2.0) == "1,234 prompt tokens, 50 new in 2.0 s (25.0 tokens/s)"
    assert usage(1234, 1000, 50, 2.0) == "1,234 prompt tokens (1,000 cached), 50 new in 2.0 s (25.0 tokens/s)"
    assert usage(1, 0, 0, 0.0).endswith("(0.0 tokens/s)")


def test_without_a_terminal_progress_is_plain_lines() -> None:
    out = io.StringIO()
    with progress(Console(file=out, width=20), "first") as report:
        report("a line longer than [twenty] columns")
        assert out.getvalue() == "first\na line longer than [twenty] columns\n"
    assert out.getvalue().count("\n") == 2


def test_a_dumb_terminal_gets_plain_lines() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, _environ={"TERM": "dumb"})
    with progress(console, "first") as report:
        report("second")
    assert out.getvalue() == "first\nsecond\n"


def test_a_terminal_gets_a_spinner_and_keeps_every_line() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, _environ={"TERM": "xterm"})
    with progress(console, "first") as report:
        report("second")
    assert "\x1b[?25l" in out.getvalue()  # the cursor is hidden beside a spinner,
    assert out.getvalue().rstrip().rfind("\x1b[?25h") > 0  # and shown again
    lines = out.getvalue().split("\n")
    assert any(line.endswith("first") for line in lines)
    assert any(line.endswith("second") for line in lines)
