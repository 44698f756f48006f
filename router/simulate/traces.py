"""Traces of requests: files and workloads that are generated without a file, and when their requests arrive.

A trace has lengths, arrival times and the blocks that prompts share. It can be iterated several times, and is
the same each time.
"""

import itertools
import math
import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from .trace_files import FileTrace, Reading, TraceRequest, UnreadableTrace


class Trace(Protocol):
    """Requests in the order of their arrival. It can be iterated several times."""

    @property
    def name(self) -> str:
        """The name that reports show."""

    def __iter__(self) -> Iterator[TraceRequest]: ...


@dataclass(frozen=True)
class Repeated:
    """The first `num` requests of a trace. A trace with fewer is repeated right after its end."""

    trace: Trace
    num: int

    @property
    def name(self) -> str:
        return self.trace.name

    def __iter__(self) -> Iterator[TraceRequest]:
        return itertools.islice(self._again(), self.num)

    def _again(self) -> Iterator[TraceRequest]:
        start = 0.0
        while True:
            last, count = 0.0, 0
            for request in self.trace:
                count += 1
                if request.arrival is not None:
                    last = request.arrival
                    request = request._replace(arrival=start + last)
                yield request
            start += last * (1 + 1 / count)


# --------------------------------------------------------------------------------
# Generated workloads


class Quantiles(NamedTuple):
    """A distribution of lengths by its quantiles at `SHARES`, with the logarithm interpolated linearly."""

    tokens: tuple[int, ...]

    def draw(self, rng: random.Random) -> int:
        """One length."""
        share = rng.random()
        idx = bisect_right(SHARES, share) - 1
        low, high = self.tokens[idx], self.tokens[idx + 1]
        part = (share - SHARES[idx]) / (SHARES[idx + 1] - SHARES[idx])
        return round(math.exp(math.log(low) + part * (math.log(high) - math.log(low))))


class Even(NamedTuple):
    """A uniform distribution of the lengths from `low` to `high`."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        """One length."""
        return rng.randint(self.low, self.high)


class LogNormal(NamedTuple):
    """A log-normal distribution of lengths, clipped to 1 to `most`. `mean`: of the length itself."""

    mean: float
    sigma: float
    most: int

    def draw(self, rng: random.Random) -> int:
        """One length."""
        mu = math.log(self.mean) - self.sigma**2 / 2
        return min(max(round(rng.lognormvariate(mu, self.sigma)), 1), self.most)


Lengths = Quantiles | Even | LogNormal
SHARES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)

# The first four have the quantiles of the published traces, computed from the files: Azure's of November 2023
# (AzurePublicDataset, CC-BY 4.0; Patel et al., Splitwise, ISCA 2024; their medians equal those of the paper,
# 1,020 and 129 for conversations, about 1,500 and 13 for code), ShareGPT's of sarathi-serve (Agrawal et al.,
# OSDI 2024) and Mooncake's conversations (Qin et al., FAST 2025), without their shared prefixes. Prompts and
# answers are drawn independently, because their ranks correlate by 0.08 at most. decode-heavy and prefill-heavy
# have the shapes of Past-Future's (Gong et al., ASPLOS 2025): the long part has 2,048 to 4,096 tokens, the
# other 32 to 4,096. In chat most answers are short, and some are long.
WORKLOADS: dict[str, tuple[Lengths, Lengths]] = {
    "azure-conv": (
        Quantiles((2, 29, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2734, 4083, 4142, 14050)),
        Quantiles((7, 16, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 601, 1000)),
    ),
    "azure-code": (
        Quantiles((3, 17, 75, 147, 385, 770, 1075, 1469, 1909, 2433, 3192, 5186, 7302, 7436, 7437)),
        Quantiles((6, 6, 6, 7, 8, 9, 11, 13, 16, 20, 29, 55, 90, 249, 1899)),
    ),
    "sharegpt": (
        Quantiles((1, 12, 29, 74, 382, 777, 1203, 1730, 2401, 3235, 4278, 5696, 6563, 7433, 8141)),
        Quantiles((2, 6, 44, 84, 181, 271, 346, 415, 493, 581, 683, 834, 920, 998, 1024)),
    ),
    "mooncake": (
        Quantiles((891, 894, 901, 964, 1662, 3263, 4993, 6909, 9570, 13196, 17869, 27367, 39549, 85399, 126195)),  # noqa: E501
        Quantiles((1, 3, 10, 24, 100, 213, 291, 350, 399, 447, 504, 597, 698, 1115, 2000)),
    ),
    "decode-heavy": (Even(32, 4096), Even(2048, 4096)),
    "prefill-heavy": (Even(2048, 4096), Even(32, 4096)),
    "chat": (LogNormal(350, 1.0, 4096), LogNormal(350, 1.0, 4096)),
}  # fmt: skip


@dataclass(frozen=True)
class GeneratedTrace:
    """`num` requests with a workload's lengths and without arrival times, drawn with `seed`."""

    name: str
    num: int
    seed: int = 0

    def __iter__(self) -> Iterator[TraceRequest]:
        prompts, outputs = WORKLOADS[self.name]
        rng = random.Random(f"{self.name} {self.seed}")
        for _ in range(self.num):
            yield TraceRequest(None, prompts.draw(rng), outputs.draw(rng))


DEFAULT_REQUESTS = 2000  # of a workload


def open_trace(name: str, num: int | None = None, seed: int = 0, reading: Reading = Reading()) -> Trace:  # noqa: B008
    """Opens the trace `name`, a workload's name or a file's path. Raises UnreadableTrace.

    `num`: the number of requests; None: all of a file, `DEFAULT_REQUESTS` of a workload. `seed`: of a workload.
    `reading`: of a file.
    """
    if name in WORKLOADS:
        return GeneratedTrace(name, num or DEFAULT_REQUESTS, seed)
    path = Path(name)
    if not path.is_file():
        raise UnreadableTrace(
            f"{name!r} is no file, and no workload; give the path of a trace, or one of {', '.join(WORKLOADS)}"
        )
    trace = FileTrace(path, reading)
    return trace if num is None else Repeated(trace, num)


# --------------------------------------------------------------------------------
# Arrivals


class Summary(NamedTuple):
    """The number of requests of a trace, and the seconds from the first to the last, None without times."""

    num: int
    span: float | None


def summarise(trace: Trace) -> Summary:
    """Reads the trace once and summarises it."""
    num, last = 0, None
    for request in trace:
        num += 1
        last = request.arrival
    return Summary(num, last)


def is_timed(trace: Trace) -> bool:
    """Whether the trace has arrival times."""
    return next(iter(trace)).arrival is not None
