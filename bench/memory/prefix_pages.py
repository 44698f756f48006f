"""Compares the prompt tokens found in the cache by token and by whole pages, on chats of real token ids.

    python -m bench.memory.prefix_pages --out bench/results/prefix-pages.json

The chats are made of random sentences and rendered by the model's own chat template and tokenizer (SmolLM2's
by default, from the cache directory that `make demo` fills). Each has one of several system prompts, among
them variants of one with examples, which differ from the middle on. Each has a few turns, which repeat the
whole history, and answers, which stay in the cache. Several chats run at once, and their turns follow each
other in random order. The same opens and closes go to the real ledger and to PagedLedger
(`router/simulate/paged_ledger.py`) at equal capacity: once so large that nothing is evicted, and once with
little more room than the open sequences need. The tokens that `open` found in the cache are counted.

No model runs and no time is measured: tokens that are not found have to be computed again, which is the cost.
"""

import argparse
import random
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.common.report import engine_help, parser, print_json, print_machine, print_table
from lightkv.ledger import TokenLedger
from lightkv.router import EngineConfig
from lightkv.router.model_files import resolve
from lightkv.router.simulate.config import SimulationConfig
from lightkv.router.simulate.paged_ledger import make_ledger
from lightkv.router.text.tokenizer import Tokenizer

PAGES = (16, 64, 256)
ALLOCATIONS = ("token", *(f"paged:{page}" for page in PAGES))
MAX_TURNS = 8

SUBJECTS = (
    "the harbour office", "our support team", "the night train", "a small library", "the garden committee",
    "the northern depot", "a travelling teacher", "the bicycle workshop", "the customer", "an apprentice",
)  # fmt: skip
VERBS = (
    "explains", "repairs", "prepares", "forgets", "orders", "describes", "measures", "delivers", "compares",
    "answers", "collects", "translates",
)  # fmt: skip
OBJECTS = (
    "the monthly report", "two broken lamps", "a list of spare parts", "a short poem",
    "the refund for order 4711",
    "the opening hours", "seven questions about history", "the route to Porto", "a recipe with lentils",
    "the password policy", "an invoice from March", "the results of the survey", "a map of the old town",
)  # fmt: skip
ENDINGS = (
    "before noon", "without being asked", "in plain words", "for the third time", "as the rules require",
    "because the ferry is late", "when it rains", "and keeps a copy", "for 25 visitors",
    "on behalf of the board",
)  # fmt: skip


class Turn(NamedTuple):
    """A prompt and its answer: int32 token ids."""

    prompt: np.ndarray
    answer: np.ndarray


