"""A ledger of several layer groups: counts, hits, tails and eviction, against a model of the memory that knows
what was written to each slot."""

import random
from array import array
from typing import NamedTuple

import pytest

from lightkv.errors import CheckFailed, OutOfTokens, SequenceTooLong
from lightkv.layer_groups import FULL, LayerGroups
from lightkv.ledger import TokenLedger
from lightkv.ledger.extension import Extension
from lightkv.ledger.holds import Hold
from lightkv.ledger.sequence import Sequence
from tests.support.combinations import slow
from tests.support.grouped_memory import GroupedMemory, groups_of

WINDOW = groups_of(("full", 0, 1), ("window", 6, 2))
GROUPS = {
    "window": WINDOW,
    "two windows": groups_of(("full", 0, 2), ("window", 4, 1), ("window", 9, 3)),
    "chunk": groups_of(("full", 0, 1), ("chunk", 8, 3)),
    "window and chunk": groups_of(("full", 0, 1), ("window", 5, 1), ("chunk", 7, 1)),
    "narrow": groups_of(("full", 0, 1), ("window", 1, 1)),
}


class Text(NamedTuple):
    """A running sequence and its token ids, of which the first `prompt` are its prompt."""

    sequence: Sequence
    ids: list[int]
    prompt: int


class Life:
    """A ledger and its memory, in which every token that is computed must find what it sees."""

    def __init__(self, groups: LayerGroups, capacity: int, num_rows: int = 6, num_entries: int = 120) -> None:
        self.ledger = TokenLedger(capacity, num_rows, num_entries, capacity // 3, groups)
        self.memory = GroupedMemory(groups, capacity, num_rows, num_entries)
        self.num_computed = 0

    def apply(self) -> None:
        self.memory.apply(self.ledger.drain())

    def open(self, ids: list[int], session: str | None = None, keep_branch: bool = False) -> Text:
        of = None if session is None else self.ledger.sessions.open(session)
        if keep_branch and (branch := self.ledger.find_branch(ids_bytes(ids))):
            before = self.ledger.num_available, self.ledger.num_held
            self.ledger.keep_branch(branch)
            assert (self.ledger.num_available, self.ledger.num_held) == before
            assert self.ledger.match(ids_bytes(ids)).num_tokens == branch.point
        sequence = self.ledger.open(ids_bytes(ids), session=of)
        self.apply()
        return Text(sequence, list(ids), len(ids))

    def extend(self, *texts: tuple[Text, int]) -> None:
        """Computes the next `count` tokens of each text."""
        self.ledger.extend([text.sequence for text, _ in texts], [count for _, count in texts])
        self.apply()
        for text, count in texts:
            end = text.sequence.length
            names = names_of(text.ids)
            self.memory.check_reads(text.sequence.row, end - count, names)
            self.memory.write(text.sequence.row, end - count, names[end - count : end])
            self.num_computed += count

    def bring(self, text: Text, length: int, spare: int = 0) -> None:
        """Gives a text the K/V of its tokens up to `length` from elsewhere: in classes that do not see
        everything, that of those that the next token sees, and of `spare` more."""
        start, names = text.sequence.length, names_of(text.ids)
        classes = self.ledger.groups.classes
        firsts = [max(one.lifetime.rule.first_seen(length) - spare, 0) for one in classes]
        self.ledger.extend_imported(text.sequence, length, firsts[1:])
        self.apply()
        for cls, first in enumerate(firsts):
            first = max(start, first)
            self.memory.write_class(cls, text.sequence.row, first, names[first:length])

    def finish_prompt(self, text: Text, chunk: int = 1000) -> None:
        while (left := text.prompt - text.sequence.length) > 0:
            self.extend((text, min(left, chunk)))
            self.publish(text)

    def publish(self, text: Text, confirm: bool = True) -> None:
        self.ledger.publish(text.sequence)
        self.apply()
        if confirm:
            self.ledger.confirm(self.ledger.step)

    def decode(self, text: Text, count: int) -> None:
        for _ in range(count):
            if len(text.ids) == text.sequence.length:
                text.ids.append(len(text.ids) % 5)
            self.extend((text, 1))

    def close(self, text: Text, cache: bool = True) -> None:
        self.ledger.close(text.sequence, ids_bytes(text.ids[text.prompt :]), cache)
        self.apply()

    def check(self) -> None:
        self.ledger.check()
        self.memory.check(self.ledger.holdings(), self.ledger.num_free)


def ids_bytes(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()


def names_of(ids: list[int]) -> list[object]:
    """Returns a name for each token: all ids up to it, on which its K/V depends."""
    return [tuple(ids[: end + 1]) for end in range(len(ids))]


def test_what_is_held_follows_the_length() -> None:
    groups = WINDOW
    life = Life(groups, 400)
    text = life.open([1] * 40)
    life.finish_prompt(text, chunk=15)
    for _ in range(60):
        before, enough = text.sequence.length, life.ledger.growth([text.sequence])
        available = life.ledger.num_available
        life.decode(text, 1)
        life.check()
        taken = available - life.ledger.num_available
        tail = max(before, 40) - 40 < 12  # the prompt's tail is held until all of it has passed
        assert taken <= enough
        if not tail:
            assert taken == enough or before == 52  # in which the tail is left
            assert life.ledger.num_held == groups.slots(before) + groups.num_groups
    life.close(text, cache=False)
    life.check()
    assert life.ledger.num_held == 0


@pytest.mark.parametrize("name", GROUPS)
def test_an_answer_is_hit_to_its_last_token(name: str) -> None:
    life = Life(GROUPS[name], 900)
    text = life.open([1, 2, 3] * 10)
    life.finish_prompt(text)
    life.decode(text, 25)
    ids = text.ids[:]
    life.close(text)
    life.check()
    again = life.open([*ids, 7, 7])
    assert again.sequence.num_hit == len(ids)
    life.finish_prompt(again)
    life.check()
    life.close(again)
    life.check()


def test_a_prompt_that_turns_off_is_hit_by_the_third() -> None:
    """The second prompt that turns off in the middle of a text keeps what the third one needs."""
    life = Life(WINDOW, 900)
    head, hits = [3] * 50, []
    for number in range(4):
        text = life.open([*head, *[number + 10] * 30])
        hits.append(text.sequence.num_hit)
        life.finish_prompt(text, chunk=20)
        life.decode(text, 3)
        life.close(text)
        life.check()
    assert hits == [0, 0, 50, 50]


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("own", [1, 5, 30])
def test_prompts_of_one_step_hit_what_they_have_in_common(name: str, own: int) -> None:
    """The first one has its slots, and is computed in the step that computes the second one's tokens, too."""
    life = Life(GROUPS[name], 1200)
    ledger, head = life.ledger, [3] * 37
    texts = []
    for number in range(3):
        text = life.open([*head, *[number + 10] * own], keep_branch=True)
        assert text.sequence.num_hit == (len(head) if number else 0)
        ledger.extend([text.sequence], [text.prompt - text.sequence.length])
        life.publish(text, confirm=False)
        texts.append(text)
    for text in texts:  # every layer writes before it attends
        names = names_of(text.ids)
        life.memory.write(text.sequence.row, text.sequence.num_hit, names[text.sequence.num_hit :])
    for text in texts:
        life.memory.check_reads(text.sequence.row, text.sequence.num_hit, names_of(text.ids))
    life.check()
    ledger.step += 1
    for text in texts:
        life.decode(text, 25)
        life.check()
    alone = ledger.groups.slots(len(texts[0].ids) - 1) + ledger.groups.num_groups
    assert ledger.num_held == 3 * alone - 2 * len(head) * ledger.groups.widths[0]  # as if nothing was kept


def test_a_waiting_prompt_asks_each_sequence_once_that_has_passed_what_it_seeks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    life = Life(WINDOW, 2000, num_rows=9)
    texts = [life.open([1] * 30 + [number + 2] * 9) for number in range(8)]
    for text in texts:
        life.finish_prompt(text)
        life.decode(text, 20)
    asked, own = list[Sequence](), Hold.own

    def ask(hold: Hold) -> int:
        asked.append(hold.sequence)
        return own.fget(hold)

    monkeypatch.setattr(Hold, "own", property(ask, own.fset))
    waiting = ids_bytes([1] * 25 + [99] * 9)
    for num_asked in (8, 0, 0):
        asked.clear()
        assert life.ledger.find_branch(waiting) is None
        assert len(set(asked)) == num_asked
    life.ledger.truncate(texts[0].sequence, texts[0].sequence.length - 1)  # which goes back
    asked.clear()
    assert life.ledger.find_branch(waiting) is None
    assert set(asked) == {texts[0].sequence}


def test_a_branch_that_a_failed_step_computes_is_not_hit() -> None:
    life = Life(WINDOW, 900)
    ledger = life.ledger
    first = life.open([3] * 50 + [10] * 30)
    life.extend((first, 80))
    life.publish(first, confirm=False)
    second = life.open([3] * 50 + [11] * 30, keep_branch=True)
    assert second.sequence.num_hit == 50
    ledger.step += 1
    for text in (first, second):
        life.close(text, cache=False)
    ledger.retract()
    life.apply()
    life.check()
    assert ledger.match(ids_bytes([3] * 50 + [12])).num_tokens == 0
    assert ledger.num_free == ledger.capacity


def test_no_sequence_needs_no_slot_once_the_batch_has_closed() -> None:
    life = Life(WINDOW, 400)
    text = life.open([1] * 30)
    life.finish_prompt(text)
    life.decode(text, 3)
    life.close(text)
    assert life.ledger.growth([]) == 0


def test_what_stays_in_a_batch_costs_nothing_when_others_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(WINDOW, 9000, num_rows=41)
    texts = [life.open([number + 2] * 9) for number in range(40)]
    for text in texts:
        life.finish_prompt(text)
    for _ in range(30):  # until all reuse their slots
        life.ledger.extend([text.sequence for text in texts], [1] * 40)
    looked_at: list[Sequence] = []
    settle = Extension.settle
    monkeypatch.setattr(Extension, "settle", lambda of, one: looked_at.append(one) or settle(of, one))
    for number in range(5):
        life.ledger.close(texts.pop(3 * number).sequence)
        texts.append(life.open([number + 50] * 9))
        new = texts[-1].sequence
        life.ledger.extend([new], [9])  # a chunk beside the decodes
        looked_at.clear()
        life.ledger.extend([text.sequence for text in texts], [1] * 40)
        assert new in looked_at
        assert len(looked_at) <= 2 * (number + 1)  # of those that have come, at most
        life.apply()
        life.check()


def test_a_sequence_that_is_due_and_forgotten_is_found() -> None:
    life = Life(WINDOW, 400)
    text = life.open([1] * 30)
    life.finish_prompt(text)
    text.sequence.look_at += 1000
    with pytest.raises(CheckFailed, match="something happens at"):
        life.ledger.check()


def test_sessions_protect_a_number_of_slots() -> None:
    ledger = TokenLedger(2000, 4, 400, 500, GROUPS["two windows"])
    counts = []
    for name in "ab":
        sequence = ledger.open(ids_bytes([ord(name)] * 150), session=ledger.sessions.open(name))
        ledger.extend([sequence], [150])
        ledger.close(sequence)
        counts.append(ledger.sessions.counts)
    assert [one.protected for one in counts] == [150, 150]  # a token takes two slots
    assert counts[-1].over_limit == 150
    ledger.check()


def test_templates_may_rewrite_the_last_tokens_of_a_turn() -> None:
    groups = groups_of(("full", 0, 1), ("window", 64, 1))
    life = Life(groups, 4000, num_entries=1000)
    text = life.open([1] * 100)
    life.finish_prompt(text)
    life.decode(text, 100)
    ids = text.ids[:]
    life.close(text)
    again = life.open([*ids[:-40], 9, 9, 9])
    assert again.sequence.num_hit == len(ids) - 40
    life.finish_prompt(again)
    life.check()


def test_a_refused_extension_takes_nothing() -> None:
    life = Life(WINDOW, 100)
    text = life.open([1] * 30)
    with pytest.raises(OutOfTokens, match="100"):
        life.ledger.extend([text.sequence], [50])
    life.apply()
    life.check()
    assert (life.ledger.num_free, text.sequence.length) == (100, 0)


def test_a_refused_extension_frees_only_what_has_passed() -> None:
    life = Life(WINDOW, 150)
    text = life.open([1] * 40)
    life.finish_prompt(text)
    held = life.ledger.num_held
    with pytest.raises(OutOfTokens):
        life.ledger.extend([text.sequence], [60])
    life.apply()
    life.check()
    assert (text.sequence.length, held - life.ledger.num_held) == (40, 29 * 2)
    life.decode(text, 20)
    life.check()


def test_counts_that_are_no_integers_are_refused() -> None:
    life = Life(WINDOW, 400)
    text = life.open([1] * 40)
    with pytest.raises(TypeError):
        life.ledger.extend([text.sequence], [2.0])  # type: ignore[list-item]
    assert not life.ledger.drain()


def test_tails_of_a_failed_step_are_not_hit() -> None:
    """The second prompt that turns off computes a tail beside tokens that are cached. The step that computes
    it fails after the next one is planned, which has stored the tail."""
    life = Life(WINDOW, 900)
    ledger = life.ledger
    first = life.open([3] * 50 + [10] * 30)
    life.finish_prompt(first)
    life.close(first)
    second = life.open([3] * 50 + [11] * 30)
    for _ in range(2):
        life.extend((second, 40))
        ledger.publish(second.sequence)
        ledger.step += 1
    life.extend((second, 1))
    life.apply()
    assert ledger.match(ids_bytes([3] * 50 + [12])).num_tokens == 50
    with pytest.raises(ValueError, match="rows"):
        ledger.retract()
    life.check()
    ledger.close(second.sequence, cache=False)
    ledger.retract()
    life.apply()
    life.check()
    assert ledger.match(ids_bytes([3] * 50 + [12])).num_tokens == 0
    assert (
        ledger.match(ids_bytes([3] * 50 + [10] * 30 + [1])).num_tokens == 80
    )  # the first one's were computed


def test_tails_of_confirmed_steps_stay_when_a_later_one_fails() -> None:
    life = Life(WINDOW, 900)
    ledger = life.ledger
    text = life.open([3] * 40)
    life.extend((text, 40))
    ledger.publish(text.sequence)
    ledger.step += 1
    life.decode(text, 1)  # stores the tail that the step before computes
    ledger.step += 1
    ledger.confirm(0)
    ledger.close(text.sequence, cache=False)
    ledger.retract()
    life.apply()
    life.check()
    assert ledger.match(ids_bytes([3] * 40 + [1])).num_tokens == 40


def test_a_prompt_that_turns_off_within_its_last_chunk_is_hit_while_it_runs() -> None:
    """Its last chunk begins with tokens that the tree has from another prompt."""
    life = Life(WINDOW, 900)
    first = life.open([3] * 50 + [10] * 30)
    life.finish_prompt(first)
    life.close(first)
    second = life.open([3] * 50 + [11] * 30)
    life.finish_prompt(second, chunk=40)
    life.decode(second, 2)
    life.check()
    assert life.ledger.match(ids_bytes([3] * 50 + [11] * 30 + [1])).num_tokens == 80


def test_a_tail_is_superseded_only_by_one_that_is_there() -> None:
    """The second turn leaves no tail: its prompt was not published, and its answer's ids are not told."""
    life = Life(WINDOW, 900)
    for token in (1, 2):
        first = life.open([token] * 40)
        life.finish_prompt(first)
        life.close(first)
    second = life.open([1] * 70)
    life.extend((second, 30))
    life.decode(second, 30)
    life.ledger.close(second.sequence)
    life.apply()
    life.ledger.evict(1)
    life.apply()
    life.check()
    assert life.ledger.match(ids_bytes([2] * 41)).num_tokens == 0  # was used the longest ago
    assert life.ledger.match(ids_bytes([1] * 41)).num_tokens == 40


def test_a_fork_within_a_prompt_keeps_the_tail_at_its_end() -> None:
    life = Life(WINDOW, 900)
    text = life.open([1, 2] * 20)
    life.extend((text, 30))
    fork = Text(life.ledger.fork(text.sequence), text.ids[:], text.prompt)
    life.apply()
    life.close(text, cache=False)
    life.finish_prompt(fork)
    life.decode(fork, 40)
    life.check()
    assert life.ledger.match(ids_bytes([1, 2] * 20 + [7])).num_tokens == 40


def test_what_was_not_published_is_no_branch() -> None:
    """The second text shares what the first one has published, and computed the windows' part itself."""
    life = Life(WINDOW, 900)
    first, second = (life.open([3] * 50 + [10] * 30) for _ in range(2))
    life.extend((second, 55))
    life.finish_prompt(first)
    life.extend((second, 3))
    assert second.sequence.shared == 55
    life.close(first)
    prompt = ids_bytes([3] * 50 + [11] * 5)
    assert life.ledger.find_branch(prompt) is None


def test_tails_that_sessions_protect_are_evicted_last() -> None:
    life = Life(WINDOW, 900)
    for token, session in ((1, "a"), (2, None)):
        text = life.open([token] * 40, session)
        life.finish_prompt(text)
        life.close(text)
    for num_evicted in (1, 24, 40):  # the other text's tail, what is left of it, and a tail and a token
        life.ledger.evict(num_evicted)
        life.apply()
        life.check()
        assert life.ledger.match(ids_bytes([1] * 40 + [9])).num_tokens == (40 if num_evicted < 40 else 0)
    assert life.ledger.match(ids_bytes([2] * 40 + [9])).num_tokens == 0


def test_a_chunk_that_is_undone_leaves_the_prompts_tail_to_be_kept() -> None:
    life = Life(WINDOW, 900)
    text = life.open([1, 2] * 20)
    life.extend((text, 30))
    life.ledger.shrink([text.sequence], [10])
    life.apply()
    life.finish_prompt(text)
    life.decode(text, 40)
    life.close(text)
    life.check()
    assert life.ledger.match(ids_bytes([1, 2] * 20 + [7])).num_tokens == 40


def test_going_back_further_than_what_is_held_is_refused() -> None:
    life = Life(WINDOW, 400)
    text = life.open([1] * 40)
    life.finish_prompt(text)
    life.decode(text, 30)
    before = life.ledger.holdings()
    with pytest.raises(ValueError, match="open a sequence for these tokens"):
        life.ledger.truncate(text.sequence, 30)
    with pytest.raises(ValueError, match="6"):
        life.ledger.shrink([text.sequence], [20])
    assert life.ledger.holdings() == before
    assert not life.ledger.drain()


@pytest.mark.parametrize("name", GROUPS)
def test_imported_tokens_take_slots_where_they_come_and_are_hit(name: str) -> None:
    """Windows get what their next tokens see; a prefix that is there already is not taken a second time."""
    groups = GROUPS[name]
    life = Life(groups, 300 * groups.num_groups)
    first = life.open([1] * 20 + [2])
    life.finish_prompt(first)
    life.close(first)
    text = life.open([1] * 20 + [3] * 50)
    hit, before = text.sequence.length, life.ledger.num_held
    assert hit == 20
    length = 60
    life.bring(text, length)
    life.check()
    parts = [one.num_groups * (length - one.lifetime.rule.first_seen(length)) for one in groups.classes[1:]]
    assert life.ledger.num_held <= before + groups.widths[0] * (length - hit) + sum(parts)
    life.finish_prompt(text)
    life.decode(text, 12)
    life.close(text)
    assert life.open([1] * 20 + [3] * 50 + [4]).sequence.length == 70
    life.check()


def test_an_import_that_lacks_what_is_seen_is_refused() -> None:
    life = Life(WINDOW, 400)
    text = life.open([1] * 60)
    for length, firsts, said in [
        (40, [36], "sees those from \\[35\\] on"),
        (40, [-1], "begins at \\[-1\\]"),
        (40, [35, 35], "begins at"),
        (0, [0], "has 0 tokens already"),
    ]:
        with pytest.raises(ValueError, match=said):
            life.ledger.extend_imported(text.sequence, length, firsts)
    with pytest.raises(SequenceTooLong):
        life.ledger.extend_imported(text.sequence, 130, [100])
    life.check()
    assert life.ledger.num_held == 0


def computed_in_conversations(groups: LayerGroups, capacity: int) -> int:
    """Returns how many prompt tokens twelve conversations of ten turns compute, whose turns come in any order,
    and each of which rewrites the last tokens of the answer before it."""
    rng = random.Random(0)
    ledger = TokenLedger(capacity, 4, 4000, groups=groups)
    texts = [[1] * 40 + [100 + number] for number in range(CONVERSATIONS)]
    computed = 0
    order = [number for number in range(CONVERSATIONS) for _ in range(10)]
    rng.shuffle(order)
    for number in order:
        prompt = texts[number] + [rng.randrange(1000) for _ in range(rng.randrange(10, 60))]
        answer = [rng.randrange(1000) for _ in range(rng.randrange(10, 60))]
        sequence = ledger.open(ids_bytes(prompt))
        computed += len(prompt) - sequence.num_hit
        ledger.extend([sequence], [len(prompt) - sequence.length])
        ledger.publish(sequence)
        ledger.confirm(ledger.step)
        for _ in answer[1:]:
            ledger.extend([sequence], [1])
        ledger.close(sequence, ids_bytes(answer))
        texts[number] = prompt + answer[:-4] + [7] * 4
    ledger.check()
    return computed


CONVERSATIONS = 12


@pytest.mark.parametrize(("occupancy", "most"), [(0.5, 1.02), (0.9, 1.15)])
def test_conversations_compute_little_more_than_with_an_unbounded_cache(
    occupancy: float, most: float
) -> None:
    """The conversations' tokens, and a tail of each, fill this share of the pool."""
    groups = groups_of(("full", 0, 1), ("window", 80, 3))
    num_tokens = CONVERSATIONS * 10 * 70 + 40  # turns of 20 to 118 tokens, after what all begin with
    tail = groups.slots(1000) - 1000
    capacity = int((num_tokens + (CONVERSATIONS + 1) * tail) / occupancy)
    unbounded = computed_in_conversations(groups, 10**6)
    assert computed_in_conversations(groups, capacity) <= most * unbounded


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("seed", [4, *slow(0, 1, 2, 3, 5)])
def test_random_lives(name: str, seed: int) -> None:
    live(GROUPS[name], random.Random(f"{name} {seed}"), 250)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", GROUPS)
def test_a_million_verbs_of_random_lives(name: str) -> None:
    for seed in range(500):
        live(GROUPS[name], random.Random(f"{name} {seed} long"), 400)


def live(groups: LayerGroups, rng: random.Random, num_verbs: int) -> None:
    """Lets sequences come and go, fork, go back, and end, in a pool that is too small for all."""
    life = Life(groups, rng.randrange(60, 260) * groups.num_groups)
    ledger = life.ledger
    texts: list[Text] = []
    known: list[list[int]] = [[1]]  # texts to begin with
    for _ in range(num_verbs):
        verb = rng.choices(
            ["open", "import", "extend", "fork", "truncate", "shrink", "close", "evict"], VERBS
        )[0]
        text = rng.choice(texts) if texts else None
        if verb == "open" and len(texts) < 6:
            base = rng.choice(known)
            ids = base[: rng.randrange(1, len(base) + 1)] + rng.choices(range(3), k=rng.randrange(1, 25))
            session, keeps = rng.choice([None, None, "a", "b"]), rng.random() < 0.5
            texts.append(life.open(ids[:100], session, keeps))
        elif text is None:
            continue
        elif verb == "import" and text.sequence.length < len(text.ids):
            bring_some(life, text, rng)
        elif verb == "extend":
            extend_some(life, texts, rng)
        elif verb == "fork" and len(texts) < 6:
            texts.append(Text(ledger.fork(text.sequence), text.ids[:], text.prompt))
            life.apply()
        elif verb in ("truncate", "shrink") and text.sequence.length:
            go_back(life, texts, text, verb, rng.randrange(12))
        elif verb == "close":
            texts.remove(text)
            if text.sequence.length:
                known.append(text.ids[: text.sequence.length][:90])
            life.close(text, rng.random() < 0.8)
        elif verb == "evict" and ledger.num_cached and rng.random() < 0.3:
            ledger.evict(rng.randrange(1, ledger.num_cached + 1))
            life.apply()
        life.check()
    for text in texts:
        life.close(text)
    life.check()
    assert ledger.num_held == 0
    ledger.evict(ledger.num_cached)
    life.apply()
    life.check()
    assert ledger.num_free == ledger.capacity


VERBS = [3, 1, 12, 1, 1, 1, 2, 1]


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3)])
def test_what_failed_steps_wrote_is_never_read(name: str, seed: int) -> None:
    """Up to two steps are in flight. What those wrote is garbage once the older one fails."""
    rng, groups = random.Random(f"{name} {seed} fails"), GROUPS[name]
    life = Life(groups, rng.randrange(150, 400) * groups.num_groups)
    ledger, written = life.ledger, life.memory.written
    texts: list[Text] = []
    known: list[list[int]] = [[1]]
    steps: list[
        tuple[int, list[Text], dict[int, object]]
    ] = []  # in flight, with what was in the slots before
    for _ in range(200):
        busy = [text for _, batch, _ in steps for text in batch]
        if len(texts) < 6 and rng.random() < 0.4:
            base = rng.choice(known)
            ids = base[: rng.randrange(1, len(base) + 1)] + rng.choices(range(3), k=rng.randrange(1, 25))
            texts.append(life.open(ids[:90], keep_branch=rng.random() < 0.5))
        for text in [text for text in texts if text not in busy and rng.random() < 0.1]:
            texts.remove(text)
            known.append(text.ids[: text.sequence.length] or [1])
            life.close(text)
        if texts and len(steps) < 2:
            before = dict(written)
            batch = rng.sample(texts, rng.randrange(1, len(texts) + 1))
            batch = extend_some(life, batch, rng, confirm=False)
            steps.append((ledger.step, batch, before))
            ledger.step += 1
        if steps and rng.random() < 0.6:
            step, _, before = steps[0]
            if rng.random() < 0.8:
                ledger.confirm(step)
                del steps[0]
            else:
                for slot, what in written.items():
                    if before.get(slot) is not what:
                        written[slot] = "garbage"
                busy = [text for _, batch, _ in steps for text in batch]
                for text in texts[:]:  # also those that have only been opened, which may have hit what failed
                    if text in busy or text.sequence.length == text.sequence.num_hit:
                        texts.remove(text)
                        life.close(text, cache=False)
                steps.clear()
                ledger.retract()
                life.apply()
        life.check()


