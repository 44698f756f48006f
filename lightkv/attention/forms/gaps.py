"""Sequences that have dropped tokens: the tokens that they hold keep their true positions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightkv.attention.batch import Batch
from lightkv.triton_kernels.attention.variants.tree import TreeMask
from lightkv.triton_kernels.attention.variants.variant import Variant

from .form import PLAIN, Form


@dataclass(frozen=True)
class Gaps(Form):
    """`dropped`: how many tokens each sequence has dropped so far, at least one of them more than none."""

    dropped: tuple[int, ...]

    @property
    def is_static(self) -> bool:
        return False  # a graph moves positions on as entries

    def check_mask(self, mask: Variant) -> None:
        if not isinstance(mask, TreeMask):
            raise ValueError(
                f"a mask of values and {list(self.dropped)} dropped tokens: its columns are positions, and "
                "these sequences do not hold all of theirs; run them without a mask, or with one of bits"
            )


def with_gaps(batch: Batch, dropped: Sequence[int]) -> Batch:
    """Returns a batch of the same sequences, each of which has dropped so many tokens: the position of an entry
    is the entry plus that number. The same batch where no sequence has dropped any.

    Raises ValueError for another number of sequences, for numbers below 0, and for a batch that is not plain.
    """
    gaps = np.array(dropped, dtype=np.int64)
    if len(gaps) != len(batch.rows) or (gaps < 0).any():
        raise ValueError(
            f"{gaps.tolist()} tokens dropped by {len(batch.rows)} sequences: give 0 or more, one number a "
            "sequence"
        )
    if not gaps.any():
        return batch
    if batch.form != PLAIN:
        raise ValueError(
            f"{gaps.tolist()} tokens dropped by sequences of {batch.form}: tokens are dropped by sequences "
            "whose rows are their own; run these in a step of their own"
        )
    positions = batch.positions + np.repeat(gaps, batch.counts)
    return replace(batch, positions=positions, form=Gaps(tuple(gaps.tolist())))
