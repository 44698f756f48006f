"""The classes of layers, each beside a twin that counts what queries see position by position."""

import math
from collections.abc import Callable

import pytest

from lightkv.classes.all import All
from lightkv.classes.chunk import Chunk
from lightkv.classes.state import State
from lightkv.classes.window import Window
from lightkv.layer_groups import SLACK, Lifetime, Rule

SIZES = [1, 2, 3, 7, 16, 63, 64, 65]
LONGEST = 300

SEES: dict[str, Callable[[int, int], list[int]]] = {
    "full": lambda size, query: list(range(query + 1)),
    "window": lambda size, query: [one for one in range(query + 1) if query - one < size],
    "chunk": lambda size, query: [one for one in range(query + 1) if one // size == query // size],
}
CASES = [("full", 0), *[(sees, size) for sees in ("window", "chunk") for size in SIZES]]


@pytest.mark.parametrize(("sees", "size"), CASES)
def test_a_class_answers_what_its_twin_counts(sees: str, size: int) -> None:
    lifetime = Lifetime(sees, size)  # type: ignore[arg-type]
    one: Rule = lifetime.rule
    assert type(one) is {"full": All, "window": Window, "chunk": Chunk}[sees]
    slack = min(SLACK, size)
    first_seen = [min(SEES[sees](size, query)) for query in range(LONGEST)]
    # A sequence that grows to `length` may have gone back by `slack` before.
    kept = [min(first_seen[max(length - slack, 0) : length + 1]) for length in range(LONGEST)]
    for at in range(LONGEST):
        assert one.first_seen(at) == first_seen[at]
        assert one.first_kept(at) == kept[at]
        assert one.boundary(at) == max(query for query in range(at + 1) if first_seen[query] == query)
        gone = [length for length in range(LONGEST) if kept[length] > at]
        assert one.gone_at(at) == gone[0] if gone else one.gone_at(at) >= LONGEST
        for chunk in (1, 9):
            assert min(at, at - kept[at] + chunk) <= lifetime.most_kept(at, chunk) <= at
    passing = {after - before for before, after in zip(kept[2 * size :], kept[2 * size + 1 :], strict=False)}
    assert one.reuses == (sees == "window" and passing == {1})


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 100])
def test_states_are_kept_at_ends_of_chunks_as_their_twin_counts(chunk: int) -> None:
    """A prompt diverges anywhere, and computes again what follows on the last snapshot before."""
    rule, kept = State(), list[int]()
    for end in range(chunk, LONGEST, chunk):
        if rule.keeps_chunk_end(end, kept[-1] if kept else 0):
            kept.append(end)
        assert len(kept) <= math.log2(end) + 1
        for diverge in range(1, end + chunk):
            there = max([0, *[one for one in kept if one <= diverge]])
            assert diverge - there < diverge / 2 + chunk
    for at in range(LONGEST):
        # After `at` tokens no entry is seen or kept, and only where there is a state does a sequence go on.
        assert (rule.first_seen(at), rule.first_kept(at), rule.boundary(at)) == (at, at, 0)
