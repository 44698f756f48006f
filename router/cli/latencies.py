"""Latencies of a service, read from the histograms of /metrics."""

from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

FIRST_TOKEN = "vllm:time_to_first_token_seconds"
BETWEEN_TOKENS = "vllm:inter_token_latency_seconds"
_FINISHED = "vllm:request_success"

Buckets = Mapping[float, float]  # upper bound in seconds → how many observations are at most that


class Observed(NamedTuple):
    """What /metrics says of the answers since the service's start. `model`: the name of its model. `finished`:
    how many answers have ended, by their reason."""

    model: str
    first_token: Buckets
    between_tokens: Buckets
    finished: Mapping[str, float]


def observed(text: str) -> Observed:
    """Reads the text of /metrics."""
    model = ""
    buckets: dict[str, dict[float, float]] = {FIRST_TOKEN: {}, BETWEEN_TOKENS: {}}
    finished: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            model = sample.labels.get("model_name", model)
            if sample.name == f"{family.name}_bucket" and family.name in buckets:
                buckets[family.name][float(sample.labels["le"])] = sample.value
            elif family.name == _FINISHED and sample.name == f"{_FINISHED}_total":
                finished[sample.labels["finished_reason"]] = sample.value
    return Observed(model, buckets[FIRST_TOKEN], buckets[BETWEEN_TOKENS], finished)


def since(later: Buckets, earlier: Buckets) -> Buckets:
    """Returns the observations between two readings; all of the later one if the service has started anew."""
    if any(later.get(bound, 0.0) < count for bound, count in earlier.items()):
        return later
    return {bound: count - earlier.get(bound, 0.0) for bound, count in later.items()}


def quantile(buckets: Buckets, share: float) -> str:
    """Returns the time within which this share of the observations lies, as a text. Within a bucket they are
    taken to be even, as Prometheus does; beyond the last finite bound the text says so."""
    bounds = sorted(buckets)
    rank = share * buckets[bounds[-1]]
    below, seen = 0.0, 0.0
    for bound in bounds:
        count = buckets[bound]
        if count >= rank and count > seen:
            if bound == float("inf"):
                return f"over {_time(below)}"
            return _time(below + (bound - below) * (rank - seen) / (count - seen))
        below, seen = bound, count
    return "none"


def line_of(buckets: Buckets, window: Buckets) -> str:
    """Returns the median and the 99th percentile: of `window` if it has observations, else since the start."""
    recent, total = (max(each.values(), default=0.0) for each in (window, buckets))
    if not total:
        return "none yet"
    chosen, what = (window, "in the last minute") if recent else (buckets, "since the start")
    number = recent or total
    return f"p50 {quantile(chosen, 0.5)}, p99 {quantile(chosen, 0.99)} (of {number:,.0f} {what})"


def _time(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
