"""What came and went in the prefix tree, as data, from which KV events are made.

The ledger notes these only where it was asked to (`PrefixTree.note_changes`). Segments are named by their ids,
and tokens are int32 bytes. Held and cached segments are not told apart, since look-ups find both; unindexed
ones never occur. Applied in order, the changes give the indexed segments and nothing else.
"""

from typing import NamedTuple

Namespace = tuple[object, ...]


class SegmentAdded(NamedTuple):
    """`segment` is found below `parent` with these `tokens`. `parent` 0 is the root of `namespace`, which means
    nothing for other parents."""

    segment: int
    parent: int
    namespace: Namespace
    tokens: bytes


class SegmentGrew(NamedTuple):
    """`segment` has `tokens` more at its end."""

    segment: int
    tokens: bytes


class SegmentSplit(NamedTuple):
    """The first `at` tokens of `segment` are a segment `head` of their own now, below which it stands."""

    segment: int
    at: int
    head: int


class SegmentCut(NamedTuple):
    """`segment` has only its first `keep` tokens left; with 0 it is gone. Nothing stands below what goes."""

    segment: int
    keep: int


TreeChange = SegmentAdded | SegmentGrew | SegmentSplit | SegmentCut
