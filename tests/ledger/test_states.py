"""A ledger with states: hits, hand-overs, forks and failed steps, against a model whose states are hashes of
all tokens that they have read."""

import itertools
import random
from collections import deque

import pytest

from lightkv.errors import CheckFailed, OutOfRows, OutOfStates
from lightkv.layer_groups import ONE_GROUP
from lightkv.ledger import TokenLedger
from tests.support.combinations import slow
from tests.support.state_life import GROUPS, Life, Text, ids_bytes, live, random_life, states_needed


@pytest.mark.parametrize("name", GROUPS)
def test_an_answer_is_hit_to_its_last_token(name: str) -> None:
    life = Life(GROUPS[name])
    ids = [1, 2, 3] * 10
    assert life.run(ids, answer=12) == 0
    answer = [i % 5 for i in range(30, 42)]
    assert life.run([*ids, *answer, 7, 7]) == 42


def test_a_prompt_of_which_all_but_the_last_token_is_shared_computes_one() -> None:
    life = Life(ONE_GROUP)
    hits = [life.run([*[3] * 40, number + 9], answer=2) for number in range(20)]
    assert hits == [0, *[40] * 19]


def test_a_place_that_is_given_is_hit_and_the_prompts_end_is_not() -> None:
    life = Life(ONE_GROUP)
    life.run([1] * 30 + [2] * 10, answer=3, keep_at=[30])
    assert life.hit([1] * 30 + [4] * 9) == 30
    assert life.hit([1] * 30 + [2] * 9 + [4]) == 30


def test_where_prompts_diverge_is_kept_at_the_second_use() -> None:
    life = Life(ONE_GROUP)
    hits = [life.run([*[3] * 50, *[number + 10] * 30], answer=2) for number in range(4)]
    assert hits == [0, 0, 50, 50]


@pytest.mark.parametrize("length", [100, 64, 37])
@pytest.mark.parametrize("chunk", [4, 7, 16])
def test_ends_of_chunks_are_kept_and_a_fork_computes_at_most_half_of_what_it_shares(
    length: int, chunk: int
) -> None:
    life = Life(ONE_GROUP)
    life.run(list(range(length)), answer=1, chunk=chunk)
    assert life.ledger.states.num_cached <= length.bit_length() + 2
    for diverge in range(2 * chunk, length):
        hit = life.hit([*range(diverge), 1000, 1001])
        assert diverge - hit <= diverge // 2 + chunk
    assert life.run([*range(length - 2), 1000, 1001]) > 0


def test_a_fork_of_a_long_chain_hits_the_end_of_a_chunk_and_a_second_one_the_token() -> None:
    """Three chains of 32,768 tokens in chunks of 2,048, in slots for fewer snapshots than their chunks have."""
    ledger = TokenLedger(200_000, 2, 40_000, num_states=16)

    def run(ids: list[int]) -> int:
        sequence = ledger.open(ids_bytes(ids))
        while left := len(ids) - sequence.length:
            count = ledger.piece(sequence, min(left, 2048))
            ledger.extend([sequence], [count])
            ledger.publish(sequence)
            ledger.confirm(ledger.step)
            ledger.step += 1
        ledger.close(sequence)
        ledger.check()
        return sequence.num_hit

    chains = [[number] * 32_768 for number in range(3)]
    assert [run(chain) for chain in chains] == [0, 0, 0]
    assert [run([*chains[1][:8192], number, 7]) for number in (3, 4)] == [8192, 8192]
    assert [run([*chains[2][:10_000], number, 7]) for number in (3, 4, 5)] == [8192, 10_000, 10_000]
    assert all(run([*chain, 7]) >= 32_767 for chain in chains)


def conversations(seed: int, rewrites: bool) -> list[tuple[int, list[int], list[int], int]]:
    """Returns the turns of 128 conversations of 12 turns each, of which about a quarter runs at a time: number,
    prompt, answer, and how many tokens of the prompt the next one repeats. `rewrites`: the template changes the
    end of the prompt and the answer then; else the next turn goes on from the answer's end."""
    rng, tokens = random.Random(seed), itertools.count(10)
    order = []
    for number in range(128):
        at = rng.random() * 1000
        for _ in range(12):
            order.append((at, number))
            at += rng.expovariate(1 / 20)
    texts, turns = {number: [1] * 400 for number in range(128)}, []
    for _, number in sorted(order):
        message, answer = (list(itertools.islice(tokens, rng.randrange(50, most))) for most in (400, 300))
        stable = [*texts[number], *message]
        prompt = [*stable, 2, 3] if rewrites else stable
        turns.append((number, prompt, answer, len(stable)))
        texts[number] = [*stable, 4, *answer[9:]] if rewrites else [*prompt, *answer]
    return turns


