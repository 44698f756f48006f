"""Measures the first token of a conversation's next turn: few new tokens after a long prefix in the cache.

    python -m bench.serving.next_turn --prefix 2048 8192 32768 --out bench/results/next-turn-h200.json

A conversation of random tokens is computed once, by an engine in this process with the shape of Llama-3-8B and
random weights, at the engine's defaults. Then come its next turns, one at a time, each with other tokens at the
end. The time runs from handing the request to the engine to its first token on the host. A turn that does not
find the whole conversation in the cache refuses the figures.
"""

import random
import time
from array import array

import torch

from bench.common.model_shapes import SHAPES, with_layers
from bench.common.random_model import random_model
from bench.common.report import Spread, parser, print_json, print_machine, print_table, refuse
from lightkv.router import EngineConfig, SamplingParams
from lightkv.router.engine.loop import LocalEngine, make_scheduler
from lightkv.router.engine.request import Request
from lightkv.router.model.build import assemble

WARM_UP = 3  # turns


class Conversation:
    """A conversation in an engine's cache: `ids`, its token ids."""

    def __init__(self, engine: LocalEngine, vocab_size: int, seed: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)
        self._num_turns = 0
        self.ids: list[int] = []

    def random_ids(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(count)]

    def turn(self, new_ids: list[int]) -> tuple[float, int]:
        """Runs the conversation and a turn after it to the first token. Returns the milliseconds, and how many
        tokens were found in the cache."""
        self._num_turns += 1
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        prompt = array("i", [*self.ids, *new_ids]).tobytes()
        start = time.perf_counter()
        self._engine.add(Request(str(self._num_turns), prompt, params, seed=1))
        events = []
        while self._engine.has_work:
            events += self._engine.step()
        took = (time.perf_counter() - start) * 1e3
        (event,) = events
        if event.finish_reason != "length" or event.num_cached is None:
            refuse(f"a turn ended with {event.finish_reason}: {event.error}")
        return took, event.num_cached


def measure(
    engine: LocalEngine, vocab_size: int, prefix: int, turn: int, repeats: int
) -> dict[str, list[float]]:
    """Measures the milliseconds of `repeats` turns of `turn` tokens after `prefix` tokens, and those of the
    conversation itself."""
    conversation = Conversation(engine, vocab_size, seed=1000 * prefix + turn)  # none is in the cache yet
    ids = conversation.random_ids(prefix)
    first, _ = conversation.turn(ids)
    conversation.ids = ids
    found = []
    for _ in range(WARM_UP + repeats):
        took, num_cached = conversation.turn(conversation.random_ids(turn))
        if num_cached < prefix:
            refuse(f"a turn found {num_cached} of the conversation's {prefix} tokens in the cache")
        found.append(took)
    return {"conversation": [first], "turns": found[WARM_UP:]}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    arguments.add_argument("--layers", type=int, help="fewer than the shape has")
    arguments.add_argument(
        "--prefix", type=int, nargs="+", default=[2048, 8192, 32768], help="tokens in the cache"
    )
    arguments.add_argument("--turn", type=int, nargs="+", default=[16, 64, 256], help="new tokens")
    arguments.add_argument("--repeats", type=int, default=20, help="turns whose median counts")
    options = arguments.parse_args()
    print_machine()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = with_layers(SHAPES[options.shape], options.layers or SHAPES[options.shape].num_hidden_layers)
    shape.max_position_embeddings = max(options.prefix) + max(options.turn) + 1

    def conversation_tokens(prefix: int) -> int:
        return prefix + (WARM_UP + options.repeats + 1) * max(options.turn)

    config = EngineConfig(
        device=device.type,
        max_model_len=shape.max_position_embeddings,
        max_total_tokens=len(options.turn) * sum(map(conversation_tokens, options.prefix)),
    )
    runner, info = assemble(random_model(shape, device, dtype), config, print)
    engine = LocalEngine(make_scheduler(info), runner)
    engine.capture_all()
    cases, rows = {}, []
    for prefix in options.prefix:
        for turn in options.turn:
            found = measure(engine, shape.vocab_size, prefix, turn, options.repeats)
            cases[f"{turn} after {prefix}"] = found
            first, turns = found["conversation"][0], Spread.of(found["turns"])
            rows.append([f"{turn} after {prefix:,}", turns.text(), f"{first:.1f}"])
    engine.check()
    print_table(["tokens", "first token of the turn, ms", "of the conversation, ms"], rows)
    settings = {"shape": options.shape, "layers": shape.num_hidden_layers, "repeats": options.repeats}
    print_json("next_turn", {"settings": settings, "milliseconds": cases}, options.out)


if __name__ == "__main__":
    main()
