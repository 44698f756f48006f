"""A life of a ledger with states: steps of pieces, of which some fail, beside a model whose states are hashes
of all tokens that they have read."""

import random
from array import array
from collections import deque
from dataclasses import dataclass, field

from lightkv.errors import OutOfTokens
from lightkv.layer_groups import ONE_GROUP, LayerGroups
from lightkv.ledger import TokenLedger
from lightkv.ledger.sequence import Sequence
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


def states_needed(ledger: TokenLedger, sequences: list[Sequence]) -> int:
    """Returns how many slots of states are enough to extend each of these once."""
    of = ledger._state.states
    return 0 if of is None else of.needed(sequences)


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
        of = None if session is None else self.ledger.sessions.open(session)
        text = Text(self.ledger.open(ids_bytes(ids), (), of, keep_at or []), len(ids), [])
        text.add(ids)
        self.apply()
        return text

    def extend(self, texts: list[Text], counts: list[int]) -> None:
        """Plans pieces of these texts, which the step computes beside one another. A refused extension changes
        nothing but what windows have passed."""
        ledger, sequences = self.ledger, [text.sequence for text in texts]
        lengths, needed = [one.length for one in sequences], states_needed(ledger, sequences)
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


def random_life(name: str, rng: random.Random) -> Life:
    """Returns a life of these groups, in pools that are too small for all its sequences."""
    groups = GROUPS[name]
    return Life(groups, rng.randrange(80, 400) * groups.num_groups, rng.randrange(1, 14))


VERBS = {"open": 4, "step": 14, "fork": 1, "back": 1, "close": 3, "evict": 1}


def live(life: Life, rng: random.Random, num_verbs: int) -> None:
    """Lets sequences come, fork, go back and end, by their length, stop tokens, stop strings and aborts, with
    up to two steps in flight, of which some fail, in pools that are too small for all."""
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
