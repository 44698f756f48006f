"""The ledger's verbs that fork a sequence or drop some of its tokens. `TokenLedger` documents each.

fork       both sequences hold the same segments; the private tail becomes an unindexed segment first
truncate   drops the last entries
release    drops the oldest entries after those that stay: the path then has a gap
keep       drops private entries anywhere; only the device memory knows which ones
"""

from lightkv.errors import OutOfRows

from .prefix_tree import TOKEN_BYTES
from .sequence import Sequence
from .state import LedgerState


def fork(state: LedgerState, sequence: Sequence) -> Sequence:
    _require(state, sequence)
    if not state.has_free_row:
        raise OutOfRows(state.max_sequences)
    state.share_tail(sequence)
    return state.fork(sequence)


def truncate(state: LedgerState, sequence: Sequence, length: int) -> None:
    _require(state, sequence)
    if not 0 <= length <= sequence.length:
        raise ValueError(f"cannot cut a sequence of {sequence.length} entries to {length}")
    start = max(length, sequence.shared)
    if start < sequence.length:
        state.free_range(sequence.row, start, sequence.length)
    if length < sequence.shared:
        state.leave_range(sequence, length, sequence.shared)
    sequence.length = length
    if sequence.gap.dropped:
        sequence.gap = sequence.gap.cut(length)
        state.set_gap(sequence.row, length, sequence.gap.dropped)
    if not sequence.gap.dropped:
        sequence.prompt = sequence.prompt[: length * TOKEN_BYTES]


def release(state: LedgerState, sequence: Sequence, count: int, start: int) -> int:
    _require(state, sequence)
    length, shared, end = sequence.length, sequence.shared, start + count
    if count < 0 or start < 0 or end > length:
        raise ValueError(f"cannot drop {count} tokens after {start}, of {length}")
    sequence.gap.require_start(start)
    if not count:
        return 0
    before = state.num_free
    if start < shared:
        state.leave_range(sequence, start, min(end, shared))
    if end > shared:
        state.free_range(sequence.row, max(start, shared), end)
    state.move_entries(sequence.row, end, length, start)
    sequence.length -= count
    sequence.gap = sequence.gap.widened(start, count)
    return state.num_free - before


def keep(state: LedgerState, sequence: Sequence, count: int) -> int:
    _require(state, sequence)
    start = max(sequence.shared, sequence.gap.start)
    num_freed = sequence.length - start - count
    if count < 0 or num_freed < 0:
        raise ValueError(f"cannot keep {count} of {sequence.length - start} private tokens")
    if num_freed:
        state.keep_entries(sequence.row, start, sequence.length, count)
        sequence.length -= num_freed
        sequence.gap = sequence.gap.widened(sequence.gap.start, num_freed)
    return num_freed


def _require(state: LedgerState, sequence: Sequence) -> None:
    """Raises ValueError for a sequence that is not open, and for a kind that has none of these verbs."""
    state.require_open(sequence)
    sequence.require_branching()
