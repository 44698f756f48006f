"""A step on the device: what every layer's attention needs to know of a batch, and where its K/V is."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from lightkv.attention.forms.form import Form, Seen
from lightkv.memory.kv_memory import KVMemory
from lightkv.memory.staging import upload
from lightkv.memory.state_passes import StatePass
from lightkv.triton_kernels.attention.decode.decode_plan import SharedPrefixGroups
from lightkv.triton_kernels.attention.lookups import Lookup
from lightkv.triton_kernels.attention.variants import TreeMask, ValueMask

from .batch import Batch
from .step_plans import StepPlans


class Packing(NamedTuple):
    """Where the sequences and tokens of a step stand, on the host; in static tensors this counts padding, too.

    `rows`: int64 `[B]`, of the step's index; `kv_lens`: int64 `[B]`, tokens in the cache, this step's included;
    `counts`: int64 `[B]`, this step's tokens of each; `num_prefills`: the first so many are prefills;
    `num_tokens`: of all sequences; `first_prefill_token`: where the tokens of prefills begin; `decodes_first`:
    whether those of decodes precede them (`BatchShape`).
    """

    rows: np.ndarray
    kv_lens: np.ndarray
    counts: np.ndarray
    num_prefills: int
    num_tokens: int
    first_prefill_token: int = 0
    decodes_first: bool = False

    @classmethod
    def of(cls, batch: Batch, seen: Seen) -> "Packing":
        """Returns the packing of a batch as it is, without padding."""
        kv_lens, num_tokens = seen.starts + batch.counts, len(batch.positions)
        return cls(seen.rows, kv_lens, batch.counts, batch.num_prefills, num_tokens)

    @property
    def num_decodes(self) -> int:
        """How many sequences are decodes."""
        return len(self.rows) - self.num_prefills

    @property
    def first_decode_token(self) -> int:
        """Where the tokens of decodes begin."""
        return 0 if self.decodes_first else self.num_tokens - self.num_decodes

    def q_starts(self) -> np.ndarray:
        """Returns where the tokens of each sequence begin, and where the last one's end, int32; of prefills
        alone where the decodes come first."""
        counts = self.counts[: self.num_prefills] if self.decodes_first else self.counts
        starts = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        return starts + np.int32(self.first_prefill_token)

    def arrays(self, places: np.ndarray, positions: np.ndarray) -> list[np.ndarray]:
        """Returns what is uploaded: rows, the `places` and `positions` of tokens, lengths, q_starts, counts."""
        kv_lens, counts = self.kv_lens.astype(np.int32), self.counts.astype(np.int32)
        return [self.rows, places, positions, kv_lens, self.q_starts(), counts]


@dataclass(frozen=True, eq=False)
class Step:
    """One step, as every layer's backend reads it. For B sequences with T tokens in all, on the device:

    - `rows`: int64 `[B]`, of `index`; `kv_lens`: int32 `[B]`, tokens in the cache, this step's included;
      `q_lens`: int32 `[B]`, this step's tokens of each sequence; `q_starts`: int32 `[B + 1]`, where they begin,
      or `[prefills + 1]` where the decodes' come first (`BatchShape`);
    - `position_ids`: int64 `[T]`; `slot_mapping`: int64 `[T]`, the slots that this step's K/V is written to;
    - `index`: int32 `[num_rows, num_entries]`, the slots of each row's entries, and `lookup`, how it finds that
      of a position. Where layers have groups, both have a dimension more in front: `slots_of` and `index_of`
      give a layer its own;
    - `mask`: what hides keys or changes scores in this step, in every layer, or None;
    - `shared_prefixes`: decodes whose first tokens are in the same slots and are read together, or None;
    - `also`: the caller's arrays;
    - `states`: the passes of layers with states.

    `host`: the numbers on the host; `form`: how the sequences hold their tokens; `plans`: what the layers
    derive from the step once for all of them.

        q         ├──── prefill 0 ────┼─ prefill 1 ─┼ decode 2 ┼ decode 3 ┤
        q_starts  0                   ┘             ┘          ┘          └ T

    `Step.of` makes one in new tensors, and `StaticStep.load` one in tensors that never move.
    """

    memory: KVMemory
    host: Packing
    form: Form
    rows: torch.Tensor
    kv_lens: torch.Tensor
    q_lens: torch.Tensor
    q_starts: torch.Tensor
    position_ids: torch.Tensor
    slot_mapping: torch.Tensor
    index: torch.Tensor
    mask: ValueMask | TreeMask | None
    shared_prefixes: SharedPrefixGroups | None
    also: Sequence[torch.Tensor]
    states: Sequence[StatePass] = ()
    plans: StepPlans = field(default_factory=StepPlans)

    @classmethod
    def of(
        cls,
        batch: Batch,
        memory: KVMemory,
        *,
        mask: ValueMask | TreeMask | None = None,
        also: Sequence[np.ndarray] = (),
    ) -> "Step":
        """Makes the step of a batch over `memory`, with one upload (two where prompts are put in order that
        have dropped tokens) and without synchronising.

        mask: with a row for each token of the batch, on the device. also: one-dimensional arrays of the
        caller's, to upload with the batch. Raises ValueError where the batch's form takes no such mask or does
        not fit the table, and IndexError for places outside the table.
        """
        form = batch.form
        places = checked_places(batch, memory, mask)
        seen = form.seen(batch, memory.table)
        host = Packing.of(batch, seen)
        shared = None if batch.shared is None or not batch.shared.reads else batch.shared
        read_together = [] if shared is None else shared.arrays(host.num_decodes)
        arrays = [*host.arrays(places, batch.positions), *read_together, *also]
        rows, places_there, position_ids, kv_lens, q_starts, q_lens, *rest = upload(arrays, memory.device)
        return cls(
            memory=memory,
            host=host,
            form=form,
            rows=rows,
            kv_lens=kv_lens,
            q_lens=q_lens,
            q_starts=q_starts,
            position_ids=position_ids,
            slot_mapping=memory.table.read(places_there).long(),
            index=seen.index if len(memory.table.groups) == 1 else memory.table.groups,
            mask=mask,
            shared_prefixes=None if shared is None else shared_groups(rest, shared.most_members),
            also=rest[len(rest) - len(also) :],
        )

    def slots_of(self, layer_idx: int) -> torch.Tensor:
        """Returns the slots that this step's K/V of a layer is written to: int64 `[T]`."""
        if self.slot_mapping.dim() == 1:
            return self.slot_mapping
        return self.slot_mapping[self.memory.group_of_layer[layer_idx]]

    def index_of(self, layer_idx: int) -> torch.Tensor:
        """Returns the slots of each row's entries in a layer: int32 `[num_rows, num_entries]`."""
        return self.index if self.index.dim() == 2 else self.index[self.memory.group_of_layer[layer_idx]]

    @property
    def lookup(self) -> Lookup:
        """How a row's index finds the slot of a position."""
        return self.form.lookup

    @property
    def num_tokens(self) -> int:
        """The tokens of the step; in static tensors this counts padding, too."""
        return self.host.num_tokens


def checked_places(batch: Batch, memory: KVMemory, mask: ValueMask | TreeMask | None) -> np.ndarray:
    """Returns where the slots of the batch's tokens are in the flattened table, int64 `[T]`, once the batch's
    form has checked them and the mask. Raises ValueError and IndexError."""
    if mask is not None:
        batch.form.check_mask(mask)
    batch.form.check_table(batch, memory.table)
    return batch.form.places(batch, memory.table)


def shared_groups(uploaded: Sequence[torch.Tensor], most_members: int) -> SharedPrefixGroups:
    """Returns the tensors of `SharedReads.arrays` as the kernels take them."""
    members, keys, place = uploaded[:3]
    return SharedPrefixGroups(members.view(-1, most_members), keys, place)
