"""Measures what KV events cost the router process, of a core and of its loop's time.

    python -m bench.serving.kv_events --out bench/results/kv-events.json

A ledger lives in real time as a service's does: requests decode side by side at --rate tokens a second
together, and one that ends is replaced by another. Half of each prompt is shared in families; the cache is
full, so that as much is evicted as is stored. A subscriber in a process of its own reads everything. The same
life runs without events, and the difference is theirs:

    loop      processor time of the thread that the router's loop is in
    threads   processor time of all other threads: encoding, hashing and ZeroMQ

The floor is hashing and encoding the same blocks, and nothing else. --full-speed seconds of a life that does
not wait say how many tokens a second the events could follow.
"""

import argparse
import hashlib
import multiprocessing
import random
import time
from array import array
from collections.abc import Sequence as Seq
from multiprocessing.connection import Connection
from typing import NamedTuple

import msgspec
import zmq

from bench.common.report import parser, print_json, print_machine, print_table, refuse
from lightkv.ledger import Sequence, TokenLedger
from lightkv.router.service.kv_events.blocks import BLOCK_TOKENS
from lightkv.router.service.kv_events.events import MEDIUM, AllBlocksCleared, BlockRemoved, BlockStored
from lightkv.router.service.kv_events.publisher import KVEventPublisher

VOCABULARY = 128_000
NUM_FAMILIES = 20  # of prompts that share their first half
LIMIT = 0.02  # of a core, at 1,000 tokens a second
ENDPOINT = "tcp://127.0.0.1:0"


class Cost(NamedTuple):
    """Seconds of processor time, over `seconds` of time in which `tokens` were generated in `steps`."""

    seconds: float
    tokens: int
    steps: int
    loop: float
    threads: float


