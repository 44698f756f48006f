"""The publisher of KV events: what the router's loop calls, and the thread that encodes and sends.

The loop hands over the changes of its ledger's prefix tree, and no more (`KVEventPublisher.send`). The thread
makes blocks of them and sends these on a PUB socket, as frames (topic, number, payload), and answers replays on
a ROUTER socket, whose port is the next one. A subscriber that does not read costs at most 1,000 batches of
memory; then ZeroMQ drops what comes for it, and it finds a gap in the numbers.

A consumer that has applied every batch has exactly the blocks that the ledger has.
"""

import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from itertools import chain

import msgspec
import zmq

from lightkv.ledger import TokenLedger
from lightkv.router.service.child_process import signals_held_back

from .blocks import BLOCK_TOKENS, BlockTree
from .change_queue import MAX_QUEUED_BYTES, ChangeQueue, Restart
from .events import DATA_PARALLEL_RANK, AllBlocksCleared, KVEvent, KVEventBatch, size
from .replay import MAX_BATCHES, Replays, Ring
from .sockets import Sockets

TOPIC = b""  # as vLLM's default
_MAX_NUMBERS = 16_384  # of one batch: some 80 KB
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
        worker = _Worker(sockets, self.queue, Ring(max_kept))
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
    """What runs in the thread."""

    def __init__(self, sockets: Sockets, queue: ChangeQueue, ring: Ring) -> None:
        self._sockets = sockets
        self._queue = queue
        self._ring = ring
        self._tree = BlockTree()
        self._encoder = msgspec.msgpack.Encoder()
        self._replays = Replays(sockets.replay, TOPIC, ring, self._everything)

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
        while True:
            self._wait()
            for one in self._sockets.connections:
                one.watch()
            requests = self._replays.receive()
            items, is_last = self._queue.take()
            for item in items:
                if isinstance(item, Restart):
                    self._publish(self._tree.restart(item.contents))
                else:
                    self._publish(self._tree.apply(item))
            if is_last:
                self._publish([AllBlocksCleared()])
                return
            for request in requests:
                self._replays.answer(*request)

    def _wait(self) -> None:
        """Waits for changes, for requests, or for connections."""
        poller = zmq.Poller()
        poller.register(self._queue.wake_fd, zmq.POLLIN)
        for one in self._sockets.connections:
            poller.register(one.monitor, zmq.POLLIN)
        poller.register(self._sockets.replay, zmq.POLLIN)
        poller.poll()

    def _publish(self, events: Iterable[KVEvent]) -> None:
        for batch in _batches(events, _MAX_NUMBERS):
            payload = self._encode(batch)
            number = self._ring.add(payload)
            self._sockets.pub.send_multipart((TOPIC, number.to_bytes(8, "big"), payload))

    def _everything(self, most: int) -> list[bytes]:
        """Returns at most so many batches that bring consumers to the present from any state."""
        events: Iterable[KVEvent] = chain[KVEvent]((AllBlocksCleared(),), self._tree.stored())
        num_numbers = 1 + len(self._tree) * (BLOCK_TOKENS + 1)
        # Two neighbouring batches have together more than what one may have.
        max_numbers = max(_MAX_NUMBERS, 2 * num_numbers // most + 1)
        return [self._encode(batch) for batch in _batches(events, max_numbers)]

    def _encode(self, events: list[KVEvent]) -> bytes:
        time.sleep(0)  # the router's loop comes first, even if consumers ask for everything all the time
        return self._encoder.encode(KVEventBatch(time.time(), events, DATA_PARALLEL_RANK))


def _batches(events: Iterable[KVEvent], max_numbers: int) -> Iterator[list[KVEvent]]:
    """Yields the events, in their order, in lists of up to `max_numbers` numbers, or of one event."""
    batch: list[KVEvent] = []
    num_numbers = 0
    for event in events:
        more = size(event)
        if batch and num_numbers + more > max_numbers:
            yield batch
            batch, num_numbers = [], 0
        batch.append(event)
        num_numbers += more
    if batch:
        yield batch
