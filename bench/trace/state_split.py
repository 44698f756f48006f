"""Simulates what it costs to split the memory between K/V and the states of recurrent layers at the start.

    python -m bench.trace.state_split --mooncake TRACE --out bench/results/state-split.json

TRACE is mooncake_conversation_trace.jsonl. Each model has the bytes that an H200 leaves beside its weights.
They are split at the start, by the default or into one state for each so many tokens of K/V; or they are one
budget, in which bytes move freely between the two (`OneBudget`). A last side has all bytes for K/V and as many
again for states: no division can find more.

    mooncake     one of four of Mooncake's conversations, at their own times
    agents       sessions of 43 turns and 142k tokens, generated with --seed, at once as many as hold the bytes
                 of one budget. A turn comes some 60 s after the one before, and all share 4,096 tokens
    agents 70 %  as many as hold 70 % of them
    chat         the generated workload of short prompts, of which none shares anything

`hits` is the share of the prompt tokens that were found: the ledger alone replays the requests at their times,
and each is held for about as long as Llama-3-8B on an H200 takes for it. `admitted` is the mean number of
tokens that running requests hold while others wait, in a simulation of some requests that all wait at the
start. It refuses to report if a ledger's recount fails.
"""

import argparse
import itertools
import math
import random
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NamedTuple

from bench.common.report import parser, print_json, print_machine, print_table, save_json
from lightkv.edits import Alloc
from lightkv.layer_groups import LayerGroups
from lightkv.ledger import Sequence, TokenLedger
from lightkv.ledger.prefix_tree import MAX_HITS
from lightkv.ledger.segments import Idle, Tail
from lightkv.ledger.snapshots import StateClass, StateCounts
from lightkv.router.engine.step_time import StepTime
from lightkv.router.model.sizes import state_ratio
from lightkv.router.simulate.arrivals import arrange, prompt_ids
from lightkv.router.simulate.config import SimulationConfig
from lightkv.router.simulate.fleet import Fleet
from lightkv.router.simulate.routing import ROUTINGS
from lightkv.router.simulate.simulation import Simulation
from lightkv.router.simulate.trace_files import IN_MILLISECONDS, FileTrace, TraceRequest
from lightkv.router.simulate.traces import GeneratedTrace, Repeated, Trace

GB = 10**9
TOKENS_A_STATE = (2048, 4096, 8192, 16384, 32768)  # of K/V, for each state of a split
SMALL = 64  # tokens, whose bytes a small state has at most
SPARE = 2  # states that the one budget keeps for snapshots, where it can
SAMPLE = 4  # one of so many of Mooncake's conversations
TURNS, SHARED, FIRST, TURN, ANSWER, GAP = 43, 4096, 6000, 3238, 300, 60.0  # of an agent's session
OPENING = 8  # tokens at the end of an agent's prompt, which open the answer and are not in the next prompt
BLOCK = 16
DEFAULT, ONE, TWICE = "default", "one budget", "all bytes twice"
CHUNK, ROWS, LONGEST, HELD_BACK = 4096, 256, 200_000, 8192
PREFILL, DECODE = 4e-5, 0.02  # seconds a token, about those of Llama-3-8B on an H200 beside others


