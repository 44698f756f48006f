"""Decodes that read their first entries together, because these are in the same slots."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightkv.ledger.shared_prefixes import SharedPrefix


class SharedReads(NamedTuple):
    """`reads`: the decodes of each read, as places among the decodes, int64, and how many first entries it has.
    There are 2 to `most_members` decodes in each, and none is in two."""

    most_members: int
    reads: tuple[tuple[np.ndarray, int], ...]

    @classmethod
    def of(
        cls, rows: np.ndarray, starts: np.ndarray, prefixes: Sequence[SharedPrefix], most_members: int
    ) -> "SharedReads":
        """Returns the reads of decodes in `rows`, which have `starts` entries from before the step.

        A prefix with more than `most_members` sequences is cut into several, as equal in size as possible; one
        that is left over reads alone. Raises ValueError for a row that is no decode, or is named twice, and for
        prefixes longer than a decode's entries.
        """
        reads = []
        known = {row: i for i, row in enumerate(rows.tolist())} if prefixes else {}
        for prefix in prefixes:
            chosen = np.array([known.pop(row, -1) for row in prefix.rows])
            if (chosen < 0).any() or (starts[chosen] < prefix.num_tokens).any():
                raise ValueError(
                    f"rows {prefix.rows} are to read {prefix.num_tokens} entries together: each has to be a "
                    "decode that had so many before this step, and may be named only once"
                )
            parts = np.array_split(chosen, -(-len(chosen) // most_members))
            reads += [(some, prefix.num_tokens) for some in parts if len(some) > 1]
        return cls(most_members, tuple(reads))

    def arrays(self, num_decodes: int) -> list[np.ndarray]:
        """Makes the arrays of `SharedPrefixGroups` for so many decodes, flat int32: members, keys, place. Each
        read has two members or more, so there are never more than half as many as decodes."""
        most = self.most_members
        members = np.full((num_decodes // 2, most), -1, dtype=np.int32)
        keys = np.zeros(len(members), dtype=np.int32)
        place = np.full(num_decodes, -1, dtype=np.int32)
        for idx, (decodes, num_tokens) in enumerate(self.reads):
            members[idx, : len(decodes)] = decodes
            keys[idx] = num_tokens
            place[decodes] = idx * most + np.arange(len(decodes))
        return [members.reshape(-1), keys, place]
