"""The latencies that `lightkv top` shows: quantiles of histograms, and the whole command."""

import pytest

from lightkv.router.api.answers.generation import AnswerClock
from lightkv.router.api.metrics import ServiceMetrics
from lightkv.router.cli.latencies import Buckets, line_of, observed, quantile, since
from lightkv.router.service.messages import Load, Status
from lightkv.router.service.router_client import LatestStatus

INF = float("inf")
HALVES: Buckets = {0.1: 50.0, 0.2: 100.0, INF: 100.0}


@pytest.mark.parametrize(
    ("buckets", "share", "text"),
    [
        (HALVES, 0.5, "100.0 ms"),
        (HALVES, 0.25, "50.0 ms"),
        (HALVES, 0.99, "198.0 ms"),
        ({1.0: 0.0, 3.0: 4.0, INF: 4.0}, 0.5, "2.00 s"),
        ({1.0: 1.0, INF: 2.0}, 0.99, "over 1.00 s"),
        ({1.0: 0.0, INF: 0.0}, 0.5, "none"),
    ],
)
def test_a_quantile_lies_evenly_in_its_bucket(buckets: Buckets, share: float, text: str) -> None:
    assert quantile(buckets, share) == text


def test_a_line_is_of_the_last_minute_or_of_all() -> None:
    later = {0.1: 60.0, 0.2: 200.0, INF: 200.0}
    window = since(later, HALVES)
    assert window == {0.1: 10.0, 0.2: 100.0, INF: 100.0}
    assert line_of(later, window).endswith("(of 100 in the last minute)")
    assert line_of(HALVES, since(HALVES, HALVES)) == "p50 100.0 ms, p99 198.0 ms (of 100 since the start)"
    assert since(HALVES, later) == HALVES  # the service has started anew
    assert line_of({}, {}) == "none yet"


def test_the_services_own_metrics_are_read() -> None:
    latest = LatestStatus(Status("ready", "", Load()), 0.0)
    metrics = ServiceMetrics('a "name"', lambda: latest)
    for seconds in (0.02, 0.02, 0.4):
        metrics.ttft.observe(seconds)
    AnswerClock(metrics, 1, 1).finish("stop")
    found = observed(metrics.text().decode())
    assert found.model == 'a "name"'
    assert found.first_token[0.025] == 2.0
    assert found.first_token[INF] == 3.0
    assert found.between_tokens[INF] == 0.0
    assert found.finished == {"stop": 1.0}
