"""Reads answers by the model's own description of them, the `response_template` of tokenizer_config.json.

transformers does the reading. It is imported with the first `ResponseTemplate`, and not with this file.
"""

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from lightkv.errors import LightKVError
from lightkv.router.text.tool_calls.source import (
    Arguments,
    CallBegins,
    Content,
    Part,
    Reasoning,
    Source,
    Steps,
)

CALLS = "tool_calls"
REASONING = ("reasoning_content", "thinking", "reasoning")  # the names that transformers' own service knows
# Of the processor, that reading the answers of a request may take beyond PIECE_SECONDS for each piece. If their
# consumer is late, up to 1,024 pieces are read in one turn of the event loop (router_client.MAX_TAKEN).
MAX_SECONDS = 0.25
PIECE_SECONDS = 0.2e-3
MAX_HELD = 4096  # characters that may be the beginning of a mark
_PIECE = 16  # characters
_SHORT = 128  # characters, of which patterns make short work
R = TypeVar("R")


class UnusableResponseTemplate(LightKVError):
    """transformers cannot use the model's response template."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        super().__init__(
            f"{path}: its response_template cannot be used ({reason}); say by --tool-parser and "
            "--reasoning-parser how the answers are read, or none"
        )


class ResponseTemplate:
    """A response template. `template`: its JSON. `path`: its file, which errors name. `special`: the texts of
    the tokenizer's special tokens.

    Attributes:
        has_calls, has_reasoning: whether it has a field for them.
        marks: the special tokens that it looks for.

    Raises:
        UnusableResponseTemplate: transformers refuses it, or knows no response templates.
    """

    def __init__(self, template: Any, path: Path, special: Sequence[str] = ()) -> None:
        try:
            from transformers.utils.chat_parsing import ResponseParser
            from transformers.utils.chat_parsing.response_templates import load_response_template

            self._template = load_response_template(template)
            ResponseParser(self._template, prefix="").feed("Hi")
        except Exception as error:  # a template is a part of the weights: it can fail in any way
            raise UnusableResponseTemplate(path, " ".join(str(error).split())[:500]) from error
        self.has_calls = CALLS in self._template.fields
        self.has_reasoning = any(name in self._template.fields for name in REASONING)
        source = json.dumps(template, ensure_ascii=False).replace("\\", "")  # patterns escape marks
        self.marks = tuple(text for text in special if text in source)

    def read(
        self,
        source: Source,
        prompt: str,
        tools: Sequence[Mapping[str, Any]] | None = None,
        limit: "TimeLimit | None" = None,
    ) -> Steps[None]:
        """Reads an answer. If the template fails in it, the rest is content as the model wrote it, from the
        beginning of a call that was not complete.

        `prompt`: its end, which may begin the answer. `tools`: those that may be called, described as chat
        templates expect them; None leaves calls in the text. `limit`: that of all answers to a request; None
        makes one for this answer.
        """
        reader = _Reader(self._template, prompt, tools, limit or TimeLimit())
        while True:
            text, parts, place = source.take(len(source.text)), [], 0
            try:
                while place < len(text):
                    piece = text[place : place + _PIECE]
                    place += len(piece)
                    parts += reader.push(piece)
                if source.ended:
                    parts += reader.finish()
            except Exception:  # of patterns, JSON and transforms that come with the weights
                parts.append(Content(reader.raw + text[place:]))
                yield from parts
                yield from source.pass_until(Content)
                return
            yield from parts
            if source.ended:
                return
            yield None


class _Reader:
    """Turns the events of transformers' parser into parts.

    Attributes:
        raw: the text that no part has shown yet. It is a call that is not complete, and what may be a mark.
    """

    def __init__(
        self, template: Any, prompt: str, tools: Sequence[Mapping[str, Any]] | None, limit: "TimeLimit"
    ) -> None:
        self.raw = ""
        self._template = template
        self._prompt = prompt
        self._tools: list[Any] = list(tools or ())
        self._names = {tool["function"]["name"] for tool in self._tools}
        self._parser: Any = None
        self._time = limit
        self._place = 0  # so many characters of `raw` are in events
        self._begun: set[type[Part]] = set()

    def push(self, text: str) -> list[Part]:
        """Adds text. Returns what is certain now and was not returned before. Raises any Exception."""
        self.raw += text
        if self._template.implicit is not None and len(self.raw) - self._place > MAX_HELD + len(text):
            raise ValueError(f"more than {MAX_HELD} characters are held back")
        return self._parts(self._time.run(lambda: self._ready().feed(text), self._num_seen))

    def finish(self) -> list[Part]:
        """Returns the rest, after the last text. Raises any Exception."""
        return self._parts(self._time.run(lambda: self._ready().finalize()[1], self._num_seen))

    @property
    def _num_seen(self) -> int:
        """The most characters that a pattern looks at next."""
        return len(self.raw) if self._parser is not None else len(self.raw) + len(self._prompt)

    def _ready(self) -> Any:
        """Returns the parser, which has read the beginning of the answer that the prompt has. A prompt without
        the template's anchor, such as one of another chat template, has none."""
        if self._parser is None:
            from transformers.utils.chat_parsing import ResponseParser

            prefix = self._prompt if self._template.start_anchor_re.search(self._prompt) else ""
            self._parser = ResponseParser(self._template, prefix=prefix, tools=self._tools)
        return self._parser

    def _parts(self, events: Sequence[Mapping[str, Any]]) -> list[Part]:
        """Returns the parts that the next events add."""
        parts: list[Part] = []
        raw, place = self.raw, self._place
        for event in events:
            kind, field = event["type"], event["field"]
            place = self._after(event, raw, place)
            is_call = field == CALLS and bool(self._names)
            if is_call and kind != "region_close":
                continue
            if is_call:
                parts += self._calls(event["value"]) or self._text(Content, raw[:place])
            elif kind == "region_chunk" or field == CALLS:  # calls of a request without tools are text
                text = event["text"] if kind == "region_chunk" else raw[:place]
                parts += self._text(Reasoning if field in REASONING else Content, text)
            raw, place = raw[place:], 0
        if events and events[-1]["type"] == "region_chunk" and raw.endswith(events[-1]["text"]):
            place = len(raw)
        self.raw, self._place = raw, place
        return parts

    def _after(self, event: Mapping[str, Any], raw: str, place: int) -> int:
        """Returns how many characters of `raw` an event, of a text or of a mark, and those before it cover."""
        field = self._template.fields[event["field"]]
        if event["type"] == "region_chunk":
            return place + len(event["text"])
        if event["type"] == "region_open":
            found = field.open_re and field.open_re.search(raw, place)
        else:
            found = field.close_re and field.close_re.match(raw, place)
        return found.end() if found else place

    def _text(self, make: type[Content | Reasoning], text: str) -> list[Part]:
        """Returns more text of a kind, whose first white space belongs to the format."""
        if make not in self._begun:
            text = text.lstrip()
        if not text:
            return []
        self._begun.add(make)
        return [make(text)]

    def _calls(self, value: Any) -> list[Part]:
        """Returns the calls of a region, or none if one of them is no call of a tool."""
        parts: list[Part] = []
        for call in value if isinstance(value, list) else [value]:
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict) or function.get("name") not in self._names:
                return []
            given = function.get("arguments", {})
            if not isinstance(given, str):
                given = json.dumps(given, ensure_ascii=False, allow_nan=False)
            parts += CallBegins(function["name"]), Arguments(given.encode(errors="replace").decode())
        return parts


