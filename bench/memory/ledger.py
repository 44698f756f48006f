"""Measures each verb of the ledger, with its edits, while a million tokens are cached.

    python -m bench.memory.ledger --out bench/results/ledger.json

It uses no device and no tensor, because the ledger is host arithmetic. A verb's time is from its call until
its edits are drained. The service encodes the edits of all verbs once per step; the time to encode one verb's
edits is reported in a separate row. The prompts of both loads have 1,000 tokens:

    documents   256 tokens that sixteen documents share, 256 tokens of one document, and a new question
    chats       a system prompt that all chats share, eight turns of 100 tokens, and a new last turn

One prompt in eight diverges from its document or chat at a random token after the first turn, so that segments
are split. After each request, as many tokens are evicted as the request added to the cache, so a prompt hits
only the part of earlier prompts that has not been evicted. Meanwhile 256 sequences are open: they decode, some
are forked, and four beams fork at every token.

Last, a sequence ends and another one comes before each step of all, once with layers that all see everything
and once with some that see a window beside these, where the ledger counts in two classes.

The floor of `open` is one look-up in a dict and one comparison of a thousand tokens. Lists of ids are
converted to bytes once, before they reach the ledger; this is reported separately. Before a figure is printed,
the ledger recounts itself, and the decoded edits have to give the same free count.
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
from lightkv.layer_groups import FULL, ONE_GROUP, LayerGroups, Lifetime
from lightkv.ledger import TokenLedger
from lightkv.ledger.prefix_tree import TOKEN_BYTES
from lightkv.ledger.sequence import Sequence
from lightkv.token_ids import int32_bytes

P = ParamSpec("P")
T = TypeVar("T")

VOCAB_SIZE = 32_000
OUTPUT = 24  # tokens that a request generates
SINK_TOKENS = 4
WINDOW_STEPS = 4
NUM_BEAMS = 4
BEAM_TOKENS = 200
BRANCH = 4  # tokens that a fork adds; all but one are then truncated
TARGET_US = {"mean": 5.0, "p99": 20.0}
STEP_TARGET_US = 20.0
TARGETED = ("open", "extend", "close", "evict")
STEP = "extend, a step of all"
CHANGED_STEP = "extend, a changed step of all"
# With this window, a sequence that takes a token in each of 256 steps reuses slots in the last 64 of them.
CLASSES = {"one class": ONE_GROUP, "two classes": LayerGroups.of([Lifetime("window", 128), FULL])}


class Load(NamedTuple):
    """A load of prompts of `prompt` tokens, each a stem that other prompts share, and then new tokens.

    There are `stems` stems of `turns` turns of `turn` tokens. Every run of `siblings` stems has the same first
    turn.
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
    """Draws the prompts of a load, as int32 bytes."""

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
        """Draws random tokens."""
        return self._numbers.integers(1, VOCAB_SIZE, count, dtype=np.int32).tobytes()

    def stems(self) -> list[bytes]:
        """Returns each stem up to each of its turns."""
        size = self.load.turn * TOKEN_BYTES
        return [stem[: size * turn] for stem in self._stems for turn in range(1, self.load.turns + 1)]

    def next(self) -> bytes:
        """Draws a prompt: a stem, cut after its first turn one time in eight, and then new tokens."""
        stem = self._rng.choice(self._stems)
        if self._rng.random() < 1 / 8:
            end = self._rng.randrange(self.load.turn, len(stem) // TOKEN_BYTES)
            stem = stem[: end * TOKEN_BYTES]
        return stem + self.tokens(self.load.prompt - len(stem) // TOKEN_BYTES)


class EditCount:
    """Counts free slots by the edits alone, to check the ledger's own count."""

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
    """Calls verbs of a ledger, and records their nanoseconds and edits."""

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
        """Within the block, the edits of verbs are recorded, but not their times."""
        was_running, self.is_running = self.is_running, False
        yield
        self.is_running = was_running

    def edits(self) -> list[Edit]:
        """Decodes all recorded edits, in order."""
        return [edit for data in self._edits for edit in decode(data)]


class Service:
    """A ledger under a load, with `cached` cached tokens and `running` sequences that decode."""

    def __init__(self, load: Load, cached: int, running: int, groups: LayerGroups = ONE_GROUP) -> None:
        self.load = load
        self.cached = cached
        room = load.prompt + 256  # for a sequence that decodes, branches and grows
        others = 2 * NUM_BEAMS
        capacity = cached + (running + others) * room * groups.num_groups
        self.ledger = TokenLedger(capacity, running + others, 2 * load.prompt, groups=groups)
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
        """Runs one request from its arrival to its end, and evicts as many tokens as it left in the cache."""
        sequence = self._prefill(self.prompts.next())
        self.clock("extend", self.ledger.extend, [sequence], [OUTPUT])
        self.clock("close", self.ledger.close, sequence, self.prompts.tokens(OUTPUT))
        self.clock("evict", self.ledger.evict, self.ledger.num_cached - self.cached)

    def branch(self) -> None:
        """Forks a running sequence, extends both, truncates the fork and closes it."""
        ledger, clock = self.ledger, self.clock
        sequence = self._rng.choice(self.running)
        fork = clock("fork", ledger.fork, sequence)
        clock("extend, two", ledger.extend, [sequence, fork], [1, BRANCH])
        clock("truncate", ledger.truncate, fork, fork.length - BRANCH + 1)
        clock("close, a fork", ledger.close, fork, cache=False)

    def beam_search(self, num_tokens: int) -> None:
        """Runs four beams of a new prompt. After every token, a fork of a random beam replaces each."""
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
        """Moves the window of a sequence over its prompt: first by a quarter, then by one token per step."""
        ledger, clock = self.ledger, self.clock
        with clock.paused():
            sequence = self._prefill(self.prompts.next())
        clock("release a quarter", ledger.release, sequence, self.load.prompt // 4, SINK_TOKENS)
        for _ in range(WINDOW_STEPS):
            with clock.paused():
                clock("extend", ledger.extend, [sequence], [1])
            clock("release 1", ledger.release, sequence, 1, SINK_TOKENS)
        with clock.paused():
            clock("extend", ledger.extend, [sequence], [64 - sequence.num_private])
        clock("keep 32 of 64", ledger.keep, sequence, 32)
        clock("close, with gaps", ledger.close, sequence)
        self.level()

    def step(self) -> None:
        """Extends all running sequences by a token, and truncates them again so that they never grow."""
        ledger = self.ledger
        self.clock(STEP, ledger.extend, self.running, [1] * len(self.running))
        with self.clock.paused():
            for sequence in self.running:
                self.clock("truncate", ledger.truncate, sequence, sequence.length - 1)

    def changed_step(self) -> None:
        """Closes the sequence that has run the longest, opens another one, and extends all by a token."""
        ledger, clock = self.ledger, self.clock
        with clock.paused():
            clock("close", ledger.close, self.running.pop(0))
            self.running.append(self._prefill(self.prompts.next()))
        clock(CHANGED_STEP, ledger.extend, self.running, [1] * len(self.running))
        self.level()

    def check(self) -> int:
        """Recounts everything, and exits if a count is wrong. Returns the number of segments."""
        ledger, count = self.ledger, EditCount(self.ledger.capacity)
        try:
            ledger.check()
        except LightKVError as error:
            refuse(str(error))
        if abs(ledger.num_cached - self.cached) > 2 * self.load.prompt:
            refuse(f"{ledger.num_cached} tokens are cached, not {self.cached}")
        count.apply(self.clock.edits())
        if count.num_free != ledger.num_free:
            refuse(f"the edits leave {count.num_free} tokens free, but the ledger counts {ledger.num_free}")
        return len(count.segments)

    def level(self) -> None:
        """Fills or evicts the cache to the given number of cached tokens, without measuring it."""
        ledger, clock = self.ledger, self.clock
        with clock.paused():
            while ledger.num_cached < self.cached:
                clock("close", ledger.close, self._prefill(self.prompts.next()))
            clock("evict", ledger.evict, ledger.num_cached - self.cached)

    def _prefill(self, prompt: bytes) -> Sequence:
        """Opens a sequence for the prompt, extends it to the end and publishes it."""
        ledger, clock = self.ledger, self.clock
        sequence = clock("open", ledger.open, prompt)
        self.hits.append(sequence.num_hit)
        clock("extend", ledger.extend, [sequence], [len(prompt) // TOKEN_BYTES - sequence.length])
        clock("publish", ledger.publish, sequence)
        ledger.confirm(ledger.step)
        return sequence


def floor_ns(service: Service, repeats: int) -> list[int]:
    """Measures a look-up in a dict and a comparison of a prompt's tokens, with a new prompt each time."""
    prompts = [service.prompts.tokens(service.load.prompt) for _ in range(repeats)]
    known = {prompt[: 2 * TOKEN_BYTES]: bytes(bytearray(prompt)) for prompt in prompts}  # equal, not the same
    times = []
    for prompt in prompts:
        begun = time.perf_counter_ns()
        is_same = prompt.startswith(known[prompt[: 2 * TOKEN_BYTES]], 0)
        times.append(time.perf_counter_ns() - begun)
        if not is_same:
            refuse("a prompt does not equal its copy")
    return times


def conversions_ns(prompt: bytes, repeats: int) -> dict[str, list[int]]:
    """Measures the conversions of token ids to bytes."""
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
            refuse(f"{name}: wrong bytes")
        times = found.setdefault(name, [])
        for _ in range(repeats):
            begun = time.perf_counter_ns()
            way()
            times.append(time.perf_counter_ns() - begun)
    return found


def spread_us(times: list[int]) -> dict[str, float]:
    """Summarises nanoseconds as µs: mean, median and 99th percentile, with the number of calls."""
    median, p99 = np.percentile(times, [50, 99]) / 1e3
    mean = float(np.mean(times) / 1e3)
    return {"mean": mean, "median": float(median), "p99": float(p99), "calls": len(times)}


def measure(load: Load, options: argparse.Namespace) -> dict[str, Any]:
    """Measures the µs of each verb under one load."""
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


def changed_steps(load: Load, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measures the µs of steps whose batch changes, with one class of layers and with two."""
    found = {}
    for name, groups in CLASSES.items():
        service = Service(load, options.cached, options.running, groups)
        for _ in range(options.running):  # until the sequences have begun one after the other
            service.changed_step()
        service.clock.times.clear()
        for _ in range(options.steps):
            service.changed_step()
        service.ledger.check()
        found[name] = spread_us(service.clock.times[CHANGED_STEP])
    return found


def missed(verbs: dict[str, dict[str, float]]) -> list[str]:
    """Lists the verbs that miss their targets, with their figures."""
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
    made.add_argument("--cached", type=int, default=1_000_000, help="cached tokens")
    made.add_argument("--running", type=int, default=256, help="sequences that decode")
    made.add_argument("--requests", type=int, default=3000, help="requests of each load")
    made.add_argument("--steps", type=int, default=1000, help="decode steps of each load")
    return made.parse_args()


def main() -> None:
    options = arguments()
    gc.freeze()  # the router process has no torch; here the garbage collector would scan torch's objects too
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
    changed = changed_steps(LOADS[0], options)
    print(
        f"{CHANGED_STEP}, median µs: "
        + ", ".join(f"{kind} {us['median']:.1f}" for kind, us in changed.items())
    )
    found = {"settings": settings, "targets_us": targets, "loads": results, "changed_steps": changed}
    print_json("ledger", found, options.out)


if __name__ == "__main__":
    main()
