"""Cross attention: which other sequence each sequence of a step reads, such as the encoder's output."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from lightkv.memory.staging import packed_size, upload
from lightkv.triton_kernels.attention.attention_reference import attend_reference
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions
from lightkv.triton_kernels.attention.variants.variant import Scored

from .metadata import AttentionMetadata

Read = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class CrossMetadata:
    """The cross sequences of the step that `metadata` holds; `prepare` fills it after `metadata.prepare`. For B
    sequences: `rows` int64 `[B]` of the token table and `kv_lens` int32 `[B]` on the device, and `rows_host`,
    `kv_lens_host` int64 `[B]`. Where `metadata` has static tensors, so has this, and sequences that pad a batch
    read row 0 with length 0.
    """

    def __init__(self, metadata: AttentionMetadata) -> None:
        self.metadata = metadata
        self.plan: object | None = None  # what the backend derives once a step for all its layers
        self._static: torch.Tensor | None = None
        self.prepare([], [])

    def prepare(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Loads the row and the length of the cross sequence that each sequence of the step reads, prefills
        first, in one upload. A sequence that reads none has length 0, and its output is zeros. Raises
        ValueError where these are more than the step has, or fewer, or are not in the token table; nothing
        changes then."""
        row, length = np.array(rows, dtype=np.int64), np.array(lengths, dtype=np.int64)
        shape, metadata = self.metadata.shape, self.metadata
        num_prefills = metadata.num_real_prefills
        if len(row) != len(length) or len(row) != metadata.num_sequences:
            raise ValueError(
                f"{len(row)} rows and {len(length)} lengths of cross sequences in a step of "
                f"{metadata.num_sequences} sequences: give one each"
            )
        table = metadata.memory.table
        if len(row) and (
            min(row.min(), length.min()) < 0
            or row.max() > table.max_sequences
            or length.max() > table.max_entries
        ):
            raise ValueError(
                f"rows {row.tolist()} with {length.tolist()} tokens, in a table of rows 0 to "
                f"{table.max_sequences} of {table.max_entries} entries; give those of `KVCache.open_cross`"
            )
        if shape is not None:
            row, length = shape.place(row, num_prefills), shape.place(length, num_prefills)
        arrays: list[np.ndarray] = [row, length.astype(np.int32)]
        device = metadata.memory.device
        if shape is not None and self._static is None:
            self._static = torch.empty(packed_size(arrays), dtype=torch.uint8, device=device)
        self.rows_host, self.kv_lens_host = row, length
        self.rows, self.kv_lens = upload(arrays, device, out=self._static)


def attend_cross(
    q: torch.Tensor, read: Read, cross: CrossMetadata, options: AttentionOptions, out: torch.Tensor
) -> None:
    """Writes the attention of q `[T, H, Dk]` to the cross sequences of a step to `out`, in plain torch and
    float64, one sequence at a time. Zeros go to padding, and to sequences that read none. `read` returns K and
    V of slots, int64 `[n]`."""
    metadata = cross.metadata
    counts = metadata.q_lens.tolist()
    num_prefills = metadata.num_prefills
    begins = np.cumsum([metadata.first_prefill_token, *counts[:num_prefills]])[:num_prefills].tolist()
    first_decode = metadata.first_decode_token
    begins += range(first_decode, first_decode + metadata.num_decodes)
    out.zero_()
    for begin, count, row, length in zip(
        begins, counts, cross.rows_host.tolist(), cross.kv_lens_host.tolist(), strict=True
    ):
        if length:
            slots = metadata.memory.table.slots(row, 0, length).long()
            tokens = slice(begin, begin + count)
            scored = Scored.of_last(tokens, 0, length, q.device)
            attended = attend_reference(q[tokens], *read(slots), options, scored)
            out[tokens] = attended.to(out.dtype)
