"""The ledger's verbs that fork a sequence or drop some of its tokens. `TokenLedger` documents each.

fork       both sequences hold the same segments; the private tail becomes an unindexed segment first
truncate   drops the last entries
release    drops the oldest entries after the sinks: the path then has a gap
keep       drops private entries anywhere; only the device memory knows which ones
"""

from lightkv.errors import OutOfRows

from .prefix_tree import TOKEN_BYTES
from .sequence import Sequence
from .state import LedgerState


def require_plain(state: LedgerState, sequence: Sequence) -> None:
    """Raises ValueError for a sequence that is not open, a ring or a cross sequence."""
    state.require_open(sequence)
    if sequence.ring is not None:
        raise ValueError(
            f"{sequence} is a ring, whose slots are written again: it is extended, published (its sinks) and "
            "closed, and no more. Open another one for the same text, or a sequence without a ring"
        )
    if sequence.num_readers is not None:
        raise ValueError(f"{sequence} is a cross sequence, which is written once, read, and closed")


def fork(state: LedgerState, sequence: Sequence) -> Sequence:
    require_plain(state, sequence)
    if not state.has_free_row:
        raise OutOfRows(state.max_sequences)
    state.share_tail(sequence)
    return state.fork(sequence)


def truncate(state: LedgerState, sequence: Sequence, length: int) -> None:
    require_plain(state, sequence)
    if not 0 <= length <= sequence.length:
        raise ValueError(f"cannot cut a sequence of {sequence.length} entries to {length}")
    start = max(length, sequence.shared)
    if start < sequence.length:
        state.free_range(sequence.row, start, sequence.length)
    if length < sequence.shared:
        state.leave_range(sequence, length, sequence.shared)
    sequence.length = length
    if sequence.dropped:
        if length <= sequence.num_sink_tokens:  # what was dropped came after all that is left
            sequence.dropped = sequence.num_sink_tokens = 0
        state.set_gap(sequence.row, length, sequence.dropped)
    if not sequence.dropped:
        sequence.prompt = sequence.prompt[: length * TOKEN_BYTES]


def release(state: LedgerState, sequence: Sequence, count: int, sink_tokens: int) -> int:
    require_plain(state, sequence)
    length, shared = sequence.length, sequence.shared
    start, end = sink_tokens, sink_tokens + count
    if count < 0 or sink_tokens < 0 or end > length:
        raise ValueError(f"cannot drop {count} tokens after {sink_tokens}, of {length}")
    num_sink_tokens = sequence.num_sink_tokens
    if sequence.dropped and (
        sink_tokens > num_sink_tokens or (sink_tokens < num_sink_tokens and sequence.sink_node is not None)
    ):
        raise ValueError(f"{num_sink_tokens} sinks were kept so far; {sink_tokens} cannot be from now on")
    if not count:
        return 0
    before = state.num_free
    if start < shared:
        state.leave_range(sequence, start, min(end, shared))
    start = max(start, shared)
    if start < end:
        state.free_range(sequence.row, start, end)
    state.move_entries(sequence.row, end, length, sink_tokens)
    sequence.length -= count
    sequence.dropped += count
    sequence.num_sink_tokens = sink_tokens
    return state.num_free - before


def keep(state: LedgerState, sequence: Sequence, count: int) -> int:
    require_plain(state, sequence)
    start = max(sequence.shared, sequence.num_sink_tokens)
    num_freed = sequence.length - start - count
    if count < 0 or num_freed < 0:
        raise ValueError(f"cannot keep {count} of {sequence.length - start} private tokens")
    if num_freed:
        state.keep_entries(sequence.row, start, sequence.length, count)
        sequence.length -= num_freed
        sequence.dropped += num_freed
    return num_freed
