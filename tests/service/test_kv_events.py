"""KV events over ZeroMQ: live, after gaps, from replays, and with peers that misbehave."""

import asyncio
import random
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from typer.testing import CliRunner

from lightkv.ledger import TokenLedger
from lightkv.ledger.changes import SegmentGrew
from lightkv.router import LLM
from lightkv.router.cli.app import app
from lightkv.router.config import EngineConfig, InvalidConfig
from lightkv.router.engine.step import TokenEvent
from lightkv.router.service.kv_events import publisher as publisher_module
from lightkv.router.service.kv_events.change_queue import ChangeQueue
from lightkv.router.service.kv_events.publisher import KVEventPublisher
from lightkv.router.service.kv_events.sockets import CannotPublish, check_endpoint
from lightkv.router.service.messages import Accepted
from tests.support.kv_event_cache import ANYWHERE, cache, free_address, publish_until_heard, publishing
from tests.support.kv_events import END, WAIT_MS, Blocks, Consumer, LedgerLife, blocks_of
from tests.support.router_service import Client, service


def live_through(life: LedgerLife, num_edits: int, every: int) -> tuple[int, int]:
    """A consumer of a life's events, which takes what comes live and at times nothing at all. Returns how many
    batches it has taken live, and how many replays it has asked for."""
    rng = random.Random(life.rng.random())
    num_live = num_steps = 0
    with publishing(life.ledger) as (publisher, consumer):
        while life.num_edits < num_edits:
            life.step()
            publisher.send()
            num_steps += 1
            if rng.random() < 0.02:
                num_live += consumer.take_live()
            if rng.random() < 0.005:  # a gap: what has come is lost
                while consumer.live.poll(0):
                    consumer.live.recv_multipart()
            if num_steps % every == 0:
                consumer.replay()
                assert consumer.blocks.prefixes() == blocks_of(life.ledger)
        consumer.replay()
        assert consumer.blocks.prefixes() == blocks_of(life.ledger)
        assert publisher.queue.num_overflows == 0
    return num_live, consumer.num_replays


def test_a_consumer_with_gaps_ends_with_the_ledgers_blocks() -> None:
    num_live, num_replays = live_through(LedgerLife(1), 3000, 200)
    assert num_live
    assert num_replays > 10


@pytest.mark.slow
def test_the_same_over_a_million_edits() -> None:
    num_live, num_replays = live_through(LedgerLife(2, capacity=20_000), 1_000_000, 20_000)
    assert num_live > 1000
    assert num_replays > 50


def test_subscribers_hear_of_changes_as_they_come() -> None:
    ledger = TokenLedger(100_000, 4, 1000)
    with publishing(ledger) as (publisher, consumer):
        for attempt in range(100):  # until the subscription has reached the publisher
            cache(ledger, attempt * 128, 128)
            publisher.send()
            if consumer.live.poll(200):
                break
        consumer.take_live()
        consumer.replay()
        cache(ledger, 50_000, 128)
        publisher.send()
        num_replays, num_applied = consumer.num_replays, 0
        while not num_applied:  # of the attempts, some that were replayed may still come
            assert consumer.live.poll(WAIT_MS)
            num_applied = consumer.take_live()
        assert num_applied == 1
        assert consumer.num_replays == num_replays
        assert consumer.blocks.prefixes() == blocks_of(ledger)


def test_what_is_left_at_the_end_is_nothing() -> None:
    ledger = TokenLedger(100_000, 4, 1000)
    publisher = KVEventPublisher(ANYWHERE)
    consumer = Consumer(publisher.endpoint, publisher.replay_endpoint)
    publisher.follow(ledger)
    publish_until_heard(publisher, consumer, ledger, 128)
    consumer.replay()
    publisher.close()
    while consumer.blocks.known:
        assert consumer.live.poll(WAIT_MS)
        consumer.take_live()
    consumer.close()


