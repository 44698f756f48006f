"""The ports of the KV events against consumers that ask for too much: connections, or replays of everything."""

import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightkv.ledger import TokenLedger
from lightkv.router.service.kv_events import publisher as publisher_module
from lightkv.router.service.kv_events import sockets
from lightkv.router.service.kv_events.publisher import KVEventPublisher
from tests.support.kv_event_cache import ANYWHERE, cache, free_address, publish_until_heard, publishing
from tests.support.kv_events import WAIT_MS, Consumer, blocks_of
from tests.support.served import Served, save_tiny_model, wait_until


def strangers(endpoint: str, count: int) -> dict[int, socket.socket]:
    """Connections that say nothing, by their descriptors."""
    address = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
    return {one.fileno(): one for one in (socket.create_connection(address) for _ in range(count))}


def wait_for_ends(found: dict[int, socket.socket], count: int) -> None:
    """Waits until the other side has ended so many connections, and takes these out of `found`. Asserts that it
    has ended no more."""
    poll = select.poll()
    for descriptor in found:
        poll.register(descriptor, select.POLLRDHUP)
    for _ in range(count):
        ended = poll.poll(WAIT_MS)
        assert ended, f"{len(found)} connections are left"
        descriptor = ended[0][0]
        poll.unregister(descriptor)
        found.pop(descriptor).close()
    assert not poll.poll(0)


@pytest.mark.parametrize("port", ["endpoint", "replay_endpoint"])
def test_connections_beyond_a_number_are_ended(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    """Those that there are stay, and when they end, others may come."""
    monkeypatch.setattr(sockets, "MAX_CONNECTIONS", 5)
    ledger = TokenLedger(10_000, 4, 1000)
    publisher = KVEventPublisher(ANYWHERE)
    publisher.follow(ledger)
    found = strangers(getattr(publisher, port), 20)
    wait_for_ends(found, 15)
    newest = strangers(getattr(publisher, port), 1)
    wait_for_ends(newest, 1)
    wait_for_ends(found, 0)
    for one in found.values():
        one.close()
    consumer = Consumer(publisher.endpoint, publisher.replay_endpoint)
    publish_until_heard(publisher, consumer, ledger, 64)
    consumer.take_live()
    consumer.replay()
    assert consumer.blocks.prefixes() == blocks_of(ledger)
    consumer.close()
    publisher.close()


def test_the_thread_steps_back_for_each_batch_that_it_makes_for_a_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps_back: list[float] = []
    clock = SimpleNamespace(time=time.time, sleep=steps_back.append)
    monkeypatch.setattr(publisher_module, "time", clock)
    ledger = TokenLedger(100_000, 4, 100_000)
    with publishing(ledger, max_kept=1) as (publisher, consumer):
        cache(ledger, 0, 100_000)
        publisher.send()
        consumer.replay()
        num_before = len(steps_back)
        assert num_before >= consumer.next > 3
        for first in (200_000, 300_000):  # the ring does not go on from what was answered with
            cache(ledger, first, 64)
            publisher.send()
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
    """Though the ring has more batches than ZeroMQ takes at once."""
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


PROGRAM = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000))
ports = [int(sys.argv[1]) + at % 2 for at in range(600)]
held = [socket.create_connection(("127.0.0.1", port), 20) for port in ports]
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_worker_is_replaced_while_strangers_hold_all_that_they_can(tmp_path: Path) -> None:
    """In a service that may have 256 descriptors."""
    model, address = save_tiny_model(tmp_path / "model"), free_address()
    served = Served(model, tmp_path / "log", "--kv-events", address)
    resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE, (256, 256))  # before it starts others
    served.wait_ready()
    program = [sys.executable, "-c", PROGRAM, address.rpartition(":")[2]]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            text = served.complete()
            os.kill(served.processes()["worker"], signal.SIGKILL)
            wait_until(lambda: served.request("/load")[1]["num_worker_starts"] == 2, seconds=60)
            wait_until(lambda: served.request("/health")[0] == 200, seconds=60)
            assert served.complete() == text
        finally:
            holder.kill()
            served.close()
