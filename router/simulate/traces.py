"""Traces of requests: reads the published formats line by line, and generates workloads without a file.

A trace has lengths, arrival times and the blocks that prompts share. It can be iterated several times, and is
the same each time.
"""

import csv
import itertools
import json
import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from lightkv.errors import LightKVError

BLOCK = 512  # tokens of a prefix block in Mooncake's traces


class UnreadableTrace(LightKVError, ValueError):
    """Raised for a file of an unknown format or without requests, and for an unknown name."""


class TraceRequest(NamedTuple):
    """A request. `arrival`: seconds from the first one, None if the trace has no times. `prompt`, `output`:
    numbers of tokens. `blocks`: ids of the prompt's blocks of `BLOCK` tokens, which are equal for equal
    prefixes; empty: the prompt shares no prefix."""

    arrival: float | None
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()


class Trace(Protocol):
    """Requests in the order of their arrival. It can be iterated several times."""

    @property
    def name(self) -> str:
        """The name that reports show."""

    def __iter__(self) -> Iterator[TraceRequest]: ...


class _Format(NamedTuple):
    """The fields of a published format. `unit`: seconds per unit of its times; 0: the times are dates."""

    prompt: str
    output: str
    time: str | None = None
    unit: float = 0.0
    blocks: str | None = None


_FORMATS = {
    # AzurePublicDataset; Patel et al., Splitwise, ISCA 2024.
    "Azure": _Format("ContextTokens", "GeneratedTokens", "TIMESTAMP"),
    # ShareGPT's lengths as sarathi-serve publishes them: no arrival times.
    "ShareGPT": _Format("num_prefill_tokens", "num_decode_tokens"),
    # Mooncake, FAST 2025: JSON lines, times in milliseconds.
    "Mooncake": _Format("input_length", "output_length", "timestamp", 1e-3, "hash_ids"),
}


class FileTrace:
    """A trace in one of the published formats: Azure and ShareGPT as CSV, Mooncake as JSON lines (.jsonl).

    Requests with an empty prompt or answer are left out. A time before the last one counts as the last one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        return self.path.name

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yields the requests. Raises UnreadableTrace, also for a file without requests, and OSError."""
        empty = True
        last = 0.0
        first: float | None = None
        with self.path.open(encoding="utf-8-sig", newline="") as lines:
            records: Iterable[Mapping[str, Any]]
            is_json = self.path.suffix in (".jsonl", ".json")
            counted = _Lines(lines)
            records = map(json.loads, counted) if is_json else csv.DictReader(counted)
            try:
                for record in records:
                    known = _format_of(record)
                    prompt, output = (_tokens(record, field) for field in (known.prompt, known.output))
                    if prompt < 1 or output < 1:
                        continue
                    empty = False
                    at = _seconds(record, known)
                    if at is not None:
                        first = at if first is None else first
                        last = at = max(at - first, last)
                    blocks = _blocks(record, known)
                    yield TraceRequest(at, prompt, output, blocks)
            except UnicodeDecodeError as error:
                raise UnreadableTrace(f"{self.path} is not text; unpack it if it is compressed") from error
            except (ValueError, TypeError, csv.Error) as error:
                reason = f"no JSON, {error.msg}" if isinstance(error, json.JSONDecodeError) else str(error)
                raise UnreadableTrace(
                    f"{self.path}, line {counted.number}: {reason}; correct it or leave it out"
                ) from error
        if empty:
            raise UnreadableTrace(f"{self.path} has no request; give an Azure, ShareGPT or Mooncake trace")


class _Lines:
    """Iterates lines. `number`: that of the last line read, from 1."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = lines
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            self.number += 1
            yield line


def _format_of(record: Mapping[str, Any]) -> _Format:
    for known in _FORMATS.values():
        if known.prompt in record and known.output in record:
            return known
    names = "; ".join(f"{known.prompt}, {known.output} ({name}'s)" for name, known in _FORMATS.items())
    raise ValueError(f"its fields are {', '.join(map(str, record))}; known are {names}")


def _tokens(record: Mapping[str, Any], field: str) -> int:
    try:
        return int(record[field])
    except (TypeError, ValueError):
        raise ValueError(f"{field} is {record[field]!r:.80}; it has to be a whole number") from None


def _seconds(record: Mapping[str, Any], known: _Format) -> float | None:
    if known.time is None or known.time not in record:
        return None
    if known.unit:
        seconds = float(record[known.time]) * known.unit
        if not math.isfinite(seconds):
            raise ValueError(f"the time is {record[known.time]}")
        return seconds
    at = datetime.fromisoformat(record[known.time])
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _blocks(record: Mapping[str, Any], known: _Format) -> tuple[int, ...]:
    """Returns the ids of a prompt's blocks, reduced to the range of token ids. Collisions are very rare."""
    if not known.blocks:
        return ()
    blocks = record.get(known.blocks, ())
    if not all(isinstance(block, int) for block in blocks):
        raise ValueError(f"{known.blocks} are {blocks!r:.80}; they have to be whole numbers")
    return tuple(block % (2**31 - 2) for block in blocks)


class Repeated:
    """The first `num` requests of a trace. A trace with fewer is repeated right after its end."""

    def __init__(self, trace: Trace, num: int) -> None:
        self._trace = trace
        self._num = num

    @property
    def name(self) -> str:
        return self._trace.name

    def __iter__(self) -> Iterator[TraceRequest]:
        return itertools.islice(self._again(), self._num)

    def _again(self) -> Iterator[TraceRequest]:
        start = 0.0
        while True:
            last, count = 0.0, 0
            for request in self._trace:
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


class GeneratedTrace:
    """`num` requests with a workload's lengths and without arrival times, drawn with `seed`."""

    def __init__(self, name: str, num: int, seed: int = 0) -> None:
        self.name = name
        self._num = num
        self._seed = seed

    def __iter__(self) -> Iterator[TraceRequest]:
        prompts, outputs = WORKLOADS[self.name]
        rng = random.Random(f"{self.name} {self._seed}")
        for _ in range(self._num):
            yield TraceRequest(None, prompts.draw(rng), outputs.draw(rng))


DEFAULT_REQUESTS = 2000  # of a workload


def open_trace(name: str, num: int | None = None, seed: int = 0) -> Trace:
    """Opens the trace `name`, a workload's name or a file's path. Raises UnreadableTrace.

    `num`: the number of requests; None: all of a file, `DEFAULT_REQUESTS` of a workload.
    """
    if name in WORKLOADS:
        return GeneratedTrace(name, num or DEFAULT_REQUESTS, seed)
    path = Path(name)
    if not path.is_file():
        raise UnreadableTrace(
            f"{name!r} is no file, and no workload; give the path of an Azure, ShareGPT or Mooncake trace, or "
            f"one of {', '.join(WORKLOADS)}"
        )
    trace = FileTrace(path)
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


def at_once(trace: Trace) -> Iterator[TraceRequest]:
    """Yields the requests with an arrival time of 0."""
    for request in trace:
        yield request._replace(arrival=0.0)


def faster(trace: Trace, factor: float) -> Iterator[TraceRequest]:
    """Yields the requests with the trace's own times divided by `factor`."""
    for request in trace:
        assert request.arrival is not None
        yield request._replace(arrival=request.arrival / factor)


def poisson(trace: Trace, rate: float, seed: int) -> Iterator[TraceRequest]:
    """Yields the requests with the arrival times of a Poisson process, `rate` a second."""
    rng = random.Random(f"arrivals {seed}")
    at = 0.0
    for request in trace:
        yield request._replace(arrival=at)
        at += rng.expovariate(rate)
