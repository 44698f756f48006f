"""What a connection parses in a turn of the event loop, and the requests that it does not take."""

from collections.abc import Iterator
from typing import Any

import h11
import pytest

from lightkv.router.api.http.parser import (
    FREE_CHUNKS,
    MAX_LINES,
    MIN_CHUNK_BYTES,
    HttpConnection,
    RefusedRequest,
)

MAX_HEADER_BYTES, NUM_EVENTS = 2**16, 64
GET = b"GET / HTTP/1.1\r\nHost: here\r\n"
POST = b"POST / HTTP/1.1\r\nHost: here\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def read(*pieces: bytes) -> HttpConnection:
    """Returns a connection that has read all that arrives in these pieces."""
    connection = HttpConnection(MAX_HEADER_BYTES)
    for _ in events(connection, *pieces):
        pass
    return connection


def events(connection: HttpConnection, *pieces: bytes) -> Iterator[Any]:
    for piece in pieces:
        connection.receive_data(piece)
        while True:
            connection.begin_turn(NUM_EVENTS)
            event = connection.next_event()
            if event in (h11.NEED_DATA, h11.PAUSED):
                break
            yield event


def cut(data: bytes, num_bytes: int) -> list[bytes]:
    return [data[start : start + num_bytes] for start in range(0, len(data), num_bytes)]


def test_a_turn_has_so_many_events() -> None:
    connection = HttpConnection(MAX_HEADER_BYTES)
    connection.receive_data(CHUNKED + chunk(b"x") * 500 + END)
    num_events = []
    while connection.their_state is not h11.DONE:
        connection.begin_turn(NUM_EVENTS)
        found = 0
        while connection.next_event() is not h11.NEED_DATA:
            found += 1
        num_events.append(found)
        assert connection.is_turn_over or connection.their_state is h11.DONE
    assert set(num_events[:-1]) == {NUM_EVENTS}
    assert sum(num_events) == 502  # with the headers and the end


@pytest.mark.parametrize("num_bytes", [2**20, 37])
def test_chunks_need_an_average_size_after_the_free_ones(num_bytes: int) -> None:
    tiny = CHUNKED + chunk(b"x") * FREE_CHUNKS
    assert read(*cut(tiny + END, num_bytes)).their_state is h11.DONE
    with pytest.raises(RefusedRequest, match=f"first {FREE_CHUNKS + 1} chunks of the body have 1001 bytes"):
        read(*cut(tiny + chunk(b"x"), num_bytes))
    enough = CHUNKED + chunk(b"x" * MIN_CHUNK_BYTES) * (FREE_CHUNKS + 200)
    assert read(*cut(enough + END, num_bytes)).their_state is h11.DONE
    with pytest.raises(RefusedRequest, match="send larger chunks, or a Content-Length"):
        read(*cut(enough + chunk(b"x"), num_bytes))


def test_extensions_of_chunks_are_no_part_of_their_size() -> None:
    extended = b"1;name=" + b"e" * 100 + b"\r\nx\r\n"
    assert read(CHUNKED, extended * FREE_CHUNKS, END).their_state is h11.DONE
    with pytest.raises(RefusedRequest):
        read(CHUNKED, extended * (FREE_CHUNKS + 1))


def test_each_body_of_a_connection_is_counted_anew() -> None:
    connection = HttpConnection(MAX_HEADER_BYTES)
    for _ in range(3):
        assert len(list(events(connection, CHUNKED + chunk(b"x") * FREE_CHUNKS + END))) == FREE_CHUNKS + 2
        for answer in (h11.Response(status_code=200, headers=[("Content-Length", "0")]), h11.EndOfMessage()):
            connection.send(answer)
        connection.start_next_cycle()


def test_a_body_of_known_length_may_arrive_byte_by_byte() -> None:
    length = 3 * FREE_CHUNKS
    head = POST + b"Content-Length: %d\r\n\r\n" % length
    assert read(head, *[b"x"] * length).their_state is h11.DONE


@pytest.mark.parametrize("end", [b"\r\n", b"\n"])
@pytest.mark.parametrize("begin", [GET, CHUNKED + b"0\r\n"], ids=["headers", "trailers"])
def test_the_lines_of_headers_and_trailers_have_a_bound(begin: bytes, end: bytes) -> None:
    num_lines = MAX_LINES - (2 if begin == GET else 0)  # the request and its Host are lines, too
    lines = (b"a:" + end) * num_lines
    assert read(begin + lines + end).their_state is h11.DONE
    for more in (b"a:" + end + end, (b"a:" + end) * 1000):  # complete, and not
        with pytest.raises(RefusedRequest, match=f"more than {MAX_LINES} header lines"):
            read(begin + lines + more)
        with pytest.raises(RefusedRequest):
            read(*cut(begin + lines + more, 1000))


def test_the_lines_of_a_body_are_not_counted() -> None:
    body = b"\n" * (3 * MAX_LINES)
    assert read(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body).their_state is h11.DONE
    assert read(CHUNKED + chunk(body) + b"0\r\nExpires: 0\r\n\r\n").their_state is h11.DONE


@pytest.mark.parametrize("status", [200, 401, 500])
def test_an_answer_before_the_end_of_the_body_ends_the_connection(status: int) -> None:
    for body, is_last in ((chunk(b"x"), True), (chunk(b"x") + END, False)):
        connection = read(CHUNKED + body)
        sent = connection.send(h11.Response(status_code=status, headers=[("Content-Length", "0")]))
        assert (b"connection: close" in sent.lower()) == is_last
        connection.send(h11.EndOfMessage())
        assert connection.our_state is (h11.MUST_CLOSE if is_last else h11.DONE)
