"""The way of a chat through the API process: few files, none of them entered again and again, as
docs/architecture.md lists them."""

import re
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from lightkv.router.service.messages import Submit
from tests.support.fake_router import CHAT, HELLO, ApiUnderTest, FakeRouter, idle, service, stream_texts

ROOT = Path(__file__).parents[2]
MOST_FILES, MOST_ENTRIES = 21, 2
TALK = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello!"}]},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "And now?"},
    ]
}
CHATS: list[dict[str, Any]] = [
    HELLO | {"max_tokens": 3},
    HELLO,  # as long as there is room
    TALK | {"max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "stop": ["five", "six"]},
    TALK | {"n": 1, "seed": 7, "user": "u"},
]


class Calls:
    """The calls of functions of the product, in order, in threads that begin while it is their trace."""

    def __init__(self) -> None:
        self.made: list[tuple[str, FrameType]] = []
        self.is_recording = False
        self._files: dict[str, str] = {}
        self._seen: set[FrameType] = set()  # a coroutine is called once, and continued often

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        is_part = code.co_name.startswith("<") and code.co_name != "<lambda>"  # of the function around it
        if not self.is_recording or event != "call" or is_part or frame in self._seen:
            return
        file = self._files.get(code.co_filename)
        if file is None:
            path = Path(code.co_filename).resolve()
            file = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else ""
            self._files[code.co_filename] = file
        if file.startswith(("router/", "lightkv/")) and not _is_of_the_fake(frame):
            self._seen.add(frame)
            self.made.append((file, frame))

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.made}

    @property
    def walk(self) -> list[str]:
        """The files that are entered from the request's arrival to its Submit, without repetitions in a row."""
        files = [file for file, _ in self.made]
        begin = files.index("router/api/http/guard.py")
        submits = [isinstance(frame.f_locals.get("self"), Submit) for _, frame in self.made]
        return [file for file, _ in groupby(files[begin : submits.index(True)])]


def _is_of_the_fake(frame: FrameType) -> bool:
    """Whether the test's own router makes this call: it runs in the same thread."""
    caller = frame.f_back
    while caller is not None:
        if isinstance(caller.f_locals.get("self"), FakeRouter):
            return True
        caller = caller.f_back
    return False


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ApiUnderTest, Calls]]:
    calls = Calls()
    before = threading.gettrace()
    threading.settrace(calls)
    try:
        with service(tmp_path_factory.mktemp("api")).running() as api:
            api.post(CHAT, CHATS[0])  # the first request compiles the chat template
            yield api, calls
    finally:
        threading.settrace(before)


def recorded(traced: tuple[ApiUnderTest, Calls], body: dict[str, Any], streams: bool) -> Calls:
    api, calls = traced
    idle(api).router.is_silent = True  # a status that arrives is no part of a request
    calls.made.clear()
    calls.is_recording = True
    try:
        if streams:
            assert stream_texts(api.stream(CHAT, body))[0]
        else:
            assert api.post(CHAT, body)["choices"]
    finally:
        calls.is_recording = False
    return calls


def documented() -> list[str]:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = text.split("**The files of a chat in the API process.**")[1].split("\n\n")[1]
    return re.findall(r"^\| `([\w/.]+\.py)` \|", section, re.MULTILINE)


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("body", CHATS, ids=["plain", "unstated", "talk", "seeded"])
def test_a_chat_runs_the_code_of_few_files(
    traced: tuple[ApiUnderTest, Calls], body: dict[str, Any], streams: bool
) -> None:
    files = documented()
    assert len(files) == len(set(files)) <= MOST_FILES
    found = recorded(traced, body, streams).files
    assert found <= set(files)
    if streams:
        assert found == set(files)


@pytest.mark.parametrize("body", CHATS, ids=["plain", "unstated", "talk", "seeded"])
def test_the_way_to_the_router_enters_no_file_more_than_twice(
    traced: tuple[ApiUnderTest, Calls], body: dict[str, Any]
) -> None:
    walk = recorded(traced, body, streams=True).walk
    assert "router/api/requests/chat.py" in walk
    assert max(Counter(walk).values()) <= MOST_ENTRIES, walk
