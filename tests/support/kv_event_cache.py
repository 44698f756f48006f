"""A cache of tests that publishes KV events, and who hears them."""

import socket
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lightkv.ledger import TokenLedger
from lightkv.router.service.kv_events.change_queue import MAX_QUEUED_BYTES
from lightkv.router.service.kv_events.publisher import KVEventPublisher
from tests.support.kv_events import Consumer

ANYWHERE = "tcp://127.0.0.1:0"


@contextmanager
def publishing(
    ledger: TokenLedger, max_queued_bytes: int = MAX_QUEUED_BYTES, max_kept: int = 10_000
) -> Iterator[tuple[KVEventPublisher, Consumer]]:
    publisher = KVEventPublisher(ANYWHERE, max_queued_bytes, max_kept)
    consumer = Consumer(publisher.endpoint, publisher.replay_endpoint)
    try:
        publisher.follow(ledger)
        yield publisher, consumer
    finally:
        publisher.close()
        consumer.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kv-events"]


def ids(first: int, count: int) -> bytes:
    return array("i", range(first, first + count)).tobytes()


def cache(ledger: TokenLedger, first: int, count: int) -> None:
    sequence = ledger.open(ids(first, count))
    ledger.extend([sequence], [count])
    ledger.close(sequence)


def publish_until_heard(
    publisher: KVEventPublisher, consumer: Consumer, ledger: TokenLedger, count: int
) -> None:
    """Caches `count` tokens again and again until the consumer's subscription has reached the publisher."""
    for attempt in range(100):
        cache(ledger, attempt * count, count)
        publisher.send()
        if consumer.live.poll(200):
            return
    pytest.fail("the consumer heard nothing of a hundred batches")


def free_address() -> str:
    """An address whose port and the next one are free."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return f"tcp://127.0.0.1:{port}"
