"""Steps in tensors that never move, so that CUDA graphs can be captured on them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from lightkv.memory.kv_memory import KVMemory
from lightkv.memory.staging import packed_size, upload
from lightkv.triton_kernels.attention.variants import TreeMask, ValueMask

from .batch import Batch
from .shared_reads import SharedReads
from .step import Packing, Step, checked_places, shared_groups


class BatchShape(NamedTuple):
    """The places of a static batch: tokens, prefills and decodes, as many as a CUDA graph is captured for.

    A batch without places for prefills is a decode batch, with as many tokens as decodes. Otherwise the tokens
    are those of the decodes, then those of the prefills, then padding:

        tokens   ├─ d decodes ─┼── prefills, by q_starts ──┼── padding ──┤ num_tokens
                 ├── num_decodes: decode attention ──┤

    The host alone knows d, so decode attention always covers the first `num_decodes` tokens, of which those
    after the first d belong to decodes of length 0. Prefill attention comes after it and writes the
    output of every token from d on. The last prefill is a request of length 0 whose queries are the
    padding: their output is zeros, so nothing that is not finite reaches the padding slot of the pool. So
    there is a place for one more prefill than there can be.
    """

    num_tokens: int
    num_prefills: int
    num_decodes: int

    @classmethod
    def of_decodes(cls, num_decodes: int) -> "BatchShape":
        """Returns the shape of a decode batch."""
        return cls(num_decodes, 0, num_decodes)

    @property
    def decodes_first(self) -> bool:
        """Whether the decodes' tokens precede those of prefills."""
        return self.num_prefills > 0

    @property
    def most_prefills(self) -> int:
        """The most prefills that a batch can have."""
        return max(self.num_prefills - 1, 0)

    def fits(self, num_tokens: int, num_prefills: int, num_decodes: int) -> bool:
        """Returns whether a batch of these numbers has room."""
        return (
            num_tokens <= self.num_tokens
            and num_prefills <= self.most_prefills
            and num_decodes <= self.num_decodes
        )

    def place_tokens(self, numbers: np.ndarray, num_prefill_tokens: int) -> np.ndarray:
        """Returns numbers of each token, those of prefills first, in the tokens of the batch; 0 in the others.

        This makes the order of tokens above, also where there are no places for prefills.
        """
        placed = np.zeros(self.num_tokens, dtype=numbers.dtype)
        num_decodes = len(numbers) - num_prefill_tokens
        placed[:num_decodes] = numbers[num_prefill_tokens:]
        placed[num_decodes : len(numbers)] = numbers[:num_prefill_tokens]
        return placed

    def pack(self, batch: Batch) -> Packing:
        """Returns the packing of a batch that fits, whose rows are those of the token table."""
        num_prefills, num_decodes = batch.num_prefills, len(batch.rows) - batch.num_prefills
        numbers = np.zeros((3, self.num_prefills + self.num_decodes), dtype=np.int64)
        given = np.stack((batch.rows, batch.starts + batch.counts, batch.counts))
        numbers[:, :num_prefills] = given[:, :num_prefills]
        numbers[:, self.num_prefills : self.num_prefills + num_decodes] = given[:, num_prefills:]
        rows, kv_lens, counts = numbers
        counts[self.num_prefills :] = 1
        if self.decodes_first:
            counts[self.num_prefills - 1] = self.num_tokens - len(batch.positions)  # the padding
        first_prefill_token = num_decodes if self.decodes_first else 0
        return Packing(
            rows, kv_lens, counts, self.num_prefills, self.num_tokens, first_prefill_token, self.decodes_first
        )


