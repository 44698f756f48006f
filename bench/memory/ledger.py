"""What counting the tokens costs: each verb of the ledger, with its edits, beside a million cached tokens.

    python -m bench.memory.ledger --out bench/results/ledger.json

No device and no tensor: the ledger is host arithmetic. A verb's time is from its call until its edits are
drained. The service encodes them for the wire, once a step for all verbs; what that takes for one verb's is a
row of its own. Two loads, of 1,000-token prompts:

    documents   256 tokens that sixteen documents begin with, 256 of the document, and a question of its own
    chats       a system prompt that all have, eight turns of 100 tokens, and another last turn each time

One prompt in eight leaves its document or chat at a random token after the first turn, so that segments are
split. What a prompt finds cached is what eviction has left of those before it: as much is evicted as each
leaves behind. Meanwhile 256 sequences are open; they decode, some are forked, four beams fork at every token.

The floor of `open` is one look-up in a dict and one comparison of a thousand tokens. Lists of ids are made into
bytes once, at the edge; that is reported apart. Before a figure is printed the ledger has recounted itself, and
the edits, decoded, have come to the same free count.
"""

import argparse
import gc
import random
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from bench.common.report import parser, print_json, print_machine, print_table, refuse
from lightkv.edits import (
    Alloc,
    CopyRow,
    Edit,
    ForgetSegment,
    FreeRange,
    FreeSegment,
    KeepEntries,
    MapSegments,
    MergeSegments,
    MoveEntries,
    SetGap,
    SplitSegment,
    StoreSegment,
    decode,
    encode,
)
from lightkv.errors import LightKVError
from lightkv.ledger import TokenLedger
from lightkv.ledger.prefix_tree import TOKEN_BYTES
from lightkv.ledger.sequence import Sequence
from lightkv.token_ids import int32_bytes

P = ParamSpec("P")
T = TypeVar("T")

VOCAB_SIZE = 32_000
OUTPUT = 24  # tokens that a request generates
SINKS = 4
WINDOW_STEPS = 4
NUM_BEAMS = 4
BEAM_TOKENS = 200
BRANCH = 4  # tokens that a fork adds, all but one of which are cut off again
TARGET_US = {"mean": 5.0, "p99": 20.0}
STEP_TARGET_US = 20.0
TARGETED = ("open", "extend", "close", "evict")
STEP = "extend, a step of all"


class Load(NamedTuple):
    """Prompts of `prompt` tokens: `turns` of `turn` tokens that others have too, and what is their own.

    There are `stems` of these turns; each first turn begins `siblings` of them.
    """

    name: str
    prompt: int
    turn: int
    turns: int
    stems: int
    siblings: int


LOADS = (
    Load("documents", 1000, turn=256, turns=2, stems=1024, siblings=16),
    Load("chats", 1000, turn=100, turns=9, stems=500, siblings=500),
)


