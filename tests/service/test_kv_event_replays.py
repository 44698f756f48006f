"""Replays: consumers that ask for more than they read, that have gone, and so many at a time."""

from types import SimpleNamespace

import zmq

from lightkv.router.service.kv_events.change_queue import ChangeQueue
from lightkv.router.service.kv_events.events import AllBlocksCleared
from lightkv.router.service.kv_events.publisher import END, _Worker
from lightkv.router.service.kv_events.sockets import MAX_TAKEN


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

    def send_multipart(self, frames: tuple[bytes, ...], flags: int, copy: bool = True) -> None:
        client = frames[0]
        if client in self.gone:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        if not self.room[client]:
            raise zmq.Again
        self.room[client] -= 1
        self.sent.append((client, frames[3]))


def numbers(full: FullSocket, client: bytes) -> list[int]:
    return [int.from_bytes(number, "big", signed=True) for name, number in full.sent if name == client]


def worker_of(full: FullSocket, num_batches: int) -> _Worker:
    sockets = SimpleNamespace(replay=full, pub=SimpleNamespace(send_multipart=lambda frames: None))
    worker = _Worker(sockets, ChangeQueue(), 100)  # type: ignore[arg-type]
    for _ in range(num_batches):
        worker._publish([AllBlocksCleared()])
    return worker


def answer(worker: _Worker) -> None:
    for request in worker._requests():
        worker._answer(*request)


def test_each_consumer_gets_what_it_takes() -> None:
    full = FullSocket([b"a", b"b", b"c"], room=6)
    full.room[b"b"] = 2
    full.gone.add(b"c")
    answer(worker_of(full, 5))
    assert numbers(full, b"a") == [0, 1, 2, 3, 4, -1]
    assert numbers(full, b"b") == [0, 1]
    assert numbers(full, b"c") == []


def test_so_many_are_answered_before_changes_are_published() -> None:
    full = FullSocket([b"a"] * (MAX_TAKEN + 1), room=1000)
    answer(worker_of(full, 0))
    assert full.sent == [(b"a", END)] * MAX_TAKEN
    assert len(full.requests) == 1
