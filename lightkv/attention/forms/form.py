"""How the sequences of a batch hold their tokens: the plain way, and what the other ways change of it."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from lightkv.memory.token_table import TokenTable
from lightkv.triton_kernels.attention.lookups import TOKEN_TABLE, Lookup
from lightkv.triton_kernels.attention.variants.variant import Variant


class Seen(NamedTuple):
    """Where a step's sequences find their tokens: the index, int32 `[num_rows, num_entries]` on the device,
    each sequence's row of it, and how many entries of that row are from before this step."""

    index: torch.Tensor  # type: ignore[assignment]  # hides the method of tuples
    rows: np.ndarray
    starts: np.ndarray


@dataclass(frozen=True)
class Form:
    """The plain form: a row of the token table has an entry for each token, in order, and none was dropped.

    Another form overrides what it changes. It says where tokens are and from which positions they are attended
    to; a layer's backend attends. `batch` is the `Batch` of the sequences, and `layer` a layer's backend: their
    files import this one, so it does not name their classes.
    """

    @property
    def is_static(self) -> bool:
        """Whether a CUDA graph can take it: the tensors of its steps have the same shapes each time."""
        return True

    @property
    def lookup(self) -> Lookup:
        """How a row's index finds the slot of a position."""
        return TOKEN_TABLE

    def check_mask(self, mask: Variant) -> None:
        """Raises ValueError for a mask that has no meaning for these sequences."""

    def check_table(self, batch: Any, table: TokenTable) -> None:
        """Raises ValueError where the form does not fit the table."""

    def check_layer(self, layer: Any) -> None:
        """Raises ValueError for a layer that cannot attend to these sequences."""

    def places(self, batch: Any, table: TokenTable) -> np.ndarray:
        """Returns where the slots of the step's tokens are in the flattened table, int64 `[T]`. Raises
        IndexError for places outside the table."""
        return table.entries(batch.rows, batch.starts, batch.counts)

    def seen(self, batch: Any, table: TokenTable) -> Seen:
        """Returns where attention finds the tokens."""
        return Seen(table.req_to_token, batch.rows, batch.starts)

    @property
    def num_sinks(self) -> int:
        """How many first entries of a sequence queries attend to from other positions: as if the tokens that
        it has dropped (`dropped_by`) had never been there. 0 for none."""
        return 0

    def dropped_by(self, sequence: int, length: int) -> int:
        """Returns how many tokens a sequence with `length` keys has dropped, where there are sinks."""
        return 0


PLAIN = Form()
