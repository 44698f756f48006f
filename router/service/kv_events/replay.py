"""Replay: what has been published, for consumers that have missed some of it.

A consumer sends the number of the first batch that it misses, 8 bytes, big-endian, behind an empty frame. It
gets the frames (topic, number, payload) of each batch from there on, and then a batch with the number -1. The
last batches are kept, bounded in number and in bytes. A consumer that asks for older ones is sent what the
cache holds now, behind an AllBlocksCleared, under the numbers of the last batches, so that it is right again.

Consumers are answered in turns, each with as much as its connection takes. An answer that makes no progress for
`STALL_SECONDS` is dropped.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

MAX_BATCHES = 10_000
MAX_BATCH_BYTES = 64 * 2**20  # of all batches that are kept
MAX_CONSUMERS = 16  # that are answered at once; the requests of others wait in their connections
MAX_TAKEN = 64  # requests at once, also of those that are dropped
STALL_SECONDS = 5.0
QUEUED_BATCHES = 64  # that ZeroMQ holds for one consumer
END = (-1).to_bytes(8, "big", signed=True)
_NEVER = 2**64  # a number that no batch has
_TURN = 32  # batches that one consumer is sent before the next one
_STALLED_MS = 10  # between two turns, while none of the consumers reads
_PAUSE_SECONDS = 0.01  # after a request was dropped


class Ring:
    """The last batches that were published. Batches are numbered from 0; `end` is the number of the next."""

    def __init__(self, max_batches: int = MAX_BATCHES, max_bytes: int = MAX_BATCH_BYTES) -> None:
        self.end = 0
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
        self._payloads.append(payload)
        self._num_bytes += len(payload)
        while len(self._payloads) > self._max_batches or self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._payloads.popleft())
        self.end += 1
        return self.end - 1

    def __getitem__(self, number: int) -> bytes:
        return self._payloads[number - self.begin]


@dataclass
class _Answer:
    """The batches [next, end) of the ring or, if `payloads` is given, the last of these. `end` is that of the
    ring when the first batch is sent."""

    next: int
    end: int = -1
    payloads: list[bytes] | None = None
    moved: float = field(default_factory=time.monotonic)


class Replays:
    """Answers requests on a ROUTER socket, one of each connection at a time, from `ring`, or from
    `everything`: called with a number, it returns at most so many batches, which bring a consumer from any
    state to that of the last batch."""

    def __init__(
        self, socket: "zmq.Socket[bytes]", topic: bytes, ring: Ring, everything: Callable[[int], list[bytes]]
    ) -> None:
        self._socket = socket
        self._topic = topic
        self._ring = ring
        self._everything = everything
        self._answers: dict[bytes, _Answer] = {}  # by the names of their connections
        self._has_moved = False  # in the last turn
        self._snapshot: tuple[int, list[bytes]] = (0, [])  # by the number of batches published before it

    @property
    def wait_ms(self) -> int | None:
        """How long to wait for anything else before the next turn. None: until a request comes."""
        if not self._answers:
            return None
        return 0 if self._has_moved else _STALLED_MS

    @property
    def has_room(self) -> bool:
        """Whether further requests are taken."""
        return len(self._answers) < MAX_CONSUMERS

    def receive(self) -> None:
        """Takes requests that have come. What is published before the next turn is part of their answers. A
        request of a consumer that still gets an answer is dropped.

        Nonsense behind an empty frame is answered by the end alone, since its sender may wait for it; anything
        else is no request.
        """
        num_dropped = 0
        for _ in range(MAX_TAKEN):
            if not self.has_room:
                break
            try:
                name, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if not frames or frames[0]:
                continue
            if name in self._answers:
                num_dropped += 1
                continue
            is_number = len(frames) == 2 and len(frames[1]) == len(END)
            first = int.from_bytes(frames[1], "big") if is_number else _NEVER
            self._answers[name] = _Answer(first)
        if num_dropped:  # the router's loop comes first
            time.sleep(_PAUSE_SECONDS)

    def turn(self) -> None:
        """Sends each consumer a few batches."""
        self._has_moved = False
        for name, answer in list(self._answers.items()):
            if not self._advance(name, answer):
                del self._answers[name]

    def _advance(self, name: bytes, answer: _Answer) -> bool:
        """Sends a consumer its next batches. Returns whether there are more, and it still reads."""
        if answer.end < 0:
            answer.end = self._ring.end
        if answer.payloads is None and answer.next < min(self._ring.begin, answer.end):
            self._start_over(answer)
        for _ in range(_TURN):
            at = answer.next
            if at >= answer.end:
                frames = (b"", END, b"")
            else:
                payload = self._ring[at] if answer.payloads is None else answer.payloads[at - answer.end]
                frames = (self._topic, at.to_bytes(8, "big"), payload)
            try:
                self._socket.send_multipart((name, b"", *frames), zmq.NOBLOCK)
            except zmq.Again:  # its connection takes nothing more for now
                return time.monotonic() - answer.moved < STALL_SECONDS
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:  # else it has gone
                    raise
                return False
            if at >= answer.end:
                return False
            answer.next += 1
            answer.moved = time.monotonic()
            self._has_moved = True
        return True

    def _start_over(self, answer: _Answer) -> None:
        """Lets a consumer whose next batch is not kept have everything instead."""
        end, payloads = self._snapshot
        answer.end = self._ring.end
        most = answer.end - answer.next
        if end != answer.end or len(payloads) > most:
            payloads = self._everything(most)
            self._snapshot = answer.end, payloads
        answer.payloads = payloads
        answer.next = answer.end - len(payloads)