class Prompts:
    """The prompts of a load, as int32 bytes."""

    def __init__(self, load: Load, seed: int = 0) -> None:
        self.load = load
        self._rng = random.Random(seed)
        self._numbers = np.random.default_rng(seed)
        self._stems: list[bytes] = []
        for i in range(load.stems):
            if i % load.siblings == 0:
                first = self.tokens(load.turn)
            self._stems.append(first + self.tokens(load.turn * (load.turns - 1)))

    def tokens(self, count: int) -> bytes:
        """Random ones."""
        return self._numbers.integers(1, VOCAB_SIZE, count, dtype=np.int32).tobytes()

    def stems(self) -> list[bytes]:
        """Every turn of every stem, after the turns before it."""
        size = self.load.turn * TOKEN_BYTES
        return [stem[: size * turn] for stem in self._stems for turn in range(1, self.load.turns + 1)]

    def next(self) -> bytes:
        """A stem, one time in eight cut off after its first turn, and then what no other prompt has."""
        stem = self._rng.choice(self._stems)
        if self._rng.random() < 1 / 8:
            end = self._rng.randrange(self.load.turn, len(stem) // TOKEN_BYTES)
            stem = stem[: end * TOKEN_BYTES]
        return stem + self.tokens(self.load.prompt - len(stem) // TOKEN_BYTES)


class Books:
    """The free count by the edits alone, which name no count."""

    def __init__(self, capacity: int) -> None:
        self.num_free = capacity
        self.segments: dict[int, int] = {}  # id → length

    def apply(self, edits: list[Edit]) -> None:
        for edit in edits:
            match edit:
                case Alloc(_, _, counts):
                    self.num_free -= sum(counts)
                case FreeRange(_, start, end):
                    self.num_free += end - start
                case KeepEntries(_, start, end, num_kept):
                    self.num_free += end - start - num_kept
                case StoreSegment(_, start, end, segment):
                    self.segments[segment] = end - start
                case SplitSegment(segment, at, head):
                    self.segments[head] = at
                    self.segments[segment] -= at
                case FreeSegment(segment, start):
                    self.num_free += self.segments.pop(segment) - start
                    if start:
                        self.segments[segment] = start
                case MergeSegments(segment, head):
                    self.segments[segment] += self.segments.pop(head)
                case ForgetSegment(segment):
                    del self.segments[segment]
                case MapSegments() | CopyRow() | SetGap() | MoveEntries():
                    pass


class Clock:
    """Calls verbs of a ledger, and keeps the nanoseconds that they take with their edits."""

    def __init__(self, ledger: TokenLedger) -> None:
        self.ledger = ledger
        self.is_running = False
        self.times: dict[str, list[int]] = {}
        self._edits: list[bytes] = []

    def __call__(self, name: str, verb: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        drain = self.ledger.drain
        begun = time.perf_counter_ns()
        made = verb(*args, **kwargs)
        left = drain()
        ended = time.perf_counter_ns()
        edits = encode(left)
        encoded = time.perf_counter_ns()
        if self.is_running:
            self.times.setdefault(name, []).append(ended - begun)
            self.times.setdefault("encode", []).append(encoded - ended)
        self._edits.append(edits)
        return made

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, verbs leave edits and no time."""
        was_running, self.is_running = self.is_running, False
        yield
        self.is_running = was_running

    def edits(self) -> list[Edit]:
        """All of them, in order, decoded."""
        return [edit for data in self._edits for edit in decode(data)]


class Service:
    """A ledger under a load: as many cached tokens as were asked for, and `running` sequences that decode."""

    def __init__(self, load: Load, cached: int, running: int) -> None:
        self.load = load
        self.cached = cached
        room = load.prompt + 256  # of a sequence that decodes, branches and grows
        others = 2 * NUM_BEAMS
        self.ledger = TokenLedger(cached + (running + others) * room, running + others, 2 * load.prompt)
        self.clock = Clock(self.ledger)
        self.prompts = Prompts(load)
        self.hits: list[int] = []
        self._rng = random.Random(1)
        for stem in self.prompts.stems():
            self.clock("close", self.ledger.close, self._prefill(stem))
        self.running = [self._prefill(self.prompts.next()) for _ in range(running)]
        for sequence in self.running:
            self.clock("extend", self.ledger.extend, [sequence], [OUTPUT])
        self.level()
        self.hits.clear()
        self.clock.is_running = True

    def request(self) -> None:
        """One prompt from its arrival to its end, and the eviction of as much as it has left cached."""
        sequence = self._prefill(self.prompts.next())
        self.clock("extend", self.ledger.extend, [sequence], [OUTPUT])
        self.clock("close", self.ledger.close, sequence, self.prompts.tokens(OUTPUT))
        self.clock("evict", self.ledger.evict, self.ledger.num_cached - self.cached)

    def branch(self) -> None:
        """A running sequence is forked; each goes on, and the twin's guesses are cut off."""
        ledger, clock = self.ledger, self.clock
        sequence = self._rng.choice(self.running)
        twin = clock("fork", ledger.fork, sequence)
        clock("extend, two", ledger.extend, [sequence, twin], [1, BRANCH])
        clock("truncate", ledger.truncate, twin, twin.length - BRANCH + 1)
        clock("close, a fork", ledger.close, twin, cache=False)

    def beam_search(self, num_tokens: int) -> None:
        """Four beams of a new prompt, each of which goes on from a random one at every token."""
        ledger, clock, rng = self.ledger, self.clock, self._rng
        with clock.paused():
            beams = [self._prefill(self.prompts.next())]
            beams += [clock("fork", ledger.fork, beams[0]) for _ in range(NUM_BEAMS - 1)]
        for _ in range(num_tokens):
            clock("extend, beams", ledger.extend, beams, [1] * NUM_BEAMS)
            forks = [clock("fork, a beam", ledger.fork, rng.choice(beams)) for _ in beams]
            for beam in beams:
                clock("close, a beam", ledger.close, beam, cache=False)
            beams = forks
        with clock.paused():
            for beam in beams:
                clock("close", ledger.close, beam, cache=False)
        self.level()

    def window(self) -> None:
        """A sequence whose window moves on over its prompt: by a quarter at first, then by a token a step."""
        ledger, clock = self.ledger, self.clock
        with clock.paused():
            sequence = self._prefill(self.prompts.next())
        clock("release a quarter", ledger.release, sequence, self.load.prompt // 4, SINKS)
        for _ in range(WINDOW_STEPS):
            with clock.paused():
                clock("extend", ledger.extend, [sequence], [1])
            clock("release 1", ledger.release, sequence, 1, SINKS)
        with clock.paused():
            clock("extend", ledger.extend, [sequence], [64 - sequence.num_private])
        clock("keep 32 of 64", ledger.keep, sequence, 32)
        clock("close, with gaps", ledger.close, sequence)
        self.level()

    def step(self) -> None:
        """A decode step of all that run; what each has generated is then cut off, so that none ends."""
        ledger = self.ledger
        self.clock(STEP, ledger.extend, self.running, [1] * len(self.running))
        with self.clock.paused():
            for sequence in self.running:
                self.clock("truncate", ledger.truncate, sequence, sequence.length - 1)

    def check(self) -> int:
        """Recount; ends without a figure where anything is amiss. Returns how many segments there are."""
        ledger, books = self.ledger, Books(self.ledger.capacity)
        try:
            ledger.check()
        except LightKVError as error:
            refuse(str(error))
        if abs(ledger.num_cached - self.cached) > 2 * self.load.prompt:
            refuse(f"{ledger.num_cached} tokens are cached, not {self.cached}")
        books.apply(self.clock.edits())
        if books.num_free != ledger.num_free:
            refuse(f"by the edits {books.num_free} tokens are free, by the ledger {ledger.num_free}")
        return len(books.segments)

    def level(self) -> None:
        """As many tokens cached as were asked for, whatever that takes; not measured."""
        ledger, clock = self.ledger, self.clock
        with clock.paused():
            while ledger.num_cached < self.cached:
                clock("close", ledger.close, self._prefill(self.prompts.next()))
            clock("evict", ledger.evict, ledger.num_cached - self.cached)

    def _prefill(self, prompt: bytes) -> Sequence:
        """Open, take slots for all of it and publish."""
        ledger, clock = self.ledger, self.clock
        sequence = clock("open", ledger.open, prompt)
        self.hits.append(sequence.num_hit)
        clock("extend", ledger.extend, [sequence], [len(prompt) // TOKEN_BYTES - sequence.length])
        clock("publish", ledger.publish, sequence)
        ledger.confirm(ledger.step)
        return sequence


def floor_ns(service: Service, repeats: int) -> list[int]:
    """A look-up in a dict and a comparison of as many tokens as a prompt has, each time of another prompt."""
    prompts = [service.prompts.tokens(service.load.prompt) for _ in range(repeats)]
    known = {prompt[: 2 * TOKEN_BYTES]: bytes(bytearray(prompt)) for prompt in prompts}  # other objects
    times = []
    for prompt in prompts:
        begun = time.perf_counter_ns()
        is_same = prompt.startswith(known[prompt[: 2 * TOKEN_BYTES]], 0)
        times.append(time.perf_counter_ns() - begun)
        if not is_same:
            refuse("a prompt is not itself")
    return times


def conversions_ns(prompt: bytes, repeats: int) -> dict[str, list[int]]:
    """Ids as people have them, made into bytes."""
    ids = array("i", prompt).tolist()
    numbers = np.array(ids)
    ways: dict[str, Callable[[], bytes]] = {
        "list, by int32_bytes": lambda: int32_bytes(ids),
        "numpy array, by int32_bytes": lambda: int32_bytes(numbers),
        "list, by array.array": lambda: array("i", ids).tobytes(),
    }
    found: dict[str, list[int]] = {}
    for name, way in ways.items():
        if way() != prompt:
            refuse(f"{name}: other bytes")
        times = found.setdefault(name, [])
        for _ in range(repeats):
            begun = time.perf_counter_ns()
            way()
            times.append(time.perf_counter_ns() - begun)
    return found


def spread_us(times: list[int]) -> dict[str, float]:
    """Nanoseconds to µs: mean, median, 99th percentile, and how many there are."""
    median, p99 = np.percentile(times, [50, 99]) / 1e3
    mean = float(np.mean(times) / 1e3)
    return {"mean": mean, "median": float(median), "p99": float(p99), "calls": len(times)}


def measure(load: Load, options: argparse.Namespace) -> dict[str, Any]:
    """µs of each verb, with what the ledger held."""
    service = Service(load, options.cached, options.running)
    service.check()
    for work in (service.request, service.branch, service.window):
        for _ in range(options.requests):
            work()
    for _ in range(options.requests // BEAM_TOKENS):
        service.beam_search(BEAM_TOKENS)
    for _ in range(options.steps):
        service.step()
    num_segments = service.check()
    return {
        "cached_tokens": service.ledger.num_cached,
        "segments": num_segments,
        "mean_hit": float(np.mean(service.hits)),
        "floor": spread_us(floor_ns(service, options.requests)),
        "conversions": {
            name: spread_us(found)
            for name, found in conversions_ns(service.prompts.next(), options.requests).items()
        },
        "verbs": {name: spread_us(found) for name, found in sorted(service.clock.times.items())},
    }


def missed(verbs: dict[str, dict[str, float]]) -> list[str]:
    """The verbs that are slower than they should be, with their figures."""
    slow = [
        f"{name} {part} {verbs[name][part]:.1f} µs, over {limit:.0f}"
        for name in TARGETED
        for part, limit in TARGET_US.items()
        if verbs[name][part] > limit
    ]
    mean = verbs[STEP]["mean"]
    return slow + ([f"{STEP} mean {mean:.1f} µs, over {STEP_TARGET_US:.0f}"] if mean > STEP_TARGET_US else [])


def arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--cached", type=int, default=1_000_000, help="cached tokens meanwhile")
    made.add_argument("--running", type=int, default=256, help="sequences that decode meanwhile")
    made.add_argument("--requests", type=int, default=3000, help="of each load")
    made.add_argument("--steps", type=int, default=1000, help="decode steps of each load")
    return made.parse_args()


def main() -> None:
    options = arguments()
    gc.freeze()  # the router process has no torch, whose objects would be gone through again and again here
    print_machine()
    results: dict[str, Any] = {}
    for load in LOADS:
        found = results[load.name] = measure(load, options)
        named = {"floor": found["floor"], **found["verbs"], **found["conversions"]}
        print(
            f"{load.name}: {found['cached_tokens']:,} tokens cached in {found['segments']:,} segments, "
            f"{options.running} sequences open; {found['mean_hit']:.0f} of {load.prompt} tokens hit"
        )
        rows = [
            [name, *(f"{times[part]:.2f}" for part in ("mean", "median", "p99")), f"{times['calls']:,}"]
            for name, times in named.items()
        ]
        print_table(["µs", "mean", "median", "p99", "calls"], rows)
        slow = missed(found["verbs"])
        print(f"targets: {'; '.join(slow) if slow else 'met'}\n")
    settings = {key: getattr(options, key) for key in ("cached", "running", "requests", "steps")}
    targets = {"verbs": TARGET_US, "step_mean": STEP_TARGET_US}
    print_json("ledger", {"settings": settings, "targets_us": targets, "loads": results}, options.out)


if __name__ == "__main__":
    main()
