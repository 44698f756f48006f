"""What a simulation found: its figures, its memory over time, and its latencies. Plain data, to and from JSON.

Of bounded size, however long the trace: a series has at most `SERIES_POINTS` points, a curve `CURVE_QUANTILES`.
Knows nothing of how any of it came about. Holds no wall-clock time, so that two runs of a seed are the same
bytes.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

SERIES_POINTS = 1024
CURVE_QUANTILES = (
    0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class Figures:
    """Every number of the JSON line. Seconds are of the simulated clock, shares are of 1.

    "While loaded" is from the first arrival until the last request is admitted: what comes after it is a pool
    that runs empty, and says nothing of a policy. Shares of memory and means over time are while loaded,
    and of the pool's capacity.
    """

    num_requests: int  # that were sent
    num_finished: int
    num_skipped: int  # left out, as they could never fit
    num_cut: int  # whose answer was cut off at max_new
    prompt_tokens: int
    hit_tokens: int  # of these, found in the cache
    output_tokens: int
    offered_rate: float  # requests a second; 0 where all are there at the start
    saturation_rate: float  # requests a second that an oracle finishes, all being there; 0: not asked for
    load: float  # the one by the other; 0: unknown
    seconds: float  # until the last request ended
    loaded_seconds: float
    served_rate: float  # requests a second while loaded: output tokens over the mean of an answer
    output_rate: float  # output tokens a second, over all of it
    goodput: float  # requests a second that met both targets, over all of it
    met_share: float  # of the requests, those that met both targets
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
    memory_held_share: float  # slots that running requests keep from others: used, padding included
    memory_used_share: float  # of these, slots with a token in them
    memory_cached_share: float  # held by nobody, kept because they may be hit
    memory_padding_share: float  # in pages or runs of a request, without a token
    peak_held_share: float
    last_page_waste_share: float  # of the slots of a request's pages (or run), empty; mean of its decode life
    num_preemptions: int
    num_preempted: int  # requests that were paused at least once
    preempted_share: float
    recomputed_tokens: int
    num_steps: int
    mean_running: float
    mean_waiting: float
    max_running: int
    max_waiting: int


@dataclass(frozen=True)
class Series:
    """What the memory held, in tokens, and how many requests there were: means over intervals of one width.

    Point i is the mean over [i · width, (i + 1) · width) of the simulated clock; the last interval may be cut
    short. used + padding is what is held; the rest of the capacity is cached or free.
    """

    width: float
    capacity: int
    used: list[float]
    padding: list[float]
    cached: list[float]
    running: list[float]
    waiting: list[float]

    def __post_init__(self) -> None:
        """Raises ValueError for what is no series."""
        lengths = [
            len(values) for values in (self.used, self.padding, self.cached, self.running, self.waiting)
        ]
        if len(set(lengths)) > 1:
            raise ValueError(f"series of {', '.join(map(str, lengths))} points; give all the same number")
        if not self.width > 0 or self.capacity < 1:
            raise ValueError(f"a series of width {self.width} and capacity {self.capacity}; give more than 0")


@dataclass(frozen=True)
class Curve:
    """A distribution of latencies: `seconds[i]` is its quantile `quantiles[i]`, to within half a per cent."""

    quantiles: list[float]
    seconds: list[float]

    def __post_init__(self) -> None:
        """Raises ValueError for what is no curve."""
        if len(self.quantiles) != len(self.seconds):
            raise ValueError(f"{len(self.quantiles)} quantiles and {len(self.seconds)} values of them")
        if not all(0 <= quantile <= 1 for quantile in self.quantiles):
            raise ValueError("a quantile is less than 0 or more than 1")


@dataclass(frozen=True)
class SimulationResult:
    """One simulation. `settings`: what it was run with, by name. `step_time`: the model's parameters."""

    settings: dict[str, Any]
    step_time: dict[str, Any]
    figures: Figures
    series: Series
    ttft: Curve  # from arrival to the first token
    tpot: Curve  # between tokens: per request, its mean over all but the first

    def __post_init__(self) -> None:
        """Raises ValueError where a setting is missing without which nothing can be said of it."""
        for name in ("trace", "allocation", "admission", "ttft_target", "tpot_target"):
            if name not in self.settings:
                raise ValueError(f"the settings have no {name}")
        for name in ("ttft_target", "tpot_target"):
            value = self.settings[name]
            if not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"the setting {name} is {value!r}; give seconds, more than 0")

    def line(self) -> str:
        """One JSON object, flat, with every figure and what it was run with: the last line printed."""
        return msgspec.json.encode({**self.settings, **asdict(self.figures)}).decode()

    def to_json(self) -> bytes:
        """All of it."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> "SimulationResult":
        """What `to_json` made. Raises msgspec.DecodeError, of which msgspec.ValidationError is one."""
        return msgspec.json.decode(data, type=cls)

    @classmethod
    def load(cls, path: Path) -> "SimulationResult":
        """From a file that `lightkv simulate --out` wrote. Raises OSError, msgspec.DecodeError."""
        return cls.from_json(path.read_bytes())
