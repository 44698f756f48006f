"""Replay: what has been published, for consumers that have missed some of it.

A consumer sends the number of the first batch that it misses, 8 bytes, big-endian, behind an empty frame. It
gets the frames (topic, number, payload) of each batch from there on, and then a batch with the number -1. The
last batches are kept, bounded in number and in bytes. A consumer that asks for older ones is sent what the
cache holds now, behind an AllBlocksCleared, under the numbers of the last batches: after those it is right
again, too.

No consumer holds up another: each is sent as much as its connection takes, in turns, one answer after the
other. It is forgotten with all that it asks for when it takes nothing for `STALL_SECONDS`, or has gone.
"""

import time
from collections import deque
from collections.abc import Callable

import zmq

MAX_BATCHES = 10_000
MAX_BATCH_BYTES = 64 * 2**20  # of all batches that are kept
MAX_CONSUMERS = 16  # that are answered at once; the requests of others wait in their connections
MAX_REQUESTS = 4  # of one consumer that are not answered; further ones are dropped
MAX_TAKEN = 64  # requests at once, also of those that are dropped
STALL_SECONDS = 5.0
QUEUED_BATCHES = 64  # that ZeroMQ holds for one consumer
END = (-1).to_bytes(8, "big", signed=True)
_NEVER = 2**64  # a number that no batch has
_TURN = 32  # batches that one consumer is sent before the next one
_STALLED_MS = 10  # between two turns, while none of the consumers reads
_PAUSE_SECONDS = 0.01  # in which no request is taken, after one was dropped


class Ring:
    """The last batches that were published. Batches are numbered from 0."""

    def __init__(self, max_batches: int = MAX_BATCHES, max_bytes: int = MAX_BATCH_BYTES) -> None:
        self.end = 0  # the number of the next batch
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._payloads: deque[bytes] = deque()
        self._num_bytes = 0

    @property
    def begin(self) -> int:
        """The number of the oldest batch that is kept."""
        return self.end - len(self._payloads)

    def add(self, payload: bytes) -> int:
        """Keeps a batch, in place of the oldest ones if need be. Returns its number."""
        payloads = self._payloads
        payloads.append(payload)
        self._num_bytes += len(payload)
        while len(payloads) > self._max_batches or self._num_bytes > self._max_bytes:
            self._num_bytes -= len(payloads.popleft())
        self.end += 1
        return self.end - 1

    def __getitem__(self, number: int) -> bytes:
        return self._payloads[number - self.begin]


class _Replay:
    """An answer: the batches [next, end) of the ring, or of `payloads`, which end at `end`."""

    def __init__(self, start: int, end: int) -> None:
        self.next = start
        self.end = end
        self.payloads: list[bytes] | None = None
        self.moved = time.monotonic()


class _Consumer:
    """A connection with requests. `asked`: from which number on each asks for batches. `replay`: what it is
    sent; None before the first turn, and after an answer's end."""

    def __init__(self) -> None:
        self.asked: deque[int] = deque()
        self.replay: _Replay | None = None


class Replays:
    """Answers requests on a ROUTER socket, from `ring`, or from what `everything` returns: the batches, at most
    as many as it is told, that bring a consumer from any state to that of the last batch."""

    def __init__(
        self, socket: "zmq.Socket[bytes]", topic: bytes, ring: Ring, everything: Callable[[int], list[bytes]]
    ) -> None:
        self._socket = socket
        self._topic = topic
        self._ring = ring
        self._everything = everything
        self._consumers: dict[bytes, _Consumer] = {}  # by the names of their connections
        self._has_moved = False  # in the last turn
        self._pause_ends = 0.0
        self._snapshot: tuple[int, list[bytes]] = (0, [])  # by the number of batches published before it

    @property
    def wait_ms(self) -> int | None:
        """How long to wait for anything else before the next turn. None: until a request comes."""
        if not self._consumers:
            return _STALLED_MS if self._is_paused else None
        return 0 if self._has_moved else _STALLED_MS

    @property
    def has_room(self) -> bool:
        """Whether requests are taken now."""
        return len(self._consumers) < MAX_CONSUMERS and not self._is_paused

    @property
    def _is_paused(self) -> bool:
        return time.monotonic() < self._pause_ends

    def receive(self) -> None:
        """Takes requests that have come. What is published before the next turn is part of their answers.

        Nonsense behind an empty frame is answered by the end alone, since its sender may wait for it; anything
        else is no request.
        """
        num_dropped = 0
        for _ in range(MAX_TAKEN):
            if not self.has_room:
                break
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) < 2 or frames[1]:
                continue
            consumer = self._consumers.setdefault(frames[0], _Consumer())
            if len(consumer.asked) + (consumer.replay is not None) >= MAX_REQUESTS:
                num_dropped += 1
                continue
            is_number = len(frames) == 3 and len(frames[2]) == len(END)
            consumer.asked.append(int.from_bytes(frames[2], "big") if is_number else _NEVER)
        if num_dropped:  # the router's loop comes first
            self._pause_ends = time.monotonic() + _PAUSE_SECONDS

    def turn(self) -> None:
        """Sends each consumer a few batches."""
        self._has_moved = False
        for name, consumer in list(self._consumers.items()):
            if consumer.replay is None:
                consumer.replay = _Replay(consumer.asked.popleft(), self._ring.end)
            if not self._advance(name, consumer, consumer.replay):
                del self._consumers[name]

    def _advance(self, name: bytes, consumer: _Consumer, replay: _Replay) -> bool:
        """Sends a consumer its next batches. Returns False where nothing is left for it, or it is to be
        forgotten."""
        if replay.payloads is None and replay.next < min(self._ring.begin, replay.end):
            self._start_over(replay)
        for _ in range(_TURN):
            at = replay.next
            if at >= replay.end:
                frames = (b"", END, b"")
            else:
                payloads = replay.payloads
                payload = self._ring[at] if payloads is None else payloads[at - replay.end]
                frames = (self._topic, at.to_bytes(8, "big"), payload)
            try:
                self._socket.send_multipart((name, b"", *frames), zmq.NOBLOCK)
            except zmq.Again:  # its connection takes nothing more for now
                return time.monotonic() - replay.moved < STALL_SECONDS
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:  # else it has gone
                    raise
                return False
            if at >= replay.end:
                consumer.replay = None
                return bool(consumer.asked)
            replay.next += 1
            replay.moved = time.monotonic()
            self._has_moved = True
        return True

    def _start_over(self, replay: _Replay) -> None:
        """Lets a consumer whose next batch is not kept have everything instead."""
        end, payloads = self._snapshot
        replay.end = self._ring.end
        num_numbers = replay.end - replay.next
        if end != replay.end or len(payloads) > num_numbers:
            payloads = self._everything(num_numbers)
            self._snapshot = replay.end, payloads
        replay.payloads = payloads
        replay.next = replay.end - len(payloads)
