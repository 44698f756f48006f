"""The state of one HTTP connection: h11's, with a bound on what one turn of the event loop parses. It refuses
requests that are costly to parse for their size, and those whose end is ambiguous."""

from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer, blank_line_regex

_FIRST_BYTES = 256  # of a request, among which a target is looked for
MAX_LINES = 128  # of the headers of a request, and of the trailers behind a body; each takes 4 microseconds
FREE_CHUNKS, MIN_CHUNK_BYTES = 1000, 64  # after the free ones, the chunks of a body need this average

_AMBIGUOUS = (
    "a request with Transfer-Encoding has to be HTTP/1.1 and to have no Content-Length; send one of the two"
)


class RefusedRequest(h11.RemoteProtocolError):
    """A request that is HTTP, but that this server does not take. The message says why."""


class _Received(ReceiveBuffer):
    """The bytes that h11 has not parsed yet. h11 parses each line of headers and trailers by itself, so these
    lines are counted first."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        if self._data.count(b"\n") > MAX_LINES:  # which may be those of a body
            headers = blank_line_regex.split(self._data, 1)[0]
            if headers.count(b"\n") >= MAX_LINES:
                raise RefusedRequest(f"the request has more than {MAX_LINES} header lines; send fewer")
        return super().maybe_extract_lines()


class HttpConnection(h11.Connection):
    """The state of a server's connection. It frames the chunks of an answer itself, which takes h11 ten times
    as long. An answer that begins before the body of its request has arrived is the connection's last."""

    def __init__(self, max_header_bytes: int) -> None:
        super().__init__(h11.SERVER, max_header_bytes)
        self._receive_buffer = _Received()  # h11 has no public way to read headers within a limit of lines
        self._is_chunked = False
        self._num_chunks = self._num_bytes = 0  # of the body that is being read
        self._num_left = 0
        self.target = b""  # of the last request whose first line has begun to arrive
        self.refusal = ""  # why the last request was refused, if that was no mistake of form

    def begin_turn(self, num_events: int) -> None:
        """Lets `next_event` return so many events, each of which takes some 10 microseconds."""
        self._num_left = num_events

    @property
    def is_turn_over(self) -> bool:
        """Whether `next_event` returns nothing before `begin_turn` is called."""
        return self._num_left == 0

    def next_event(self) -> Any:
        """Returns the next part of a request, or h11.NEED_DATA when the turn is over.

        Raises RefusedRequest for a body in tiny chunks, for too many lines of headers, and for a request of
        which a proxy in front could see another end (RFC 9112, section 6.1): the rest of its body would then be
        another client's request. Raises h11.RemoteProtocolError for a request that is not HTTP.
        """
        if self._num_left == 0:
            return h11.NEED_DATA
        self._num_left -= 1
        if self.their_state is h11.IDLE and self._receive_buffer:
            first = bytes(self._receive_buffer._data[:_FIRST_BYTES])
            self.target = first.partition(b" ")[2].partition(b" ")[0]
        try:
            event = super().next_event()
            if type(event) is h11.Request:
                self._num_chunks = self._num_bytes = 0
                names = {name for name, _ in event.headers}  # in lower case
                is_ambiguous = b"content-length" in names or event.http_version < b"1.1"
                if b"transfer-encoding" in names and is_ambiguous:
                    raise RefusedRequest(_AMBIGUOUS)
            elif type(event) is h11.Data:
                self._count(event)
        except RefusedRequest as refused:
            self.refusal = str(refused)
            raise
        return event

    def _count(self, data: h11.Data) -> None:
        """Counts a piece of a body. Raises RefusedRequest if the chunks so far are too small."""
        self._num_chunks += data.chunk_end
        self._num_bytes += len(data.data)
        if self._num_chunks > FREE_CHUNKS and self._num_bytes < MIN_CHUNK_BYTES * self._num_chunks:
            raise RefusedRequest(
                f"the first {self._num_chunks} chunks of the body have {self._num_bytes} bytes; after "
                f"{FREE_CHUNKS} chunks they need {MIN_CHUNK_BYTES} bytes on average; send larger chunks, or a "
                "Content-Length"
            )

    def send(self, event: Any) -> Any:
        """Returns the bytes of an event. Raises h11.LocalProtocolError where it may not be sent now."""
        if type(event) is h11.Data and self._is_chunked and self.our_state is h11.SEND_BODY:
            data = event.data
            return b"%x\r\n%b\r\n" % (len(data), data) if data else b""  # an empty chunk would be the last
        if type(event) is not h11.Response:
            return super().send(event)
        if self.their_state is h11.SEND_BODY:
            headers = [*event.headers, (b"connection", b"close")]
            event = h11.Response(status_code=event.status_code, headers=headers, reason=event.reason)
        sent = super().send(event)
        self._is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in sent.lower()
        return sent
