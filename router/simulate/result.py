"""The result of a simulation: figures, memory over time and latencies, as plain data and as JSON.

Its size is bounded for traces of any length: a series has at most `SERIES_POINTS` points, a curve has
`CURVE_QUANTILES`. It holds no wall-clock time, so two runs with the same seed give the same bytes.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

SERIES_POINTS = 1024
CURVE_QUANTILES = (
    0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class Figures:
    """Every number of the JSON line. Seconds are of the simulated clock, shares are of 1.

    "While loaded" is from the first arrival until the last request is admitted. After that the pool only runs
    empty, which says nothing about a policy. Means over time and shares of memory are while loaded, and
    shares of memory are of the pool's capacity.
    """

    num_requests: int  # that were sent
    num_finished: int
    num_skipped: int  # left out, because they could never fit
    num_cut: int  # whose answer was cut at max_new
    prompt_tokens: int
    hit_tokens: int  # prompt tokens that were found in the cache
    output_tokens: int
    offered_rate: float  # arrivals per second; 0 if all requests wait at the start
    saturation_rate: float  # requests per second of an oracle when all wait at the start; 0: not simulated
    load: float  # offered_rate / saturation_rate; 0: unknown
    seconds: float  # until the last step ended
    loaded_seconds: float
    served_rate: float  # requests per second while loaded: output tokens over the mean length of an answer
    output_rate: float  # output tokens per second, over the whole time
    goodput: float  # requests per second that met both targets, over the whole time
    met_share: float  # the share of requests that met both targets
    ttft_mean: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    ttft_max: float
    tpot_mean: float
    tpot_p50: float
    tpot_p90: float
    tpot_p99: float
    tpot_max: float
    memory_held_share: float  # slots that running requests hold: used and padding
    memory_used_share: float  # held slots with a token
    memory_cached_share: float  # slots of the prefix cache, which no running request holds
    memory_padding_share: float  # held slots without a token, in pages or runs
    peak_held_share: float
    num_preemptions: int
    num_preempted: int  # requests that were preempted at least once
    preempted_share: float
    recomputed_tokens: int
    num_steps: int
    mean_running: float
    mean_waiting: float
    max_running: int
    max_waiting: int
    num_preempted_stated: int = 0  # requests with max_tokens that were preempted at least once
    num_preempted_guaranteed: int = 0  # requests that were preempted although they were guaranteed
    most_preemptions: int = 0  # of one request
    mean_guaranteed: float = 0.0  # running requests that are never preempted


@dataclass(frozen=True)
class Series:
    """Memory in tokens and numbers of requests over time, as means over intervals of one width.

    Point i is the mean over [i · width, (i + 1) · width) of the simulated clock; the last interval may be
    shorter. `used + padding` slots are held; the rest of the capacity is cached or free. `promised`: the most
    slots that the guaranteed requests may come to hold.
    """

    width: float
    capacity: int
    used: list[float]
    padding: list[float]
    cached: list[float]
    running: list[float]
    waiting: list[float]
    promised: list[float]


@dataclass(frozen=True)
class Curve:
    """A distribution of latencies: `seconds[i]` is its quantile `quantiles[i]`."""

    quantiles: list[float]
    seconds: list[float]


@dataclass(frozen=True)
class SimulationResult:
    """The result of one simulation. `settings`: by name. `step_time`: the parameters of the step-time model.
    `replicas`, `each`: the figures and the series of each replica, where there are several; the others are of
    all together."""

    settings: dict[str, Any]
    step_time: dict[str, Any]
    figures: Figures
    series: Series
    ttft: Curve  # seconds from arrival to the first token
    tpot: Curve  # seconds per token after the first, a request's mean
    replicas: list[Figures] = field(default_factory=list)
    each: list[Series] = field(default_factory=list)

    def line(self) -> str:
        """Returns one JSON object with every setting and figure: the last line that is printed. It is flat, but
        for `per_replica`, the figures of each of several replicas."""
        flat: dict[str, Any] = {**self.settings, **asdict(self.figures)}
        if self.replicas:
            flat["per_replica"] = self.replicas
        return msgspec.json.encode(flat).decode()

    def to_json(self) -> bytes:
        """Encodes the whole result."""
        return msgspec.json.encode(self)


def encode_all(results: Sequence[SimulationResult]) -> bytes:
    """Encodes results for one file: a single one as itself, several as a list named "results"."""
    return results[0].to_json() if len(results) == 1 else msgspec.json.encode({"results": results})
