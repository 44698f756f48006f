"""The publisher of KV events: what the router's loop calls, and the thread that encodes and sends.

The loop hands over the changes of its ledger's prefix tree, and no more (`KVEventPublisher.send`). The thread
makes blocks of them and sends these on a PUB socket, as frames (topic, number, payload). A subscriber that does
not read costs at most 1,000 batches of memory; then ZeroMQ drops what comes for it, and it finds a gap in the
numbers.

Replays are answered on a ROUTER socket, whose port is the next one. A consumer sends the number of the first
batch that it misses, 8 bytes, big-endian, behind an empty frame. It gets the frames of each batch from there
on, and then a batch with the number -1. The last batches are kept, bounded in number and in bytes. Where these
lack some, all that the cache holds is published anew, behind an AllBlocksCleared, and the replay begins there.

A consumer that has applied every batch has exactly the blocks that the ledger has.
"""

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice

import msgspec
import zmq

from lightkv.ledger import TokenLedger
from lightkv.router.service.child_process import signals_held_back

from .blocks import BlockTree
from .change_queue import MAX_QUEUED_BYTES, ChangeQueue, Restart
from .events import DATA_PARALLEL_RANK, AllBlocksCleared, KVEvent, KVEventBatch, size
from .sockets import MAX_BATCHES, MAX_TAKEN, Sockets

TOPIC = b""  # as vLLM's default
END = (-1).to_bytes(8, "big", signed=True)
MAX_KEPT_BYTES = 256 * 2**20  # of the batches for replays; all blocks of 50 million tokens fit
_NEVER = 2**64  # a number that no batch has
_MAX_NUMBERS = 16_384  # of one batch: some 80 KB
_TURN = 32  # batches of a replay after which the router's loop goes on
_LAST_SECONDS = 5.0  # for the thread to end


class KVEventPublisher:
    """Publishes what the ledger holds that it follows. Its methods are for one thread, and none of them waits
    but `close`.

    `endpoint`: tcp://HOST:PORT; replays are at PORT + 1. Port 0 takes two free ones. Raises CannotPublish.

    Attributes:
        endpoint, replay_endpoint: where it listens.
        queue: what the thread has not taken yet.
    """

    def __init__(
        self, endpoint: str, max_queued_bytes: int = MAX_QUEUED_BYTES, max_kept: int = MAX_BATCHES
    ) -> None:
        sockets = Sockets(endpoint)
        self.endpoint, self.replay_endpoint = sockets.endpoint, sockets.replay_endpoint
        self.queue = ChangeQueue(max_queued_bytes)
        self.queue.restart([])  # consumers may still believe in what an earlier process had
        self._ledger: TokenLedger | None = None
        worker = _Worker(sockets, self.queue, max_kept)
        self._thread = threading.Thread(target=worker.run, name="kv-events", daemon=True)
        with signals_held_back():  # the thread inherits this
            self._thread.start()

    def follow(self, ledger: TokenLedger | None) -> None:
        """Publishes another ledger's blocks from now on, in place of those before; None: none."""
        self._ledger = ledger
        if ledger is not None:
            ledger.tree.note_changes()
        self.queue.restart([] if ledger is None else ledger.tree.contents())

    def send(self) -> None:
        """Hands over what has changed since the last call."""
        ledger = self._ledger
        if ledger is not None and (changes := ledger.tree.drain_changes()):
            self.queue.put(changes, ledger.tree.contents)

    def close(self) -> None:
        """Publishes what was handed over, and that no block is left, and stops listening."""
        self._ledger = None
        self.queue.end()
        self._thread.join(_LAST_SECONDS)
        if not self._thread.is_alive():
            self.queue.close()