def go_back(life: Life, texts: list[Text], text: Text, verb: str, count: int) -> None:
    """Takes the last tokens of a text back, unless the ledger refuses, which then has changed nothing."""
    sequence, length = text.sequence, max(text.sequence.length - count, 1)
    before = life.ledger.holdings()
    try:
        if verb == "truncate":
            life.ledger.truncate(sequence, length)
        else:
            life.ledger.shrink([sequence], [sequence.length - length])
    except ValueError:
        assert life.ledger.holdings() == before
        assert not life.ledger.drain()
        return
    life.apply()
    if verb == "truncate":
        texts[texts.index(text)] = Text(sequence, text.ids[:length], min(text.prompt, length))


def bring_some(life: Life, text: Text, rng: random.Random) -> None:
    """Gives a text K/V from elsewhere, if the pool has room."""
    before = life.ledger.holdings(), life.ledger.num_free
    length = rng.randrange(text.sequence.length + 1, len(text.ids) + 1)
    try:
        life.bring(text, length, rng.randrange(8))
    except OutOfTokens:
        assert (life.ledger.holdings(), life.ledger.num_free) == before


def extend_some(life: Life, texts: list[Text], rng: random.Random, confirm: bool = True) -> list[Text]:
    """Extends some of the texts, and publishes most of what is of their prompts. Returns those that it has
    extended."""
    batch = rng.sample(texts, rng.randrange(1, len(texts) + 1))
    wanted = []
    for text in batch:
        length = text.sequence.length
        left = text.prompt - length
        count = min(left, rng.randrange(1, 20)) if left > 0 else 1
        if length + count > 118:
            continue
        while len(text.ids) < length + count:
            text.ids.append(rng.randrange(3))
        wanted.append((text, count))
    if not wanted:
        return []
    sequences = [text.sequence for text, _ in wanted]
    enough = life.ledger.growth(sequences, max(count for _, count in wanted))
    available = life.ledger.num_available
    try:
        life.extend(*wanted)
    except OutOfTokens:
        assert enough > available
        life.apply()
        return []
    for text, _ in wanted:
        if rng.random() < 0.7 and text.sequence.length <= text.prompt:
            life.publish(text, confirm)
    return [text for text, _ in wanted]


