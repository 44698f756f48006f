"""Measures how many of its tokens a conversation's next turn finds in the cache, with sessions and without.

    python -m bench.trace.sessions --trace mooncake_conversation_trace.jsonl --out bench/results/sessions.json

A conversation of Mooncake's trace is a request and all later ones whose prompts continue its blocks. Those with
several turns have a session, as clients that send a session_id do; the other requests have none and compete for
the same cache. The scheduler, the ledger and the admission are the service's; steps are not computed, they take
the time of the simulator's model. A session is released `--ttl` seconds after its last answer has ended.

The first run has an ample pool, and measures the most tokens that running requests hold and sessions protect
together. The other pools are so small that this is a part of the pool (`--occupancy`, 0.9 and others), or more
than all of it. In each, sessions may protect as much as all of them need, the default share, or nothing. A
turn's own tokens are those that it has in common with an earlier turn of its session, in whole blocks; without
any cache it would find none of them.
"""

import argparse
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.common.report import parser, print_json, print_machine, print_table, refuse
from lightkv.ledger import TokenLedger
from lightkv.ledger.prefix_tree import TOKEN_BYTES, common_prefix
from lightkv.router.config import EngineConfig
from lightkv.router.engine.loop import LocalEngine
from lightkv.router.engine.prefill_budget import PrefillBudget
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import ExpectedMemory, Limits, StepPlan, StepResult
from lightkv.router.engine.step_time import StepTime
from lightkv.router.sampling_params import SamplingParams
from lightkv.router.simulate.trace_files import BLOCK, IN_MILLISECONDS, FileTrace, TraceRequest

MAX_NUM_SEQS = 256
PREFILL_CHUNK = 2048
MAX_MODEL_LEN = 2**18
TOKEN = 1  # which every step samples
DEFAULT_SHARE = EngineConfig.session_share
EARLIER_TURNS = 16  # of a session, with which a turn is compared


class Turn(NamedTuple):
    """A request of the trace, and the number of its conversation; `has_session`: the conversation continues."""

    asked: TraceRequest
    conversation: int
    has_session: bool

    def prompt_ids(self) -> bytes:
        """Returns the ids of the prompt, int32 bytes: those of each block are all the same."""
        ids = np.repeat(np.array(self.asked.blocks, np.int32) + 1, BLOCK)[: self.asked.prompt].tobytes()
        return ids + bytes(TOKEN_BYTES * self.asked.prompt - len(ids))


def conversations(trace: FileTrace, every: int) -> list[Turn]:
    """Returns the requests of every `every`-th conversation of a trace with blocks, in order.

    A request continues the conversation whose whole blocks its own begin with, the longest of them. Two blocks
    at least: the first is a system prompt that many conversations share.
    """
    by_prefix: dict[int, int] = {}
    found: list[tuple[TraceRequest, int]] = []
    turns: defaultdict[int, int] = defaultdict(int)
    for asked in trace:
        digest, conversation, prefixes = 0, None, []
        for block in asked.blocks:
            digest = hash((digest, block))
            prefixes.append(digest)
            if len(prefixes) >= 2:
                conversation = by_prefix.get(digest, conversation)
        if conversation is None:
            conversation = len(turns)
        turns[conversation] += 1
        found.append((asked, conversation))
        num_whole = asked.prompt // BLOCK
        if num_whole >= 2:
            by_prefix[prefixes[num_whole - 1]] = conversation
    return [Turn(asked, number, turns[number] > 1) for asked, number in found if not number % every]


@dataclass
class Found:
    """What one run found. Tokens: `own`, those that next turns have in common with earlier turns of their
    sessions, and `hit`, how many of them were cached; `prompt` and `prompt_hit`, those of all requests.
    Most at once: `occupied`, tokens that were held or protected, and `protected`."""

    capacity: int
    share: float
    turns: int = 0  # next turns that came while their session was open
    late_turns: int = 0  # after it had expired
    whole_turns: int = 0  # those of `turns` that found all of their own tokens
    own: int = 0
    hit: int = 0
    prompt: int = 0
    prompt_hit: int = 0
    occupied: int = 0
    protected: int = 0
    evicted: int = 0
    over_share: int = 0
    num_refused: int = 0
    hits: list[float] = field(default_factory=list)

    @property
    def hit_share(self) -> float:
        """The share of their own tokens that next turns found."""
        return self.hit / self.own if self.own else 0.0


