"""The passes of layers with states over a step: which tokens they compute side by side, from which slots on.

A step may have several pieces of one row, where a snapshot is kept between them. Each goes on from the state
that the one before it leaves, so it is computed in a later pass. What is short by then is computed token by
token, as decodes are; so is the only piece of a row if it has few tokens:

    tokens    ├──── row 1, piece 0 ────┼─ row 1, piece 1 ─┼──── row 2 ────┼ row 3 ┼ row 4 ┤
    pass        0: in chunks             1: by token        0               1       1
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightkv.triton_kernels.states.rows import StateRows

from .staging import packed_size, upload
from .state_memory import StateMemory, StateSlots

CHUNK = 64  # tokens that the kernels of prompts compute at once
SHORT = 64  # tokens: a later piece of so many is computed token by token
_ALONE = 16  # tokens: so is the only piece of a row
_MOST_SHORT = 256  # tokens of all later pieces by token in a CUDA graph

Earlier = Mapping[int, tuple[int, int]]  # by part: the slots that it reads and writes


class ChunkIndex(NamedTuple):
    """The chunks of a pass: `bounds`, int64 `[n + 1]`, where its sequences begin, and where the last one ends;
    `places`, int64 `[m, 2]`, the sequence of each chunk, and which of its chunks it is. Places that are left
    have chunks of the last sequence that are behind its end, of which kernels compute nothing. No chunk stands
    there twice: fla's kernels find the state before a chunk by its place."""

    bounds: Tensor
    places: Tensor


@dataclass(frozen=True, eq=False)
class StatePass:
    """Pieces of sequences that layers with states compute side by side. Piece i goes on from the state in slot
    `slots.reads[i]` and leaves its own in slot `slots.writes[i]`, 0 for padding.

    `tokens`: where the tokens of all pieces stand in the step: a slice, or int64 `[T]` on the device. `starts`:
    int32 `[n + 1]`, where the pieces begin among `tokens`, and where the last one ends. `most_chunks`: at least
    as many as the pieces have; 0 where they are computed token by token. `is_single`: each has one token.
    """

    tokens: slice | Tensor
    starts: Tensor
    slots: StateSlots
    most_chunks: int = 0
    is_single: bool = False

    @property
    def rows(self) -> StateRows:
        """The pieces as the kernels that compute them token by token take them, with the tensors of `own`."""
        places = None if isinstance(self.tokens, slice) else self.tokens
        return StateRows(*self.slots, self.starts, places)

    @property
    def recurrent_rows(self) -> StateRows:
        """The same, in which no loop over tokens is compiled where each piece has one."""
        return self.rows._replace(starts=None) if self.is_single else self.rows

    def own(self, *tensors: Tensor) -> list[Tensor]:
        """Returns what `rows` finds its tokens in: views of a slice of the step, or else the tensors."""
        if isinstance(self.tokens, slice):
            return [tensor[self.tokens] for tensor in tensors]
        return list(tensors)

    @cached_property
    def chunks(self) -> ChunkIndex:
        """The chunks of the pieces, for all layers; a CUDA graph that computes it keeps it."""
        bounds = self.starts.long()
        counts = (bounds.diff() + (CHUNK - 1)).div(CHUNK, rounding_mode="floor")
        ends = counts.cumsum(0)
        number = torch.arange(self.most_chunks, device=bounds.device)
        piece = torch.searchsorted(ends, number, right=True).clamp(max=len(ends) - 1)
        return ChunkIndex(bounds, torch.stack((piece, number - (ends - counts)[piece]), 1))


def decode_pass(states: StateMemory, rows: Tensor) -> StatePass:
    """Returns the pass of one token of each of `rows`, int64 `[n]` on the device, with the states that their
    rows say when this runs. A CUDA graph can capture it."""
    starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device)
    return StatePass(slice(0, len(rows)), starts, states.slots_of(rows), is_single=True)


class _Parts(NamedTuple):
    """The parts of a batch by their passes: those computed in chunks first, those by token, and all others in
    further passes in chunks."""

    first: list[int]
    by_token: list[int]
    further: list[list[int]]

    @classmethod
    def of(cls, rows: Sequence[int], counts: Sequence[int], num_prefills: int) -> "_Parts":
        first, by_token = list[int](), list(range(num_prefills, len(rows)))
        pieces, before, further = Counter(rows[:num_prefills]), Counter[int](), list[list[int]]()
        for part, row in enumerate(rows[:num_prefills]):
            rank = before[row]
            before[row] += row > 0  # rows of padding have no state
            if counts[part] <= (SHORT if rank == 1 else _ALONE if pieces[row] == 1 else 0):
                by_token.append(part)
            elif not rank:
                first.append(part)
            else:
                further += [[] for _ in range(rank - len(further))]
                further[rank - 1].append(part)
        return cls(first, by_token, [parts for parts in further if parts])