def oracle(turns: list[tuple[int, list[int], list[int], int]], num_states: int, rewrites: bool) -> int:
    """Returns the tokens that are hit if the state goes first whose conversation goes on last."""
    later: dict[int, deque[int]] = {}
    for at, (number, *_) in enumerate(turns):
        later.setdefault(number, deque()).append(at)
    kept, hits = dict[int, int](), 0
    for number, prompt, answer, stable in turns:
        hits += kept.pop(number, 400)
        later[number].popleft()
        if later[number]:
            kept[number] = stable if rewrites else len(prompt) + len(answer)
        if len(kept) > num_states:
            del kept[max(kept, key=lambda one: later[one][0])]
    return hits


@pytest.mark.parametrize("rewrites", [False, True])
def test_conversations_hit_nearly_what_an_oracle_hits(rewrites: bool) -> None:
    """Of 128 conversations, a third have a state at a time."""
    turns, num_states, hits = conversations(1, rewrites), 128 // 3, 0
    ledger = TokenLedger(10**7, 2, 10_000, num_states=num_states)
    for _, prompt, answer, stable in turns:
        sequence = ledger.open(ids_bytes(prompt), keep_at=[stable] if rewrites else [])
        hits += sequence.num_hit
        for end in (len(prompt), len(prompt) + len(answer)):
            while left := end - sequence.length:
                ledger.extend([sequence], [ledger.piece(sequence, left)])
                ledger.publish(sequence)
                ledger.confirm(ledger.step)
                ledger.step += 1
        ledger.close(sequence, ids_bytes(answer))
    ledger.check()
    assert hits >= 0.95 * oracle(turns, num_states, rewrites)


def test_a_snapshot_is_hit_from_the_next_step_on() -> None:
    """The tokens are there within the step that computes them, and their state is not."""
    life = Life(ONE_GROUP)
    first = life.open([3] * 40 + [1])
    life.extend([first], [life.ledger.piece(first.sequence, 41)])
    assert first.sequence.length == 40
    life.extend([first], [1])
    assert life.hit([3] * 40 + [2]) == 0
    assert life.ledger.tree.match((), ids_bytes([3] * 40 + [2])).num_tokens == 40
    life.compute(confirm=False)
    assert life.hit([3] * 40 + [2]) == 40
    second = life.open([3] * 40 + [2])
    life.extend([second], [1])
    life.compute()
    life.check()


def test_what_a_failed_step_hands_over_is_not_hit() -> None:
    life = Life(ONE_GROUP)
    life.run([1] * 20, answer=3)
    text = life.open([1] * 20 + [2] * 20)
    for _ in range(2):  # up to where they diverge, and on
        life.compute()
        life.extend([text], [life.ledger.piece(text.sequence, 20)])
    life.compute(confirm=False)
    other = life.open([1] * 20 + [2] * 20)
    life.extend([text], [1])
    assert life.hit([1] * 20 + [2] * 19 + [9]) == 39
    with pytest.raises(ValueError, match="rows"):
        life.ledger.retract()
    for one in (text, other):
        life.close(one, cache=False)
    life.ledger.retract()
    life.apply()
    life.check()
    assert life.hit([1] * 20 + [2] * 19 + [9]) == 20


@pytest.mark.parametrize("unknown", [0, 1, 2])
def test_a_state_that_has_read_tokens_of_unknown_ids_is_freed(unknown: int) -> None:
    life = Life(ONE_GROUP)
    text = life.open([1] * 20)
    life.finish_prompt(text)
    life.decode(text, 5)
    life.close(text, unknown=unknown)
    life.check()
    assert life.hit([*text.ids, 9]) == (19 if unknown else 25)


@pytest.mark.parametrize("name", GROUPS)
def test_forks_read_what_their_parent_has_computed(name: str) -> None:
    life = Life(GROUPS[name], num_states=4)
    text = life.open([1] * 20)
    life.finish_prompt(text)
    life.decode(text, 3)
    fork = Text(life.ledger.fork(text.sequence), 20, text.ids[:], text.names[:])
    life.apply()
    life.check()
    assert life.ledger.states.num_owed == 2
    for one, ids in ((text, [7]), (fork, [8])):
        one.add(ids)
    life.extend([text, fork], [1, 1])
    life.compute()
    life.decode(text, 1)
    life.decode(fork, 1)
    life.check()
    assert life.ledger.states.num_held == 2
    life.close(fork)
    life.close(text, cache=False)
    life.check()
    assert life.hit([*fork.ids, 9]) == 25
    assert life.hit([*text.ids, 9]) == 19


def test_as_many_sequences_run_as_there_are_states() -> None:
    """Short of slots, a sequence goes on in the slot of the snapshot that it has hit."""
    life = Life(ONE_GROUP, num_states=2)
    for token in (1, 2):
        life.run([token] * 20, keep_at=[20])
    texts = [life.open([token] * 20 + [9]) for token in (1, 2)]
    assert [text.sequence.num_hit for text in texts] == [20, 20]
    assert states_needed(life.ledger, [text.sequence for text in texts]) == 0
    life.extend(texts, [1, 1])
    life.compute()
    life.check()
    assert life.ledger.states.num_held == 2
    third = life.open([3] * 5)
    with pytest.raises(OutOfStates, match="1 state slots needed, 0 available, of 2"):
        life.extend([third], [5])
    life.check()
    life.close(texts[0], cache=False)
    life.extend([third], [5])


