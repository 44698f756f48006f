"""Computes throughput, percentiles, gaps beside prefills and the time of a step from the load client's answers.

Clients that start together have a steady time: from the moment when the last of them gets its first piece to
the moment when the first of them ends. All of them decode during it, and nothing else runs. Each step
generates one token for each of them, so the pieces count the steps. The mean time between pieces is what is
compared with the replay of the graph, because it includes every delay. The median, which ignores rare delays,
is reported too.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from bench.serving.load_client import Answer

Results = dict[str, Any]

MOST_TOKENS_A_PIECE = 1.01  # above it pieces do not count steps
LEAST_STEPS = 16  # in a steady time


class NotSteady(Exception):
    """Raised when the time of a step cannot be computed from the answers."""


class Targets(NamedTuple):
    """The targets of goodput: most seconds to the first token, and most mean seconds between the others."""

    ttft: float = 10.0
    tpot: float = 0.1


def span(answers: Sequence[Answer]) -> float:
    """Returns the seconds from the first request to the end of the last answer."""
    return max(answer.ended for answer in answers) - min(answer.sent for answer in answers)


def summary(seconds: Sequence[float]) -> dict[str, float] | None:
    """Returns the mean and percentiles in milliseconds; None without values."""
    if not len(seconds):
        return None
    values = np.asarray(seconds) * 1e3
    percentiles = (50, 90, 95, 99)
    found = zip(percentiles, np.percentile(values, percentiles), strict=True)
    return {"mean": float(values.mean()), **{f"p{percent}": float(value) for percent, value in found}}


def tokens_per_piece(answers: Sequence[Answer]) -> float:
    return sum(answer.num_output for answer in answers) / sum(len(answer.arrivals) for answer in answers)


def summarise(answers: Sequence[Answer], targets: Targets = Targets()) -> Results:  # noqa: B008
    """Summarises the answers of one load."""
    seconds = span(answers)
    in_time = [
        answer.ttft <= targets.ttft and max(answer.per_token, default=0.0) <= targets.tpot
        for answer in answers
    ]
    num_output = sum(answer.num_output for answer in answers)
    num_prompt = sum(answer.num_prompt for answer in answers)
    alone, beside = split_gaps(answers)
    return {
        "requests": len(answers),
        "seconds": seconds,
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "requests_per_s": len(answers) / seconds,
        "goodput_per_s": sum(in_time) / seconds,
        "met_share": sum(in_time) / len(answers),
        "output_tokens_per_s": num_output / seconds,
        "total_tokens_per_s": (num_output + num_prompt) / seconds,
        "tokens_per_piece": tokens_per_piece(answers),
        "ttft_ms": summary([answer.ttft for answer in answers]),
        "between_pieces_ms": summary([gap for answer in answers for gap in answer.gaps]),
        "between_pieces_alone_ms": summary(alone),
        "between_pieces_beside_prefill_ms": summary(beside),
        "share_beside_prefill": len(beside) / max(len(alone) + len(beside), 1),
        "per_token_ms": summary([seconds for answer in answers for seconds in answer.per_token]),
        "end_to_end_ms": summary([answer.latency for answer in answers]),
    }


def split_gaps(answers: Sequence[Answer]) -> tuple[list[float], list[float]]:
    """Returns the gaps between pieces in seconds, in two lists: decode alone, and beside a prefill.

    A gap is beside a prefill if another request waited for its first piece during most of it.
    """
    waits = sorted((answer.sent, answer.arrivals[0]) for answer in answers)
    starts, ends = [waits[0][0]], [waits[0][1]]
    for start, end in waits[1:]:
        if start > ends[-1]:
            starts.append(start)
            ends.append(end)
        else:
            ends[-1] = max(ends[-1], end)
    lengths = np.subtract(ends, starts)
    # Up to the i-th start or end, at least one request waited during `waited[i]` seconds in all.
    bounds = np.stack((starts, ends), axis=1).ravel()
    waited = np.stack((np.cumsum(lengths) - lengths, np.cumsum(lengths)), axis=1).ravel()
    alone: list[float] = []
    beside: list[float] = []
    for answer in answers:
        at = np.asarray(answer.arrivals)
        shares = np.diff(np.interp(at, bounds, waited))
        for gap, share in zip(np.diff(at).tolist(), shares.tolist(), strict=True):
            (beside if share > gap / 2 else alone).append(gap)
    return alone, beside


class Steady(NamedTuple):
    """The steps of a steady time. `gaps`: seconds between successive pieces, of all clients. `context`: mean
    number of tokens of a sequence over clients and steps. `begin`, `end`: times of `time.perf_counter`."""

    gaps: list[float]
    context: float
    begin: float
    end: float

    @property
    def mean_ms(self) -> float:
        return sum(self.gaps) / len(self.gaps) * 1e3

    @property
    def median_ms(self) -> float:
        return float(np.median(self.gaps)) * 1e3


def steady(answers: Sequence[Answer]) -> Steady:
    """Finds the steady time of clients that started together with one request each. Raises NotSteady."""
    pieces = tokens_per_piece(answers)
    if pieces > MOST_TOKENS_A_PIECE:
        raise NotSteady(f"a piece has {pieces:.3f} tokens, so the time of each token is unknown")
    begin = max(answer.arrivals[0] for answer in answers)
    end = min(answer.arrivals[-1] for answer in answers)
    gaps, contexts = [], []
    for answer in answers:
        within = [i for i, at in enumerate(answer.arrivals) if begin <= at <= end]
        for before, after in pairwise(within):
            gaps.append(answer.arrivals[after] - answer.arrivals[before])
            contexts.append(answer.num_prompt + after)  # the tokens over which piece `after` was computed
    if len(gaps) < LEAST_STEPS * len(answers):
        raise NotSteady(
            f"all {len(answers)} clients decoded together for {len(gaps) / len(answers):.0f} steps; "
            f"{LEAST_STEPS} are needed: give a longer --output, or room for all of them at once"
        )
    return Steady(gaps, sum(contexts) / len(contexts), begin, end)


def step_rate_ms(counts: Sequence[tuple[float, int]], begin: float, end: float) -> float | None:
    """Returns the milliseconds of a step by the router's own count of steps, as seen at several times.

    The count is updated now and then, and its age is known only when it has just changed. Returns None if it
    changed fewer than two times from `begin` to `end`.
    """
    renewed = [
        (at, steps) for (_, before), (at, steps) in pairwise(counts) if steps != before and begin <= at <= end
    ]
    if len(renewed) < 2:
        return None
    (first, least), (last, most) = renewed[0], renewed[-1]
    return (last - first) / (most - least) * 1e3
