"""The stream between API and router: a peer that reads late loses nothing, however the bytes are cut."""

import asyncio
import socket
from collections.abc import Iterator

import msgspec
import pytest

from lightkv.router.service import messages as frames
from lightkv.router.service.messages import Abort, AskMap, BadFrame, FrameStream, ToRouter

KIB = 1024


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def ends(runner: asyncio.Runner) -> Iterator[list[FrameStream[ToRouter]]]:
    """Both ends of a stream."""

    async def opened(end: socket.socket) -> FrameStream[ToRouter]:
        return FrameStream[ToRouter](*await asyncio.open_unix_connection(sock=end), ToRouter)

    streams = [runner.run(opened(end)) for end in socket.socketpair()]
    yield streams
    for stream in streams:
        stream.close()


async def test_a_peer_that_reads_nothing_stays_connected(ends: list[FrameStream[ToRouter]]) -> None:
    """The sender sees how much is unread, and everything arrives once the peer reads."""
    ours, theirs = ends
    for _ in range(64):
        ours.send(Abort("a" * 64 * KIB))
        await asyncio.sleep(0.002)
    assert 2048 * KIB < ours.num_unread < 64 * 65 * KIB
    for _ in range(64):
        assert await theirs.receive() == Abort("a" * 64 * KIB)
    assert ours.num_unread == 0


async def test_messages_to_a_closed_stream_are_lost_without_an_error(
    ends: list[FrameStream[ToRouter]],
) -> None:
    ours, theirs = ends
    theirs.close()
    assert await ours.receive() is None
    ours.close()
    for _ in range(10):
        ours.send(Abort("lost"))


async def test_a_burst_that_is_read_in_time_arrives_whole(ends: list[FrameStream[ToRouter]]) -> None:
    ours, theirs = ends
    for _ in range(3):
        for i in range(64):  # 4 MiB in one turn of the event loop
            ours.send(Abort(f"{i} " + "a" * 64 * KIB))
        for i in range(64):
            message = await theirs.receive()
            assert isinstance(message, Abort)
            assert message.request_id.startswith(f"{i} ")


async def test_a_frame_of_the_most_bytes_arrives_and_a_longer_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, ends: list[FrameStream[ToRouter]]
) -> None:
    ours, theirs = ends
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 400)
    longest = Abort("a" * (700 - len(msgspec.msgpack.encode(Abort("a" * 300)))))
    ours.send(longest)
    assert await theirs.receive() == longest
    ours.send(Abort(longest.request_id + "a"))
    with pytest.raises(BadFrame, match="a frame of 401 bytes; at most 400 are allowed"):
        await theirs.receive()


def nested(levels: int) -> bytes:
    """An Abort with a field that it does not know, in which as many maps are nested."""
    whole = msgspec.msgpack.encode({"type": "Abort", "request_id": "a", "more": 0})
    return whole[:-1] + b"\x81\xa1x" * levels + whole[-1:]


async def test_a_frame_that_nests_too_deeply_is_refused_as_any_other_that_is_no_message(
    ends: list[FrameStream[ToRouter]],
) -> None:
    ours, theirs = ends
    for levels in (100, 100_000):
        data = nested(levels)
        ours.send_frame(frames.LENGTH.pack(len(data)) + data)
    assert await theirs.receive() == Abort("a")
    with pytest.raises(BadFrame, match="300031 bytes are not a message: maximum recursion depth"):
        await theirs.receive()


def test_bytes_that_are_no_message_are_refused() -> None:
    decoder = msgspec.msgpack.Decoder(Abort)
    for data in (b"", b"\xc1", nested(0)[:-1], nested(0) + b"\0", msgspec.msgpack.encode({"type": "Other"})):
        with pytest.raises(BadFrame, match=f"^{len(data)} bytes are not a message: "):
            frames.decode(decoder, data)


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_messages_arrive_however_their_bytes_are_cut(size: int) -> None:
    sender, receiver = socket.socketpair()
    stream = FrameStream[ToRouter](*await asyncio.open_unix_connection(sock=receiver), ToRouter)
    sent = [Abort("a"), Abort("b" * 300), AskMap(), Abort("")]
    encoded = [msgspec.msgpack.encode(message) for message in sent]
    data = b"".join(len(frame).to_bytes(4, "little") + frame for frame in encoded) + b"\5\0\0\0cut"
    for start in range(0, len(data), size):
        sender.send(data[start : start + size])
        await asyncio.sleep(0)
    sender.close()
    assert [await stream.receive() for _ in range(5)] == [*sent, None]
    stream.close()
