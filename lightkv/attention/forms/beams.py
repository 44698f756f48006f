"""Rows that read some positions from other rows, as those of beams: a table of beams names the row for each."""

from dataclasses import dataclass, replace

import torch

from lightkv.attention.batch import Batch
from lightkv.memory.token_table import TokenTable
from lightkv.triton_kernels.attention.lookups import BeamTable, Lookup

from .form import PLAIN, Form


@dataclass(frozen=True, eq=False)
class Beams(Form):
    """`indirection`: int32 `[table rows, n]` on the device, the row whose slot is read for each position of a
    row (`BeamTable`)."""

    indirection: torch.Tensor

    @property
    def lookup(self) -> Lookup:
        return BeamTable(self.indirection)

    def check_table(self, batch: Batch, table: TokenTable) -> None:
        wanted, longest = len(table.req_to_token), int((batch.starts + batch.counts).max(initial=0))
        given = self.indirection
        if (
            given.dim() != 2
            or given.dtype != torch.int32
            or len(given) != wanted
            or given.shape[1] < longest
            or given.device != table.device
        ):
            raise ValueError(
                f"indirection must be int32 [{wanted}, n] on {table.device}, a row for each of the table and n "
                f"of {longest} or more; got {given.dtype} {tuple(given.shape)} on {given.device}"
            )

    def check_scores(self) -> None:
        raise ValueError(
            "a step with an indirection is not scored by entries; use rows that hold their own tokens in order"
        )


def over_beams(batch: Batch, indirection: torch.Tensor) -> Batch:
    """Returns a batch of the same sequences, which read each position from the row that `indirection` names
    (`Beams`), and write new K/V to their own slots. A captured graph reads the tensor that it was captured
    with.

    Raises ValueError where sequences have dropped tokens, are of another form, or read prefixes together.
    Whether the tensor fits is checked when a step is made.
    """
    if batch.form != PLAIN or batch.shared is not None:
        raise ValueError(
            f"an indirection with {batch.form}, prefixes {batch.shared}: it names a row for each position, so "
            "nothing may be dropped, rows hold their own tokens in order, and each sequence reads its "
            "own; run these apart"
        )
    return replace(batch, form=Beams(indirection))
