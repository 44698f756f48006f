"""Replay: what has been published, for consumers that have missed some of it.

A consumer sends the number of the first batch that it misses, 8 bytes, big-endian, behind an empty frame. It
gets the frames (topic, number, payload) of each batch from there on, and then a batch with the number -1. The
last batches are kept, bounded in number and in bytes. A consumer that asks for older ones is sent what the
cache held at some time since, behind an AllBlocksCleared and under the numbers of the batches before that time,
and the batches after it, so that it is right again.

An answer is queued at once. Consumers share the memory of its batches, and ZeroMQ holds the rest for each of
them. What a consumer that does not read has no room for is dropped, and it finds a gap.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import zmq

MAX_BATCHES = 10_000
MAX_BATCH_BYTES = 64 * 2**20  # of all batches that are kept
MAX_TAKEN = 16  # requests that are answered before what has changed is published
QUEUED_BATCHES = MAX_BATCHES + 1024  # that ZeroMQ holds for one consumer
_NEVER = 2**64  # a number that no batch has
END = (-1).to_bytes(8, "big", signed=True)
_TURN = 32  # batches after which the router's loop goes on


class Ring:
    """The last batches that were published. Batches are numbered from 0; `end` is the number of the next."""

    def __init__(self, max_batches: int = MAX_BATCHES, max_bytes: int = MAX_BATCH_BYTES) -> None:
        self.end = 0
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._payloads: deque[zmq.Frame] = deque()
        self._num_bytes = 0

    @property
    def begin(self) -> int:
        """The number of the oldest batch that is kept."""
        return self.end - len(self._payloads)

    def add(self, payload: bytes) -> int:
        """Keeps a batch, in place of the oldest ones if need be. Returns its number."""
        self._payloads.append(zmq.Frame(payload))
        self._num_bytes += len(payload)
        while len(self._payloads) > self._max_batches or self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._payloads.popleft())
        self.end += 1
        return self.end - 1

    def __getitem__(self, number: int) -> zmq.Frame:
        return self._payloads[number - self.begin]


class Replays:
    """Answers requests on a ROUTER socket from `ring`, or from `everything`: called with a number, it returns
    at most so many batches, which bring a consumer from any state to that of the last batch."""

    def __init__(
        self, socket: "zmq.Socket[bytes]", topic: bytes, ring: Ring, everything: Callable[[int], list[bytes]]
    ) -> None:
        self._socket = socket
        self._topic = topic
        self._ring = ring
        self._everything = everything
        self._snapshot: tuple[int, Sequence[zmq.Frame]] = (
            0,
            (),
        )  # by the number of batches published before it

    def receive(self) -> list[tuple[bytes, int]]:
        """Returns the requests that have come: the names of their connections, and the first numbers. What is
        published before `answer` is part of their answers. Nonsense behind an empty frame is answered by the
        end alone, since its sender may wait for it; anything else is no request."""
        found: list[tuple[bytes, int]] = []
        while len(found) < MAX_TAKEN:
            try:
                name, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if frames and not frames[0]:
                is_number = len(frames) == 2 and len(frames[1]) == len(END)
                found.append((name, int.from_bytes(frames[1], "big") if is_number else _NEVER))
        return found

    def answer(self, name: bytes, first: int) -> None:
        """Sends a consumer the batches from `first` on, as far as its connection takes them."""
        try:
            for number, payload in self._batches(first):
                frames = (name, b"", self._topic, number.to_bytes(8, "big"), payload)
                self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
                if number % _TURN == 0:
                    time.sleep(0)
            self._socket.send_multipart((name, b"", b"", END, b""), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):  # it does not read, or has gone
                raise

    def _batches(self, first: int) -> Iterator[tuple[int, zmq.Frame]]:
        """Yields the batches from `first` on with their numbers: everything, if the ring lacks some."""
        if first < self._ring.begin:
            end, payloads = self._snapshot
            if end < self._ring.begin or end - len(payloads) < first:
                end = self._ring.end
                payloads = [zmq.Frame(one) for one in self._everything(end - first)]
                self._snapshot = end, payloads
            first = end
            yield from enumerate(payloads, end - len(payloads))
        for number in range(first, self._ring.end):
            yield number, self._ring[number]
