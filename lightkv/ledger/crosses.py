"""The recount of cross sequences and their readers (`TokenLedger.open_cross`)."""

from collections import Counter
from collections.abc import Mapping

from lightkv.errors import CheckFailed

from .sequence import Sequence


def check(sequences: Mapping[int, Sequence]) -> None:
    """Raises CheckFailed unless cross sequences and their readers, all open, know of each other. `sequences`:
    the open ones, by row."""
    readers = Counter(sequence.cross.row for sequence in sequences.values() if sequence.cross)
    for row, sequence in sequences.items():
        counted, read = sequence.num_readers, readers.pop(row, 0)
        if (counted or 0) != read or not (sequence.is_kept or counted):
            raise CheckFailed(f"{sequence} counts {counted} readers, and has {read}")
        if counted is not None and (sequence.shared or sequence.dropped or sequence.cross):
            raise CheckFailed(f"{sequence} is a cross sequence, which only holds tokens of its own")
        if (cross := sequence.cross) is not None:
            namespace, of_cross = sequence.root.namespace, cross.root.namespace
            if (
                sequences.get(cross.row) is not cross
                or namespace not in cross.reader_namespaces
                or namespace[-len(of_cross) :] != of_cross
            ):
                raise CheckFailed(f"{sequence} reads {cross}, which is not open, or does not know it")
    if readers:
        raise CheckFailed(f"rows {sorted(readers)} are read, and hold no open sequence")