def test_another_ledger_takes_the_place_of_one_that_is_lost() -> None:
    first, second = TokenLedger(1000, 4, 1000), TokenLedger(1000, 4, 1000)
    with publishing(first) as (publisher, consumer):
        cache(first, 0, 200)
        publisher.send()
        consumer.replay()
        assert consumer.blocks.prefixes() == blocks_of(first)
        publisher.follow(None)
        publisher.send()
        consumer.replay()
        assert not consumer.blocks.known
        cache(second, 500, 100)
        publisher.follow(second)  # which may have been in use
        cache(second, 700, 100)
        publisher.send()
        consumer.replay()
        assert consumer.blocks.prefixes() == blocks_of(second)
        assert len(consumer.blocks.known) == 2


# Bounds


@pytest.mark.parametrize("max_queued_bytes", [1, 3000])
def test_a_queue_that_overflows_leaves_consumers_right(max_queued_bytes: int) -> None:
    life = LedgerLife(3)
    with publishing(life.ledger, max_queued_bytes) as (publisher, consumer):
        for step in range(400):
            life.step()
            if step % 7 == 0:
                publisher.send()
            if step % 50 == 0:
                publisher.send()
                consumer.replay()
                assert consumer.blocks.prefixes() == blocks_of(life.ledger)
        assert publisher.queue.num_overflows > 0


def test_an_overflow_drops_all_that_was_queued() -> None:
    ledger = TokenLedger(10_000, 4, 5000)
    ledger.tree.note_changes()
    queue = ChangeQueue(max_bytes=10_000)
    for first in range(0, 9000, 1000):
        cache(ledger, first, 1000)
        queue.put(ledger.tree.drain_changes(), ledger.tree.contents)
    items, is_last = queue.take()
    assert not is_last
    assert queue.num_overflows == 3
    (restart,) = items[:1]
    assert len(restart.contents) == 9  # type: ignore[union-attr]
    assert len(items) == 1
    assert queue.take() == ([], False)
    queue.close()


@pytest.mark.parametrize(("max_kept", "max_bytes"), [(1, 2**20), (3, 2**20), (40, 2**20), (10_000, 30_000)])
def test_a_replay_from_before_the_batches_that_are_kept_brings_everything(
    monkeypatch: pytest.MonkeyPatch, max_kept: int, max_bytes: int
) -> None:
    monkeypatch.setattr(publisher_module, "MAX_KEPT_BYTES", max_bytes)
    life = LedgerLife(5)
    with publishing(life.ledger, max_kept=max_kept) as (publisher, consumer):
        for step in range(600):
            life.step()
            publisher.send()
            if step % 60 == 59:
                consumer.replay()
                assert consumer.blocks.prefixes() == blocks_of(life.ledger)
                late = Blocks()  # one that has come now
                batches = consumer.ask(bytes(8))
                for _, payload in batches:
                    late.apply(payload)
                assert late.known == consumer.blocks.known
                numbers = [number for number, _ in batches]
                assert numbers == list(range(numbers[0], numbers[0] + len(batches)))
                assert len(batches) <= max_kept
                assert len(batches) == 1 or sum(len(payload) for _, payload in batches) <= max_bytes


def test_everything_is_published_anew_once_as_long_as_it_is_kept() -> None:
    ledger = TokenLedger(100_000, 4, 100_000)
    with publishing(ledger, max_kept=20) as (publisher, consumer):
        cache(ledger, 0, 100_000)  # more than one batch takes
        publisher.send()
        for first in range(200_000, 230_000, 1000):
            cache(ledger, first, 64)
            publisher.send()
            consumer.replay()
        first_number, last_number = (consumer.ask(bytes(8))[at][0] for at in (0, -1))
        assert last_number > first_number + 3
        again = consumer.ask(bytes(8))
        assert (again[0][0], again[-1][0]) == (first_number, last_number)
        consumer.replay()
        assert consumer.blocks.prefixes() == blocks_of(ledger)


# Strangers

