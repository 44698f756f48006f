"""Other allocations to compare with: the ledger, where memory goes by pages, or by one run a request.

For the simulator alone: these count what a paged or a contiguous allocator would take, and drive no device.
The ledger underneath stays what it is, and counts tokens; beside it the *padding* is counted, slots that a
request keeps from others and has no token in. Capacity is `num_free + num_cached + num_held` as ever, and what
is held includes the padding.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from lightkv.errors import CheckFailed, SequenceTooLong
from lightkv.ledger import Match, Sequence, TokenLedger
from lightkv.ledger.prefix_tree import TOKEN_BYTES, Namespace

from .config import InvalidAllocation, page_of


class PagedLedger(TokenLedger):
    """A ledger in pages of `page` slots, as vLLM's: a page has one owner, and is shared, cached and evicted as
    a whole. Capacity is rounded down to whole pages.

        page       |      0        |      1        |      2        |
        entries    ├── shared, or computed ────────┼── last ──┤ padding
                   0                                        length

    A prefix is found by whole pages alone, and one page at least is left to compute where the prompt ends with
    one. In the tree a page is written as its number, which pages of the same ids have in common, and zeros: so
    two pages are equal or differ from their first token on, and no segment begins or ends within a page.
    """

    def __init__(self, capacity: int, max_sequences: int, max_entries: int, page: int) -> None:
        if capacity < page:
            raise InvalidAllocation(
                f"a capacity of {capacity} tokens is less than a page of {page}; give a larger --capacity"
            )
        super().__init__(capacity // page * page, max_sequences, max_entries)
        self.page = page
        self.padding = 0
        self._prompts: dict[int, bytes] = {}  # row → its prompt as it was given
        self._coded: dict[int, bytes] = {}  # row → the whole pages of it, as the tree has them
        self._numbers: dict[bytes, int] = {}  # ids of a page → its number
        self._next_number = 1
        self._last = (b"", b"")  # the prompt looked up last, and its code

    @property
    def num_free(self) -> int:
        """Slots of pages that nobody holds and nothing is cached in."""
        return self._paths.num_free - self.padding

    def slots(self, rows: Seq[int], lengths: np.ndarray, steps: int = 1) -> int:
        """Slots of the pages of sequences of these lengths; summed over `steps`, a token more in each."""

        def pages_up_to(
            length: np.ndarray,
        ) -> np.ndarray:  # of sequences of 1, 2 … length tokens, all together
            full, rest = np.divmod(length, self.page)
            return self.page * full * (full + 1) // 2 + rest * (full + 1)

        return self.page * int((pages_up_to(lengths + steps - 1) - pages_up_to(lengths - 1)).sum())

    def growth(self, sequences: Seq[Sequence], count: int = 1) -> int:
        """Slots that `count` tokens more for each of these take: where a last page is full, another one."""
        page = self.page
        if count == 1:
            return page * [sequence.length % page for sequence in sequences].count(0)
        return page * sum(
            [-(-(sequence.length + count) // page) + -sequence.length // page for sequence in sequences]
        )

    def growth_cycle(self, sequences: Seq[Sequence]) -> list[int]:
        """Slots that a token more for each takes in the next step and those after it; then it begins again."""
        lengths = np.array([sequence.length for sequence in sequences])
        at_end = np.bincount(-lengths % self.page, minlength=self.page)
        return (self.page * at_end).tolist()

    def match(self, token_ids: bytes, namespace: Namespace = ()) -> Match:
        """What `open` would hit: whole pages."""
        found = super().match(self._findable(self._code_prompt(token_ids), token_ids), namespace)
        assert found.num_tokens % self.page == 0
        return found

    def open(self, token_ids: bytes, namespace: Namespace = ()) -> Sequence:
        """A new sequence that holds the longest run of cached pages of its prompt."""
        if len(token_ids) > self.max_entries * TOKEN_BYTES:
            raise SequenceTooLong(len(token_ids) // TOKEN_BYTES, self.max_entries)
        coded = self._code_prompt(token_ids)
        sequence = super().open(self._findable(coded, token_ids), namespace)
        sequence.prompt = token_ids
        self._prompts[sequence.row] = token_ids
        self._coded[sequence.row] = coded
        return sequence

    def extend(self, sequences: Seq[Sequence], counts: Seq[int]) -> None:
        """`counts[i]` more tokens for `sequences[i]`, and the pages that takes; evicts cached pages."""
        page = self.page
        if len(set(counts)) <= 1:
            slots = self.growth(sequences, counts[0]) if counts else 0
        else:
            slots = page * sum(
                -(-(sequence.length + count) // page) + -sequence.length // page
                for sequence, count in zip(sequences, counts, strict=True)
            )
        before = self.padding
        # The tokens that are asked for less what they find in last pages: so that the pool is asked for pages.
        self.padding += slots - sum(counts)
        try:
            super().extend(sequences, counts)
        except BaseException:
            self.padding = before
            raise

    def publish(self, sequence: Sequence) -> None:
        """Let the whole pages that the sequence has of its prompt be hit by others."""
        size = self.page * TOKEN_BYTES
        coded = self._coded[sequence.row]
        end = min(sequence.length * TOKEN_BYTES // size * size, len(coded))
        if end > sequence.shared * TOKEN_BYTES:
            prompt, sequence.prompt = sequence.prompt, coded[:end]
            super().publish(sequence)
            sequence.prompt = prompt

    def close(self, sequence: Sequence, output_ids: bytes = b"", cache: bool = True) -> None:
        """End a sequence; its whole pages stay to be hit."""
        self.require_open(sequence)
        prompt, coded = self._prompts.pop(sequence.row), self._coded.pop(sequence.row)
        self.padding -= -sequence.length % self.page
        if cache:
            size = self.page * TOKEN_BYTES
            end = sequence.length * TOKEN_BYTES // size * size
            if end > len(coded):
                coded += self._code((prompt + output_ids)[len(coded) : end])
            sequence.prompt = coded[:end]
        super().close(sequence, b"", cache)

    def evict(self, count: int) -> None:
        """Free `count` cached tokens, and what else is in their pages."""
        super().evict(-(-count // self.page) * self.page)

    def shrink(self, sequences: Seq[Sequence], counts: Seq[int]) -> None:
        """Undo an `extend`, and give back the pages that hold nothing then."""
        before = sum(-sequence.length % self.page for sequence in sequences)
        super().shrink(sequences, counts)
        self.padding += sum(-sequence.length % self.page for sequence in sequences) - before

    def check(self) -> None:
        """Recount everything. Raises CheckFailed."""
        _check_tokens(self, super().check)
        padding = sum(-sequence.length % self.page for sequence in self.sequences)
        if padding != self.padding:
            raise CheckFailed(f"{self.padding} slots of padding in the books, {padding} by recount")
        if self.num_free < 0 or self.num_free % self.page or self.num_cached % self.page:
            raise CheckFailed(
                f"{self.num_free} slots free, {self.num_cached} cached, in pages of {self.page}"
            )

    def _findable(self, coded: bytes, token_ids: bytes) -> bytes:
        """What of a prompt may be found, and one token, which is left to compute."""
        size = self.page * TOKEN_BYTES
        return coded[: (len(token_ids) - TOKEN_BYTES) // size * size] + token_ids[:TOKEN_BYTES]

    def _code_prompt(self, token_ids: bytes) -> bytes:
        if self._last[0] is not token_ids:  # a prompt that waits is looked up again and again
            self._last = token_ids, self._code(token_ids)
        return self._last[1]

    def _code(self, token_ids: bytes) -> bytes:
        """The whole pages of these ids, as the tree has them."""
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
        """Forget the numbers of pages that are nowhere any more."""
        known = [segment.tokens for segment in self._paths.tree]
        known += [*self._coded.values(), self._last[1]]
        size = self.page
        used = {number for tokens in known for number in np.frombuffer(tokens, np.int32)[::size].tolist()}
        for ids in [ids for ids, number in self._numbers.items() if number not in used]:
            del self._numbers[ids]


class ContiguousLedger(TokenLedger):
    """One run of slots a request, as long as it may get: its prompt and `max_new` tokens. Nothing is shared.

    No room is lost between runs, as though they could be moved: a pool of equal runs, or one that compacts
    itself. A real one holds less.
    """

    def __init__(self, capacity: int, max_sequences: int, max_entries: int, max_new: int) -> None:
        super().__init__(capacity, max_sequences, max_entries)
        self.padding = 0
        self._max_new = max_new
        self._runs: dict[int, int] = {}  # row → slots of its run

    @property
    def num_free(self) -> int:
        """Slots that are in nobody's run."""
        return self._paths.num_free - self.padding

    @property
    def num_available(self) -> int:
        """Tokens that `extend` could give: runs have been reserved, so those that are in none yet, too."""
        return self._paths.num_free

    def slots(self, rows: Seq[int], lengths: np.ndarray, steps: int = 1) -> int:
        """Slots of the runs of these rows; summed over `steps`."""
        return steps * sum([self._runs[row] for row in rows])

    def growth(self, sequences: Seq[Sequence], count: int = 1) -> int:
        """Tokens take slots of the run: nothing of the pool."""
        return 0

    def growth_cycle(self, sequences: Seq[Sequence]) -> list[int]:
        """The same."""
        return [0]

    def match(self, token_ids: bytes, namespace: Namespace = ()) -> Match:
        """Nothing is shared."""
        return Match((), 0, 0)

    def open(self, token_ids: bytes, namespace: Namespace = ()) -> Sequence:
        """A new sequence with a run of its own."""
        sequence = super().open(token_ids, namespace)
        run = len(token_ids) // TOKEN_BYTES + self._max_new - 1  # the last token is never written
        self._runs[sequence.row] = run
        self.padding += run
        if self.num_free < 0:
            raise CheckFailed(f"a run of {run} slots was admitted, and {self.num_free + run} are free")
        return sequence

    def extend(self, sequences: Seq[Sequence], counts: Seq[int]) -> None:
        """`counts[i]` more slots of its run for `sequences[i]`."""
        total = sum(counts)
        self.padding -= total
        try:
            super().extend(sequences, counts)
        except BaseException:
            self.padding += total
            raise

    def shrink(self, sequences: Seq[Sequence], counts: Seq[int]) -> None:
        """Undo an `extend`: the run keeps its slots."""
        super().shrink(sequences, counts)
        self.padding += sum(counts)

    def publish(self, sequence: Sequence) -> None:
        """Nothing is shared."""

    def close(self, sequence: Sequence, output_ids: bytes = b"", cache: bool = True) -> None:
        """End a sequence; nothing of it stays."""
        self.require_open(sequence)
        self.padding -= self._runs.pop(sequence.row) - sequence.length
        super().close(sequence, b"", cache=False)

    def check(self) -> None:
        """Recount everything. Raises CheckFailed."""
        _check_tokens(self, super().check)
        padding = sum(self._runs[sequence.row] - sequence.length for sequence in self.sequences)
        if padding != self.padding or self.num_free < 0:
            raise CheckFailed(f"{self.padding} slots of padding in the books, {padding} by recount")


def make_ledger(
    allocation: str, capacity: int, max_sequences: int, max_entries: int, max_new: int
) -> TokenLedger:
    """The ledger of an allocation's name. `max_new`: tokens that a contiguous one reserves behind a prompt."""
    page = page_of(allocation)
    if page == 1:
        return TokenLedger(capacity, max_sequences, max_entries)
    if not page:
        return ContiguousLedger(capacity, max_sequences, max_entries, max_new)
    return PagedLedger(capacity, max_sequences, max_entries, page)


def _check_tokens(ledger: PagedLedger | ContiguousLedger, check: Callable[[], None]) -> None:
    """The ledger's own recount, which is of tokens."""
    padding, ledger.padding = ledger.padding, 0
    try:
        check()
    finally:
        ledger.padding = padding