class _Worker:
    """What runs in the thread. Batches are numbered from 0."""

    def __init__(self, sockets: Sockets, queue: ChangeQueue, max_kept: int) -> None:
        self._sockets = sockets
        self._queue = queue
        self._max_kept = max_kept
        self._tree = BlockTree()
        self._encoder = msgspec.msgpack.Encoder()
        self._kept: deque[zmq.Frame] = deque()  # the last batches; consumers share their memory
        self._kept_bytes = 0
        self._next = 0  # the number of the next batch
        self._whole = -1  # that of the last batch which brings consumers to the present from any state

    def run(self) -> None:
        """Works until the queue ends. An error, which is a bug, closes the sockets, so that consumers do not
        take what they have for what is there; the service goes on."""
        try:
            self._work()
        except Exception:
            text = traceback.format_exc()
            print(f"no more KV events are published; report this:\n{text}", file=sys.stderr, flush=True)
        finally:
            self._sockets.close()

    def _work(self) -> None:
        poller = zmq.Poller()
        poller.register(self._queue.wake_fd, zmq.POLLIN)
        poller.register(self._sockets.replay, zmq.POLLIN)
        while True:
            poller.poll()
            requests = self._requests()
            items, is_last = self._queue.take()
            for item in items:
                if isinstance(item, Restart):
                    self._publish_whole(self._tree.restart(item.contents))
                else:
                    self._publish(self._tree.apply(item))
            if is_last:
                self._publish([AllBlocksCleared()])
                return
            for request in requests:
                self._answer(*request)

    def _publish(self, events: Iterable[KVEvent]) -> None:
        for batch in _batches(events):
            time.sleep(0)  # the router's loop comes first, even if consumers ask for everything all the time
            payload = self._encoder.encode(KVEventBatch(time.time(), batch, DATA_PARALLEL_RANK))
            self._kept.append(zmq.Frame(payload))
            self._kept_bytes += len(payload)
            while len(self._kept) > self._max_kept or self._kept_bytes > MAX_KEPT_BYTES:
                self._kept_bytes -= len(self._kept.popleft())
            self._sockets.pub.send_multipart((TOPIC, self._next.to_bytes(8, "big"), payload))
            self._next += 1

    def _publish_whole(self, events: Iterable[KVEvent]) -> None:
        """Publishes events that bring consumers to the present from any state."""
        self._whole = self._next
        self._publish(events)

    def _requests(self) -> list[tuple[bytes, int]]:
        """Returns the requests for replays that have come: the names of their connections, and the first
        numbers. What is published before `_answer` is part of their answers. Nonsense behind an empty frame is
        answered by the end alone, since its sender may wait for it; anything else is no request."""
        found: list[tuple[bytes, int]] = []
        while len(found) < MAX_TAKEN:
            try:
                name, *frames = self._sockets.replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if frames and not frames[0]:
                is_number = len(frames) == 2 and len(frames[1]) == len(END)
                found.append((name, int.from_bytes(frames[1], "big") if is_number else _NEVER))
        return found

    def _answer(self, name: bytes, first: int) -> None:
        """Sends a consumer the batches from `first` on, as far as its connection takes them. What has no room
        is dropped, and the consumer finds a gap."""
        if first < self._next - len(self._kept):
            if self._whole < self._next - len(self._kept):
                self._publish_whole(chain((AllBlocksCleared(),), self._tree.stored()))
            first = self._whole
        begin, send = self._next - len(self._kept), self._sockets.replay.send_multipart
        first = min(max(first, begin), self._next)
        try:
            for number, payload in enumerate(islice(self._kept, first - begin, None), first):
                send((name, b"", TOPIC, number.to_bytes(8, "big"), payload), zmq.NOBLOCK, copy=False)
                if number % _TURN == 0:
                    time.sleep(0)
            send((name, b"", b"", END, b""), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):  # it does not read, or has gone
                raise


def _batches(events: Iterable[KVEvent]) -> Iterator[list[KVEvent]]:
    """Yields the events, in their order, in lists of up to _MAX_NUMBERS numbers, or of one event."""
    batch: list[KVEvent] = []
    num_numbers = 0
    for event in events:
        more = size(event)
        if batch and num_numbers + more > _MAX_NUMBERS:
            yield batch
            batch, num_numbers = [], 0
        batch.append(event)
        num_numbers += more
    if batch:
        yield batch