def state_passes(
    states: StateMemory, rows: Sequence[int], counts: Sequence[int], num_prefills: int, earlier: Earlier
) -> list[StatePass]:
    """Returns the passes of a step, in their order, in one upload and without synchronising.

    rows, counts, num_prefills: as in `Batch`. earlier: the slots of the parts that another one of their row
    follows, by their index; of all others the rows say them now.
    """
    ends = np.cumsum(counts, dtype=np.int64)
    begins = ends - counts
    first, by_token, further = _Parts.of(rows, counts, num_prefills)
    passes = [parts for parts in (first, by_token, *further) if parts]
    slots = _slots(states, rows, earlier)
    arrays, spans = list[np.ndarray](), list[slice | None]()
    for parts in passes:
        is_whole = parts[-1] - parts[0] + 1 == len(parts)
        spans.append(slice(int(begins[parts[0]]), int(ends[parts[-1]])) if is_whole else None)
        places = [] if is_whole else [np.arange(begins[part], ends[part]) for part in parts]
        arrays += [
            *slots[parts].T,
            np.cumsum([0, *(counts[part] for part in parts)], dtype=np.int32),
            np.concatenate([np.zeros(0, dtype=np.int64), *places]),
        ]
    uploaded, found = iter(upload(arrays, states.table.device)), list[StatePass]()
    for parts, span, reads, writes, starts, places in zip(passes, spans, *[uploaded] * 4, strict=True):
        chunks = 0 if parts is by_token else sum(-(-counts[part] // CHUNK) for part in parts)
        tokens = places if span is None else span
        found.append(StatePass(tokens, starts, StateSlots(reads, writes), chunks))
    return found


def _slots(states: StateMemory, rows: Sequence[int], earlier: Earlier) -> np.ndarray:
    """Returns the slots that the parts of `rows` read and write: int64 `[n, 2]`."""
    known = [earlier.get(part) or states.of_rows[row] for part, row in enumerate(rows)]
    return np.array(known, dtype=np.int64).reshape(-1, 2)


class StaticPasses:
    """The passes of steps with prompts in tensors that never move, for a CUDA graph: one of all prefills in
    chunks, where pieces that are computed by token are padding, and one by token of these and of decodes, whose
    tokens are gathered.

    `num_tokens`, `num_prefills`, `num_decodes`: those of the `BatchShape`.
    """

    def __init__(self, states: StateMemory, num_tokens: int, num_prefills: int, num_decodes: int) -> None:
        self._states = states
        self._num_tokens, self._num_prefills = num_tokens, num_prefills
        self._num_by_token = num_decodes + num_prefills
        self._num_gathered = num_decodes + min(_MOST_SHORT + _ALONE * num_prefills, num_tokens)
        self._packed: Tensor | None = None

    def fits(self, rows: Sequence[int], counts: Sequence[int], num_prefills: int) -> bool:
        """Returns whether the pieces of a step have room."""
        _, by_token, further = _Parts.of(rows, counts, num_prefills)
        return not further and sum(counts[part] for part in by_token) <= self._num_gathered

    def load(
        self,
        rows: Sequence[int],
        counts: Sequence[int],
        num_prefills: int,
        earlier: Earlier,
        q_starts: Tensor,
    ) -> list[StatePass]:
        """Loads the parts of a step that fits, with one upload, and returns the passes. `q_starts`: where the
        tokens of prefills begin in the step, as in `Step`; the decodes' come first."""
        num_decodes = len(rows) - num_prefills
        _, by_token, _ = _Parts.of(rows, counts, num_prefills)
        begins = np.cumsum([num_decodes, *counts[:num_prefills]])[:-1].tolist()
        begins += range(num_decodes)
        places = [begins[part] + i for part in by_token for i in range(counts[part])]
        known = _slots(self._states, rows, earlier)
        slots = np.zeros((self._num_prefills + self._num_by_token, 2), dtype=np.int64)
        starts = np.full(self._num_by_token + 1, len(places), dtype=np.int32)
        tokens = np.zeros(self._num_gathered, dtype=np.int64)
        slots[:num_prefills] = known[:num_prefills]
        slots[[part for part in by_token if part < num_prefills]] = 0
        slots[self._num_prefills : self._num_prefills + len(by_token)] = known[by_token]
        starts[: len(by_token) + 1] = np.cumsum([0, *(counts[part] for part in by_token)])
        tokens[: len(places)] = places
        arrays: list[np.ndarray] = [*slots.T, starts, tokens]
        if self._packed is None:
            device = self._states.table.device
            self._packed = torch.empty(packed_size(arrays), dtype=torch.uint8, device=device)
        *both, starts_there, tokens_there = upload(arrays, self._states.table.device, out=self._packed)
        num, most = self._num_prefills, self._num_tokens // CHUNK + self._num_prefills
        reads, writes = (one.split((num, self._num_by_token)) for one in both)
        chunked, gathered = StateSlots(reads[0], writes[0]), StateSlots(reads[1], writes[1])
        return [
            StatePass(slice(0, self._num_tokens), q_starts, chunked, most),
            StatePass(tokens_there, starts_there, gathered),
        ]
