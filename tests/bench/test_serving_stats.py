"""Latency summaries, steady steps and step rates computed from the answers of load clients."""

import pytest

from bench.serving import stats as serving_stats
from bench.serving.load_client import Answer
from bench.serving.stats import NotSteady, split_gaps, steady, step_rate_ms
from tests.support.answers import decoding


def test_percentiles_are_milliseconds() -> None:
    found = serving_stats.summary([i / 1000 for i in range(101)])
    assert found == pytest.approx({"mean": 50.0, "p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0})
    assert serving_stats.summary([]) is None


def test_throughput_is_of_the_whole_span() -> None:
    answers = [
        Answer(10.0, [11.0, 13.0], 14.0, num_prompt=6, num_output=4, text="ab"),
        Answer(12.0, [15.0], 20.0, num_prompt=4, num_output=1, text="c"),
    ]
    found = serving_stats.summarise(answers)
    assert found["seconds"] == 10.0
    assert found["requests_per_s"] == 0.2
    assert found["output_tokens_per_s"] == 0.5
    assert found["total_tokens_per_s"] == 1.5
    assert found["tokens_per_piece"] == pytest.approx(5 / 3)
    assert found["ttft_ms"]["p50"] == 2000.0
    assert found["between_pieces_ms"]["p50"] == 2000.0
    assert found["per_token_ms"]["mean"] == pytest.approx(2000 / 3)
    assert found["end_to_end_ms"]["mean"] == 6000.0
    assert (found["goodput_per_s"], found["met_share"]) == (0.1, 0.5)  # one is slow between its tokens
    assert serving_stats.summarise(answers, serving_stats.Targets(2.0, 0.7))["met_share"] == 0.5
    assert serving_stats.summarise(answers, serving_stats.Targets(3.0, 0.7))["met_share"] == 1.0


def test_gaps_beside_another_requests_prefill_are_told_apart() -> None:
    answers = [
        Answer(0.0, [1.0, 2.0, 3.0, 5.0, 6.0], 6.0, num_prompt=1, num_output=5, text=""),
        Answer(
            3.1, [5.001, 6.001], 6.1, num_prompt=1, num_output=2, text=""
        ),  # its prefill was in the long step
        Answer(1.8, [2.0, 2.5], 2.5, num_prompt=1, num_output=2, text=""),  # came late in a step of the first
    ]
    alone, beside = split_gaps(answers)
    assert beside == [2.0]
    assert sorted(alone) == [0.5, 1.0, 1.0, 1.0, 1.0]
    found = serving_stats.summarise(answers)
    assert found["between_pieces_beside_prefill_ms"]["p99"] == 2000.0
    assert found["between_pieces_alone_ms"]["p99"] == 1000.0
    assert found["share_beside_prefill"] == pytest.approx(1 / 6)


def test_a_step_is_timed_while_all_clients_decode() -> None:
    slow_start = decoding(1.0, 40)
    slow_start.arrivals[1:] = [at + 3.0 for at in slow_start.arrivals[1:]]  # the other's prefill
    found = steady([slow_start, decoding(4.05, 30)])
    assert found.mean_ms == pytest.approx(100.0)
    assert found.median_ms == pytest.approx(100.0)
    assert (found.begin, found.end) == (4.05, pytest.approx(4.05 + 2.9))
    # One had 1 to 29 tokens of its answer before it, the other from the second piece on 2 to 30.
    assert found.context == pytest.approx(10 + (15 * 29 + 16 * 28) / 57, abs=0.6)


def test_one_long_step_counts_in_the_mean_and_not_in_the_median() -> None:
    answer = decoding(1.0, 41)
    answer.arrivals[20:] = [at + 4.0 for at in answer.arrivals[20:]]
    found = steady([answer])
    assert found.mean_ms == pytest.approx(200.0)
    assert found.median_ms == pytest.approx(100.0)
    assert found.context == 10 + 20.5


@pytest.mark.parametrize(
    ("answers", "match"),
    [
        ([decoding(1.0, 30), decoding(3.0, 30)], "together for 9 steps; 16 are needed"),
        ([decoding(1.0, 30), decoding(9.0, 30)], "together for 0 steps"),
        ([decoding(1.0, 60, pieces=30)], "a piece has 2.000 tokens"),
    ],
    ids=["too short", "never together", "several tokens a piece"],
)
def test_what_is_not_steady_is_no_time_of_a_step(answers: list[Answer], match: str) -> None:
    with pytest.raises(NotSteady, match=match):
        steady(answers)


def test_the_routers_steps_are_timed_by_when_its_count_was_new() -> None:
    counts = [(0.0, 5), (1.0, 5), (1.5, 10), (2.0, 10), (2.5, 30), (3.0, 30), (3.5, 50), (9.0, 500)]
    assert step_rate_ms(counts, 1.2, 4.0) == pytest.approx(50.0)
    assert step_rate_ms(counts, 1.2, 2.0) is None
