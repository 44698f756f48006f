"""Compares the slots that branching requests hold by token and by pages.

    python -m bench.memory.branches --out bench/results/branches.json

By token it is the real ledger: a branch is a `fork`, wrong guesses are truncated, and a branch that loses is
closed. By pages it is a table of pages with reference counts: a fork shares pages, and a write into a shared
page copies it first. Both run the same branches, step by step. `slots` is the mean number of held slots over
the steps. `copied` is the number of tokens whose K/V moves when pages are copied; by token it is 0, because a
branch can begin at any token. Only the parents of the beams are computed by a model, and no time is measured.

    samples      n answers to one prompt, with the lengths of the generated chat workload beams        the
    parents of each step in a beam search of the model (SmolLM2 by default), after a short prompt,
                 and after one with --beam-prompt more tokens
    speculation  a step extends by a token and k guesses. Each guess is right with probability --right until the
                 first wrong one; the wrong ones are truncated
    tree         the same with 4 branches of 4 guesses, of which one branch is kept short        the number of
    chats of 8 to 64 tokens, with answers of 8 to 64, that fit when each is at a random
                 point of its answer
"""

import argparse
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from bench.common.report import engine_help, parser, print_json, print_machine, print_table
from lightkv.errors import CheckFailed
from lightkv.ledger import ledger
from lightkv.router import EngineConfig
from lightkv.router.model_files import resolve
from lightkv.router.simulate.traces import GeneratedTrace
from lightkv.token_ids import int32_bytes

PAGES = (16, 64, 256)
POOL = 120_064  # slots; whole pages of 256
ROWS = 8192
LONGEST = 16_384
TREE = 4  # branches, and guesses in each
PROMPTS = (
    "The lighthouse keeper wrote a letter to the harbour office about the storm. It said",
    "To bake bread you need flour, water, salt and yeast. First",
    "Question: why do ships float although they are made of steel?\nAnswer:",
)


class Memory(Protocol):
    """Sequences, identified by numbers, and the slots that they hold. `copied`: tokens copied with pages."""

    copied: int

    def open(self, length: int) -> int: ...
    def extend(self, sequences: Sequence[int], count: int) -> None: ...
    def fork(self, sequence: int) -> int: ...
    def truncate(self, sequence: int, length: int) -> None: ...
    def close(self, sequence: int) -> None: ...
    def length(self, sequence: int) -> int: ...
    def check(self) -> None: ...
    @property
    def num_held(self) -> int: ...


class ByToken:
    """The real ledger."""

    def __init__(self) -> None:
        self.copied = 0
        self._ledger = ledger.TokenLedger(4 * POOL, ROWS, LONGEST)
        self._numbers = itertools.count()
        self._sequences: dict[int, ledger.Sequence] = {}

    @property
    def num_held(self) -> int:
        return self._ledger.num_held

    def open(self, length: int) -> int:
        number = next(self._numbers)
        sequence = self._ledger.open(int32_bytes([number, *[0] * (length - 1)]))  # shares no prefix
        self._ledger.extend([sequence], [length])
        return self._add(number, sequence)

    def extend(self, sequences: Sequence[int], count: int) -> None:
        self._ledger.extend([self._sequences[i] for i in sequences], [count] * len(sequences))
        self._ledger.drain()

    def fork(self, sequence: int) -> int:
        return self._add(next(self._numbers), self._ledger.fork(self._sequences[sequence]))

    def truncate(self, sequence: int, length: int) -> None:
        self._ledger.truncate(self._sequences[sequence], length)

    def close(self, sequence: int) -> None:
        self._ledger.close(self._sequences.pop(sequence), cache=False)

    def length(self, sequence: int) -> int:
        return self._sequences[sequence].length

    def check(self) -> None:
        self._ledger.check()

    def _add(self, number: int, sequence: ledger.Sequence) -> int:
        self._sequences[number] = sequence
        return number