class StaticStep:
    """The tensors of steps of one shape, which never move. `load` loads a batch into them.

    A smaller batch is padded with sequences in row 0, with length 0, and tokens at position 0, with slot 0.
    `prefix_members`: how many decodes may read one shared prefix together (`Batch.sharing`); with 1 there is no
    room for shared prefixes. `room`: the bytes of what `load` gets in `also` (`staging.packed_size`), the same
    in every step.
    """

    def __init__(
        self, shape: BatchShape, memory: KVMemory, *, prefix_members: int = 1, room: int = 0
    ) -> None:
        self.shape = shape
        self.memory = memory
        self.prefix_members = prefix_members
        self._room = room
        self._packed: torch.Tensor | None = None
        num_groups = len(memory.table.groups)
        size = (shape.num_tokens,) if num_groups == 1 else (num_groups, shape.num_tokens)
        self._slots = torch.empty(size, dtype=torch.int64, device=memory.device)
        self._unshared: list[np.ndarray] = []
        if prefix_members > 1 and shape.num_decodes > 1:
            self._unshared = SharedReads(prefix_members, ()).arrays(shape.num_decodes)

    def load(
        self,
        batch: Batch,
        *,
        mask: ValueMask | TreeMask | None = None,
        also: Sequence[np.ndarray] = (),
    ) -> Step:
        """Loads a batch with one upload, outside the graph, and without synchronising. Kernels inside the graph
        may change `rows`, `kv_lens`, `position_ids` and `slot_mapping` of the step in place.

        A graph captured on the returned step reads what every later `load` puts there. It reads the mask that
        it was captured with, and it reads prefixes together if the batch that it was captured on has `sharing`,
        even of no prefixes; then all batches need it. Raises the errors of `Step.of`, and ValueError for a
        batch that is too large, or of a form that no graph can take; the tensors are then as before.
        """
        self._check(batch)
        places = checked_places(batch, self.memory, mask)
        shape, host = self.shape, self.shape.pack(batch)
        num_prefill_tokens = len(batch.positions) - (len(batch.rows) - batch.num_prefills)
        shared, shared_arrays = batch.shared, self._unshared
        if shared is not None and self._unshared:
            shared_arrays = shared.arrays(shape.num_decodes)
        placed = (shape.place_tokens(numbers, num_prefill_tokens) for numbers in (places, batch.positions))
        arrays = [*host.arrays(*placed), *shared_arrays, *also]
        if self._packed is None:
            size = packed_size(arrays) - packed_size(also) + self._room
            self._packed = torch.empty(size, dtype=torch.uint8, device=self.memory.device)
        table = self.memory.table
        uploaded = upload(arrays, self.memory.device, out=self._packed)
        rows, places_there, position_ids, kv_lens, q_starts, q_lens, *rest = uploaded
        self._slots.copy_(table.read(places_there))
        return Step(
            memory=self.memory,
            host=host,
            form=batch.form,
            rows=rows,
            kv_lens=kv_lens,
            q_lens=q_lens,
            q_starts=q_starts,
            position_ids=position_ids,
            slot_mapping=self._slots,
            index=table.req_to_token if len(table.groups) == 1 else table.groups,
            mask=mask,
            shared_prefixes=(
                shared_groups(rest, self.prefix_members) if shared is not None and self._unshared else None
            ),
            also=rest[len(rest) - len(also) :],
        )

    def _check(self, batch: Batch) -> None:
        shape = self.shape
        num_sequences, num_prefills = len(batch.rows), batch.num_prefills
        if not shape.fits(len(batch.positions), num_prefills, num_sequences - num_prefills):
            raise ValueError(
                f"{len(batch.positions)} tokens, {num_prefills} prefills and {num_sequences - num_prefills} "
                f"decodes; there are places for {shape.num_tokens} tokens, {shape.most_prefills} prefills and "
                f"{shape.num_decodes} decodes here: split the step, or run it eagerly (Step.of)"
            )
        if not batch.form.is_static:
            raise ValueError(
                f"{batch.form}: a CUDA graph takes entries for positions; run this step eagerly (Step.of)"
            )
        if batch.shared is not None and self._unshared and batch.shared.most_members != self.prefix_members:
            raise ValueError(
                f"prefixes shared by up to {batch.shared.most_members} decodes, where a read here serves "
                f"{self.prefix_members}: give Batch.sharing that number"
            )
