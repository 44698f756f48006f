"""The table of verbs in the docstring of `lightkv/edits.py`, compared with what each verb does."""

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

import lightkv.edits
from tests.support.cache_life import Life

COUNTS = ("free", "cached", "held")
STEPS = 3000
EACH = "of each sequence "


def table() -> dict[str, tuple[str, list[str], bool]]:
    """Returns the counts and the edits of each verb, and whether the edits are those of each sequence."""
    text = (lightkv.edits.__doc__ or "").split("beside them:\n\n")[1]
    text = re.sub(r",\n {8,}", ", ", text)
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines() if line.strip()]
    return {
        verb: (counts, [] if edits == "none" else edits.removeprefix(EACH).split(", "), EACH in edits)
        for verb, counts, edits in rows
    }


def is_in_order(kinds: list[str], order: list[str], repeats: bool) -> bool:
    """Returns whether `kinds` is of the kinds in `order`, each any number of times, and so is the whole if it
    `repeats`."""
    parts = "".join(f"(?:{kind} )*" for kind in order)
    pattern = f"(?:{parts})*" if repeats else parts
    return re.fullmatch(pattern, "".join(f"{kind} " for kind in kinds)) is not None


def test_each_verb_changes_these_counts_and_emits_these_edits() -> None:
    life, described = Life(5, torch.device("cpu")), table()
    ledger: Any = life.cache.ledger
    emitted: dict[str, set[str]] = defaultdict(set)
    changed: dict[str, set[str]] = defaultdict(set)

    def noting(name: str, verb: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before = [getattr(ledger, f"num_{one}") for one in COUNTS]
            num_edits = len(ledger._state._edits)
            result = verb(*args, **kwargs)
            after = [getattr(ledger, f"num_{one}") for one in COUNTS]
            kinds = [type(edit).__name__ for edit in ledger._state._edits[num_edits:]]
            assert is_in_order(kinds, *described[name][1:]), (name, kinds)
            emitted[name].update(kinds)
            changed[name].update(
                one for one, was, now in zip(COUNTS, before, after, strict=True) if was != now
            )
            return result

        return call

    for name in described:
        setattr(ledger, name, noting(name, getattr(ledger, name)))
    for _ in range(STEPS):
        life.step()
    for name, (counts, edits, _) in described.items():
        assert emitted[name] == set(edits), name
        assert changed[name] == {one for one in COUNTS if re.search(rf"\b{one}\b", counts)}, name