class ByPages:
    """Tables of pages of `page` slots with reference counts. A shared page is copied before a write."""

    def __init__(self, page: int) -> None:
        self.copied = 0
        self._page = page
        self._numbers = itertools.count()
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._holders: dict[int, int] = {}  # page → number of tables that it is in

    @property
    def num_held(self) -> int:
        return len(self._holders) * self._page

    def open(self, length: int) -> int:
        number = next(self._numbers)
        self._tables[number], self._lengths[number] = [], 0
        self.extend([number], length)
        return number

    def extend(self, sequences: Sequence[int], count: int) -> None:
        for number in sequences:
            table, length = self._tables[number], self._lengths[number]
            within = length % self._page
            if within and self._holders[table[-1]] > 1:
                self._holders[table[-1]] -= 1
                table[-1] = self._new_page()
                self.copied += within
            while len(table) * self._page < length + count:
                table.append(self._new_page())
            self._lengths[number] = length + count

    def fork(self, sequence: int) -> int:
        number = next(self._numbers)
        table = self._tables[number] = list(self._tables[sequence])
        self._lengths[number] = self._lengths[sequence]
        for page in table:
            self._holders[page] += 1
        return number

    def truncate(self, sequence: int, length: int) -> None:
        table = self._tables[sequence]
        while (len(table) - 1) * self._page >= length:
            self._release(table.pop())
        self._lengths[sequence] = length

    def close(self, sequence: int) -> None:
        for page in self._tables.pop(sequence):
            self._release(page)
        del self._lengths[sequence]

    def length(self, sequence: int) -> int:
        return self._lengths[sequence]

    def check(self) -> None:
        counted: dict[int, int] = {}
        for page in itertools.chain(*self._tables.values()):
            counted[page] = counted.get(page, 0) + 1
        if counted != self._holders:
            raise CheckFailed(f"{len(self._holders)} pages are held, {len(counted)} by recount")
        for number, table in self._tables.items():
            if len(table) != -(-self._lengths[number] // self._page):
                raise CheckFailed(f"{self._lengths[number]} tokens in {len(table)} pages")

    def _new_page(self) -> int:
        page = next(self._numbers)
        self._holders[page] = 1
        return page

    def _release(self, page: int) -> None:
        self._holders[page] -= 1
        if not self._holders[page]:
            del self._holders[page]


class Held(NamedTuple):
    """`slots`: mean number held over the steps. `copied`: tokens copied. `tokens`: tokens generated."""

    slots: float
    copied: int
    tokens: int


class Steps:
    """Records the slots that a memory holds, step by step."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._held: list[int] = []
        self._tokens = 0

    def add(self, tokens: int) -> None:
        """Records a step that generates `tokens` tokens."""
        self._held.append(self._memory.num_held)
        self._tokens += tokens

    def end(self) -> Held:
        """Returns the figures, after all sequences are closed. Raises CheckFailed if slots are still held."""
        self._memory.check()
        if self._memory.num_held:
            raise CheckFailed(f"{self._memory.num_held} slots are held without a sequence")
        return Held(sum(self._held) / len(self._held), self._memory.copied, self._tokens)


# --------------------------------------------------------------------------------
# The loads


def samples(memory: Memory, num: int, prompts: int, seed: int) -> Held:
    """Generates `num` answers to each of some prompts, one prompt after another."""
    steps = Steps(memory)
    lengths = list(GeneratedTrace("chat", prompts * num, seed))
    for i in range(prompts):
        first = memory.open(lengths[i * num].prompt)
        left = {first: lengths[i * num].output}
        left |= {memory.fork(first): own.output for own in lengths[i * num + 1 : (i + 1) * num]}
        while left:
            memory.extend(list(left), 1)
            steps.add(len(left))
            left = {sequence: count - 1 for sequence, count in left.items()}
            for sequence in [sequence for sequence, count in left.items() if not count]:
                memory.close(sequence)
                del left[sequence]
    return steps.end()


def beams(memory: Memory, searches: Sequence[tuple[int, list[list[int]]]], more: int) -> Held:
    """Replays beam searches: each has the length of its prompt, plus `more`, and the parents of each step."""
    steps = Steps(memory)
    for prompt, parents in searches:
        first = memory.open(prompt + more)
        own = [first, *(memory.fork(first) for _ in parents[0][1:])]
        for step in parents:
            last = {parent: i for i, parent in enumerate(step)}
            grown = [own[p] if last[p] == i else memory.fork(own[p]) for i, p in enumerate(step)]
            for parent, sequence in enumerate(own):
                if parent not in last:
                    memory.close(sequence)
            own = grown
            memory.extend(own, 1)
            steps.add(len(own))
        for sequence in own:
            memory.close(sequence)
    return steps.end()


def speculation(memory: Memory, guesses: int, right: float, requests: int, seed: int) -> Held:
    """Runs chats that extend by one token and `guesses` guesses per step."""
    steps, rng = Steps(memory), random.Random(seed)
    for request in GeneratedTrace("chat", requests, seed):
        sequence, end = memory.open(request.prompt), request.prompt + request.output
        while (length := memory.length(sequence)) < end:
            memory.extend([sequence], 1 + guesses)
            accepted = _accepted(guesses, right, rng)
            steps.add(1 + accepted)
            memory.truncate(sequence, length + 1 + accepted)
        memory.close(sequence)
    return steps.end()


def tree(memory: Memory, right: float, requests: int, seed: int) -> Held:
    """Runs chats that extend by one token per step, and by TREE branches of TREE guesses after it."""
    steps, rng = Steps(memory), random.Random(seed)
    for request in GeneratedTrace("chat", requests, seed):
        sequence, end = memory.open(request.prompt), request.prompt + request.output
        while (length := memory.length(sequence)) < end:
            memory.extend([sequence], 1)
            branches = [sequence, *(memory.fork(sequence) for _ in range(TREE - 1))]
            memory.extend(branches, TREE)
            accepted, kept = _accepted(TREE, right, rng), rng.randrange(TREE)
            steps.add(1 + accepted)
            sequence = branches.pop(kept)
            for branch in branches:
                memory.close(branch)
            memory.truncate(sequence, length + 1 + accepted)
        memory.close(sequence)
    return steps.end()


def short(memory: Memory, seed: int) -> int:
    """Returns how many short chats fit into POOL slots."""
    rng = random.Random(seed)
    for num in itertools.count():
        prompt, output = rng.randint(8, 64), rng.randint(8, 64)
        memory.open(prompt + rng.randint(1, output))
        if memory.num_held > POOL:
            memory.check()
            return num
    raise AssertionError


def _accepted(guesses: int, right: float, rng: random.Random) -> int:
    return next((i for i in range(guesses) if rng.random() >= right), guesses)


class Parents(DynamicCache):
    """A cache that records the parents of the beams."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[int]] = []

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.steps.append(beam_idx.tolist())
        super().reorder_cache(beam_idx)


def searches(model_name: str, num_beams: int, new_tokens: int) -> list[tuple[int, list[list[int]]]]:
    """Runs beam searches of a model. Returns the length of each prompt and the parents of each step."""
    directory = resolve(model_name, print)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found = []
    for text in PROMPTS:
        inputs, cache = tokenizer(text, return_tensors="pt"), Parents()
        model.generate(
            **inputs, past_key_values=cache, num_beams=num_beams, min_new_tokens=new_tokens,
            max_new_tokens=new_tokens, do_sample=False, pad_token_id=0,
        )  # fmt: skip
        found.append((inputs["input_ids"].shape[1], cache.steps))
    return found


# --------------------------------------------------------------------------------
# The command line


def sides() -> Iterator[tuple[str, Callable[[], Memory]]]:
    """Yields the name and the constructor of each memory: by token, and by pages of every size."""
    yield "token", ByToken
    for page in PAGES:
        yield f"paged:{page}", partial(ByPages, page)


def compare(run: Callable[[Memory], Held]) -> dict[str, Any]:
    """Runs the same branches on every memory."""
    by = {name: run(make()) for name, make in sides()}
    least = by["token"].slots
    return {name: {**own._asdict(), "more": own.slots / least - 1} for name, own in by.items()}


def arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--model", default=EngineConfig.model, help=engine_help("model"))
    made.add_argument("--prompts", type=int, default=40, help="of the chat workload")
    made.add_argument("--samples", type=int, nargs="+", default=[1, 4, 16])
    made.add_argument("--beams", type=int, nargs="+", default=[4, 8])
    made.add_argument("--beam-tokens", type=int, default=96)
    made.add_argument("--beam-prompt", type=int, default=512)
    made.add_argument("--guesses", type=int, nargs="+", default=[4, 8])
    made.add_argument("--right", type=float, default=0.7, help="the probability that a guess is right")
    made.add_argument("--seed", type=int, default=0)
    return made.parse_args()


def main() -> None:
    options = arguments()
    print_machine()
    prompts, seed, right = options.prompts, options.seed, options.right
    cases: dict[str, dict[str, Any]] = {}
    for num in options.samples:
        cases[f"{num} samples"] = compare(partial(samples, num=num, prompts=prompts, seed=seed))
    for num in options.beams:
        searched = searches(options.model, num, options.beam_tokens)
        for more, name in ((0, "beams"), (options.beam_prompt, "beams, long prompt")):
            cases[f"{num} {name}"] = compare(partial(beams, searches=searched, more=more))
    for num in options.guesses:
        drafted = partial(speculation, guesses=num, right=right, requests=prompts, seed=seed)
        cases[f"{num} guesses"] = compare(drafted)
    cases[f"tree {TREE} x {TREE}"] = compare(partial(tree, right=right, requests=prompts, seed=seed))
    fits = {name: short(make(), seed) for name, make in sides()}
    rows = [
        [
            f"{case}, {name}",
            f"{own['slots']:,.0f}",
            f"{own['more']:+.1%}",
            f"{own['copied'] / own['tokens']:.3f}",
        ]
        for case, by in cases.items()
        for name, own in by.items()
    ]
    print_table(["branches", "slots held", "more than by token", "tokens copied a token"], rows)
    print(f"\nshort chats in {POOL:,} slots: " + ", ".join(f"{name} {num:,}" for name, num in fits.items()))
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    results = {"settings": {**settings, "pool": POOL}, "branches": cases, "short_chats_that_fit": fits}
    print_json("branches", results, options.out)


if __name__ == "__main__":
    main()
