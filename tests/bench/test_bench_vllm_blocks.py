"""vLLM's rule for layers of several lifetimes, as the benchmarks count it, against brute force and by hand."""

import random
from array import array
from collections.abc import Sequence

import pytest

from bench.memory.vllm_blocks import BlockMemory, BlockSequence, equal_groups
from lightkv.errors import CheckFailed, OutOfTokens
from lightkv.layer_groups import FULL, Lifetime

WINDOW = Lifetime("window", 9)
CHUNK = Lifetime("chunk", 8)


def ids(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def dense(capacity: int, block: int, groups: Sequence[Lifetime]) -> BlockMemory:
    return BlockMemory(capacity, block, groups, dense=True)


def run(memory: BlockMemory, tokens: Sequence[int], chunk: int = 1000) -> int:
    """Computes a request, in chunks of so many tokens, and closes it. Returns how many tokens it hit."""
    sequence = memory.open(ids(tokens), len(tokens))
    while left := len(tokens) - sequence.length:
        memory.extend(sequence, min(left, chunk))
    memory.close(sequence)
    memory.check()
    return sequence.num_hit


# --------------------------------------------------------------------------------
# By hand


@pytest.mark.parametrize(
    ("full", "window", "size", "num_full", "num_window"),
    [
        (3, 15, 3, 1, 5),  # Gemma-3-270M
        (8, 40, 8, 1, 5),  # Gemma-3-12B
        (10, 52, 10, 1, 6),  # Gemma-3-27B: eight places of the last group are padding
        (12, 12, 12, 1, 1),  # gpt-oss-20b
        (17, 12, 17, 1, 1),  # nearly as many: the larger count, since 17 < 1.5 × 12
        (18, 12, 12, 2, 1),  # 18 is not
        (24, 0, 24, 1, 0),
    ],
)
def test_groups_have_equally_many_layers(
    full: int, window: int, size: int, num_full: int, num_window: int
) -> None:
    groups = equal_groups([WINDOW] * window + [FULL] * full)
    assert groups == (size, (WINDOW,) * num_window + (FULL,) * num_full)


def test_a_request_holds_whole_blocks_that_its_groups_still_see() -> None:
    memory = dense(4000, 4, (WINDOW, FULL))
    sequence = memory.open(ids(range(100)), 100)
    memory.extend(sequence, 30)  # in one chunk: both groups hold all of it
    assert memory.num_held == 2 * 32
    memory.extend(sequence, 1)  # position 30 sees those from 22 on: five blocks, with 20 and 21, have passed
    assert (memory.num_held, memory.num_cached) == (32 + 32 - 20, 20)
    memory.extend(sequence, 2)
    assert memory.num_held == 36 + 36 - 20
    memory.close(sequence)
    assert (memory.num_held, memory.num_cached) == (0, 32 + 32)  # the two blocks that are not full are free


def test_a_chunk_is_given_back_once_the_next_has_begun() -> None:
    memory = dense(4000, 4, (CHUNK, FULL))
    sequence = memory.open(ids(range(100)), 100)
    memory.extend(sequence, 8)
    assert memory.num_held == 8 + 8
    memory.extend(sequence, 1)
    assert memory.num_held == 4 + 12
    memory.check()


def test_a_short_prompt_takes_a_block_of_each_group() -> None:
    memory = BlockMemory(528 * 20, 528, (WINDOW,) * 5 + (FULL,))
    memory.extend(memory.open(ids(range(12)), 12), 12)
    assert memory.num_held == 6 * 528


def test_a_hit_is_of_whole_blocks_and_leaves_some_of_the_prompt() -> None:
    for groups in ((FULL,), (WINDOW, FULL), (CHUNK, FULL)):
        memory = dense(4000, 4, groups)
        assert run(memory, range(16)) == 0
        assert run(memory, range(16)) == 12  # the last block is computed again
        assert run(memory, range(17)) == 16
        assert run(memory, [*range(10), 99, 98]) == 8
        assert run(memory, [99, *range(1, 16)]) == 0


def taken(memory: BlockMemory, group: int, tokens: Sequence[int], block: int) -> None:
    """Has a group's block of these tokens taken for something else."""
    key = memory._keys_of(ids(tokens))[block]
    found = next(iter(memory._known[group, key]))
    memory._queue.move_to_end(found, last=False)
    assert memory._take() == found
    memory._give_back([found])


@pytest.mark.parametrize(
    ("lost", "hit"),
    [
        ([], 28),
        ([0, 1, 2, 3, 4], 28),  # two blocks have the eight tokens that position 28 sees before it
        ([6], 24),
        ([5, 6], 20),
        ([5], 20),  # block 6 alone is not enough
        ([4, 6], 16),
        ([1, 3, 5, 6], 4),  # block 0 is all that position 4 sees
        ([0, 2, 4, 6], 0),
    ],
)
def test_a_window_is_hit_where_its_last_blocks_are_there(lost: Sequence[int], hit: int) -> None:
    memory = dense(4000, 4, (WINDOW, WINDOW, FULL))
    run(memory, range(32))
    for block in lost:
        taken(memory, 1, range(32), block)  # of one of the two groups, which is as good as of both
    assert run(memory, range(32)) == hit


@pytest.mark.parametrize(("lost", "hit"), [([0, 1, 2, 3, 4, 5], 28), ([6], 24), ([5, 6], 24), ([4, 6], 24)])
def test_a_chunk_is_hit_from_its_beginning_or_at_it(lost: Sequence[int], hit: int) -> None:
    memory = dense(4000, 4, (CHUNK, FULL))
    run(memory, range(32))
    for block in lost:
        taken(memory, 0, range(32), block)
    assert run(memory, range(32)) == hit


def test_layers_that_see_everything_need_all_blocks() -> None:
    memory = dense(4000, 4, (WINDOW, FULL))
    run(memory, range(32))
    taken(memory, 1, range(32), 3)
    assert run(memory, range(32)) == 12  # at which the window's blocks are there, too


def test_the_blocks_given_back_the_longest_ago_are_taken_first() -> None:
    memory = BlockMemory(4 * 7, 4, (FULL,))  # six blocks
    run(memory, range(12))
    run(memory, range(50, 62))
    run(memory, range(70, 74))  # takes the last block of the first request
    assert (
        run(memory, range(13)) == 8
    )  # and this one takes two of the last of the second, after a hit of the first
    assert run(memory, range(50, 63)) == 4


def test_too_few_blocks_are_an_error_and_nothing_is_taken() -> None:
    memory = BlockMemory(4 * 7, 4, (WINDOW, FULL))
    sequence = memory.open(ids(range(40)), 40)
    memory.extend(sequence, 9)
    with pytest.raises(OutOfTokens, match="8 tokens needed, 0 available, of 24"):
        memory.extend(sequence, 4)
    assert (sequence.length, memory.num_held) == (9, 24)
    memory.check()


def test_a_wrong_count_is_found() -> None:
    memory = BlockMemory(400, 4, (WINDOW, FULL))
    memory.extend(memory.open(ids(range(40)), 40), 40)
    memory.check()
    memory._holders[0] += 1
    with pytest.raises(CheckFailed):
        memory.check()


def test_by_default_a_window_is_hit_where_a_prompt_ended_or_turned_off() -> None:
    memory = BlockMemory(4000, 4, (WINDOW, FULL))
    said = list(range(40))
    sequence = memory.open(ids(said), 22)  # a prompt of 22 tokens, and an answer
    memory.extend(sequence, 22)
    for _ in range(17):
        memory.extend(sequence, 1)
    memory.close(sequence)
    assert run(memory, said[:23]) == 20  # the end of the prompt
    assert (
        run(memory, [*said[:38], 99]) == 20
    )  # the answer is computed again, which both groups have up to 36
    assert run(memory, [*said[:38], 98]) == 36  # and is then kept where the prompt turned off
    assert run(memory, [*said[:14], 97]) == 0
    assert run(memory, [*said[:14], 96]) == 12


# --------------------------------------------------------------------------------
# Brute force


class Blocks:
    """The same rule in lists that are searched: a block is what it has, tuples of all tokens up to its end."""

    def __init__(self, num_blocks: int, block: int, groups: Sequence[Lifetime], dense: bool) -> None:
        self.block, self.groups, self.dense = block, groups, dense
        self.content: list[tuple[int, tuple[int, ...]] | None] = [None] * num_blocks
        self.full: list[int] = []  # blocks in the order in which they became full
        self.queue = list(range(num_blocks))
        self.rows: dict[
            int, tuple[list[int], list[dict[int, int]]]
        ] = {}  # tokens; blocks of each group by place
        self.useful: dict[int, list[set[int]]] = {}  # places of each group's blocks that a later hit may need

    def find(self, group: int, tokens: Sequence[int], place: int) -> int | None:
        wanted = group, tuple(tokens[: (place + 1) * self.block])
        return next((one for one in self.full if self.content[one] == wanted), None)

    def seen(self, lifetime: Lifetime, length: int) -> set[int]:
        """Returns the places of the blocks with tokens that the next one sees."""
        return {position // self.block for position in range(lifetime.first_seen(length), length)}

    def open(self, row: int, tokens: list[int], num_prompt: int) -> int:
        for hit in range((num_prompt - 1) // self.block * self.block, -1, -self.block):
            needed = [(g, place) for g, one in enumerate(self.groups) for place in self.seen(one, hit)]
            if all(self.find(group, tokens, place) is not None for group, place in needed):
                break
        full = self.groups.index(FULL)
        ends = [(num_prompt - 1) // self.block * self.block, 0]
        while ends[1] < ends[0] and self.find(full, tokens, ends[1] // self.block) is not None:
            ends[1] += self.block
        self.useful[row] = [set().union(*(self.seen(one, end) for end in ends)) for one in self.groups]
        held: list[dict[int, int]] = [{} for _ in self.groups]
        for group, place in needed:
            found = self.find(group, tokens, place)
            assert found is not None
            held[group][place] = found
        self.rows[row] = tokens, held
        self.queue = [one for one in self.queue if one not in self.held()]
        return hit

    def held(self) -> set[int]:
        return {block for _, groups in self.rows.values() for places in groups for block in places.values()}

    def back(self, row: int, group: int, places: Sequence[int]) -> None:
        for place in places:
            block = self.rows[row][1][group].pop(place)
            if block not in self.held():
                self.queue.insert(0 if self.content[block] is None else len(self.queue), block)

    def extend(self, row: int, length: int, count: int) -> bool:
        tokens, held = self.rows[row]
        for group, lifetime in enumerate(self.groups):
            seen = self.seen(lifetime, length) | {length // self.block}
            self.back(row, group, sorted(set(held[group]) - seen, reverse=True))
        old, new = -(-length // self.block), -(-(length + count) // self.block)
        if (new - old) * len(self.groups) > len(self.queue):
            return False
        for places in held:
            for place in range(old, new):
                places[place] = taken = self.queue.pop(0)
                if self.content[taken] is not None:
                    self.content[taken] = None
                    self.full.remove(taken)
        for group, places in enumerate(held):
            for place in range(length // self.block, (length + count) // self.block):
                is_window = self.groups[group].sees == "window"
                if self.dense or not is_window or place in self.useful[row][group]:
                    self.content[places[place]] = group, tuple(tokens[: (place + 1) * self.block])
                    self.full.append(places[place])
        return True

    def close(self, row: int) -> None:
        for group in range(len(self.groups)):
            self.back(row, group, sorted(self.rows[row][1][group], reverse=True))
        del self.rows[row]


@pytest.mark.parametrize("keeps_all", [False, True], ids=["default", "dense"])
@pytest.mark.parametrize("block", [1, 3, 4])
@pytest.mark.parametrize(
    "groups",
    [(WINDOW, WINDOW, FULL), (FULL, CHUNK), (CHUNK, WINDOW, FULL), (Lifetime("window", 2), FULL)],
    ids=lambda groups: "-".join(f"{one.sees}{one.size}" for one in groups),
)
def test_random_requests_match_brute_force(groups: tuple[Lifetime, ...], block: int, keeps_all: bool) -> None:
    rng = random.Random(block)
    num_blocks = 8 * len(groups)
    memory = BlockMemory((num_blocks + 1) * block, block, groups, keeps_all)
    model = Blocks(num_blocks, block, groups, keeps_all)
    rows: dict[int, BlockSequence] = {}
    past, hits, refused = [[rng.randrange(2) for _ in range(6 * block)]], set(), 0
    for number in range(500):
        chosen = rng.choice(list(rows)) if rows else None
        if chosen is None or (rng.random() < 0.15 and len(rows) < 3):
            begun = rng.choice(past[-6:])
            tokens = begun[: rng.randint(0, len(begun))] + [
                rng.randrange(2) for _ in range(rng.randint(2, 9))
            ]
            num_prompt = rng.randint(1, len(tokens))
            rows[number] = memory.open(ids(tokens), num_prompt)
            assert rows[number].num_hit == model.open(number, tokens, num_prompt)
            hits.add(rows[number].num_hit)
            past.append(tokens[: 7 * block])
        elif (length := rows[chosen].length) < len(rows[chosen].token_ids) // 4:
            count = rng.randint(1, len(rows[chosen].token_ids) // 4 - length)
            if model.extend(chosen, length, count):
                memory.extend(rows[chosen], count)
            else:
                refused += 1
                with pytest.raises(OutOfTokens):
                    memory.extend(rows[chosen], count)
                memory.close(rows.pop(chosen))
                model.close(chosen)
        else:
            memory.close(rows.pop(chosen))
            model.close(chosen)
        memory.check()
        assert list(memory._queue) == model.queue
        cached = sum(model.content[one] is not None for one in model.queue)
        assert (memory.num_cached, memory.num_held) == (cached * block, len(model.held()) * block)
        assert memory.num_free + memory.num_cached + memory.num_held == memory.capacity
    assert len(hits) > 2
    assert refused
