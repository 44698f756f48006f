"""Compares what models with windows or chunks hold and find in the cache by lightkv's layer groups and by
vLLM's hybrid KV cache manager, which is simulated by its rules (`vllm_blocks.py`).

    python -m bench.memory.hybrid_blocks --out bench/results/hybrid-blocks.json

*Held*: the bytes of one request while its prompt is computed, once it decodes, and in the mean of its decode
steps, beside those of every layer holding every token; and those of a prompt of 12 tokens.

*Turns*: conversations of ten turns, whose turns come in random order. Each prompt repeats what came before but
for the last tokens of the turn before, which the chat template writes anew. All sides get a pool of the same
bytes, of which what the layers of all conversations still see in the end is a given share (the occupancy). What
`open` does not find has to be computed; the figures are prompt tokens computed, relative to a cache that loses
nothing, in which every layer holds every token. Blocks of windows are kept as vLLM does by default, and all of
them ("dense").

Everything is counted, by the real ledger and by that of blocks; no model runs and no time is measured.
"""

import random
from array import array
from collections import deque
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

from bench.common.report import parser, print_json, print_table, refuse
from bench.memory.vllm_blocks import BlockMemory, equal_groups
from lightkv.layer_groups import FULL, ONE_GROUP, LayerGroups, Lifetime
from lightkv.ledger import Sequence as TokenSequence
from lightkv.ledger import TokenLedger
from lightkv.ledger.prefix_tree import TOKEN_BYTES

BLOCKS = (16, 64, 528)  # vLLM's default, a large one, and one that models with recurrent layers get
LENGTHS = (2048, 8192, 32768)
SHORT = 12
CHUNK = 2048  # the most tokens of a prompt that are computed at once
STEPS = 512  # of decode, over which the mean is taken
OCCUPANCIES = (0.25, 0.5, 0.9)
TURNS = 10
SYSTEM = 800  # tokens of the system prompt, which all conversations share
ASKED, ANSWERED = (50, 500), (50, 400)  # tokens of a turn, the least and the most
REWRITTEN = (1, 32)  # of its last tokens
RUNNING = 4  # requests that are open at once


class Shape(NamedTuple):
    """What a model's layers see, and the bytes of a token's K/V in one of them, in 16 bits."""

    lifetimes: tuple[Lifetime, ...]
    row_bytes: int


def _pattern(others: int, lifetime: Lifetime, repeats: int) -> tuple[Lifetime, ...]:
    return ((lifetime,) * others + (FULL,)) * repeats


SHAPES = {
    "gemma-3-270m": Shape(_pattern(5, Lifetime("window", 512), 3), 2 * 1 * 256 * 2),
    "gemma-3-12b": Shape(_pattern(5, Lifetime("window", 1024), 8), 2 * 8 * 256 * 2),
    "gpt-oss-20b": Shape(_pattern(1, Lifetime("window", 128), 12), 2 * 8 * 64 * 2),
    "llama-4-scout": Shape(_pattern(3, Lifetime("chunk", 8192), 12), 2 * 8 * 128 * 2),
}


class TokenMemory:
    """The verbs of `BlockMemory` on the real ledger."""

    def __init__(self, capacity: int, longest: int, groups: LayerGroups) -> None:
        self._ledger = TokenLedger(capacity, RUNNING, longest, groups=groups)
        self._answers: dict[int, bytes] = {}  # row → what follows the prompt

    @property
    def num_held(self) -> int:
        """Slots that requests hold."""
        return self._ledger.num_held

    def open(self, token_ids: bytes, num_prompt: int) -> TokenSequence:
        """Opens a request that holds what its prompt hits."""
        sequence = self._ledger.open(token_ids[: num_prompt * TOKEN_BYTES])
        self._answers[sequence.row] = token_ids[num_prompt * TOKEN_BYTES :]
        return sequence

    def extend(self, sequence: TokenSequence, count: int) -> None:
        """Takes slots for `count` more tokens, which others can hit."""
        ledger = self._ledger
        ledger.extend([sequence], [count])
        ledger.publish(sequence)
        ledger.confirm(ledger.step)
        ledger.step += 1
        ledger.drain()

    def close(self, sequence: TokenSequence) -> None:
        """Ends a request, whose tokens stay cached."""
        self._ledger.close(sequence, self._answers.pop(sequence.row))
        self._ledger.drain()

    def check(self) -> None:
        """Recounts everything. Raises CheckFailed."""
        self._ledger.check()