@pytest.mark.parametrize("sees", ["window", "chunk"])
@pytest.mark.parametrize("size", [1, 5, 20])
def test_no_sequence_holds_more_than_its_class_says(sees: str, size: int) -> None:
    """A prompt hits a tail, is computed in chunks, and decodes."""
    groups = groups_of(("full", 0, 1), (sees, size, 1))
    life = Life(groups, 2000)
    first = life.open([1] * 60)
    life.finish_prompt(first)
    life.close(first)
    text = life.open([*[1] * 60, *range(2, 42)])
    while text.sequence.length < text.prompt:
        life.extend((text, 10))
        life.publish(text)
        (row,) = life.ledger.holdings().rows
        (window,) = row.windows
        assert text.sequence.length - window.start <= groups.classes[1].lifetime.most_kept(100, 10)
    life.decode(text, 15)
    assert life.ledger.num_held <= groups.most_slots(text.sequence.length, 10)


def random_groups(rng: random.Random) -> LayerGroups:
    """Returns one to three classes beside the one that sees everything, of two to eight groups in all."""
    classes = [("full", 0, rng.randrange(1, 3))]
    sizes = rng.sample([*range(1, 12), 16, 24, 32, 48, 64], rng.randrange(1, 4))
    classes += [(rng.choice(["window", "chunk"]), size, rng.randrange(1, 3)) for size in sizes]
    return groups_of(*classes)


@pytest.mark.parametrize("seed", [*range(3), *slow(3, 4, 5)])
def test_random_lives_of_random_classes(seed: int) -> None:
    rng = random.Random(seed)
    groups = random_groups(rng)
    assert groups.classes[0].lifetime == FULL
    live(groups, rng, 150)


@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
def test_what_failed_steps_wrote_is_never_read_in_random_classes(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = random_groups(random.Random(seed))
    monkeypatch.setitem(GROUPS, "random", groups)
    test_what_failed_steps_wrote_is_never_read("random", seed)
