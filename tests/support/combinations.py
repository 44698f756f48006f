"""Parametrizes tests with combinations of values: a set that covers every pair of values, or every value, runs
in `make test`, and all others are marked `slow`, so `make test-all` runs the whole product."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def slow(*values: Any) -> list[Any]:
    """Returns parameters of a test that are left to `make test-all`."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def slow_cases(*cases: tuple[Any, ...]) -> list[Any]:
    """Returns values for several parameters of a test that are left to `make test-all`."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def pairs(**axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns combinations, one value of each axis in the order of the axes, in which every two values of
    different axes occur together at least once. The same axes give the same combinations."""
    return [_values(axes, places) for places in _pair_places(_lengths(axes))]


def single_values(**axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns as many combinations as the longest axis has values; every value occurs at least once."""
    return [_values(axes, places) for places in _single_places(_lengths(axes))]


def each_pair(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test with the product of the axes. Combinations outside `pairs` of the values without a
    mark are `slow`; a combination that has a value with marks, as `slow` gives them, has just those marks."""
    plain = {name: [value for value in values if not _marks(value)] for name, values in axes.items()}
    return _parametrized(axes, pairs(**plain))


def each_value(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test as `each_pair` does, but only `single_values` run in `make test`."""
    plain = {name: [value for value in values if not _marks(value)] for name, values in axes.items()}
    return _parametrized(axes, single_values(**plain))


def each_pair_of(names: str, cases: Sequence[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Parametrizes a test with these cases, of which all but `covering_pairs` are `slow`."""
    quick = covering_pairs(cases)
    marked = [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in cases]
    return pytest.mark.parametrize(names, marked, ids=str)


def _lengths(axes: dict[str, Sequence[Any]]) -> list[int]:
    return [len(values) for values in axes.values()]


def _values(axes: dict[str, Sequence[Any]], places: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(values[place] for values, place in zip(axes.values(), places, strict=True))


def _single_places(lengths: list[int]) -> list[tuple[int, ...]]:
    return [tuple(at % length for length in lengths) for at in range(max(lengths))]


def _pair_places(lengths: list[int]) -> list[tuple[int, ...]]:
    return covering_pairs(list(product(*map(range, lengths))))


def covering_pairs(cases: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Returns some of the cases, in which all values occur and every two values that one of the cases has
    together. It takes, again and again, the first case that has the most pairs which no taken one has."""
    together = min(2, len(cases[0]))
    candidates = {case: set(combinations(enumerate(map(repr, case)), together)) for case in cases}
    missing, taken = set().union(*candidates.values()), []
    while missing:
        best = max(candidates, key=lambda case: len(candidates[case] & missing))
        taken.append(best)
        missing -= candidates.pop(best)
    return taken


def _parametrized(axes: dict[str, Sequence[Any]], quick: list[tuple[Any, ...]]) -> pytest.MarkDecorator:
    cases, quick = [], [tuple(map(repr, values)) for values in quick]
    for chosen in product(*axes.values()):
        values = tuple(value.values[0] if isinstance(value, ParameterSet) else value for value in chosen)
        marks = [mark for value in chosen for mark in _marks(value)]
        if not marks and tuple(map(repr, values)) not in quick:
            marks = [pytest.mark.slow]
        label = "-".join(_label(name, value) for name, value in zip(axes, values, strict=True))
        cases.append(pytest.param(*values, marks=marks, id=label))
    return pytest.mark.parametrize(tuple(axes), cases)


def _marks(value: Any) -> list[Any]:
    return list(value.marks) if isinstance(value, ParameterSet) else []


def _label(name: str, value: Any) -> str:
    return value if isinstance(value, str) and value else f"{name} {value}".replace("torch.", "")
