"""The chunks of a stream: their events, and how they are framed for HTTP."""

from itertools import chain
from typing import Any

import h11
import msgspec
import pytest

from lightkv.router.api.answers.chat_writer import ChatWriter
from lightkv.router.api.answers.completion_writer import CompletionWriter
from lightkv.router.api.answers.extras import Echo, Extras
from lightkv.router.api.answers.generation import Answer, TextDelta
from lightkv.router.api.http.parser import HttpConnection
from lightkv.router.api.http.stream import EventWriter

UNUSED: Any = None
ECHO = Extras(echoed=[Echo("the prompt")])
TEXTS = ["Once", " upon", ' a "time"\n', "", "\u00e9\u4e2d\U0001f600", "</s>\u2028\\", "the end"]


def answer(index: int, has_logprobs: bool = False) -> Answer:
    return Answer(index, 0, UNUSED, UNUSED, has_logprobs)


def plainly(writer: CompletionWriter | ChatWriter, deltas: list[TextDelta], with_usage: bool) -> list[Any]:
    """The chunks that a writer makes without an EventWriter."""
    chunks: list[Any] = [chunk for delta in deltas if delta.text for chunk in writer.chunks(delta)]
    return [chunk | {"usage": None} if with_usage else chunk for chunk in chunks]


def streamed(writer: CompletionWriter | ChatWriter, deltas: list[TextDelta], with_usage: bool) -> list[Any]:
    events = EventWriter(UNUSED, writer, with_usage, False)
    data = b"".join(chain.from_iterable(map(events.delta, deltas))).decode()
    *lines, rest = data.split("\n\n")
    assert rest == ""
    assert all(line.startswith("data: ") for line in lines)
    return [msgspec.json.decode(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("with_usage", [False, True], ids=["without usage", "with usage"])
@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
def test_events_made_of_the_first_one_equal_those_written_whole(is_chat: bool, with_usage: bool) -> None:
    writer: CompletionWriter | ChatWriter
    writer = ChatWriter("mödel", UNUSED) if is_chat else CompletionWriter("mödel", UNUSED, ECHO)
    deltas = [TextDelta(answer(i % 2), text) for text in TEXTS for i in range(2)]
    deltas.append(TextDelta(answer(0), "", finish_reason="length"))
    deltas.append(TextDelta(answer(1), "!", finish_reason="stop"))
    found = streamed(writer, deltas, with_usage)
    writer._opened.clear()
    deltas[-2].text = "?"  # so that `plainly` has it, too
    expected = plainly(writer, deltas, with_usage)
    expected[-2]["choices"][0] = found[-2]["choices"][0]
    assert found == expected
    assert found[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_chunks_are_framed_as_h11_frames_them(version: bytes) -> None:
    def sent(connection: h11.Connection, length: list[tuple[str, str]]) -> list[bytes]:
        if isinstance(connection, HttpConnection):
            connection.begin_turn(8)
        connection.receive_data(b"GET / HTTP/%b\r\nHost: here\r\n\r\n" % version)
        while type(connection.next_event()) is not h11.EndOfMessage:
            pass
        events = [h11.Response(status_code=200, headers=length)]
        events += [h11.Data(data=data) for data in (b"one", b"", b"x" * 300)]
        return [bytes(connection.send(event)) for event in [*events, h11.EndOfMessage()]]

    for length in ([], [("Content-Length", "303")]):
        theirs = h11.Connection(h11.SERVER, 1000)
        assert sent(HttpConnection(1000), length) == sent(theirs, length)


def test_nothing_is_sent_after_the_last_chunk() -> None:
    connection = HttpConnection(1000)
    connection.begin_turn(8)
    connection.receive_data(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    while type(connection.next_event()) is not h11.EndOfMessage:
        pass
    for event in (h11.Response(status_code=200, headers=[]), h11.Data(data=b"one"), h11.EndOfMessage()):
        connection.send(event)
    with pytest.raises(h11.LocalProtocolError):
        connection.send(h11.Data(data=b"two"))