class _Device:
    """An executor that computes nothing and moves the clock by what a step would take."""

    fatal = False

    def __init__(self, step_time: StepTime) -> None:
        self.now = 0.0
        self._step_time = step_time
        self._results: deque[StepResult] = deque()

    def launch(self, plan: StepPlan) -> None:
        self.now += self._step_time.seconds(plan.work)
        self._results.append(StepResult(plan.step, [TOKEN] * len(plan.sample), plan.num_free, 0))

    def collect(self) -> StepResult:
        return self._results.popleft()

    def check(self, edits: bytes, expected: ExpectedMemory) -> None:
        pass


class _Session:
    """A session as its client and the API process know it."""

    def __init__(self) -> None:
        self.prompts: deque[bytes] = deque(maxlen=EARLIER_TURNS)
        self.num_running = 0
        self.expires: float | None = None  # None: a request runs, or the session is not open


class Replay:
    """One run of the trace in a pool of `capacity` tokens, of which sessions protect up to `share`."""

    def __init__(self, capacity: int, share: float, ttl: float, step_time: StepTime) -> None:
        limits = Limits(MAX_NUM_SEQS, MAX_MODEL_LEN, PREFILL_CHUNK, 2**31 - 1)
        self.ledger = TokenLedger(capacity, MAX_NUM_SEQS, MAX_MODEL_LEN, int(share * capacity))
        self.device = _Device(step_time)
        budget = PrefillBudget(limits, step_time)
        scheduler = Scheduler(self.ledger, limits, clock=lambda: self.device.now, budget=budget)
        self.engine = LocalEngine(scheduler, self.device)
        self.found = Found(capacity, share)
        self._ttl = ttl
        self._sessions: defaultdict[int, _Session] = defaultdict(_Session)
        self._expiries: list[tuple[float, int]] = []  # ascending
        self._live: dict[str, tuple[Turn, Request, int]] = {}

    def run(self, turns: list[Turn]) -> Found:
        """Runs all turns at the times of the trace."""
        waiting = deque(turns)
        while waiting or self.engine.has_work:
            if not self.engine.has_work:
                self.device.now = max(self.device.now, waiting[0].asked.arrival or 0.0)
            self._expire()
            while waiting and (waiting[0].asked.arrival or 0.0) <= self.device.now:
                self._send(waiting.popleft())
            for event in self.engine.step():
                if event.finish_reason is not None:
                    self._end(*self._live.pop(event.request_id))
        self.engine.check()
        counts = self.ledger.session_counts
        self.found.evicted, self.found.over_share = counts.evicted, counts.over_limit
        return self.found

    def _send(self, turn: Turn) -> None:
        asked, found = turn.asked, self.found
        tokens = asked.prompt + asked.output
        if tokens - 1 > self.ledger.capacity or tokens > MAX_MODEL_LEN:
            found.num_refused += 1
            return
        prompt_ids = turn.prompt_ids()
        number = f"{len(self._live)} {found.prompt}"
        params = SamplingParams(temperature=0.0, max_tokens=asked.output, ignore_eos=True)
        request = Request(number, prompt_ids, params, seed=0)
        own = 0
        if turn.has_session:
            session = self._sessions[turn.conversation]
            is_open = session.num_running > 0 or session.expires is not None
            last = len(prompt_ids) - TOKEN_BYTES
            common = [common_prefix(earlier, prompt_ids, 0, last) for earlier in session.prompts]
            own = max(common, default=0) // TOKEN_BYTES // BLOCK * BLOCK
            if session.prompts and not is_open:
                found.late_turns += 1
            if not is_open:
                own = 0
            session.expires = None
            session.num_running += 1
            request.session = self.ledger.open_session(str(turn.conversation))
        found.prompt += asked.prompt
        self.engine.add(request)
        self._live[number] = turn, request, own

    def _end(self, turn: Turn, request: Request, own: int) -> None:
        found = self.found
        found.prompt_hit += request.num_hit
        if own:
            hit = min(request.num_hit, own)
            found.turns += 1
            found.whole_turns += hit == own
            found.own += own
            found.hit += hit
            found.hits.append(hit / own)
        if turn.has_session:
            session = self._sessions[turn.conversation]
            session.prompts.append(request.prompt_ids)
            session.num_running -= 1
            if not session.num_running:
                session.expires = self.device.now + self._ttl
                insort(self._expiries, (session.expires, turn.conversation))
        found.occupied = max(found.occupied, self._occupied())
        found.protected = max(found.protected, self.ledger.session_counts.protected)

    def _expire(self) -> None:
        """Releases the sessions whose time is over, as the API process does."""
        while self._expiries and self._expiries[0][0] <= self.device.now:
            at, conversation = self._expiries.pop(0)
            session = self._sessions[conversation]
            if session.expires == at:
                session.expires = None
                self.ledger.release_session(str(conversation))

    def _occupied(self) -> int:
        """Counts the tokens that sequences hold or sessions protect."""
        idle = (one for one in self.ledger.indexed_segments() if one.protected and not one.holders)
        return self.ledger.num_held + sum(one.length for one in idle)


