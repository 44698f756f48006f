"""A consumer of KV events as a gateway is one, and a ledger that lives a random life.

The structs have the fields of vLLM 0.33's (`vllm/distributed/kv_events.py` in its wheel), in their order and
with their defaults. The consumer applies what it decodes with these and asserts that each event makes sense.
"""

import random
from array import array
from contextlib import suppress
from typing import Any

import msgspec
import zmq

from lightkv.errors import LightKVError
from lightkv.ledger import Sequence, TokenLedger
from lightkv.ledger.prefix_tree import Segment

BLOCK = 64
SALTED = ("salt",)
END = b"\xff" * 8
WAIT_MS = 20_000  # for what has to come


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """vLLM's base of all events."""


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Blocks:
    """The blocks that a consumer believes in: by name, the tokens up to each one's end and its extra key."""

    def __init__(self) -> None:
        self.known: dict[bytes | int, tuple[bytes, str | None]] = {}
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)

    def apply(self, payload: bytes) -> KVEventBatch:
        batch = self._decoder.decode(payload)
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    del self.known[name]
            else:
                self.known.clear()
        return batch

    def _store(self, event: BlockStored) -> None:
        assert event.block_size == BLOCK
        assert len(event.token_ids) == BLOCK * len(event.block_hashes)
        parent = event.parent_block_hash
        tokens, key = (b"", None) if parent is None else self.known[parent]
        if parent is None and event.extra_keys is not None:
            first, *others = event.extra_keys
            assert first is not None
            assert others == [None] * len(others)
            (key,) = first
        for at, name in enumerate(event.block_hashes):
            assert name not in self.known
            tokens += array("i", event.token_ids[at * BLOCK : (at + 1) * BLOCK]).tobytes()
            self.known[name] = tokens, key

    def prefixes(self) -> tuple[set[bytes], set[bytes]]:
        """The tokens up to the end of each block, without a namespace and in the one that there is."""
        assert len({key for _, key in self.known.values()} - {None}) <= 1
        plain = {tokens for tokens, key in self.known.values() if key is None}
        salted = {tokens for tokens, key in self.known.values() if key is not None}
        assert len(plain) + len(salted) == len(self.known)
        return plain, salted


