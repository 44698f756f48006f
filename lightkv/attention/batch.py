"""What a step computes, on the host: which rows, from where on, and how many tokens of each."""

import reprlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightkv.attention.forms.form import PLAIN, Form
from lightkv.ledger.shared_prefixes import SharedPrefix
from lightkv.memory.token_table import packed_ranges

from .shared_reads import SharedReads


@dataclass(frozen=True, eq=False)
class Batch:
    """The sequences of a step, packed: first the prefills, each with any number of tokens, then the decodes,
    with one token each. For B sequences with T tokens in all, on the host:

        tokens    ├──── prefill 0 ────┼─ prefill 1 ─┼ decode 2 ┼ decode 3 ┤
        counts             6                 4            1          1

    - `rows`, `starts`, `counts`: int64 `[B]`, each sequence's row of the token table, how many entries of it
      have K/V before this step, and how many tokens it computes;
    - `num_prefills`: the first so many sequences are prefills;
    - `positions`: int64 `[T]`, the true position of each token;
    - `form`: how the sequences hold their tokens;
    - `shared`: which decodes read their first entries together (`sharing`).

    `Batch.of` makes one in which every row has an entry for each token. A file of `lightkv.attention.forms`
    makes another form of it. Raises ValueError where the numbers make no batch.
    """

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    num_prefills: int
    positions: np.ndarray
    form: Form = PLAIN
    shared: SharedReads | None = None

    def __post_init__(self) -> None:
        rows, starts, counts, num_prefills = self.rows, self.starts, self.counts, self.num_prefills
        if not len(rows) == len(starts) == len(counts):
            raise ValueError(
                f"{len(rows)} rows, {len(starts)} starts and {len(counts)} counts: give one each a sequence"
            )
        if not 0 <= num_prefills <= len(rows):
            raise ValueError(f"{num_prefills} prefills; there can be 0 to {len(rows)} here")
        if len(rows) and (counts.min() < 1 or (counts[num_prefills:] != 1).any()):
            raise ValueError(
                f"counts {counts.tolist()} with {num_prefills} prefills: a prefill computes at least one "
                "token, a decode exactly one, and the prefills come first"
            )
        if len(self.positions) != (num_tokens := int(counts.sum())):
            raise ValueError(f"{len(self.positions)} positions of {num_tokens} tokens: give one each")

    @classmethod
    def of(
        cls,
        rows: Sequence[int] | np.ndarray,
        starts: Sequence[int] | np.ndarray,
        counts: Sequence[int] | np.ndarray,
        num_prefills: int,
    ) -> "Batch":
        """Returns the batch of these numbers. The slots of its tokens have to be in the token table before a
        step is made of it. Raises ValueError."""
        row, start, count = (integers(numbers) for numbers in (rows, starts, counts))
        same = len(start) == len(count)  # if not, the batch says so
        positions = packed_ranges(start, count) if same else start
        return cls(row, start, count, num_prefills, positions)

    @classmethod
    def empty(cls) -> "Batch":
        """Returns the batch of no sequences. In static tensors it is padding alone."""
        return cls.of([], [], [], 0)

    def at_positions(self, positions: Sequence[int]) -> "Batch":
        """Returns the batch with the position of each token, where they do not follow from the entries, as
        those of a tree of guesses. Raises ValueError for another number of positions."""
        return replace(self, positions=integers(positions))

    def sharing(self, prefixes: Sequence[SharedPrefix], most_members: int) -> "Batch":
        """Returns the batch whose decodes read their first entries together, where these are in the same slots
        (`KVCache.shared_prefixes`); no row twice. `most_members`: how many one read serves
        (`attention.prefix_members` of the backends); with 1, each reads its own. Raises ValueError."""
        if most_members <= 1:
            return self
        if not self.form.lookup.is_plain:
            raise ValueError(
                f"prefixes {prefixes} of sequences of {self.form}: only plain decodes read together, otherwise "
                "each sequence reads its own; run these apart"
            )
        begin = self.num_prefills
        return replace(
            self, shared=SharedReads.of(self.rows[begin:], self.starts[begin:], prefixes, most_members)
        )


def integers(numbers: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns a copy of the numbers, int64 `[n]`. Raises ValueError unless they are integers in one
    dimension."""
    if isinstance(numbers, np.ndarray):
        if numbers.ndim != 1 or (numbers.dtype.kind not in "iu" and numbers.size):
            raise ValueError(
                f"got {numbers.dtype} of shape {numbers.shape}: give integers in one dimension, one each a "
                "sequence or token"
            )
        return numbers.astype(np.int64)
    try:
        return np.array(array("q", numbers))  # unlike numpy, it takes integers alone
    except (TypeError, OverflowError) as error:
        raise ValueError(f"got {reprlib.repr(numbers)}: give a list of integers ({error})") from error
