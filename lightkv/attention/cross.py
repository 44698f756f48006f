"""Cross attention: which other sequence each sequence of a step reads, such as the encoder's output."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from lightkv.attention.forms.form import Form
from lightkv.memory.staging import packed_size, upload

from .batch import integers
from .static_step import StaticStep
from .step import Step
from .step_plans import StepPlans


@dataclass(frozen=True)
class _OfOthers(Form):
    """Rows of the token table that other sequences than a step's own have."""

    @property
    def may_restore(self) -> bool:
        return False


@dataclass(frozen=True, eq=False)
class CrossStep:
    """A step as cross attention reads it: `step` has the tokens of the step that it was made of, and for each
    sequence the row and the length of its cross sequence. Sequences that pad a static batch read row 0 with
    length 0."""

    step: Step

    @classmethod
    def of(
        cls, step: Step, rows: Sequence[int], lengths: Sequence[int], out: torch.Tensor | None = None
    ) -> "CrossStep":
        """Makes it of the row and the length of the cross sequence that each sequence of the step reads,
        prefills first, in one upload, to `out` if given. A sequence that reads none has length 0, and its
        output is zeros. Raises ValueError where these are more than the step has, or fewer, or are not in the
        token table; nothing is uploaded then."""
        row, length = integers(rows), integers(lengths)
        if len(row) != len(length) or len(row) != step.host.num_real:
            raise ValueError(
                f"{len(row)} rows and {len(length)} lengths of cross sequences in a step of "
                f"{step.host.num_real} sequences: give one each"
            )
        table = step.memory.table
        if len(row) and (
            min(row.min(), length.min()) < 0
            or row.max() > table.max_sequences
            or length.max() > table.max_entries
        ):
            raise ValueError(
                f"rows {row.tolist()} with {length.tolist()} tokens, in a table of rows 0 to "
                f"{table.max_sequences} of {table.max_entries} entries; give those of `KVCache.open_cross`"
            )
        row, length = step.host.place(row), step.host.place(length)
        rows_there, kv_lens = upload([row, length.astype(np.int32)], step.memory.device, out=out)
        return cls(
            replace(
                step,
                host=step.host._replace(rows=row, kv_lens=length),
                form=_OfOthers(),
                rows=rows_there,
                kv_lens=kv_lens,
                index=table.req_to_token,
                mask=None,
                shared_prefixes=None,
                plans=StepPlans(),
            )
        )


class StaticCross:
    """The tensors of the cross sequences of a `StaticStep`, which never move."""

    def __init__(self, static: StaticStep) -> None:
        places = static.shape.num_prefills + static.shape.num_decodes
        size = packed_size([np.zeros(places, dtype=np.int64), np.zeros(places, dtype=np.int32)])
        self._packed = torch.empty(size, dtype=torch.uint8, device=static.memory.device)

    def load(self, step: Step, rows: Sequence[int], lengths: Sequence[int]) -> CrossStep:
        """Loads the cross sequences of a step of the `StaticStep`, as `CrossStep.of`; after an error the
        tensors are as before."""
        return CrossStep.of(step, rows, lengths, self._packed)