Memory = TokenMemory | BlockMemory


class Side(NamedTuple):
    """A way to hold a shape's layers. `block`: tokens of a block, 1 for lightkv; `dense`: whether all blocks of
    windows are kept."""

    shape: Shape
    block: int
    dense: bool = False

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        lanes = equal_groups(self.shape.lifetimes)[0] if self.block > 1 else self.groups.num_lanes
        return lanes * self.shape.row_bytes

    @property
    def groups(self) -> LayerGroups:
        """lightkv's."""
        return LayerGroups.of(self.shape.lifetimes)

    def memory(self, num_bytes: int, longest: int) -> Memory:
        """Makes a memory of so many bytes for requests of up to `longest` tokens."""
        capacity = num_bytes // self.slot_bytes
        if self.block > 1:
            return BlockMemory(capacity, self.block, equal_groups(self.shape.lifetimes)[1], self.dense)
        return TokenMemory(capacity - 1, longest, self.groups)  # a slot is set aside


def sides(shape: Shape) -> dict[str, Side]:
    """Returns lightkv and vLLM's blocks of every size, which hold the same whether they are dense or not."""
    return {"lightkv": Side(shape, 1)} | {f"blocks of {block}": Side(shape, block) for block in BLOCKS}


def dense_sides(shape: Shape) -> dict[str, Side]:
    """Returns vLLM's blocks of every size where all blocks of windows are kept."""
    return {f"blocks of {block}, dense": Side(shape, block, True) for block in BLOCKS}


# --------------------------------------------------------------------------------
# One request


def held(side: Side, length: int) -> dict[str, float]:
    """Returns the bytes that a request of `length` tokens holds: at most while its prompt is computed, in its
    first decode step, and in the mean of its decode steps; each also as a share of what it were if every layer
    held every token."""
    shape, total = side.shape, length + STEPS
    whole = len(shape.lifetimes) * shape.row_bytes  # of a token
    memory = side.memory(4 * (total + max(BLOCKS)) * whole, total)
    sequence: Any = memory.open(array("i", range(total)).tobytes(), length)
    most, steps, shares = 0, [], []
    while sequence.length < length:
        memory.extend(sequence, min(CHUNK, length - sequence.length))
        most = max(most, memory.num_held * side.slot_bytes)
    while sequence.length < total:
        memory.extend(sequence, 1)
        steps.append(memory.num_held * side.slot_bytes)
        shares.append(steps[-1] / (sequence.length * whole))
    memory.check()
    return {
        "prefill_bytes": most,
        "prefill_share": most / (length * whole),
        "first_decode_bytes": steps[0],
        "first_decode_share": shares[0],
        "decode_bytes": fmean(steps),
        "decode_share": fmean(shares),
    }


# --------------------------------------------------------------------------------
# Conversations


class Turn(NamedTuple):
    """A prompt of `num_prompt` tokens and its answer, as int32 bytes, of the conversation `number`."""

    number: int
    token_ids: bytes
    num_prompt: int

    @property
    def length(self) -> int:
        """Tokens that are computed: the last one of an answer is not."""
        return len(self.token_ids) // TOKEN_BYTES - 1


def conversations(num: int, rng: random.Random) -> list[Turn]:
    """Makes the turns of `num` conversations, in the random order in which they come."""

    def written(count: int) -> list[int]:
        return [rng.randrange(1 << 30) for _ in range(count)]

    said = [written(SYSTEM)] * num
    left, found = [number for number in range(num) for _ in range(TURNS)], []
    rng.shuffle(left)
    for number in left:
        prompt = said[number] + written(rng.randint(*ASKED))
        whole = prompt + written(rng.randint(*ANSWERED))
        found.append(Turn(number, array("i", whole).tobytes(), len(prompt)))
        anew = rng.randint(*REWRITTEN)
        said[number] = whole[:-anew] + written(anew)
    return found