def pools(ample: Found, occupancies: list[float]) -> Iterator[tuple[float, int, float]]:
    """Yields (occupancy, capacity, share) for each occupancy: the share holds what the sessions protect at
    most, up to all of the pool."""
    for occupancy in occupancies:
        capacity = round(ample.occupied / occupancy)
        yield occupancy, capacity, min(ample.protected / capacity * 1.001, 1.0)


def arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--trace", type=Path, required=True, help="a trace with blocks, as Mooncake's")
    made.add_argument("--every", type=int, default=8, help="simulate every n-th conversation")
    made.add_argument("--ttl", type=float, default=600.0, help="seconds")
    made.add_argument("--occupancy", type=float, nargs="+", default=[0.5, 0.9, 1.2])
    return made.parse_args()


def main() -> None:
    options = arguments()
    print_machine()
    step_time = StepTime.parse("")
    turns = conversations(FileTrace(options.trace, IN_MILLISECONDS), options.every)
    if not any(turn.has_session for turn in turns):
        refuse(f"{options.trace} has no conversation of several turns; give Mooncake's trace")
    total = sum(turn.asked.prompt + turn.asked.output for turn in turns)
    ample = Replay(total, 1.0, options.ttl, step_time).run(turns)
    print(
        f"{len(turns):,} requests, {ample.turns:,} next turns within {options.ttl:g} s and "
        f"{ample.late_turns:,} later; at most {ample.occupied:,} tokens held or protected, "
        f"{ample.protected:,} protected\n"
    )
    if ample.hit != ample.own:
        refuse(f"in an ample pool next turns found {ample.hit:,} of their {ample.own:,} tokens, not all")
    results: dict[str, Any] = {
        "settings": {"trace": options.trace.name, "every": options.every, "ttl": options.ttl,
                     "requests": len(turns)},
        "ample": figures(ample),
        "pools": {},
    }  # fmt: skip
    rows = []
    for occupancy, capacity, share in pools(ample, options.occupancy):
        sides = {"all fit": share, "half": min(share, DEFAULT_SHARE), "none": 0.0}
        for name, own_share in sides.items():
            found = Replay(capacity, own_share, options.ttl, step_time).run(turns)
            results["pools"].setdefault(str(occupancy), {})[name] = figures(found)
            rows.append(row(f"{occupancy:.0%}, {name}", found))
    header = ["occupied, sessions", "pool", "share", "own found", "whole turns", "worst turn", "all prompts",
              "evicted", "over share"]  # fmt: skip
    print_table(header, rows)
    print_json("sessions", results, options.out)


def figures(found: Found) -> dict[str, Any]:
    """Returns the numbers of a run for the JSON line."""
    numbers = {name: value for name, value in vars(found).items() if name != "hits"}
    return numbers | {"hit_share": found.hit_share, "worst": min(found.hits, default=0.0)}


def row(name: str, found: Found) -> list[str]:
    """Returns the cells of a run."""
    return [
        name,
        f"{found.capacity:,}",
        f"{found.share:.0%}",
        f"{found.hit_share:.2%}",
        f"{found.whole_turns:,} of {found.turns:,}",
        f"{min(found.hits, default=0.0):.1%}",
        f"{found.prompt_hit / found.prompt:.1%}",
        f"{found.evicted:,}",
        f"{found.over_share:,}",
    ]


if __name__ == "__main__":
    main()