class Life:
    """A ledger's life, as the scheduler drives it: decode steps, and in each one prompts that are new."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._rng = random.Random(0)
        half = options.prompt // 2
        self._families = [self._tokens(half) for _ in range(NUM_FAMILIES)]
        self.ledger = TokenLedger(options.capacity, options.running + 1, options.capacity)
        self._running: list[tuple[Sequence, list[int]]] = []
        self.publisher: KVEventPublisher | None = None

    def step(self) -> int:
        """Takes one step. Returns how many tokens were generated."""
        ledger, options = self.ledger, self._options
        if self._running:
            ledger.extend([sequence for sequence, _ in self._running], [1] * len(self._running))
        for pair in list(self._running):
            sequence, outputs = pair
            outputs.append(self._rng.randrange(VOCABULARY))
            if len(outputs) >= options.output:
                self._running.remove(pair)
                ledger.close(sequence, array("i", outputs).tobytes())
        # New requests come one by one, so that they do not all end in the same step.
        if len(self._running) < options.running and self._rng.random() < 2 * options.running / options.output:
            family = self._rng.choice(self._families)
            prompt = family + self._tokens(options.prompt - len(family))
            sequence = ledger.open(array("i", prompt).tobytes())
            ledger.extend([sequence], [options.prompt - sequence.length])
            ledger.publish(sequence)
            ledger.confirm(ledger.step)
            self._running.append((sequence, []))
        ledger.step += 1
        ledger.drain()
        if self.publisher is not None:
            self.publisher.send()
        return len(self._running)

    def fill(self) -> None:
        """Runs until the pool is full."""
        while self.ledger.num_free:
            self.step()

    def run(self, seconds: float, rate: float) -> Cost:
        """Runs for so many seconds, at `rate` tokens a second; 0: as fast as it can."""
        tokens = steps = 0
        process, loop, begun = time.process_time(), time.thread_time(), time.perf_counter()
        while (now := time.perf_counter() - begun) < seconds:
            if rate and tokens > rate * now:
                time.sleep(tokens / rate - now)
                continue
            tokens += self.step()
            steps += 1
        loop = time.thread_time() - loop
        process = time.process_time() - process
        return Cost(time.perf_counter() - begun, tokens, steps, loop, process - loop)

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(VOCABULARY) for _ in range(count)]


def subscribe(endpoint: str, results: Connection) -> None:
    """Applies events until all blocks are cleared for the last time. Sends what came: first None, once anything
    has come; then batches, blocks stored and removed, bytes, and batches that are missing."""
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(endpoint)
    decoder = msgspec.msgpack.Decoder(tuple[float, list[BlockStored | BlockRemoved | AllBlocksCleared], int])
    counts = dict.fromkeys(("batches", "stored", "removed", "bytes", "missing"), 0)
    last = None
    while True:
        _, number, payload = socket.recv_multipart()
        if last is None:
            results.send(None)
        else:
            counts["missing"] += int.from_bytes(number, "big") - last - 1
        last = int.from_bytes(number, "big")
        counts["batches"] += 1
        counts["bytes"] += len(payload)
        events = decoder.decode(payload)[1]
        for event in events:
            if isinstance(event, BlockStored):
                counts["stored"] += len(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                counts["removed"] += len(event.block_hashes)
        if isinstance(events[-1], AllBlocksCleared):
            results.send(counts)
            return


def with_events(life: Life, seconds: float, rate: float) -> tuple[Cost, dict[str, int]]:
    """Runs a life whose events are published and read. Returns its cost, and what the subscriber counted."""
    publisher = KVEventPublisher(ENDPOINT)
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=subscribe, args=(publisher.endpoint, theirs))
    child.start()
    try:
        publisher.follow(life.ledger)
        life.publisher = publisher
        while not ours.poll(0.01):  # the subscriber is there once it has read something
            life.step()
        ours.recv()
        cost = life.run(seconds, rate)
        life.publisher = None
        if publisher.queue.num_overflows:
            refuse(f"the queue overflowed {publisher.queue.num_overflows} times")
        publisher.close()
        if not ours.poll(60.0):
            refuse("the subscriber has not heard of the end")
        return cost, ours.recv()
    finally:
        child.kill()
        child.join()


def floor_seconds(num_blocks: int) -> float:
    """Returns the processor time of hashing and encoding so many blocks."""
    tokens = array("i", range(BLOCK_TOKENS))
    name = bytes(32)
    begun = time.thread_time()
    for _ in range(num_blocks):
        name = hashlib.sha256(name + tokens.tobytes()).digest()
        number = int.from_bytes(name[-8:], "big")
        msgspec.msgpack.encode(
            BlockStored([number], number, tokens.tolist(), BLOCK_TOKENS, None, MEDIUM, None)
        )
    return time.thread_time() - begun


def arguments(given: Seq[str] | None = None) -> argparse.Namespace:
    """Parses the options of the benchmark."""
    made = parser(__doc__)
    made.add_argument("--rate", type=float, default=1000.0, help="tokens generated in a second")
    made.add_argument("--seconds", type=float, default=20.0, help="of each life in real time")
    made.add_argument("--full-speed", type=float, default=5.0, help="seconds of the life that does not wait")
    made.add_argument("--running", type=int, default=32, help="requests that decode side by side")
    made.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    made.add_argument("--output", type=int, default=256, help="tokens of an answer")
    made.add_argument("--capacity", type=int, default=200_000, help="tokens of the pool")
    return made.parse_args(given)


def main() -> None:
    options = arguments()
    print_machine()
    lives: dict[str, Cost] = {}
    life = Life(options)
    life.fill()
    lives["without"] = life.run(options.seconds, options.rate)
    lives["with"], counts = with_events(life, options.seconds, options.rate)
    lives["full speed"], fast = with_events(life, options.full_speed, 0)
    floor = floor_seconds(counts["stored"])
    without, kept = lives["without"], lives["with"]
    share = (kept.loop + kept.threads) / kept.seconds - (without.loop + without.threads) / without.seconds
    send_us = (kept.loop / kept.steps - without.loop / without.steps) * 1e6
    print(f"floor   {floor / kept.seconds:.3%} of a core: hashing and encoding {counts['stored']:,} blocks\n")
    rows = [
        [
            name,
            f"{cost.tokens / cost.seconds:,.0f}",
            f"{cost.loop / cost.seconds:.2%}",
            f"{cost.threads / cost.seconds:.2%}",
            f"{cost.loop / cost.steps * 1e6:.1f}",
        ]
        for name, cost in lives.items()
    ]
    print_table(["events", "tokens/s", "loop", "threads", "us of the loop a step"], rows)
    for name, found in (("with", counts), ("full speed", fast)):
        cost = lives[name]
        print(
            f"{name}: {found['batches']:,} batches, {found['stored']:,} blocks stored and {found['removed']:,} "
            f"removed, {found['bytes'] / cost.seconds / 1e3:,.0f} KB/s, {found['missing']} batches missing"
        )
    print(
        f"\nevents take {share:.2%} of a core at {kept.tokens / kept.seconds:,.0f} tokens/s, and {send_us:.1f} "
        f"us of each step; at most {LIMIT:.0%} at 1,000"
    )
    results = {name: cost._asdict() for name, cost in lives.items()}
    results |= {"counts": counts, "fast": fast, "floor": floor, "share": share, "send_us": send_us}
    print_json("kv-events", results, options.out)


if __name__ == "__main__":
    main()
