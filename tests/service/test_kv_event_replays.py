"""Replays in turns: consumers that read slowly, that ask for more than they read, and that have gone."""

import pytest
import zmq

from lightkv.router.service.kv_events import replay
from lightkv.router.service.kv_events.replay import (
    END,
    MAX_CONSUMERS,
    MAX_TAKEN,
    Replays,
    Ring,
)


class FullSocket:
    """A ROUTER socket with requests, whose connections take `room` messages each."""

    def __init__(self, clients: list[bytes], room: int) -> None:
        self.requests = [[client, b"", bytes(8)] for client in clients]
        self.room = dict.fromkeys(clients, room)
        self.sent: list[tuple[bytes, bytes]] = []
        self.gone: set[bytes] = set()

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self.requests:
            raise zmq.Again
        return self.requests.pop(0)

    def send_multipart(self, frames: tuple[bytes, ...], flags: int) -> None:
        client = frames[0]
        if client in self.gone:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        if not self.room[client]:
            raise zmq.Again
        self.room[client] -= 1
        self.sent.append((client, frames[3]))


def turn(replays: Replays) -> None:
    replays.receive()
    replays.turn()


def test_a_replay_goes_on_when_its_consumer_reads_and_is_forgotten_when_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(replay.time, "monotonic", lambda: now)
    ring = Ring()
    for _ in range(5):
        ring.add(b"payload")
    names = [bytes([number]) for number in range(MAX_CONSUMERS + 1)]
    full = FullSocket(names, room=2)
    replays = Replays(full, b"", ring, lambda most: [])  # type: ignore[arg-type]
    assert replays.wait_ms is None
    turn(replays)
    assert (replays.has_room, replays.wait_ms) == (False, 0)
    assert len(full.requests) == 1  # it waits in the socket
    turn(replays)
    assert replays.wait_ms == 10  # nobody reads
    full.room[b"\x00"] = 10
    full.gone.add(b"\x01")
    turn(replays)
    numbers = [
        int.from_bytes(number, "big", signed=True) for client, number in full.sent if client == b"\x00"
    ]
    assert numbers == [0, 1, 2, 3, 4, -1]
    assert replays.has_room  # the first has ended, the second has gone
    now = replay.STALL_SECONDS
    turn(replays)
    assert replays.wait_ms == 0  # the last request was taken, and all others are forgotten
    full.room = dict.fromkeys(names, 10)
    turn(replays)
    assert replays.wait_ms is None
    assert {client for client, number in full.sent if number == END} == {names[0], names[-1]}


def test_a_request_before_the_last_answer_has_ended_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(replay.time, "sleep", pauses.append)
    ring = Ring()
    for _ in range(2):
        ring.add(b"payload")
    full = FullSocket([b"a"] * MAX_TAKEN + [b"b"], room=1000)
    replays = Replays(full, b"", ring, lambda most: [])  # type: ignore[arg-type]
    turn(replays)
    assert len(full.requests) == 1  # so many are taken at a time
    assert len(pauses) == 1  # in which the router's loop goes on
    whole = [number.to_bytes(8, "big", signed=True) for number in (0, 1, -1)]
    assert full.sent == [(b"a", number) for number in whole]
    full.sent.clear()
    full.requests.append([b"a", b"", bytes(8)])  # its answer has ended
    turn(replays)
    assert full.sent == [(name, number) for name in (b"b", b"a") for number in whole]
    assert (replays.wait_ms, len(pauses)) == (None, 1)


def test_a_consumer_that_has_gone_is_forgotten() -> None:
    ring = Ring()
    ring.add(b"payload")
    full = FullSocket([b"a"], room=1)
    replays = Replays(full, b"", ring, lambda most: [])  # type: ignore[arg-type]
    turn(replays)
    assert replays.wait_ms == 0
    full.gone.add(b"a")
    turn(replays)
    assert replays.wait_ms is None
    assert len(full.sent) == 1


def test_the_ring_may_overtake_a_consumer_that_reads_slowly() -> None:
    ring = Ring(max_batches=4)
    for _ in range(4):
        ring.add(b"old")
    full = FullSocket([b"c"], room=2)
    asked: list[int] = []

    def everything(most: int) -> list[bytes]:
        asked.append(most)
        return [b"all", b"of it"]

    replays = Replays(full, b"", ring, everything)  # type: ignore[arg-type]
    turn(replays)
    for _ in range(6):
        ring.add(b"new")
    full.room[b"c"] = 10
    turn(replays)
    assert asked == [8]
    numbers = [int.from_bytes(number, "big", signed=True) for _, number in full.sent]
    assert numbers == [0, 1, 8, 9, -1]
    assert replays.wait_ms is None
