"""Chooses the numbers of tokens that steps with prompts have CUDA graphs for, by measuring, and the shapes of
each one's graphs.

cuBLAS picks the tiles of a matrix product by its sizes, so a step of more tokens can be faster than one of
fewer. A graph whose products are slower than those of a larger one would only cost memory, and slow down the
steps that are padded to it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from statistics import median
from typing import Any, cast

import torch

from lightkv.attention import BatchShape
from lightkv.integrations.weights.plain import PlainWeight

from .step_timing import measured_once

Report = Callable[[str], None]

# Larger steps run eagerly, since a graph's memory grows with its tokens. The device does not wait for the host,
# but the tokens of the step before such a step are sent only once it is launched.
MOST_TOKENS = 4352
# The prefill slots of most prompt graphs, the one for padding included. With more slots the general kernel of
# prefill would have smaller tiles, as for prefills of few tokens each (`prefill_tuning.prefill_launch`).
FEW_PREFILLS = 8

# These are not measured, since the limit on padding needs each of them.
_SMALL = (16, 24, 32, 48, 64, 96, 128, 192)
# Larger sizes are measured at these multiples. Multiples of 64 less 4 are measured, too: for some multiples of
# 64, cuBLAS picks tiles that are slower than those for any number of tokens close by.
_LEAST_MEASURED, _STEP, _ODD_STEP, _LESS = 256, 32, 64, 4
MOST_MEASURED = 40  # of these are kept

# What a bucket has to save: 5 % of the time of steps of 40 sizes, or as large a sum of squares.
_BUCKET_COST = 40 * 0.05**2

_LEAST_TIME = 1e-6  # milliseconds, more than 0
_TIMES = 3  # that a size is measured, after once to warm up
_HEAD_START = 100_000  # cycles of the device that the host gets for the launch of one product


def candidates(most: int, chunk: int = 0) -> list[int]:
    """Returns the sizes to choose the larger buckets from, in ascending order.

    They end with `most`, or with MOST_TOKENS if that is less, and `chunk` is among them if it is as large as
    they are. A single one needs no choice.
    """
    most = min(most, MOST_TOKENS)
    if most <= _LEAST_MEASURED:
        return [most]
    odd = range(_LEAST_MEASURED + _ODD_STEP - _LESS, most, _ODD_STEP)
    chunks = {chunk} if _LEAST_MEASURED <= chunk <= most else set[int]()
    return sorted({*range(_LEAST_MEASURED, most, _STEP), *odd, *chunks, most})


def most_buckets(most: int) -> int:
    """Returns how many buckets `token_buckets` may return for steps of up to `most` tokens."""
    sizes = candidates(most)
    # A chunk may be one more candidate than these.
    return sum(size < sizes[0] for size in _SMALL) + min(len(sizes) + 1, MOST_MEASURED)


def choose(times: Mapping[int, float], chunk: int = 0) -> list[int]:
    """Returns the numbers of tokens to capture prompt graphs for, in ascending order and ending with the
    largest in `times`.

    times: those of steps of each size in `candidates`, positive and in any unit. Each bucket is at most 1.5
    times the one before, above 512 at most 1.2 times. `chunk` is a bucket if it is in `times`: long prompts
    are cut into steps of as many tokens, so it is by far the most frequent size. Within this limit, the sum
    is the least of what padding costs the steps of all sizes and of a cost for each bucket. A step's is the
    square of the part by which it takes longer than with the best of all sizes that have room for it: one
    step that loses much is worse than many that lose little.
    """
    sizes = sorted(times)
    small = [size for size in _SMALL if size < sizes[0]]
    cost = _BUCKET_COST
    while len(large := _cheapest(times, small[-1] if small else sizes[0], cost, chunk)) > MOST_MEASURED:
        cost *= 1.05
    return [*small, *large]


def _cheapest(times: Mapping[int, float], before: int, bucket_cost: float, chunk: int) -> list[int]:
    """Returns the buckets with the least cost, as `choose` says. `before` is the bucket below all of them."""
    sizes = sorted(times)
    smaller = [before, *sizes]
    from_largest = [times[size] for size in reversed(sizes)]
    fastest = list(accumulate(from_largest, min))[::-1]  # of all sizes with room for a step
    cheapest: dict[int, tuple[float, list[int]]] = {before: (0.0, [])}  # buckets that end with a size
    for last, bucket in enumerate(sizes):
        lost, found = 0.0, []
        for i in range(last, -1, -1):
            if not _may_follow(bucket, smaller[i]) or sizes[i] == chunk < bucket:
                break
            lost += (sizes[i] - smaller[i]) * (times[bucket] / fastest[i] - 1) ** 2
            cost, buckets = cheapest[smaller[i]]
            found.append((cost + lost + bucket_cost, [*buckets, bucket]))
        cheapest[bucket] = min(found)
    return cheapest[sizes[-1]][1]


def _may_follow(size: int, smaller: int) -> bool:
    """Returns whether steps of more than `smaller` tokens may be padded to `size`."""
    return 10 * size <= (15 if size <= 512 else 12) * smaller


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


@torch.inference_mode()
def measure(
    weights: Sequence[Sequence[PlainWeight]],
    sizes: Sequence[int],
    make_event: Callable[[], Any] = _timing_event,
) -> dict[int, float]:
    """Returns the milliseconds that the products with `weights`, as `Linears.by_shape` returns them, take
    together for each of the ascending `sizes`.

    Of the weights of one shape each run takes the next one, so that no cache holds a weight. The sizes are
    measured in turn, up and down, so that a clock that changes meanwhile favours none. Synchronises once, at
    the end. Allocates the input and the output of the widest weights at the largest size, and frees them.
    """
    first = weights[0][0]
    widest = max(same[0].shape[1] for same in weights)
    x = torch.randn(sizes[-1] * widest, dtype=first.dtype, device=first.device)
    events: dict[int, list[list[Any]]] = {size: [] for size in sizes}
    num_runs = 0
    for turn in range(1 + _TIMES):
        for size in sizes if turn % 2 else reversed(sizes):
            if first.device.type == "cuda":  # the device must not wait for the host between products
                cast(Any, torch.cuda)._sleep(_HEAD_START * len(weights))
            run = [make_event()]
            run[0].record()
            for same in weights:
                weight = same[num_runs % len(same)]
                weight.matmul(x[: size * weight.shape[1]].view(1, size, -1))
                run.append(make_event())
                run[-1].record()
            num_runs += 1
            events[size].append(run)
    run[-1].synchronize()
    found = {
        size: sum(
            len(same) * median(run[i].elapsed_time(run[i + 1]) for run in runs[1:])
            for i, same in enumerate(weights)
        )
        for size, runs in events.items()
    }
    return {size: max(time, _LEAST_TIME) for size, time in found.items()}


def token_buckets(
    weights: Sequence[Sequence[PlainWeight]], chunk: int, most: int, report: Report
) -> list[int]:
    """Returns what `choose` does for steps of up to `most` tokens, by the times of `weights` on their GPU.

    Times that an earlier start has measured for these weights are taken again. Without weights, or with a
    single size to choose from, nothing is measured; times are then taken to be proportional to the tokens.
    """
    begun, sizes = time.perf_counter(), candidates(most, chunk)
    times, how = {size: float(size) for size in sizes}, "not measured"
    if weights and len(sizes) > 1:
        shapes = [(len(same), *same[0].shape, str(same[0].dtype)) for same in weights]
        try:
            times, is_kept = measured_once(
                "products", [shapes, sizes], dict[int, float], lambda: measure(weights, sizes)
            )
            seconds = time.perf_counter() - begun
            how = "measured in an earlier start" if is_kept else f"measured in {seconds:.1f} s"
        except torch.OutOfMemoryError:
            how = "not measured, for lack of memory"
        torch.cuda.empty_cache()
    buckets = choose(times, chunk)
    report(f"prompt graphs for {len(buckets)} sizes, {how}: {', '.join(map(str, buckets))} tokens")
    return buckets


def prompt_shapes(buckets: Sequence[int], max_num_seqs: int) -> dict[int, list[BatchShape]]:
    """Returns the shapes of the prompt graphs of each of the ascending `buckets`, the cheapest first.

    They are for a few prompts alone, for a few beside decodes, and for as many of both as a step can have. The
    last is rarely needed, so a bucket lacks it where its steps may be padded to the next one that has it. The
    last bucket has all of them.
    """
    found: dict[int, list[BatchShape]] = {}
    next_with_many = None
    for size, smaller in zip(reversed(buckets), reversed([0, *buckets[:-1]]), strict=True):
        num_seqs = min(size, max_num_seqs)
        few, many = min(FEW_PREFILLS, num_seqs + 1), num_seqs + 1
        shapes = [(few, 0), (few, num_seqs)]
        if next_with_many is None or not _may_follow(next_with_many, smaller):
            shapes.append((many, num_seqs))
            next_with_many = size
        found[size] = [BatchShape(size, *shape) for shape in dict.fromkeys(shapes)]
    return dict(reversed(found.items()))
