"""A ledger with states: hits, hand-overs, forks and failed steps, against a model whose states are hashes of
all tokens that they have read."""

import random
from array import array
from collections import deque
from dataclasses import dataclass, field

import pytest

from lightkv.errors import CheckFailed, OutOfRows, OutOfStates, OutOfTokens
from lightkv.layer_groups import ONE_GROUP, LayerGroups
from lightkv.ledger import TokenLedger
from lightkv.ledger.sequence import Sequence
from lightkv.ledger.snapshots import MAX_OF_PATH
from tests.support.combinations import slow
from tests.support.grouped_memory import groups_of
from tests.support.state_memory import Piece, StateMemory, names_after

ROWS, ENTRIES = 6, 130
GROUPS: dict[str, LayerGroups] = {
    "all": ONE_GROUP,
    "window": groups_of(("full", 0, 1), ("window", 6, 2)),
    "chunk": groups_of(("full", 0, 2), ("chunk", 8, 1)),
}


def ids_bytes(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()


@dataclass(eq=False)
class Text:
    """A sequence, the ids of its tokens, and their names; the first `prompt` ones are its prompt."""

    sequence: Sequence
    prompt: int
    ids: list[int]
    names: list[int] = field(default_factory=list)

    def add(self, ids: list[int]) -> None:
        self.ids += ids
        self.names += names_after(self.names[-1] if self.names else 0, ids)


class Life:
    """A ledger and its memory, in which every piece must find the state and the tokens that it reads. A step is
    computed when it is planned, and confirmed or failed later."""

    def __init__(
        self, groups: LayerGroups, capacity: int = 2000, num_states: int = 40, num_rows: int = ROWS
    ) -> None:
        self.ledger = TokenLedger(capacity, num_rows, ENTRIES, capacity // 3, groups, num_states)
        self.memory = StateMemory(groups, capacity, num_states, num_rows, ENTRIES)
        self.pieces: list[
            list[Piece]
        ] = []  # of the step that is being planned: first, second, … of their rows
        self.batch: list[Text] = []
        self.num_computed = 0

    def apply(self) -> None:
        self.memory.apply(self.ledger.drain())

    def check(self) -> None:
        self.ledger.check()
        self.memory.check(self.ledger.holdings(), self.ledger.states, self.ledger.num_free)

    def open(self, ids: list[int], session: str | None = None, keep_at: list[int] | None = None) -> Text:
        of = None if session is None else self.ledger.open_session(session)
        text = Text(self.ledger.open(ids_bytes(ids), (), of, keep_at or []), len(ids), [])
        text.add(ids)
        self.apply()
        return text

    def extend(self, texts: list[Text], counts: list[int]) -> None:
        """Plans pieces of these texts, which the step computes beside one another. A refused extension changes
        nothing but what windows have passed."""
        ledger, sequences = self.ledger, [text.sequence for text in texts]
        lengths, needed = [one.length for one in sequences], ledger.states_needed(sequences)
        enough = ledger.growth(sequences, max(counts))
        available = ledger.num_available, ledger.states.num_available
        try:
            ledger.extend(sequences, counts)
        except OutOfTokens:
            assert enough > available[0] or needed > available[1]
            assert [one.length for one in sequences] == lengths
            self.batch += texts  # which may share meanwhile what others compute in this step
            raise
        finally:
            self.apply()
        for text, start in zip(texts, lengths, strict=True):
            end = text.sequence.length
            while len(text.ids) < end:
                text.add([len(text.ids) % 5])
            piece = self.memory.piece(text.sequence.row, start, end, text.names)
            rank = next(
                (i for i, pieces in enumerate(self.pieces) if piece.row not in [one.row for one in pieces]),
                len(self.pieces),
            )
            self.pieces += [[]] * (rank == len(self.pieces))
            self.pieces[rank] = [*self.pieces[rank], piece]
            self.batch.append(text)
            self.num_computed += end - start
            if text.sequence.length <= text.prompt:
                ledger.publish(text.sequence)
                self.apply()

    def compute(self, confirm: bool = True) -> None:
        """Computes the step that was planned. The next one may be planned."""
        self.memory.compute(self.pieces)
        self.pieces, self.batch = [], []
        if confirm:
            self.ledger.confirm(self.ledger.step)
        self.ledger.step += 1

    def finish_prompt(self, text: Text, chunk: int = 1000) -> None:
        """Computes a prompt, a chunk a step, of as many pieces as its snapshots want."""
        while (left := text.prompt - text.sequence.length) > 0:
            rest = min(left, chunk)
            while rest:
                count = self.ledger.piece(text.sequence, rest)
                if not count:
                    break
                self.extend([text], [count])
                rest -= count
            self.compute()

    def decode(self, text: Text, count: int) -> None:
        for _ in range(count):
            self.extend([text], [1])
            self.compute()

    def close(self, text: Text, cache: bool = True, unknown: int = 0) -> None:
        """Closes a text of whose last tokens so many ids are not known."""
        known = text.ids[text.prompt : max(text.sequence.length - unknown, text.prompt)]
        self.ledger.close(text.sequence, ids_bytes(known), cache)
        self.apply()

    def run(self, ids: list[int], answer: int = 0, chunk: int = 1000, **options: object) -> int:
        """Runs a request. Returns how many tokens it hits."""
        text = self.open(ids, **options)  # type: ignore[arg-type]
        self.finish_prompt(text, chunk)
        self.decode(text, answer)
        self.close(text)
        self.check()
        return text.sequence.num_hit

    def hit(self, ids: list[int]) -> int:
        return self.ledger.match(ids_bytes(ids)).num_tokens


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
    assert life.ledger.states_needed([text.sequence for text in texts]) == 0
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


def test_one_path_does_not_crowd_out_the_others() -> None:
    """The other conversation has used its state before all of the long one's."""
    life = Life(ONE_GROUP, num_states=MAX_OF_PATH + 2)
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


VERBS = {"open": 4, "step": 14, "fork": 1, "back": 1, "close": 3, "evict": 1}


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("seed", [0, 1, 2, *slow(3, 4, 5)])
def test_random_lives(name: str, seed: int) -> None:
    live(name, random.Random(f"{name} {seed}"), 300)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", GROUPS)
def test_a_million_verbs_of_random_lives(name: str) -> None:
    for seed in range(700):
        live(name, random.Random(f"{name} {seed} long"), 500)


def live(name: str, rng: random.Random, num_verbs: int) -> None:
    """Lets sequences come, fork, go back and end, by their length, stop tokens, stop strings and aborts, with
    up to two steps in flight, of which some fail, in pools that are too small for all."""
    groups = GROUPS[name]
    life = Life(groups, rng.randrange(80, 400) * groups.num_groups, rng.randrange(1, 14))
    ledger, memory, depth = life.ledger, life.memory, rng.choice([1, 2])
    texts: list[Text] = []
    known: list[list[int]] = [[1]]
    flying: deque[tuple[int, list[Text], dict[int, object], dict[int, object]]] = deque()
    ending: dict[Text, int] = {}  # texts that end once they are in no step in flight, and their unknown ids
    for _ in range(num_verbs):
        busy = {text for _, batch, *_ in flying for text in batch}
        free = [text for text in texts if text not in busy]
        verb = rng.choices(list(VERBS), list(VERBS.values()))[0]
        text = rng.choice(free) if free else None
        if verb == "open" and len(texts) < ROWS:
            base = rng.choice(known)
            ids = base[: rng.randrange(1, len(base) + 1)] + rng.choices(range(3), k=rng.randrange(1, 25))
            places = rng.choice([[], [rng.randrange(1, 40)], [len(ids)]])
            if rng.random() < 0.4 and (branch := ledger.find_branch(ids_bytes(ids[:100]))):
                ledger.keep_branch(branch)
                assert life.hit(ids[:100]) == branch.point
            texts.append(life.open(ids[:100], rng.choice([None, None, "a", "b"]), places))
        elif verb == "step" and len(flying) < depth:
            before = dict(memory.tokens.written), dict(memory.values)
            step = ledger.step
            plan(life, [text for text in texts if text not in ending], rng)
            batch = life.batch
            life.compute(confirm=False)
            flying.append((step, batch, *before))
        elif verb == "fork" and text is not None and len(texts) < ROWS and not flying:
            texts.append(Text(ledger.fork(text.sequence), text.prompt, text.ids[:], text.names[:]))
            life.apply()
        elif verb == "back" and text is not None and text.sequence.length:
            go_back(life, text, rng)
        elif verb == "close" and texts:
            # A text in flight ends by a stop token of the step before, a stop string, or an abort: it stays
            # open until it is in no step. What steps read meanwhile is known, or is not.
            text = rng.choice(texts)
            ending.setdefault(text, rng.choice([0, 0, 0, 1, 2, 50]))
        elif verb == "evict" and ledger.num_cached and rng.random() < 0.3:
            ledger.evict(rng.randrange(1, ledger.num_cached + 1))
            life.apply()
        if flying and rng.random() < 0.5:
            if rng.random() < 0.9:
                ledger.confirm(flying.popleft()[0])
            else:
                fail(life, texts, flying, ending)
        busy = {text for _, batch, *_ in flying for text in batch}
        for text, unknown in [one for one in ending.items() if one[0] not in busy]:
            texts.remove(text)
            del ending[text]
            if text.sequence.length:
                known.append(text.ids[: text.sequence.length][:90])
            life.close(text, rng.random() < 0.9, unknown)
        life.check()
    for _ in range(len(flying)):
        ledger.confirm(flying.popleft()[0])
    for text in texts:
        life.close(text)
    life.check()
    assert (ledger.num_held, ledger.states.num_held) == (0, 0)
    ledger.evict(ledger.num_cached)
    life.apply()
    life.check()
    assert ledger.num_free == ledger.capacity
    assert ledger.states.num_free == ledger.states.capacity


def plan(life: Life, texts: list[Text], rng: random.Random) -> None:
    """Plans a step: pieces of prompts one by one, and the next token of the others together."""
    batch = rng.sample(texts, rng.randrange(len(texts) + 1))
    decodes = [one for one in batch if one.prompt <= one.sequence.length < ENTRIES - 2]
    for text in [one for one in batch if one.sequence.length < one.prompt]:
        rest = min(text.prompt - text.sequence.length, rng.randrange(1, 20))
        while rest:
            count = life.ledger.piece(text.sequence, rest)
            if not count:
                break
            count = count if rng.random() < 0.9 else rest
            try:
                life.extend([text], [count])
            except OutOfTokens:
                break
            rest -= count
    if decodes:
        for text in decodes:
            if len(text.ids) == text.sequence.length:
                text.add([rng.randrange(3)])
        try:
            life.extend(decodes, [1] * len(decodes))
        except OutOfTokens:
            life.check()


def fail(
    life: Life,
    texts: list[Text],
    flying: deque[tuple[int, list[Text], dict[int, object], dict[int, object]]],
    ending: dict[Text, int],
) -> None:
    """Fails all steps in flight: what they have written is garbage."""
    _, _, written, values = flying[0]
    for now, before in ((life.memory.tokens.written, written), (life.memory.values, values)):
        for slot, what in now.items():
            if before.get(slot) is not what:
                now[slot] = "garbage"
    busy = {text for _, batch, *_ in flying for text in batch}
    for text in texts[:]:  # also those that have only been opened, which may have hit what failed
        if text in busy or text.sequence.length == text.sequence.num_hit:
            texts.remove(text)
            ending.pop(text, None)
            life.close(text, cache=False)
    flying.clear()
    life.ledger.retract()
    life.apply()


def go_back(life: Life, text: Text, rng: random.Random) -> None:
    """Takes the last tokens of a text back, unless the ledger refuses, which then has changed nothing."""
    sequence, length = text.sequence, max(text.sequence.length - rng.randrange(1, 4), 0)
    before = life.ledger.holdings()
    try:
        if rng.random() < 0.5:
            life.ledger.truncate(sequence, length)
            text.prompt = min(text.prompt, length)
            del text.ids[length:], text.names[length:]
        else:
            life.ledger.shrink([sequence], [sequence.length - length])
    except ValueError:
        assert life.ledger.holdings() == before
        assert not life.ledger.drain()
    life.apply()


def test_rows_run_out_before_anything_changes() -> None:
    life = Life(ONE_GROUP, num_rows=1)
    text = life.open([1] * 5)
    with pytest.raises(OutOfRows):
        life.ledger.fork(text.sequence)
    life.check()
