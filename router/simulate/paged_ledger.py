"""Ledgers for other ways to allocate, for comparison: by pages, or one run of slots per request.

They are for the simulator and the benchmarks: they count what a paged or a contiguous allocator would hold, and
drive no device memory. Each is a `TokenLedger`, which counts tokens, and counts beside it the *padding*: slots
that a request keeps from others without a token in them. `num_free + num_cached + num_held == capacity`
holds here, too; `num_held` includes the padding.
"""

from collections.abc import Sequence as Seq

import numpy as np

from lightkv.edits import Alloc
from lightkv.errors import CheckFailed, OutOfTokens, SequenceTooLong
from lightkv.layer_groups import ONE_GROUP, LayerGroups
from lightkv.ledger import Match, Sequence, TokenLedger
from lightkv.ledger.ledger import S
from lightkv.ledger.prefix_tree import TOKEN_BYTES, Namespace

from .config import InvalidSimulation, SimulationConfig, page_of


class PaddedLedger(TokenLedger):
    """A token ledger and a count of padding. Its verbs do not change the padding; subclasses add the others.

    Sessions protect nothing here.
    """

    padding = 0

    @property
    def num_free(self) -> int:
        """Slots that no sequence holds and the cache does not keep."""
        return super().num_free - self.padding

    @property
    def num_held(self) -> int:
        """Slots that open sequences hold, padding included; shared slots count once."""
        return super().num_held + self.padding

    @property
    def num_available(self) -> int:
        """Slots that are free or can be evicted."""
        return super().num_available - self.padding

    def _open(self, sequence: S, num_entries: int, namespace: Namespace, within: Namespace = ()) -> S:
        sequence.session = None
        return super()._open(sequence, num_entries, namespace, within)


