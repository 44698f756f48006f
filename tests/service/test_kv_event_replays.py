"""Replays: consumers that ask for more than they read, that have gone, and what the ring lacks."""

import zmq

from lightkv.router.service.kv_events.replay import END, MAX_TAKEN, Replays, Ring


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


def answer(replays: Replays) -> None:
    for request in replays.receive():
        replays.answer(*request)


def test_each_consumer_gets_what_it_takes() -> None:
    ring = Ring()
    for _ in range(5):
        ring.add(b"payload")
    full = FullSocket([b"a", b"b", b"c"], room=6)
    full.room[b"b"] = 2
    full.gone.add(b"c")
    replays = Replays(full, b"", ring, lambda most: [])  # type: ignore[arg-type]
    answer(replays)
    assert numbers(full, b"a") == [0, 1, 2, 3, 4, -1]
    assert numbers(full, b"b") == [0, 1]
    assert numbers(full, b"c") == []


def test_so_many_are_answered_before_changes_are_published() -> None:
    ring = Ring()
    full = FullSocket([b"a"] * (MAX_TAKEN + 1), room=1000)
    replays = Replays(full, b"", ring, lambda most: [])  # type: ignore[arg-type]
    answer(replays)
    assert full.sent == [(b"a", END)] * MAX_TAKEN
    assert len(full.requests) == 1


def test_everything_is_made_once_as_long_as_the_ring_goes_on_from_it() -> None:
    ring = Ring(max_batches=4)
    for _ in range(6):
        ring.add(b"old")
    asked: list[int] = []

    def everything(most: int) -> list[bytes]:
        asked.append(most)
        return [b"all", b"of it"]

    full = FullSocket([b"a", b"b"], room=100)
    replays = Replays(full, b"", ring, everything)  # type: ignore[arg-type]
    answer(replays)
    assert numbers(full, b"a") == numbers(full, b"b") == [4, 5, -1]
    for _ in range(4):
        ring.add(b"new")
    full.requests.append([b"a", b"", bytes(8)])
    answer(replays)
    assert asked == [6]
    assert numbers(full, b"a")[3:] == [4, 5, 6, 7, 8, 9, -1]
    ring.add(b"newer")
    full.requests.append([b"b", b"", bytes(8)])
    answer(replays)
    assert asked == [6, 11]
    assert numbers(full, b"b")[3:] == [9, 10, -1]