def blocks_of(ledger: TokenLedger) -> tuple[set[bytes], set[bytes]]:
    """The same of a ledger, counted from its tree: a block is there if all of its tokens are."""
    plain: set[bytes] = set()
    salted: set[bytes] = set()
    paths: dict[Segment, tuple[set[bytes], bytes]] = {}
    for segment in ledger.tree:
        parent = segment.parent
        assert parent is not None
        if parent.parent is None:
            assert parent.namespace in ((), SALTED)
            found, before = (salted if parent.namespace else plain), b""
        else:
            found, before = paths[parent]
        path = before + segment.tokens
        paths[segment] = found, path
        first = len(before) // (4 * BLOCK) + 1
        found.update(path[: 4 * BLOCK * number] for number in range(first, len(path) // (4 * BLOCK) + 1))
    return plain, salted


class Consumer:
    """A subscriber that applies what comes, by the numbers of the batches, and asks for what it has missed."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self.context = zmq.Context()
        self.live = self.context.socket(zmq.SUB)
        self.live.setsockopt(zmq.SUBSCRIBE, b"")
        self.live.connect(endpoint)
        self.asking = self.context.socket(zmq.DEALER)
        self.asking.connect(replay_endpoint)
        self.blocks = Blocks()
        self.next = 0  # the number of the batch that it waits for
        self.num_replays = 0

    def close(self) -> None:
        self.context.destroy(linger=0)

    def take_live(self) -> int:
        """Applies what has come to the subscription; replays what is missing before it. Returns how many
        batches it has applied."""
        num_applied = 0
        while self.live.poll(0):
            topic, number, payload = self.live.recv_multipart()
            assert topic == b""
            at = int.from_bytes(number, "big")
            if at > self.next:
                self.replay()
            if at == self.next:
                self.blocks.apply(payload)
                self.next += 1
                num_applied += 1
        return num_applied

    def ask(self, start: bytes) -> list[tuple[int, bytes]]:
        """Returns the batches of a replay, by their numbers."""
        self.asking.send_multipart([b"", start])
        found = []
        while True:
            assert self.asking.poll(WAIT_MS), "no answer to a replay"
            empty, topic, number, payload = self.asking.recv_multipart()
            assert (empty, topic) == (b"", b"")
            if number == END:
                assert payload == b""
                return found
            found.append((int.from_bytes(number, "big"), payload))

    def replay(self) -> None:
        """Asks for all that it has not applied. What the publisher was handed before is part of the answer."""
        self.num_replays += 1
        for number, payload in self.ask(self.next.to_bytes(8, "big")):
            assert number >= self.next
            self.blocks.apply(payload)
            self.next = number + 1


class LedgerLife:
    """A ledger and random verbs, with prompts of a few families that are long enough for several blocks."""

    def __init__(self, seed: int, capacity: int = 4000) -> None:
        self.rng = random.Random(seed)
        self.ledger = TokenLedger(capacity, 12, capacity, capacity // 4)
        self.families = [[self.rng.randrange(9) for _ in range(600)] for _ in range(3)]
        self.open_ones: list[tuple[Sequence, list[int]]] = []
        self.num_edits = 0
        self.num_unindexed = 0

    def step(self) -> None:
        rng = self.rng
        verb = rng.choices(
            (self._open, self._grow, self._publish, self._fork, self._drop, self._close, self._shed),
            (4, 8, 8, 1, 1, 4, 2),
        )[0]
        with suppress(LightKVError, ValueError):  # refused, and nothing is changed
            verb()
        self.num_edits += len(self.ledger.drain())

    def _pick(self) -> tuple[Sequence, list[int]]:
        if not self.open_ones:
            self._open()
        return self.rng.choice(self.open_ones)

    def _open(self) -> None:
        rng, ledger = self.rng, self.ledger
        prompt = rng.choice(self.families)[: rng.randint(1, 600)]
        prompt = prompt + [rng.randrange(9) for _ in range(rng.randint(0, 150))]
        session = ledger.sessions.open(str(rng.randrange(4))) if rng.random() < 0.3 else None
        ids = array("i", prompt).tobytes()
        self.open_ones.append((ledger.open(ids, rng.choice([(), (), SALTED]), session), prompt))

    def _grow(self) -> None:
        sequence, known = self._pick()
        left = len(known) - sequence.length
        count = self.rng.randint(1, left) if left > 0 and not sequence.dropped else self.rng.randint(1, 70)
        self.ledger.extend([sequence], [count])
        known += [self.rng.randrange(9) for _ in range(sequence.position - len(known))]

    def _publish(self) -> None:
        self.ledger.publish(self._pick()[0])
        if self.rng.random() < 0.8:
            self.ledger.confirm(self.ledger.step)
            self.ledger.step += 1

    def _fork(self) -> None:
        sequence, known = self._pick()
        self.open_ones.append((self.ledger.fork(sequence), list(known)))

    def _drop(self) -> None:
        """A sequence leaves tokens in its middle, or at its end. It is closed without being cached: its tokens
        are not what its prompt says from then on."""
        sequence, known = pair = self._pick()
        if self.rng.random() < 0.5:
            start = self.rng.randint(0, sequence.length)
            self.ledger.release(sequence, self.rng.randint(0, sequence.length - start), start)
        else:
            self.ledger.truncate(sequence, self.rng.randint(0, sequence.length))
            del known[sequence.position :]
        if self.rng.random() < 0.5:
            self.open_ones.remove(pair)
            self.ledger.close(sequence, cache=False)

    def _close(self) -> None:
        sequence, known = pair = self._pick()
        self.open_ones.remove(pair)
        outputs = array("i", known[len(sequence.prompt) // 4 :]).tobytes()
        self.ledger.close(sequence, outputs, cache=self.rng.random() < 0.8)

    def _shed(self) -> None:
        rng, ledger = self.rng, self.ledger
        kind = rng.random()
        if kind < 0.7:
            ledger.evict(min(rng.randint(0, 300), ledger.num_cached))
        elif kind < 0.8:
            ledger.evict(ledger.num_cached)
        elif kind < 0.9:
            ledger.sessions.release(str(rng.randrange(4)))
        else:  # the steps since the last `confirm` fail
            rows = ledger._state.unconfirmed_rows()
            for pair in [pair for pair in self.open_ones if pair[0].row in rows]:
                self.open_ones.remove(pair)
                ledger.close(pair[0], cache=False)
            ledger.retract()