class TimeLimit:
    """Ends work by TimeoutError once reading answers has taken too much of the processor's time, since
    patterns of a template may look at a long text very often. Signals reach the main thread alone, where the
    service reads answers; in other threads the next work ends at once.

    A signal may still be on its way when the timer is stopped, and SIGVTALRM would end the process by default.
    So the handler stays, and ends nothing then.
    """

    def __init__(self) -> None:
        self._left = MAX_SECONDS
        self._deadline = math.inf  # of the work that may be ended now, by the time of the thread

    def run(self, work: Callable[[], R], num_chars: int) -> R:
        """Returns the result of `work`, which looks at so many characters."""
        if self._left <= 0:
            self._end()
        begun = time.thread_time()
        try:
            is_long = num_chars > _SHORT and threading.current_thread() is threading.main_thread()
            return self._interrupted(work) if is_long else work()
        finally:
            used = time.thread_time() - begun
            self._left = min(self._left + PIECE_SECONDS - used, MAX_SECONDS)

    def _interrupted(self, work: Callable[[], R]) -> R:
        signal.signal(signal.SIGVTALRM, self._on_alarm)
        self._deadline = time.thread_time() + self._left
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, self._left)
            return work()
        finally:
            self._stop()

    def _stop(self) -> None:
        self._deadline = math.inf
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def _on_alarm(self, *_: object) -> None:
        left = self._deadline - time.thread_time()
        if left <= 0:
            self._stop()
            self._end()
        if left < math.inf:  # the timer counts the time of all threads, and the signal may be of earlier work
            signal.setitimer(signal.ITIMER_VIRTUAL, left)

    def _end(self) -> NoReturn:
        raise TimeoutError("the response template's patterns take too long")
