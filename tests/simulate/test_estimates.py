"""Tests the estimates of output lengths that only a simulation compares."""

import pytest

from lightkv.router.engine.estimates import OutputLengths
from lightkv.router.simulate.admissions import AverageLength, DrawnLengths


def test_an_estimate_is_the_mean_or_a_tenth_more_than_a_longer_output() -> None:
    lengths = AverageLength()
    for _ in range(OutputLengths.num_needed - 1):
        lengths.observe(100)
    assert lengths.estimate(0, 500) == 500  # too few outputs for an estimate
    lengths.observe(100)
    assert [lengths.estimate(n, 500) for n in (0, 99, 100, 200, 490)] == [100, 108, 110, 220, 500]
    assert lengths.estimate(3, 4) == 4
    for _ in range(OutputLengths.num_recent):
        lengths.observe(7)
    assert [lengths.estimate(n, 500) for n in (0, 7, 8)] == [7, 8, 9]


def test_an_estimate_is_drawn_from_longer_outputs() -> None:
    lengths = DrawnLengths(seed=1)
    for i in range(1000):
        lengths.observe(i + 1)
    drawn = [lengths.estimate(500, 5000) for _ in range(4000)]
    assert min(drawn) > 500
    assert max(drawn) <= 1000
    assert sum(drawn) / len(drawn) == pytest.approx(750, abs=10)
    other = DrawnLengths(seed=1)
    for i in range(1000):
        other.observe(i + 1)
    assert [other.estimate(500, 5000) for _ in range(4000)] == drawn
