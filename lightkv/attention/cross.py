"""Cross attention: which other sequence each sequence of a step reads, such as the encoder's output."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from lightkv.memory.staging import packed_size, upload
from lightkv.triton_kernels.attention.attention_reference import attend_reference
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions
from lightkv.triton_kernels.attention.variants.variant import Scored

from .batch import integers
from .static_step import StaticStep
from .step import Step
from .step_plans import StepPlans

Read = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, eq=False)
class CrossStep:
    """The cross sequences of `step`. For B sequences: `rows` int64 `[B]` of the token table and `kv_lens` int32
    `[B]` on the device, and `rows_host`, `kv_lens_host` int64 `[B]`. Sequences that pad a static batch read row
    0 with length 0."""

    step: Step
    rows_host: np.ndarray
    kv_lens_host: np.ndarray
    rows: torch.Tensor
    kv_lens: torch.Tensor
    plans: StepPlans = field(default_factory=StepPlans)

    @classmethod
    def of(cls, step: Step, rows: Sequence[int], lengths: Sequence[int]) -> "CrossStep":
        """Makes it of the row and the length of the cross sequence that each sequence of the step reads,
        prefills first, in one upload. A sequence that reads none has length 0, and its output is zeros. Raises
        ValueError where these are more than the step has, or fewer, or are not in the token table."""
        row, length = _checked(step, rows, lengths)
        rows_there, kv_lens = upload([row, length.astype(np.int32)], step.memory.device)
        return cls(step, row, length, rows_there, kv_lens)


class StaticCross:
    """The tensors of the cross sequences of a `StaticStep`, which never move."""

    def __init__(self, static: StaticStep) -> None:
        places = static.shape.num_prefills + static.shape.num_decodes
        size = packed_size([np.zeros(places, dtype=np.int64), np.zeros(places, dtype=np.int32)])
        self._packed = torch.empty(size, dtype=torch.uint8, device=static.memory.device)

    def load(self, step: Step, rows: Sequence[int], lengths: Sequence[int]) -> CrossStep:
        """Loads the cross sequences of a step of the `StaticStep`, as `CrossStep.of`; after an error the
        tensors are as before."""
        row, length = _checked(step, rows, lengths)
        arrays = [row, length.astype(np.int32)]
        rows_there, kv_lens = upload(arrays, step.memory.device, out=self._packed)
        return CrossStep(step, row, length, rows_there, kv_lens)


def _checked(step: Step, rows: Sequence[int], lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows and lengths in the places of the step, int64. Raises ValueError."""
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
    return step.host.place(row), step.host.place(length)


def attend_cross(
    q: torch.Tensor, read: Read, cross: CrossStep, options: AttentionOptions, out: torch.Tensor
) -> None:
    """Writes the attention of q `[T, H, Dk]` to the cross sequences of a step to `out`, in plain torch and
    float64, one sequence at a time. Zeros go to padding, and to sequences that read none. `read` returns K and
    V of slots, int64 `[n]`."""
    host = cross.step.host
    counts, num_prefills = host.counts.tolist(), host.num_prefills
    begins = np.cumsum([host.first_prefill_token, *counts[:num_prefills]])[:num_prefills].tolist()
    begins += range(host.first_decode_token, host.first_decode_token + host.num_decodes)
    out.zero_()
    for begin, count, row, length in zip(
        begins, counts, cross.rows_host.tolist(), cross.kv_lens_host.tolist(), strict=True
    ):
        if length:
            slots = cross.step.memory.table.slots(row, 0, length).long()
            tokens = slice(begin, begin + count)
            scored = Scored.of_last(tokens, 0, length, q.device)
            attended = attend_reference(q[tokens], *read(slots), options, scored)
            out[tokens] = attended.to(out.dtype)