class Model(NamedTuple):
    """The bytes of a token of K/V, of a sequence's states, and of the weights, in 16 bits but for recurrent
    states in float32."""

    token: int
    state: int
    weights: int

    @property
    def tokens(self) -> int:
        """The bytes beside the weights on an H200 with --mem-fraction 0.9, less 4 GB for steps, in tokens."""
        return (int(0.9 * 141 * GB) - self.weights - 4 * GB) // self.token

    @property
    def ratio(self) -> int:
        """The bytes of a state, in tokens."""
        return -(-self.state // self.token)


def _delta(layers: int, v_heads: int, k_heads: int = 16) -> int:
    """Returns the bytes of the states of gated delta layers with heads of 128: the recurrent state in float32,
    and the last three inputs of the convolution over q, k and v in 16 bits."""
    return layers * (v_heads * 128 * 128 * 4 + (2 * k_heads + v_heads) * 128 * 3 * 2)


# Attention layers x (K and V) x heads x dims x bytes; then the states of the other layers.
MODELS = {
    "Qwen3.5-9B": Model(8 * 2 * 4 * 256 * 2, _delta(24, 32), 18 * GB),
    "Qwen3.5-27B": Model(16 * 2 * 4 * 256 * 2, _delta(48, 48), 54 * GB),
    "LFM2.5-1.2B": Model(6 * 2 * 8 * 64 * 2, 10 * 2048 * 3 * 2, int(2.4 * GB)),
    # Mamba-2: 64 heads of 64 with a state of 128, and a convolution over 4,096 + 2 x 8 x 128 channels.
    "Nemotron-3-Nano": Model(6 * 2 * 2 * 128 * 2, 23 * (64 * 64 * 128 * 4 + 6144 * 3 * 2), 63 * GB),
}


# --------------------------------------------------------------------------------
# One budget


class _Ordered(StateClass):
    """States that are evicted in one order with tokens. `ratio`: the tokens whose bytes a state has."""

    ratio = 1

    def due(self, tail: Tail) -> int:
        """Returns the place of the snapshot's segment, and a hit's worth for each token that is computed again
        for a token's bytes of the snapshot, up to as many hits as count."""
        place = tail.segment.due
        saved = super().due(tail) - place
        worth = self.state.tree._hit_worth  # type: ignore[attr-defined]
        return place + min(saved // self.ratio, MAX_HITS) * int(worth)


class _Idle(Idle):
    """Snapshots that can be evicted. Where they are small, those that later ones of their path supersede are
    not evicted first, since a path may lose its end."""

    def __init__(self, ratio: int) -> None:
        super().__init__()
        self._is_small = ratio < SMALL

    def supersede(self, tail: Tail) -> None:
        """Has a tail evicted before all that are not superseded."""
        if not self._is_small:
            super().supersede(tail)


class OneBudget(TokenLedger):
    """A ledger whose tokens and states share the bytes of `budget` tokens, of which a state has `ratio`. That
    is evicted which is the first in one order, tokens or a state. `capacity` is what tokens can hold beside the
    states that are held, and one more."""

    def __init__(self, budget: int, ratio: int, max_sequences: int, max_entries: int) -> None:
        super().__init__(budget, max_sequences, max_entries, num_states=1)
        self.budget, self.ratio = budget, ratio
        state = self._state
        self._states = _Ordered(state, state.classes[-1].cls, 0)
        self._states.ratio, self._states.idle = ratio, _Idle(ratio)
        state.states = state.classes[-1] = self._states

    @property
    def capacity(self) -> int:
        """Tokens that can be held."""
        if not hasattr(self, "_states"):
            return self._state.capacity
        return self.budget - self.ratio * (self._held_states + self._states.num_owed + 1)

    @property
    def _held_states(self) -> int:
        return self._states.counts.num_held

    @property
    def num_available(self) -> int:
        """Tokens that can be allocated, if every snapshot that is not held is evicted."""
        state, states = self._state, self._states
        spare = states.num_free + states.num_cached - states.num_owed
        return state.num_free + state.num_cached + self.ratio * spare

    @property
    def states(self) -> StateCounts:
        """The states as if all bytes that are not held were theirs."""
        states = self._states
        free = states.num_free + (self._state.num_free + self._state.num_cached) // self.ratio
        held = self._held_states
        return StateCounts(free + states.num_cached + held, free, states.num_cached, states.num_owed)

    def extend(self, sequences: Seq[Sequence], counts: Seq[int]) -> Alloc:
        """Extends sequences, after it has evicted for their tokens and states."""
        owed, available = self._states.num_owed, self.num_available
        spare = min(SPARE, max((available - sum(counts)) // self.ratio, 0))
        self._make_room(sum(counts), owed + spare)
        return super().extend(sequences, counts)

    def _make_room(self, tokens: int, states: int) -> None:
        """Evicts until so many tokens and states are free."""
        state, own, ratio = self._state, self._states, self.ratio
        while (missing := tokens - state.num_free - ratio * (own.num_free - states)) > 0:
            leaf, snapshot = state.idle.oldest(), own.idle.oldest()
            if snapshot is not None and (leaf is None or snapshot.due <= leaf.due):
                assert isinstance(snapshot, Tail)
                snapshot.drop()
            elif leaf is not None:
                state.evict(min(missing, leaf.length))
            else:
                break
        moved = own.num_free - states  # the free bytes of other states are tokens'
        state.num_free += ratio * moved
        state.capacity += ratio * moved
        own.num_free -= moved
        own.capacity -= moved


# --------------------------------------------------------------------------------
# The loads


class Sampled:
    """One of `SAMPLE` conversations of a trace of Mooncake's: those whose second block has such a number. The
    first block is that of all."""

    def __init__(self, path: Path) -> None:
        self._trace = FileTrace(path, IN_MILLISECONDS)
        self.name = f"{self._trace.name}, 1 of {SAMPLE} conversations"

    def __iter__(self) -> Iterator[TraceRequest]:
        return (one for one in self._trace if one.blocks[:2][-1] % SAMPLE == 0)


class Agents:
    """Sessions of `TURNS` turns, `num` at once, one after the other; the first ones are under way. All lasts as
    long as one session. As in a chat, the next turn goes on from the place before a prompt's last tokens."""

    def __init__(self, num: int, seed: int) -> None:
        self.name = f"{num} agents"
        self._num, self._seed = num, seed

    def __iter__(self) -> Iterator[TraceRequest]:
        rng, numbers = random.Random(f"agents {self._seed}"), itertools.count(SHARED // BLOCK)
        found: list[TraceRequest] = []
        for _ in range(self._num):
            at, turn, end = rng.uniform(0, GAP), rng.randrange(TURNS), GAP * TURNS
            blocks = list(range(SHARED // BLOCK))
            length = FIRST + turn * TURN
            while at < end:
                length = length // BLOCK * BLOCK
                blocks += [next(numbers) for _ in range(length // BLOCK - len(blocks))]
                answer = max(round(rng.expovariate(1 / ANSWER)), 1)
                found.append(TraceRequest(at, length + OPENING, answer, tuple(blocks), BLOCK))
                at += GAP / 2 + rng.expovariate(2 / GAP)
                turn += 1
                length += answer + round(rng.uniform(0.5, 1.5) * (TURN - ANSWER))
                if turn == TURNS:
                    turn, length, blocks = 0, FIRST, list(range(SHARED // BLOCK))
        return iter(sorted(found, key=lambda one: one.arrival or 0.0))


# --------------------------------------------------------------------------------
# The runs


class Side(NamedTuple):
    """A way to divide a budget. `states`: of a split; None is one budget of `tokens`."""

    tokens: int
    states: int | None


def split(model: Model, ratio: float) -> Side:
    """Returns the split with so many bytes of states for each of K/V."""
    states = int(model.tokens * ratio / (1 + ratio) / model.ratio)
    return Side(model.tokens - states * model.ratio, states)


class _OfOneBudget(Simulation):
    """A simulation whose ledger has one budget, in which a state has the bytes of `config.states` tokens."""

    def make_ledger(self, num_slots: int, longest: int, groups: LayerGroups) -> TokenLedger:
        return OneBudget(num_slots, self.config.states, self.config.max_num_seqs, longest)


def sides(model: Model) -> dict[str, Side]:
    """Returns the sides by their names."""
    budget, ratio = model.tokens, model.ratio
    found = {str(tokens): split(model, ratio / tokens) for tokens in TOKENS_A_STATE}
    found[DEFAULT] = split(model, state_ratio(budget, 1, ratio, ROWS))
    return found | {ONE: Side(budget, None), TWICE: Side(budget, budget // ratio)}


def ledger_of(model: Model, side: Side) -> TokenLedger:
    """Returns the empty ledger of a side."""
    if side.states is None:
        return OneBudget(side.tokens, model.ratio, ROWS, LONGEST)
    return TokenLedger(side.tokens, ROWS, LONGEST, num_states=side.states)


class Open(NamedTuple):
    """A request that runs until `end`, and then has `answer` tokens."""

    end: float
    number: int
    sequence: Sequence
    answer: int


def hits(trace: Trace, ledger: TokenLedger) -> float:
    """Replays the requests of a trace at their times. Each is computed when it comes, and held for as long as
    its prompt and answer take to compute. Returns the share of prompt tokens that were found."""
    running: list[Open] = []
    prompt = found = 0
    for number, asked in enumerate(trace, start=1):
        now, ids = asked.arrival or 0.0, prompt_ids(number, asked)
        while running and running[0].end <= now:
            end(ledger, heappop(running))
        boundary = (asked.prompt // asked.block_tokens * asked.block_tokens,) if asked.blocks else ()
        longest = asked.prompt + asked.output
        while running and not has_room(ledger, ids, longest + sum([one.answer for one in running])):
            end(ledger, heappop(running))
        sequence = ledger.open(ids, keep_at=boundary)
        prompt, found = prompt + asked.prompt, found + sequence.num_hit
        until = now + (asked.prompt - sequence.num_hit) * PREFILL + asked.output * DECODE
        while left := asked.prompt - sequence.length:
            if count := ledger.piece(sequence, min(left, CHUNK)):
                ledger.extend([sequence], [count])
                ledger.publish(sequence)
            ledger.confirm(ledger.step)
            ledger.step += 1
        heappush(running, Open(until, number, sequence, asked.output))
        ledger.drain()
    while running:
        end(ledger, heappop(running))
    ledger.check()
    return found / prompt


def has_room(ledger: TokenLedger, ids: bytes, most: int) -> bool:
    """Returns whether a request has room that shares nothing, with the answers of those that run."""
    return (
        most <= ledger.num_available - HELD_BACK and ledger.states.num_available > ledger.states.num_owed + 1
    )


def end(ledger: TokenLedger, one: Open) -> None:
    """Writes an answer, and closes its request."""
    ledger.extend([one.sequence], [one.answer])
    ledger.publish(one.sequence)
    ledger.confirm(ledger.step)
    ledger.step += 1
    ledger.close(one.sequence, array("i", [1] * one.answer).tobytes())


def admitted(trace: Trace, model: Model, side: Side) -> float:
    """Simulates requests that all wait at the start. Returns the mean of the tokens that running ones hold."""
    one = model.ratio if side.states is None else side.states
    config = SimulationConfig(capacity=side.tokens, states=one, rate=math.inf, skip_too_large=True)
    arrivals, offered, saturated = arrange(trace, config)
    make = _OfOneBudget if side.states is None else Simulation
    simulation = make(trace, config, StepTime.parse(""), arrivals.all_at_start)
    Fleet([simulation], ROUTINGS["prefix"]).run(arrivals, lambda num: None)
    figures = simulation.result(offered, saturated).figures
    return figures.memory_held_share * simulation.ledger.capacity


def loads(model: Model, mooncake: Path, seed: int) -> dict[str, Trace]:
    """Returns the traces of which hits are counted."""
    at_once = model.tokens / (FIRST + TURNS / 2 * TURN + model.ratio)
    return {
        "mooncake": Sampled(mooncake),
        "agents": Agents(round(at_once), seed),
        "agents 70 %": Agents(round(0.7 * at_once), seed),
    }


def arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--mooncake", type=Path, required=True, help="Mooncake's trace of conversations")
    made.add_argument("--waiting", type=int, default=1500, help="requests that wait at the start")
    made.add_argument("--seed", type=int, default=0)
    return made.parse_args()


def main() -> None:
    options = arguments()
    print_machine()
    results: dict[str, Any] = {"waiting": options.waiting, "seed": options.seed, "models": {}}
    for name, model in MODELS.items():
        named, traces = sides(model), loads(model, options.mooncake, options.seed)
        of_model: dict[str, Any] = {"bytes_per_token": model.token, "bytes_per_state": model.state}
        of_model["sides"] = {side: one._asdict() for side, one in named.items()}
        results["models"][name] = of_model
        print(f"\n{name}: {model.tokens:,} tokens, of which a state has the bytes of {model.ratio:,}")
        rows: dict[str, dict[str, float]] = {}
        for load, trace in traces.items():
            kept = [side for side in named if not side.isdigit() or "%" not in load]
            rows["hits " + load] = {side: hits(trace, ledger_of(model, named[side])) for side in kept}
        waiting = {
            "mooncake": Repeated(traces["mooncake"], options.waiting),
            "chat": GeneratedTrace("chat", options.waiting, options.seed),
        }
        for load, trace in waiting.items():
            kept = [side for side in named if not side.isdigit()]
            rows["admitted " + load] = {side: round(admitted(trace, model, named[side])) for side in kept}
        of_model |= rows
        shown = [
            [row, *[f"{found[side]:,.4g}" if side in found else "" for side in named]]
            for row, found in rows.items()
        ]
        print_table(("", *named), shown)
        save_json("state-split", results, options.out)
    print_json("state-split", results, options.out)


if __name__ == "__main__":
    main()