def computed(memory: Memory, turns: Sequence[Turn]) -> int:
    """Runs the turns, `RUNNING` at a time and those of a conversation one after another. Returns the prompt
    tokens that were computed."""
    running: deque[tuple[Turn, Any]] = deque()
    total = 0

    def decode() -> None:
        for turn, sequence in running:
            if sequence.length < turn.length:
                memory.extend(sequence, 1)

    def finish() -> None:
        turn, sequence = running[0]
        while sequence.length < turn.length:
            decode()
        memory.close(sequence)
        running.popleft()

    for turn in turns:
        while len(running) == RUNNING or turn.number in [other.number for other, _ in running]:
            finish()
        sequence: Any = memory.open(turn.token_ids, turn.num_prompt)
        total += turn.num_prompt - sequence.num_hit
        while sequence.length < turn.num_prompt:
            memory.extend(sequence, min(CHUNK, turn.num_prompt - sequence.length))
        running.append((turn, sequence))
        decode()
    while running:
        finish()
    memory.check()
    if memory.num_held:
        refuse(f"{memory.num_held} slots are held without a request")
    return total


def compare_turns(shape: Shape, turns: Sequence[Turn]) -> dict[str, Any]:
    """Returns the prompt tokens computed by each side, relative to a cache that loses nothing, at each
    occupancy, and in a pool in which nothing is evicted."""
    longest = max(turn.length for turn in turns) + 1
    ends = {turn.number: turn.length for turn in turns}  # the last turn of each conversation
    groups = LayerGroups.of(shape.lifetimes)
    needed = sum(map(groups.slots, ends.values())) * groups.num_lanes * shape.row_bytes
    rooms = {f"{share:.0%}": int(needed / share) for share in OCCUPANCIES}
    whole = len(shape.lifetimes) * shape.row_bytes
    rooms["nothing evicted"] = 2 * whole * sum(turn.length + max(BLOCKS) for turn in turns)
    ideal = computed(TokenMemory(sum(turn.length for turn in turns) + 1, longest, ONE_GROUP), turns)
    return {
        "prompt_tokens": sum(turn.num_prompt for turn in turns),
        "computed_without_loss": ideal,
        "bytes": rooms,
        "computed_ratio": {
            room: {
                name: computed(side.memory(num_bytes, longest), turns) / ideal
                for name, side in (sides(shape) | dense_sides(shape)).items()
            }
            for room, num_bytes in rooms.items()
        },
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    made.add_argument("--conversations", type=int, default=32)
    made.add_argument("--seed", type=int, default=0)
    options = made.parse_args()
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    turns = conversations(options.conversations, random.Random(options.seed))
    results: dict[str, Any] = {}
    for name in options.shapes:
        shape = SHAPES[name]
        by_length = {
            length: {side: held(own, length) for side, own in sides(shape).items()}
            for length in (SHORT, *LENGTHS)
        }
        results[name] = {
            "layers": len(shape.lifetimes),
            "groups": [str(one) for one in LayerGroups.of(shape.lifetimes).classes],
            "bytes_of_12_tokens_in_all_layers": SHORT * len(shape.lifetimes) * shape.row_bytes,
            "held": by_length,
            "turns": compare_turns(shape, turns),
        }
        print(f"\n{name}: bytes held, of those of every layer holding every token")
        rows = [
            [side]
            + [f"{by_length[length][side]['prefill_bytes'] / 1024:,.0f}" for length in (SHORT,)]
            + [
                f"{by_length[length][side][key]:.3f}"
                for length in LENGTHS
                for key in ("prefill_share", "decode_share")
            ]
            for side in sides(shape)
        ]
        print_table(
            ["", "12 tokens, KiB"]
            + [f"{length // 1024}k, {phase}" for length in LENGTHS for phase in ("prefill", "decode")],
            rows,
        )
        ratios = results[name]["turns"]["computed_ratio"]
        print("prompt tokens computed, relative to a cache that loses nothing")
        names = list(sides(shape) | dense_sides(shape))
        print_table(
            ["", *ratios], [[name, *(f"{own[name]:.3f}" for own in ratios.values())] for name in names]
        )
    print_json("hybrid_blocks", {"settings": settings, "shapes": results}, options.out)


if __name__ == "__main__":
    main()