NONSENSE = [
    [b""],
    [b"", b""],
    [b"", b"\0" * 7],
    [b"", b"\0" * 9],
    [b"", b"all of it"],
    [b"", b"\0" * 8, b"more"],
    [b"", b"\xff" * 8],
    [b"", b"\x7f" + b"\xff" * 7],
]


def test_nonsense_is_answered_by_the_end_alone() -> None:
    ledger = TokenLedger(1000, 4, 1000)
    with publishing(ledger) as (publisher, consumer):
        cache(ledger, 0, 200)
        publisher.send()
        for frames in NONSENSE:
            consumer.asking.send_multipart(frames)
            assert consumer.asking.poll(WAIT_MS)
            assert consumer.asking.recv_multipart() == [b"", b"", END, b""]
        for frames in ([b"1"], [b"\0" * 8], [b"1", b"2", b"3", b"4"]):  # no empty frame
            consumer.asking.send_multipart(frames)
        stranger = consumer.context.socket(zmq.DEALER)
        stranger.connect(publisher.replay_endpoint)
        stranger.send_multipart([b"", b"x" * 100_000])  # its connection is closed
        raw = socket.create_connection(("127.0.0.1", int(publisher.replay_endpoint.rpartition(":")[2])))
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
        consumer.replay()
        assert consumer.blocks.prefixes() == blocks_of(ledger)
        raw.close()


def test_a_req_socket_is_answered_as_vllm_does() -> None:
    ledger = TokenLedger(1000, 4, 1000)
    with publishing(ledger) as (publisher, consumer):
        req = consumer.context.socket(zmq.REQ)
        req.connect(publisher.replay_endpoint)
        req.send(bytes(8))
        assert req.poll(WAIT_MS)
        topic, number, payload = req.recv_multipart()
        assert (topic, number) == (b"", bytes(8))
        assert len(Blocks().apply(payload).events) == 1  # AllBlocksCleared


def unread(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, endpoint: str) -> "zmq.Socket[bytes]":
    """A connection of which nothing is ever read, with as little room as there is."""
    one = context.socket(kind)
    one.setsockopt(zmq.RCVHWM, 1)
    one.setsockopt(zmq.RCVBUF, 2048)
    if kind == zmq.SUB:
        one.setsockopt(zmq.SUBSCRIBE, b"")
    one.connect(endpoint)
    return one


def test_consumers_that_never_read_hold_up_no_other() -> None:
    ledger = TokenLedger(300_000, 4, 100_000)
    with publishing(ledger) as (publisher, consumer):
        for _ in range(3):
            unread(consumer.context, zmq.SUB, publisher.endpoint)
        for round_ in range(3):
            for first in range(20):
                cache(ledger, (20 * round_ + first) * 10_000, 10_000)
                publisher.send()
            ledger.evict(ledger.num_cached // 2)
            publisher.send()
            for _ in range(5):
                stalled = unread(consumer.context, zmq.DEALER, publisher.replay_endpoint)
                stalled.send_multipart([b"", bytes(8)])
            consumer.replay()
            assert consumer.blocks.prefixes() == blocks_of(ledger)


def test_an_error_in_the_thread_closes_the_sockets(capfd: pytest.CaptureFixture[str]) -> None:
    ledger = TokenLedger(1000, 4, 1000)
    with publishing(ledger) as (publisher, _):
        publisher.queue.put([SegmentGrew(99, b"\0\0\0\0")], ledger.tree.contents)
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "kv-events"]
        thread.join(20)
        assert not thread.is_alive()
        cache(ledger, 0, 200)
        publisher.send()  # the service goes on
        assert_free(publisher.endpoint)
    assert "no more KV events are published" in capfd.readouterr().err


