"""The ports of the KV events against consumers that ask for too much: replays of everything."""

import socket
import time
from types import SimpleNamespace

import pytest

from lightkv.ledger import TokenLedger
from lightkv.router.service.kv_events import publisher as publisher_module
from lightkv.router.service.kv_events import sockets
from tests.support.kv_event_cache import cache, publishing
from tests.support.kv_events import Consumer, blocks_of


def test_the_thread_steps_back_for_each_batch_that_it_makes_for_a_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps_back: list[float] = []
    clock = SimpleNamespace(time=time.time, sleep=steps_back.append)
    monkeypatch.setattr(publisher_module, "time", clock)
    ledger = TokenLedger(100_000, 4, 100_000)
    with publishing(ledger, max_kept=10) as (publisher, consumer):
        cache(ledger, 0, 100_000)
        publisher.send()
        for first in range(200_000, 230_000, 1000):  # the first batches are kept no more
            cache(ledger, first, 64)
            publisher.send()
            consumer.replay()
        num_before = len(steps_back)
        num_batches = len(consumer.ask(bytes(8)))
        assert num_batches > 3
        assert len(steps_back) >= num_before + num_batches


def dealer(endpoint: str) -> socket.socket:
    """A connection of a DEALER that ZeroMQ has accepted, by hand, so that nothing reads what comes on it."""
    connection = socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2])), 20)
    connection.sendall(b"\xff" + bytes(8) + b"\x7f" + b"\x03\0" + b"NULL".ljust(20, b"\0") + bytes(32))
    connection.recv(64, socket.MSG_WAITALL)
    ready = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
    connection.sendall(b"\x04" + bytes([len(ready)]) + ready)
    return connection


@pytest.mark.parametrize("goes", [True, False])
def test_a_consumer_that_asks_again_and_again_and_reads_nothing_keeps_no_other_waiting(
    monkeypatch: pytest.MonkeyPatch, goes: bool
) -> None:
    """Though more batches are kept than ZeroMQ takes at once."""
    monkeypatch.setattr(sockets, "QUEUED_BATCHES", 64)
    ledger = TokenLedger(200_000, 4, 1000)
    with publishing(ledger) as (publisher, consumer):
        for number in range(48):
            cache(ledger, 1000 * number, 1000)
            publisher.send()
            if number % 8 == 0:
                consumer.replay()  # the thread makes a batch of what has come
        greedy = dealer(publisher.replay_endpoint)
        greedy.sendall((b"\x01\0\0\x08" + bytes(8)) * 100_000)
        if goes:
            greedy.close()
        for _ in range(5):
            honest = Consumer(publisher.endpoint, publisher.replay_endpoint)
            honest.replay()
            assert honest.blocks.prefixes() == blocks_of(ledger)
            honest.close()
        greedy.close()