class PagedLedger(PaddedLedger):
    """A ledger in pages of `page` slots, like vLLM's: a page has one owner, and is shared, cached and evicted
    as a whole. Capacity is rounded down to whole pages.

        page       |      0        |      1        |      2        |
        entries    ├── shared, or computed ────────┼── last ──┤ padding
                   0                                        length

    Only whole pages of a prefix are hit, and where a prompt ends with a whole page, that page at least is left
    to compute. In the token ledger the token ids of a page are written as a number, the same for pages with the
    same ids, followed by zeros. So two pages are equal or differ from their first token on, and no segment
    begins or ends within a page. A sequence's `prompt` is in this code.
    """

    def __init__(self, capacity: int, max_sequences: int, max_entries: int, page: int) -> None:
        if capacity < page:
            raise InvalidSimulation(
                f"a capacity of {capacity} tokens is less than a page of {page}; give a larger --capacity"
            )
        super().__init__(capacity // page * page, max_sequences, max_entries)
        self.page = page
        self._prompts: dict[int, bytes] = {}  # row → its prompt's token ids
        self._coded: dict[int, bytes] = {}  # row → the code of the whole pages of its prompt
        self._numbers: dict[bytes, int] = {}  # token ids of a page → its number
        self._next_number = 1
        self._last = (b"", b"")  # the prompt looked up last, and its code

    def growth(self, sequences: Seq[Sequence], count: int = 1) -> int:
        """Returns the slots of the pages that are needed to extend each of these by `count` tokens."""
        return self._slots_for(sequences, [count] * len(sequences))

    def _slots_for(self, sequences: Seq[Sequence], counts: Seq[int]) -> int:
        """Returns the slots of the pages that are needed to extend each sequence by its count of tokens."""
        page, pairs = self.page, zip(sequences, counts, strict=True)
        return page * sum([-(-(one.length + count) // page) + -one.length // page for one, count in pairs])

    def match(self, token_ids: bytes, namespace: Namespace = ()) -> Match:
        """Returns the whole pages that `open` would hit."""
        found = super().match(self._findable(self._code_prompt(token_ids), token_ids), namespace)
        assert found.num_tokens % self.page == 0
        return found

    def _open(self, sequence: S, num_entries: int, namespace: Namespace, within: Namespace = ()) -> S:
        """Opens a sequence that holds the longest run of cached pages of its prompt."""
        prompt = sequence.prompt
        coded = self._code_prompt(prompt)
        sequence.prompt = self._findable(coded, prompt)
        super()._open(sequence, num_entries, namespace, within)
        self._prompts[sequence.row] = prompt
        self._coded[sequence.row] = coded
        return sequence

    def extend(self, sequences: Seq[Sequence], counts: Seq[int]) -> Alloc:
        """Allocates the pages for `counts[i]` more tokens of `sequences[i]`; evicts cached pages."""
        slots = self._slots_for(sequences, counts)
        if slots > self.num_free:
            self._make_page_room(slots, sequences, counts)
        alloc = super().extend(sequences, counts)
        self.padding += slots - sum(counts)
        return alloc

    def _make_page_room(self, slots: int, sequences: Seq[Sequence], counts: Seq[int]) -> None:
        """Evicts pages until `slots` are free. Raises OutOfTokens, and what `extend` would raise after it."""
        longest = max(one.length + count for one, count in zip(sequences, counts, strict=True))
        if longest > self.max_entries:
            raise SequenceTooLong(longest, self.max_entries)
        for sequence in sequences:
            self.require_open(sequence)
        if slots > self.num_available:
            raise OutOfTokens(slots, self.num_available, self.capacity)
        self.evict(slots - self.num_free)

    def publish(self, sequence: Sequence) -> None:
        """Lets other sequences hit the whole pages that the sequence has of its prompt."""
        size = self.page * TOKEN_BYTES
        coded = self._coded[sequence.row]
        end = min(sequence.length * TOKEN_BYTES // size * size, len(coded))
        if end > sequence.shared * TOKEN_BYTES:
            self.set_prompt(sequence, coded[:end])
            super().publish(sequence)

    def close(self, sequence: Sequence, output_ids: bytes = b"", cache: bool = True) -> None:
        """Closes a sequence; with `cache` its whole pages stay to be hit."""
        self.require_open(sequence)
        prompt, coded = self._prompts.pop(sequence.row), self._coded.pop(sequence.row)
        self.padding -= -sequence.length % self.page
        if cache:
            size = self.page * TOKEN_BYTES
            end = sequence.length * TOKEN_BYTES // size * size
            if end > len(coded):
                coded += self._code((prompt + output_ids)[len(coded) : end])
            self.set_prompt(sequence, coded[:end])
        super().close(sequence, b"", cache)

    def evict(self, count: int) -> None:
        """Frees at least `count` cached slots, by whole pages."""
        super().evict(-(-count // self.page) * self.page)

    def check(self) -> None:
        super().check()
        padding = sum(-sequence.length % self.page for sequence in self.sequences)
        if padding != self.padding:
            raise CheckFailed(f"{self.padding} slots of padding by the ledger's count, {padding} by recount")
        if self.num_free < 0 or self.num_free % self.page or self.num_cached % self.page:
            raise CheckFailed(
                f"{self.num_free} slots free, {self.num_cached} cached, in pages of {self.page}"
            )

    def _findable(self, coded: bytes, token_ids: bytes) -> bytes:
        """Returns the code of the pages that may be hit, and one more token, which is left to compute."""
        size = self.page * TOKEN_BYTES
        return coded[: (len(token_ids) - TOKEN_BYTES) // size * size] + token_ids[:TOKEN_BYTES]

    def _code_prompt(self, token_ids: bytes) -> bytes:
        if self._last[0] is not token_ids:  # a waiting prompt is looked up in every step
            self._last = token_ids, self._code(token_ids)
        return self._last[1]

    def _code(self, token_ids: bytes) -> bytes:
        """Returns the code of the whole pages of these token ids."""
        size = self.page * TOKEN_BYTES
        numbers = self._numbers
        if len(numbers) > 2 * self.capacity // self.page + 1024:
            self._forget()
        coded = np.zeros((len(token_ids) // size, self.page), np.int32)
        for i in range(len(coded)):
            ids = token_ids[i * size : (i + 1) * size]
            number = numbers.get(ids)
            if number is None:
                number = numbers[ids] = self._next_number
                self._next_number += 1
            coded[i, 0] = number
        return coded.tobytes()

    def _forget(self) -> None:
        """Forgets the numbers of pages that neither the tree nor an open sequence has."""
        known = [segment.tokens for segment in self.tree]
        known += [*self._coded.values(), self._last[1]]
        size = self.page
        used = {number for tokens in known for number in np.frombuffer(tokens, np.int32)[::size].tolist()}
        for ids in [ids for ids, number in self._numbers.items() if number not in used]:
            del self._numbers[ids]


class ContiguousLedger(PaddedLedger):
    """One run of slots per request, as long as the request may get: its prompt and `max_new` tokens. No token
    is shared or cached.

    No room is lost between runs, as if they could be moved or were all equally long. A real allocator holds
    fewer requests.
    """

    def __init__(self, capacity: int, max_sequences: int, max_entries: int, max_new: int) -> None:
        super().__init__(capacity, max_sequences, max_entries)
        self._max_new = max_new
        self._runs: dict[int, int] = {}  # row → slots of its run

    @property
    def num_available(self) -> int:
        """Tokens that `extend` can allocate: the slots in no run, and those of runs that have no token yet."""
        return self.num_free + self.padding

    def growth(self, sequences: Seq[Sequence], count: int = 1) -> int:
        """Returns 0: tokens use the slots of their run."""
        return 0

    def match(self, token_ids: bytes, namespace: Namespace = ()) -> Match:
        """Returns an empty match."""
        return Match((), 0, 0)

    def _open(self, sequence: S, num_entries: int, namespace: Namespace, within: Namespace = ()) -> S:
        """Opens a sequence with a run of its own."""
        super()._open(sequence, num_entries, namespace, within)
        run = num_entries + self._max_new - 1  # the last token's K/V is never written
        self._runs[sequence.row] = run
        self.padding += run
        if self.num_free < 0:
            raise CheckFailed(f"a run of {run} slots was admitted, and {self.num_free + run} are free")
        return sequence

    def extend(self, sequences: Seq[Sequence], counts: Seq[int]) -> Alloc:
        """Uses `counts[i]` more slots of the run of `sequences[i]`."""
        alloc = super().extend(sequences, counts)
        self.padding -= sum(counts)
        return alloc

    def publish(self, sequence: Sequence) -> None:
        """Does nothing, because no token is shared."""

    def close(self, sequence: Sequence, output_ids: bytes = b"", cache: bool = True) -> None:
        """Closes a sequence and frees its run."""
        self.require_open(sequence)
        self.padding -= self._runs.pop(sequence.row) - sequence.length
        super().close(sequence, b"", cache=False)

    def check(self) -> None:
        super().check()
        padding = sum(self._runs[sequence.row] - sequence.length for sequence in self.sequences)
        if padding != self.padding or self.num_free < 0:
            raise CheckFailed(
                f"{self.padding} slots of padding by the ledger's count, {padding} by recount, "
                f"{self.num_free} slots free"
            )


def make_ledger(
    config: SimulationConfig, capacity: int, longest: int, groups: LayerGroups = ONE_GROUP
) -> TokenLedger:
    """Returns the ledger of the setting's allocation, of `capacity` slots, for requests of up to `longest`
    tokens. "token" alone knows `groups`, of layers that do not all see everything, and states."""
    page, rows = page_of(config.allocation), config.max_num_seqs
    if page == 1:
        return TokenLedger(capacity, rows, longest, groups=groups, num_states=config.states)
    if not page:
        return ContiguousLedger(capacity, rows, longest, config.max_new)
    return PagedLedger(capacity, rows, longest, page)
