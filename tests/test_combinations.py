"""Checks that the combinations of `tests.support.combinations` cover what they should and lose none."""

from itertools import combinations, product
from math import prod
from typing import Any

import pytest

from tests.support.combinations import each_pair, each_value, pairs, single_values, slow

AXES: list[dict[str, list[Any]]] = [
    {"one": [1, 2, 3]},
    {"one": [1, 2, 3], "two": ["a", "b"]},
    {"one": [1, 2, 3], "two": ["a", "b"], "three": [0.0, 5.0]},
    {"one": [0, 1], "two": [False, True], "three": [0.0, 1.0], "four": list(range(7)), "five": [None, ""]},
    {"one": [1, 2, 3], "two": [1, 2, 3], "three": [1, 2, 3], "four": [1, 2, 3]},
]


@pytest.mark.parametrize("axes", AXES, ids=lambda axes: f"{len(axes)} axes")
def test_every_pair_occurs(axes: dict[str, list[Any]]) -> None:
    chosen = pairs(**axes)
    for (one, values), (two, others) in combinations(enumerate(axes.values()), 2):
        found = {(combination[one], combination[two]) for combination in chosen}
        assert found == set(product(values, others))
    assert len(set(chosen)) == len(chosen) <= prod(len(values) for values in axes.values())
    assert chosen == pairs(**axes)


def test_pairs_are_much_fewer_than_products() -> None:
    assert len(pairs(**AXES[1])) == 6
    assert len(pairs(**AXES[2])) == 6
    assert len(pairs(**AXES[3])) <= 16  # of 112
    assert len(pairs(**AXES[4])) <= 11  # of 81


@pytest.mark.parametrize("axes", AXES, ids=lambda axes: f"{len(axes)} axes")
def test_every_value_occurs(axes: dict[str, list[Any]]) -> None:
    chosen = single_values(**axes)
    assert [set(values) for values in zip(*chosen, strict=True)] == [set(values) for values in axes.values()]
    assert len(chosen) == max(len(values) for values in axes.values())


@pytest.mark.parametrize("axes", AXES, ids=lambda axes: f"{len(axes)} axes")
def test_the_rest_of_the_product_is_slow(axes: dict[str, list[Any]]) -> None:
    for decorator, chosen in (
        (each_pair(**axes), pairs(**axes)),
        (each_value(**axes), single_values(**axes)),
    ):
        names, cases = decorator.args
        assert names == tuple(axes)
        assert [case.values for case in cases] == list(product(*axes.values()))
        quick = [case.values for case in cases if not case.marks]
        assert sorted(map(str, quick)) == sorted(map(str, chosen))
        assert {mark.name for case in cases for mark in case.marks} <= {"slow"}
        assert len({case.id for case in cases}) == len(cases)


def test_values_with_marks_keep_them() -> None:
    """They stay in the product with their own marks, and the others' pairs are covered without them."""
    gpu = pytest.param("bf16", marks=pytest.mark.gpu)
    decorator = each_pair(window=[0, 40, *slow(1)], softcap=[0.0, 5.0], dtype=["f32", gpu])
    marks = {case.values: {mark.name for mark in case.marks} for case in decorator.args[1]}
    assert len(marks) == 12
    assert {values for values, names in marks.items() if not names} == set(
        product([0, 40], [0.0, 5.0], ["f32"])
    )
    assert all(("gpu" in names) == (values[2] == "bf16") for values, names in marks.items())
    assert all(("slow" in names) == (values[0] == 1) for values, names in marks.items())