class Writer:
    """Writes random sentences."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def text(self, sentences: int) -> str:
        """Writes a number of sentences."""
        return " ".join(self._sentence() for _ in range(sentences))

    def _sentence(self) -> str:
        parts = [self._rng.choice(words) for words in (SUBJECTS, VERBS, OBJECTS, ENDINGS)]
        text = " ".join(parts)
        return f"{text[0].upper()}{text[1:]}."


def system_prompts(writer: Writer) -> list[str]:
    """Writes five system prompts of different lengths, and six variants of one with examples.

    The variants share their first three examples, and differ in the others.
    """
    plain = [f"You are a helpful assistant. {writer.text(num)}" for num in (2, 6, 12, 25, 45)]
    task = f"Sort the message into one of five classes. {writer.text(8)}"

    def examples(num: int) -> str:
        return "".join(f"\n\nMessage: {writer.text(2)}\nClass: {writer.text(1)}" for _ in range(num))

    common = task + examples(3)
    return plain + [common + examples(num) for num in (1, 1, 2, 2, 3, 4)]


def chats(tokenizer: Tokenizer, num: int, rng: random.Random) -> list[list[Turn]]:
    """Writes conversations, as the turns that a service gets."""
    writer = Writer(rng)
    systems = system_prompts(writer)
    weights = [1 / (rank + 1) for rank in range(len(systems))]
    order = rng.sample(systems, len(systems))
    found = []
    for _ in range(num):
        messages = [{"role": "system", "content": rng.choices(order, weights)[0]}]
        turns = []
        for _ in range(min(1 + int(rng.expovariate(1 / 2.5)), MAX_TURNS)):
            messages.append({"role": "user", "content": writer.text(rng.randint(1, 5))})
            prompt = tokenizer.encode_chat(messages)
            messages.append({"role": "assistant", "content": writer.text(rng.randint(1, 12))})
            whole = tokenizer.encode_chat(messages, add_generation_prompt=False)
            # The answer is what follows the prompt; the line end after it belongs to the next turn.
            same = np.array_equal(whole[: len(prompt)], prompt)
            assert same, "the chat template changes a prompt after its answer"
            turns.append(Turn(prompt, whole[len(prompt) :]))
        found.append(turns)
    return found


def interleaved(conversations: Sequence[Sequence[Turn]], at_once: int, rng: random.Random) -> Iterator[Turn]:
    """Yields the turns of `at_once` conversations at a time, each time of a random one."""
    waiting = deque(deque(turns) for turns in conversations)
    talking: list[deque[Turn]] = []
    while waiting or talking:
        while waiting and len(talking) < at_once:
            talking.append(waiting.popleft())
        idx = rng.randrange(len(talking))
        yield talking[idx].popleft()
        if not talking[idx]:
            talking.pop(idx)


def replay(ledger: TokenLedger, turns: Sequence[Turn], running: int) -> dict[str, int]:
    """Opens and closes the turns in their order, `running` at a time.

    Returns the numbers of prompt tokens, of those found in the cache and those computed, and of cached tokens.
    """
    open_now: deque[tuple[Any, bytes]] = deque()
    prompt = found = 0

    def close_first() -> None:
        sequence, answer = open_now.popleft()
        ledger.close(sequence, answer)
        ledger.drain()

    for turn in turns:
        if len(open_now) == running:
            close_first()
        sequence = ledger.open(turn.prompt.tobytes())
        prompt += len(turn.prompt)
        found += sequence.shared
        ledger.extend([sequence], [len(turn.prompt) - sequence.shared])
        ledger.publish(sequence)
        ledger.confirm(ledger.step)
        ledger.step += 1
        if len(turn.answer) > 1:
            ledger.extend([sequence], [len(turn.answer) - 1])  # the last one is never written
        open_now.append((sequence, turn.answer.tobytes()))
    while open_now:
        close_first()
    ledger.check()
    return {"prompt_tokens": prompt, "found": found, "computed": prompt - found, "cached": ledger.num_cached}


def least_capacity(turns: Sequence[Turn], running: int) -> int:
    """Returns the slots in which any `running` turns fit, in pages of any size, even if they share nothing."""
    most = sorted(len(turn.prompt) + len(turn.answer) for turn in turns)[-running:]
    return -(-(sum(most) + running * max(PAGES)) // max(PAGES)) * max(PAGES)


def arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--model", default=EngineConfig.model, help=engine_help("model"))
    made.add_argument("--chats", type=int, default=600)
    made.add_argument("--at-once", type=int, default=64, help="conversations whose turns are interleaved")
    made.add_argument("--running", type=int, default=16, help="requests that are open at once")
    made.add_argument("--seed", type=int, default=0)
    return made.parse_args()


def main() -> None:
    options = arguments()
    print_machine()
    tokenizer = Tokenizer(Path(resolve(options.model, print)))
    rng = random.Random(options.seed)
    turns = list(interleaved(chats(tokenizer, options.chats, rng), options.at_once, rng))
    tight = least_capacity(turns, options.running)
    ample = tight + sum(len(turn.prompt) + len(turn.answer) + max(PAGES) for turn in turns)
    ample = -(-ample // max(PAGES)) * max(PAGES)
    longest = max(len(turn.prompt) + len(turn.answer) for turn in turns)
    results: dict[str, Any] = {
        "settings": {name: value for name, value in vars(options).items() if name != "out"},
        "turns": len(turns),
        "mean_prompt": float(np.mean([len(turn.prompt) for turn in turns])),
        "mean_answer": float(np.mean([len(turn.answer) for turn in turns])),
        "pools": {},
    }
    rows = []
    for name, capacity in (("ample", ample), ("tight", tight)):
        by = {
            allocation: replay(
                make_ledger(SimulationConfig(allocation, max_num_seqs=options.running), capacity, longest),
                turns,
                options.running,
            )
            for allocation in ALLOCATIONS
        }
        results["pools"][name] = {"capacity": capacity, "allocations": by}
        for allocation, own in by.items():
            more = own["computed"] / by["token"]["computed"] - 1
            share = own["found"] / own["prompt_tokens"]
            cells = [f"{own['found']:,}", f"{share:.2%}", f"{own['computed']:,}", f"{more:+.1%}"]
            rows.append([f"{name}, {allocation}", *cells])
    print(f"{len(turns)} turns of {results['mean_prompt']:.0f} prompt tokens, {tight:,} tokens when tight")
    print_table(["pool", "found", "of the prompts", "to compute", "more than by token"], rows)
    print_json("prefix_pages", results, options.out)


if __name__ == "__main__":
    main()
