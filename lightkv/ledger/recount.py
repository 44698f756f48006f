"""The recount of a ledger, from its sequences and its tree."""

from lightkv.errors import CheckFailed

from .segments import Segment, Tail
from .state import LedgerState


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
    state.idle.check(segments)
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
