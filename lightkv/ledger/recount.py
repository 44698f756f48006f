"""What a ledger holds, and its recount, from its sequences and its tree."""

from lightkv.errors import CheckFailed
from lightkv.holdings import HeldRow, Holdings

from .segments import Segment, Tail
from .state import LedgerState


def holdings_of(state: LedgerState) -> Holdings:
    """Returns what each open sequence's row and each segment holds (`TokenLedger.holdings`)."""
    found = dict.fromkeys(state.tree)
    rows = []
    for row, sequence in state.sequences.items():
        path = list(sequence.path())[::-1]
        found.update(dict.fromkeys(path))
        ids = tuple(segment.id for segment in path)
        windows = tuple([hold.held() for hold in sequence.holds])
        dropped = sequence.gap.dropped
        rows.append(HeldRow(row, ids, sequence.shared, sequence.length, dropped, windows))
    parts: tuple[dict[int, int], ...] = tuple({} for _ in state.classes)
    for segment in found:
        for cls, tail in segment.tails.items():
            parts[cls - 1][segment.id] = tail.length or 1  # a state
    return Holdings(rows, {segment.id: segment.length for segment in found}, parts)


def recount(state: LedgerState) -> None:
    """Recounts everything. Raises CheckFailed."""
    state.tree.check()
    state.sessions.check()
    segments = set(state.tree)
    holders: dict[Segment | Tail, set[int]] = {}
    held = cached = 0
    for row, sequence in state.sequences.items():
        sequence.check(state.sequences)
        path = list(sequence.path())
        segments.update(path)
        held += sequence.num_private * state.width
        held += sum([(sequence.length - hold.own) * hold.of.width for hold in sequence.holds])
        found: list[Segment | Tail] = [*path]
        found += [tail for hold in sequence.holds for tail, _ in hold.tails()]
        for one in found:
            holders.setdefault(one, set()).add(row)
        has_gap = sequence.gap.node is not None
        if (row in state.gapped) != has_gap or row not in sequence.root.holders:
            raise CheckFailed(f"{sequence} has a path of {path}, and its gap or its root does not say so")
    if (states := state.states) is not None:
        states.check(segments, state.sequences.values())
    state.idle.check(segments, *(of.idle for of in state.classes))
    widths: dict[Segment | Tail, int] = dict.fromkeys(segments, state.width)
    widths.update({tail: tail.of.width for segment in segments for tail in segment.tails.values()})
    for one, width in widths.items():
        if one.holders != holders.get(one, set()):
            rows = sorted(holders.get(one, ()))
            raise CheckFailed(f"{one} lists {sorted(one.holders)}; it is on the paths of {rows}")
        if one.holders:
            held += one.length * width
        else:
            cached += one.length * width
    counted = state.num_cached, state.capacity - state.num_free - state.num_cached
    if counted != (cached, held):
        raise CheckFailed(f"{counted} slots cached and held by the ledger's count, {cached, held} by recount")
    if state.num_free < 0:
        raise CheckFailed(f"{state.num_free} slots free")
    if sorted([*state.free_rows, *state.sequences]) != list(range(1, state.max_sequences + 1)):
        raise CheckFailed(f"rows free {sorted(state.free_rows)}, open {sorted(state.sequences)}")
