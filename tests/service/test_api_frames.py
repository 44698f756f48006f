"""The stream between API and router disconnects a peer that does not read, but not after a burst."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from lightkv.router.service import frames
from lightkv.router.service.frames import FrameStream
from lightkv.router.service.messages import Abort, AskMap, ToRouter

KIB = 1024
STALL_SECONDS = 0.2


def run(body: Callable[[FrameStream[ToRouter], FrameStream[ToRouter]], Awaitable[None]]) -> None:
    """Runs `body` with both ends of a stream."""

    async def ends() -> None:
        pair = socket.socketpair()
        ours, theirs = [
            FrameStream[ToRouter](*await asyncio.open_unix_connection(sock=end), ToRouter) for end in pair
        ]
        try:
            await asyncio.wait_for(body(ours, theirs), 20)
        finally:
            ours.close()
            theirs.close()

    asyncio.run(ends())


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_PENDING_BYTES", 512 * KIB)
    monkeypatch.setattr(frames, "MAX_STALL_SECONDS", STALL_SECONDS)


def test_a_peer_that_does_not_read_is_disconnected() -> None:
    async def body(ours: FrameStream[ToRouter], theirs: FrameStream[ToRouter]) -> None:
        sent, begun = 0, time.monotonic()
        receiving = asyncio.create_task(ours.receive())
        while not receiving.done():  # the router notices the end in the same way
            ours.send(Abort("a" * 64 * KIB))
            sent += 1
            await asyncio.sleep(0.005)
        assert receiving.result() is None
        assert time.monotonic() - begun > STALL_SECONDS
        assert sent > 512 // 64
        for _ in range(10):
            ours.send(Abort("lost"))  # raises no error
        received = 0
        while await theirs.receive() is not None:
            received += 1
        assert received < sent

    run(body)


def test_a_burst_that_is_read_in_time_arrives_whole() -> None:
    async def body(ours: FrameStream[ToRouter], theirs: FrameStream[ToRouter]) -> None:
        for _ in range(3):
            for i in range(64):  # 4 MiB in one turn of the event loop
                ours.send(Abort(f"{i} " + "a" * 64 * KIB))
            for i in range(64):
                message = await theirs.receive()
                assert isinstance(message, Abort)
                assert message.request_id.startswith(f"{i} ")
            await asyncio.sleep(2 * STALL_SECONDS)

    run(body)


def test_a_slow_peer_that_catches_up_is_not_disconnected() -> None:
    """The time counts from when the peer last had few unread bytes, not from when it first had many."""

    async def body(ours: FrameStream[ToRouter], theirs: FrameStream[ToRouter]) -> None:
        for _ in range(4):
            for _ in range(32):
                ours.send(Abort("a" * 64 * KIB))
            await asyncio.sleep(0.6 * STALL_SECONDS)
            ours.send(Abort("still there"))
            for _ in range(33):
                assert await theirs.receive() is not None
            ours.send(Abort("caught up"))
            assert await theirs.receive() == Abort("caught up")

    run(body)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_messages_arrive_however_their_bytes_are_cut(size: int) -> None:
    async def scenario() -> None:
        sender, receiver = socket.socketpair()
        stream = FrameStream[ToRouter](*await asyncio.open_unix_connection(sock=receiver), ToRouter)
        sent = [Abort("a"), Abort("b" * 300), AskMap(), Abort("")]
        frames = [msgspec.msgpack.encode(message) for message in sent]
        data = b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames) + b"\5\0\0\0cut"
        for start in range(0, len(data), size):
            sender.send(data[start : start + size])
            await asyncio.sleep(0)
        sender.close()
        assert [await stream.receive() for _ in range(5)] == [*sent, None]
        stream.close()

    asyncio.run(scenario())
