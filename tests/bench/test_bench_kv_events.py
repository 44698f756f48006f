"""The life whose KV events are measured: its cache is full, and its subscriber misses nothing."""

import pytest

from bench.serving import kv_events

FEW = ["--capacity", "6000", "--running", "4", "--prompt", "256", "--output", "32"]


@pytest.mark.slow
def test_a_life_stores_as_much_as_it_evicts_and_its_subscriber_misses_nothing() -> None:
    life = kv_events.Life(kv_events.arguments(FEW))
    life.fill()
    cost, counts = kv_events.with_events(life, 0.5, 0)
    assert cost.tokens > cost.steps > 0
    assert counts["missing"] == 0
    assert counts["stored"] > 0
    assert abs(counts["stored"] - counts["removed"]) <= 2 * 6000 / 64
    life.ledger.check()


def test_a_rate_is_kept() -> None:
    life = kv_events.Life(kv_events.arguments(FEW))
    assert life.run(0.1, 10.0).tokens < 10


def test_the_floor_hashes_and_encodes() -> None:
    assert kv_events.floor_seconds(100) > 0
