"""The passes of layers with states over a step: which tokens they compute side by side, from which state slots on.

A step may have several pieces of one row, where a snapshot is kept between them. Each goes on from the state
that the one before it leaves, so it is computed in the next pass. Decodes have a pass of their own, whose kernel
takes one token of each:

    tokens    ├── row 1, piece 0 ──┼─ row 1, piece 1 ─┼── row 2 ──┼ row 3 ┼ row 4 ┤
    pass              1                    2                1         0       0
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from .staging import upload
from .state_memory import StateMemory, StateSlots


class StatePass(NamedTuple):
    """Pieces of sequences that layers with states compute side by side. Piece i goes on from the state in slot
    `slots.reads[i]` and leaves its own in slot `slots.writes[i]`.

    `tokens`: where the tokens of all pieces stand in the step, one piece after the other: a slice, or int64
    `[T]` on the device. `counts`: the tokens of each piece, on the host; None where each has one. `starts`:
    int32 `[n + 1]`, where the pieces begin among `tokens`, and where the last one ends.
    """

    tokens: slice | torch.Tensor
    counts: list[int] | None
    starts: torch.Tensor
    slots: StateSlots


def decode_pass(states: StateMemory, rows: torch.Tensor) -> StatePass:
    """Returns the pass of one token of each of `rows`, int64 `[n]` on the device, with the states that their
    rows say when this runs. It can be captured."""
    starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device)
    return StatePass(slice(0, len(rows)), None, starts, states.slots_of(rows))


def state_passes(
    states: StateMemory,
    rows: Sequence[int],
    counts: Sequence[int],
    num_prefills: int,
    earlier: Mapping[int, StateSlots],
) -> list[StatePass]:
    """Returns the passes of a step, in their order, in one upload and without synchronising.

    rows, counts, num_prefills: as in `Batch`. earlier: the slots of the parts that another one of their row
    follows, by their index; of all others the rows say them now.
    """
    ends = np.cumsum(counts, dtype=np.int64)
    begins = ends - counts
    before, passes = Counter[int](), list[list[int]]()
    for part in range(num_prefills):
        row = rows[part]
        if before[row] == len(passes):
            passes.append([])
        passes[before[row]].append(part)
        before[row] += row > 0  # rows of padding have no state
    if num_prefills < len(rows):
        passes.insert(0, list(range(num_prefills, len(rows))))
    arrays, spans = list[np.ndarray](), list[slice | None]()
    for parts in passes:
        first, last = parts[0], parts[-1]
        is_whole = last - first + 1 == len(parts)
        spans.append(slice(int(begins[first]), int(ends[last])) if is_whole else None)
        places = [] if is_whole else [np.arange(begins[part], ends[part]) for part in parts]
        starts = np.cumsum([0, *(counts[part] for part in parts)], dtype=np.int32)
        arrays += [np.array([rows[part] for part in parts]), starts, np.concatenate([*places, []]).astype(int)]
    found = []
    uploaded = iter(upload(arrays, states.table.device))
    for parts, span, part_rows, starts, places in zip(passes, spans, *[uploaded] * 3, strict=True):
        slots = states.slots_of(part_rows)
        for i, part in enumerate(parts):
            if part in earlier:
                for target, known in zip(slots, earlier[part], strict=True):
                    target[i : i + 1].copy_(known)
        own = None if parts[0] >= num_prefills else [counts[part] for part in parts]
        found.append(StatePass(places if span is None else span, own, starts, slots))
    return found