def assert_free(endpoint: str) -> None:
    """Asserts that nothing listens there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", int(endpoint.rpartition(":")[2])))


# In the service


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_router_publishes_its_ledger(tmp_path: Path, depth: int) -> None:
    address = free_address()
    host, _, port = address.rpartition(":")
    consumer = Consumer(address, f"{host}:{int(port) + 1}")

    async def answered(client: Client, **prompts: list[int]) -> None:
        for name, prompt in prompts.items():
            assert await client.submit(name, prompt) == Accepted(name)
        await client.until_ended(*prompts)

    async def replayed(until: Callable[[], bool]) -> None:
        for _ in range(1000):
            await asyncio.to_thread(consumer.replay)
            if until():
                return
        raise AssertionError(f"{len(consumer.blocks.known)} blocks are known")

    async with service(tmp_path, depth, kv_events=address) as made:
        client = await made.connect()
        await answered(client, a=list(range(80)))
        engine = made.router._engine
        assert engine is not None
        ledger = engine.scheduler.ledger
        assert isinstance(ledger, TokenLedger)
        await replayed(lambda: len(consumer.blocks.known) == 1)
        assert consumer.blocks.prefixes() == blocks_of(ledger)
        # These evict, since the pool has 200 tokens.
        prompts = {name: [*range(40), *range(50 * i + 40, 50 * i + 80)] for i, name in enumerate("bcde")}
        await answered(client, **prompts)
        await replayed(lambda: consumer.blocks.prefixes() == blocks_of(ledger))
        made.router._reset_cache()
        await replayed(lambda: not consumer.blocks.known)
        await answered(client, f=list(range(80)))
        await replayed(lambda: len(consumer.blocks.known) == 1)
        made.workers[0].crash(signal.SIGKILL)
        await client.until(lambda status: status.state == "starting")
        await replayed(lambda: not consumer.blocks.known)
    consumer.close()
    assert_free(address)


async def test_without_the_option_nothing_is_noted(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        client = await made.connect()
        await client.submit("a", list(range(80)))
        ends: dict[str, TokenEvent] = await client.until_ended("a")
        assert ends["a"].finish_reason == "length"
        engine = made.router._engine
        assert engine is not None
        assert engine.scheduler.ledger._state.tree.changes is None  # type: ignore[attr-defined]


# What is refused


def test_a_port_in_use_is_an_error_that_says_what_to_do() -> None:
    address = free_address()
    port = int(address.rpartition(":")[2])
    for taken in (port, port + 1):
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", taken))
            listener.listen()
            with pytest.raises(CannotPublish, match=rf"port {taken} \(Address already in use.*give another"):
                check_endpoint(address)
            ended = CliRunner().invoke(app, ["serve", "no/model", "--kv-events", address])
            assert ended.exit_code == 1
            assert f"port {taken}" in ended.output
    check_endpoint(address)  # nothing was left open


def test_a_host_that_is_not_this_machines() -> None:
    with pytest.raises(CannotPublish, match=r"192\.0\.2\.1 port 5557 \(.*give another tcp://HOST:PORT"):
        check_endpoint("tcp://192.0.2.1:5557")
    with pytest.raises(CannotPublish, match=r"no\.such\.host\.invalid"):
        check_endpoint("tcp://no.such.host.invalid:5557")
    check_endpoint("tcp://localhost:" + free_address().rpartition(":")[2])


@pytest.mark.parametrize(
    "address",
    [
        *("", "5557", "localhost:5557", "tcp://:5557", "tcp://*", "tcp://*:", "tcp://*:0", "tcp://*:65535"),
        *("udp://*:5557", "tcp://*:5557/x", "tcp://a b:5557", "tcp://*:5557\n", "tcp://::1:5557"),
        *("ipc:///tmp/x", "tcp://*:99999", "tcp://user@host:5557"),
    ],
)
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(InvalidConfig, match=r"--kv-events is .*give tcp://HOST:PORT"):
        EngineConfig(kv_events=address)


@pytest.mark.parametrize("address", ["tcp://*:5557", "tcp://[::1]:1", "tcp://gpu-7.local:65534"])
def test_addresses(address: str) -> None:
    assert EngineConfig(kv_events=address).kv_events == address


def test_a_program_has_no_gateway() -> None:
    with pytest.raises(InvalidConfig, match="for lightkv serve"):
        LLM(EngineConfig("/nowhere", kv_events="tcp://*:5557"))
