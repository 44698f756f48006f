"""A call of a Hugging Face model as its cache sees it: what it is to compute, its padding and its positions."""

from typing import Any, NamedTuple

import numpy as np
import torch

from lightkv.errors import OutOfRows
from lightkv.kv_cache import KVCache
from lightkv.ledger.sequence import Sequence
from lightkv.memory.kv_memory import KVMemory
from lightkv.memory.staging import upload
from lightkv.memory.token_table import TokenTable, packed_ranges


class ModelCall(NamedTuple):
    """What the cache has to know of a call of the model."""

    input_ids: torch.Tensor  # int64 [B, new columns]
    padding: list[int]  # columns of padding, of each row
    num_logits: int  # the last columns of which each row gets logits


class Part(NamedTuple):
    """What a step computes of one row: `num_tokens` entries from entry `start`."""

    row: int  # of the batch
    start: int
    num_tokens: int


class GatheredStep(NamedTuple):
    """A step on the model's own attention: which K/V is written, and which every row sees, in each of G layer
    groups."""

    source: torch.Tensor  # int64 [n]: the computed tokens that are new, as places in [B * T], row by row
    slots: torch.Tensor  # int64 [G, n]: the slots that their K/V is written to
    seen: torch.Tensor  # int64 [G, B, width]: the slots of each row's columns; 0 where it sees nothing


def left_padding(mask: torch.Tensor | None, num_rows: int, num_columns: int) -> list[int]:
    """Returns the columns of padding of each row. Raises ValueError if padding is not on the left."""
    if mask is None:
        return [0] * num_rows
    real = (mask != 0).cpu().numpy()
    padding = num_columns - real.sum(1)
    if (padding == num_columns).any() or (real != (np.arange(num_columns) >= padding[:, None])).any():
        raise ValueError(
            "a row consists of padding alone, or is padded elsewhere than on the left: pad the prompts there"
        )
    return padding.tolist()


def require_own_columns(
    padding: list[int], num_before: int, num_new: int, mask: torch.Tensor | None, position_ids: Any
) -> None:
    """Raises ValueError for a mask or positions other than those that the cached K/V was computed with.

    `padding` has the columns of padding of every row, `num_before` and `num_new` count the columns before the
    call and those that are new; `mask` `[rows, columns]` is that of a batch that continues, None for one that
    begins. Synchronises.
    """
    starts = np.array(padding)[:, None]
    columns = np.arange(num_before + num_new)
    real = columns >= starts
    if num_before and mask is None and any(padding):
        raise ValueError(
            f"rows with {padding} columns of padding continue without a mask: pass it in every call"
        )
    if mask is not None and ((mask != 0).cpu().numpy() != real).any():
        raise ValueError(
            f"the mask is not that of the {padding} columns of padding which the rows began with, and "
            "computed tokens cannot be hidden: call reset(), and begin a text without them"
        )
    if position_ids is not None:
        new = slice(num_before, None)
        expected = (columns - starts)[:, new]
        given = position_ids.cpu().numpy()
        if given.shape not in (expected.shape, (1, num_new)) or (given != expected)[real[:, new]].any():
            raise ValueError(
                f"position_ids {given.tolist()}, where the text without its padding has "
                f"{expected.tolist()}: leave them out"
            )


def gather_step(
    memory: KVMemory, rows: list[int], parts: list[Part], call: ModelCall, num_before: int
) -> tuple[GatheredStep, int, torch.Tensor]:
    """Prepares a call on the model's own attention, which computes all columns from the first that any row
    needs computed.

    `rows` of the table belong to the rows of the batch, which has `num_before` columns before the call. Rows
    that are computed once, since they have the same text, have the same one. Returns the step, the first
    column, and the positions of the texts without their padding from there on, int64 `[B, columns]`.
    """
    table = memory.table
    first = min(call.padding[part.row] + part.start for part in parts)
    width = num_before + call.input_ids.shape[1]
    seen = _seen_entries(table, rows, call.padding, width)
    _, starts, counts = zip(*parts, strict=True)
    entries = table.entries([rows[part.row] for part in parts], starts, counts)
    firsts = [row * (width - first) + call.padding[row] + start - first for row, start, _ in parts]
    source = packed_ranges(np.array(firsts), np.array(counts))
    positions = np.maximum(np.arange(first, width) - np.array(call.padding, dtype=np.int64)[:, None], 0)
    # The first column that any token sees that the step computes of a row, int64 `[groups, rows]`.
    groups, start_of = memory.pool.spec.groups, {rows[part.row]: part.start for part in parts}
    of_classes = [[one.lifetime.rule.first_seen(start_of[row]) for row in rows] for one in groups.classes]
    first_seen = (np.array(of_classes, np.int64) + np.array(call.padding)).repeat(groups.widths, axis=0)
    source_there, entries_there, seen_there, positions_there, first_there = upload(
        [source, entries, seen.reshape(-1), positions.reshape(-1), first_seen.reshape(-1)],
        call.input_ids.device,
    )
    slots, seen_slots = (
        table.read(there).long().view(len(table.groups), -1) for there in (entries_there, seen_there)
    )
    seen_slots = seen_slots.unflatten(1, (len(rows), width))
    columns = torch.arange(width, device=seen_slots.device)
    # A slot that a row does not hold any more may have bytes of another layer's format. They may be NaN, which
    # no mask hides.
    seen_slots.masked_fill_(columns < first_there.view(*first_seen.shape, 1), 0)
    return GatheredStep(source_there, slots, seen_slots), first, positions_there.view(len(rows), -1)


def seen_by_rows(table: TokenTable, rows: list[int], padding: list[int], width: int) -> torch.Tensor:
    """Returns the slots of the first `width` columns of each row, int64 `[rows, width]`; 0 in padding."""
    (there,) = upload([_seen_entries(table, rows, padding, width).reshape(-1)], table.device)
    return table.read(there).long().view(len(rows), width)


def _seen_entries(table: TokenTable, rows: list[int], padding: list[int], width: int) -> np.ndarray:
    """Returns where the columns of each row are in the flattened table, `[rows, width]`; 0 in padding."""
    first, row = (np.array(numbers, dtype=np.int64)[:, None] for numbers in (padding, rows))
    columns = np.arange(width)
    return np.where(columns < first, 0, row * table.max_entries + columns - first)


def select(cache: KVCache, sequences: list[Sequence], order: list[int]) -> list[Sequence]:
    """Returns the sequences at the places in `order`; the others are closed.

    A place that appears again gets a fork, which copies indices and no K/V. Raises OutOfRows, with nothing
    changed.
    """
    if cache.num_open - len(sequences) + len(order) > cache.max_sequences:
        raise OutOfRows(cache.max_sequences)
    for idx in set(range(len(sequences))).difference(order):
        cache.close(sequences[idx], cache=False)
    used: set[int] = set()
    selected = []
    for idx in order:
        selected.append(cache.fork(sequences[idx]) if idx in used else sequences[idx])
        used.add(idx)
    return selected
