"""Rows that read some positions from other rows, as those of beams: a table of beams names the row for each."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lightkv.attention.batch import Batch
from lightkv.memory.token_table import TokenTable

from .form import Form, Numbers, Seen
from .lookup import Lookup


@dataclass(frozen=True, eq=False)
class Beams(Form):
    """`held`: how the rows hold their tokens. `indirection`: int32 `[table rows, n]` on the device, the row
    whose slot is read for each position of a row (`PagedKV`)."""

    held: Form
    indirection: torch.Tensor

    @property
    def is_table(self) -> bool:
        return False

    @property
    def is_static(self) -> bool:
        return self.held.is_static

    @property
    def lookup(self) -> Lookup:
        return self.held.lookup._replace(indirection=self.indirection)

    def check_mask(self, mask: Any) -> None:
        self.held.check_mask(mask)

    def check_table(self, numbers: Numbers, table: TokenTable) -> None:
        self.held.check_table(numbers, table)
        wanted, longest = len(table.req_to_token), int((numbers.starts + numbers.counts).max(initial=0))
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

    def check_layer(self, layer: Any) -> None:
        self.held.check_layer(layer)

    def check_scores(self) -> None:
        raise ValueError(
            "a step with an indirection is not scored by entries; use rows that hold their own tokens"
        )

    def places(self, numbers: Numbers, table: TokenTable) -> np.ndarray:
        return self.held.places(numbers, table)

    def seen(self, numbers: Numbers, table: TokenTable) -> Seen:
        return self.held.seen(numbers, table)

    def attend_by_kernels(self, layer: Any, q: torch.Tensor, step: Any, out: torch.Tensor) -> None:
        self.held.attend_by_kernels(layer, q, step, out)

    def attend_in_torch(
        self, layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: Any, out: torch.Tensor
    ) -> None:
        self.held.attend_in_torch(layer, q, k, v, step, out)


def over_beams(batch: Batch, indirection: torch.Tensor) -> Batch:
    """Returns a batch of the same sequences, which read each position from the row that `indirection` names
    (`Beams`), and write new K/V to their own slots. A captured graph reads the tensor that it was captured
    with.

    Raises ValueError where sequences have dropped tokens or read prefixes together, and for prompts that have
    no table of their entries. Whether the tensor fits is checked when a step is made.
    """
    if batch.form.has_gaps or batch.shared is not None:
        raise ValueError(
            f"an indirection with {batch.form}, prefixes {batch.shared}: it names a row for each position, so "
            "nothing may be dropped, and each sequence reads its own; run these apart"
        )
    if batch.num_prefills and not batch.form.is_static:
        raise ValueError(
            f"{batch.num_prefills} prefills over {batch.form} with an indirection: only their decodes have "
            "one; compute the prompts without it"
        )
    return replace(batch, form=Beams(batch.form, indirection))