def test_a_snapshot_never_takes_a_state_that_a_sequence_needs() -> None:
    life = Life(ONE_GROUP, num_states=2)
    first, second = life.open([1] * 20), life.open([2] * 20)
    life.finish_prompt(first, chunk=5)
    life.finish_prompt(second, chunk=5)
    assert life.ledger.states.num_held == 2
    life.check()


def test_a_snapshot_supersedes_those_before_it_once_it_is_hit() -> None:
    life = Life(ONE_GROUP, num_states=3, capacity=1000)
    life.run([1] * 20, answer=5)  # one token before the prompt's end, and at the answer's end
    assert life.hit([1] * 19 + [9]) == 19
    answer = [0, 1, 2, 3, 4]
    life.run([1] * 20 + answer + [5] * 3, answer=2)
    # Of three slots the running state takes one, and the two that came later the others.
    assert life.hit([1] * 19 + [9]) == 0
    assert life.hit([1] * 20 + answer + [5] * 2 + [9]) == 27


def test_a_turn_that_goes_on_from_an_answer_leaves_its_end_beside_the_given_place() -> None:
    """As in a loop of tools, whose thinking is left out in the user's next turn."""
    life = Life(ONE_GROUP, num_states=4)
    life.run([1] * 40, answer=3, keep_at=[30])
    ids = [1] * 40 + [0, 1, 2] + [7] * 2
    assert life.run(ids, answer=2, keep_at=[30]) == 43
    for token in (2, 3):
        life.run([token] * 10)
    assert life.hit([*ids, 0, 1, 9]) == 47
    assert life.hit([1] * 35) == 30


def test_one_path_does_not_crowd_out_the_others() -> None:
    """The other conversation has used its state before all of the long one's."""
    life = Life(ONE_GROUP, num_states=4)
    life.run([2] * 20, answer=5)
    ids = [1] * 10
    for _ in range(9):
        text = life.open(ids)
        life.finish_prompt(text)
        life.decode(text, 3)
        life.close(text)
        ids = [*text.ids, 7]
    assert life.hit([2] * 20 + [0, 1, 2, 3, 4, 9]) == 25
    assert life.hit([*ids, 7]) == len(ids) - 1


def test_the_snapshot_that_saves_the_least_is_evicted_first() -> None:
    life = Life(ONE_GROUP, num_states=4)
    for token, length in ((1, 100), (2, 10)):
        life.run([token] * length, keep_at=[length])
    for token in (3, 4, 5):
        life.run([token] * 10, keep_at=[10])
    assert life.hit([1] * 100 + [9]) == 100
    assert life.hit([2] * 10 + [9]) == 0


def test_going_back_is_refused_but_for_what_a_snapshot_stands_for() -> None:
    life = Life(ONE_GROUP)
    life.run([1] * 20, answer=3)
    text = life.open([1] * 20 + [0, 1, 2, 7, 8])
    life.ledger.extend([text.sequence], [2])
    life.ledger.shrink([text.sequence], [2])  # whose step was not computed
    life.apply()
    life.check()
    life.finish_prompt(text)
    life.decode(text, 2)
    before = life.ledger.holdings()
    for verb in (
        lambda: life.ledger.shrink([text.sequence], [1]),
        lambda: life.ledger.truncate(text.sequence, 24),
        lambda: life.ledger.release(text.sequence, 3),
        lambda: life.ledger.keep(text.sequence, 1),
        lambda: life.ledger.open_cross(5),
    ):
        with pytest.raises(ValueError, match="state"):
            verb()
    assert life.ledger.holdings() == before


def test_a_wrong_count_of_states_is_found() -> None:
    life = Life(ONE_GROUP)
    text = life.open([1] * 20)
    life.finish_prompt(text)
    states = life.ledger._state.states
    assert states is not None
    states.count(free=1)
    with pytest.raises(CheckFailed, match="by recount"):
        life.ledger.check()


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("seed", [0, 1, 2, *slow(3, 4, 5)])
def test_random_lives(name: str, seed: int) -> None:
    rng = random.Random(f"{name} {seed}")
    live(random_life(name, rng), rng, 300)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", GROUPS)
def test_a_million_verbs_of_random_lives(name: str) -> None:
    for seed in range(700):
        rng = random.Random(f"{name} {seed} long")
        live(random_life(name, rng), rng, 500)


def test_rows_run_out_before_anything_changes() -> None:
    life = Life(ONE_GROUP, num_rows=1)
    text = life.open([1] * 5)
    with pytest.raises(OutOfRows):
        life.ledger.fork(text.sequence)
    life.check()
