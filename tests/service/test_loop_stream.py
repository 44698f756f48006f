"""rpyc over a watched socket: large messages in both directions, a peer that does not read, every kind of
end."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import rpyc
import uvloop

from lightkv.router.service.loop_stream import LoopStream
from lightkv.router.service.worker import RPYC_CONFIG, connect

MESSAGE = bytes(range(256)) * 20_000  # 5 MB, far more than a socket's buffer


@pytest.fixture(
    autouse=True, params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner


class Echo(rpyc.Service):
    """Sends back what it receives, once the test allows it."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()

    def exposed_echo(self, data: bytes) -> bytes:
        self.may_answer.wait(10)
        return data


class End:
    """The event loop's end of a socket pair: a connection over a LoopStream, and what the stream reported."""

    def __init__(self, ours: socket.socket) -> None:
        self.num_ends = 0
        self.stream = LoopStream(asyncio.get_running_loop(), ours, self._serve, self._end)
        self.connection = connect(
            rpyc.VoidService(), self.stream, {**RPYC_CONFIG, "sync_request_timeout": 10}
        )

    def _serve(self) -> None:
        self.connection.serve(0)

    def _end(self) -> None:
        self.num_ends += 1

    async def has_ended(self) -> None:
        while not self.num_ends:
            await asyncio.sleep(0.001)

    def close(self) -> None:
        self.stream.close()
        self.connection.close()


@asynccontextmanager
async def echoing() -> AsyncIterator[tuple[End, Echo, socket.socket]]:
    theirs, ours = socket.socketpair()
    echo, end = Echo(), End(ours)
    served = connect(echo, rpyc.SocketStream(theirs), RPYC_CONFIG)
    thread = threading.Thread(target=served.serve_all, daemon=True)
    thread.start()
    try:
        yield end, echo, theirs
    finally:
        echo.may_answer.set()
        end.close()
        await asyncio.to_thread(thread.join, 10)
        assert not thread.is_alive()


async def longest_block(until: "asyncio.Future[object]") -> float:
    """Returns the longest time in seconds for which the event loop was blocked."""
    longest, last = 0.0, time.monotonic()
    while not until.done():
        await asyncio.sleep(0.005)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    return longest


async def test_a_large_message_waits_for_its_peer_without_blocking_the_loop() -> None:
    async with echoing() as (end, echo, _):
        send = rpyc.async_(end.connection.root.echo)
        answers = []
        # The peer answers the first message before it reads the second.
        for data in (MESSAGE, b"", MESSAGE[::-1]):
            answers.append(asyncio.get_running_loop().create_future())
            send(data).add_callback(lambda result, to=answers[-1]: to.set_result(result.value))
        assert len(end.stream._unsent) > len(MESSAGE)
        blocked = asyncio.create_task(longest_block(answers[-1]))
        await asyncio.sleep(0.1)
        assert not answers[0].done()
        echo.may_answer.set()
        assert await asyncio.wait_for(asyncio.gather(*answers), 60) == [MESSAGE, b"", MESSAGE[::-1]]
        assert await blocked < 9  # the peer would wait ten seconds for leave to answer
        assert len(end.stream._unsent) == 0


@pytest.mark.parametrize("num_bytes", [0, 3, 100])
async def test_a_peer_that_ends_within_a_message_ends_the_stream_once(num_bytes: int) -> None:
    theirs, ours = socket.socketpair()
    end = End(ours)
    theirs.sendall((b"\0\0\x10\0\0" + bytes(200))[:num_bytes])
    theirs.close()
    await asyncio.wait_for(end.has_ended(), 60)
    with pytest.raises(EOFError):
        end.connection.async_request(1, b"")
    await asyncio.sleep(0.01)
    assert end.num_ends == 1
    end.close()
    end.close()
    assert end.stream.closed


async def test_a_send_to_a_closed_peer_raises_and_reports_the_end() -> None:
    theirs, ours = socket.socketpair()
    end = End(ours)
    theirs.close()
    with pytest.raises(EOFError):  # the event loop had no turn in which to notice the end
        end.connection.async_request(1, b"")
    await asyncio.wait_for(end.has_ended(), 60)
    end.close()
