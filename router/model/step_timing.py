"""Measures what steps take on this device with this model, by running plans made up for it, and fits the
step-time model by which the scheduler bounds the prompt tokens of a step (`engine/prefill_budget.py`).

The memory is empty before and after. What stays of a measurement is the last token of some rows, which a
sequence's first token overwrites, and kernels that are compiled already.

What a start has measured is kept in files beside Triton's compiled kernels, for later starts.
"""

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from lightkv import __version__
from lightkv.edits import Alloc, Edit, FreeRange, encode
from lightkv.holdings import Holdings
from lightkv.router.engine.loop import Executor
from lightkv.router.engine.step import ExpectedMemory, RunnerInfo, StepPlan
from lightkv.router.engine.step_time import LEAST_STEPS, StepTime, Work, fit
from lightkv.router.sampling_params import SamplerKind

Report = Callable[[str], None]

IN_FLIGHT = 2  # the engine has as many on a GPU
# A step is timed 5 times; 3 times, if they add up to 50 ms; or until they add up to half a second.
MOST_TIMES, ENOUGH_TIMES, ENOUGH_SECONDS, MOST_SECONDS = 5, 3, 0.05, 0.5
MOST_STEPS = MOST_TIMES + IN_FLIGHT  # of one shape
LONGEST_CONTEXT, LONGEST_CHUNK, LATEST_START = 2048, 2048, 8192
_STEPS = "lightkv-steps.json"
FIRST_STEP = -(2**31)  # no step of an engine follows one of these: graphs know by the number what is loaded


class Shape(NamedTuple):
    """A step to measure: `decodes` requests of `context` tokens each, and `chunk` tokens of a prompt from
    position `start` on."""

    decodes: int
    context: int
    start: int
    chunk: int


def shapes(info: RunnerInfo) -> list[Shape]:
    """Returns the steps to measure: decodes alone, prompts alone, and both; the largest of each that the limits
    and half of the pool have room for."""
    limits, room = info.limits, info.capacity // 2 // info.groups.widths[0]
    most = limits.max_num_seqs
    chunk = min(LONGEST_CHUNK, limits.prefill_budget, limits.max_model_len, room)
    start = min(LATEST_START, limits.max_model_len - chunk, room - chunk)

    def long(decodes: int) -> int:
        return min(LONGEST_CONTEXT, limits.max_model_len - MOST_STEPS, room // max(decodes, 1) - MOST_STEPS)

    alone = [
        Shape(num, context, 0, 0)
        for num in (1, min(32, most), most)
        for context in (long(num) // 8, long(num))
        if context > 0
    ]
    prompts = [Shape(0, 0, at, num) for num in (chunk // 16, chunk // 4, chunk) for at in (0, start) if num]
    few, many = min(32, most - 1), most - 1  # a prompt takes a row, too
    both = [
        Shape(few, long(few) // 8, 0, chunk // 16),
        Shape(few, long(few), 0, chunk // 4),
        Shape(many, long(many) // 8, 0, chunk // 4),
        Shape(many, long(many), 0, chunk // 16),
    ]
    both = [shape for shape in both if shape.decodes and shape.context > 0 and shape.chunk]
    return list(dict.fromkeys([*alone, *prompts, *both]))


def _is_enough(times: list[float]) -> bool:
    """Returns whether a step was timed often enough."""
    enough = MOST_TIMES if sum(times) < ENOUGH_SECONDS else ENOUGH_TIMES
    return len(times) >= enough or sum(times) >= MOST_SECONDS


class StepTimer:
    """Measures an executor whose memory is empty, and leaves it empty. `prepare` is called with a step of each
    kind before it is timed; `clock` returns seconds.

    Where layers have groups, slots are allocated for those layers alone that see everything; the others read
    the padding's.
    """

    def __init__(
        self,
        executor: Executor,
        info: RunnerInfo,
        prepare: Callable[[StepPlan], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._executor = executor
        self._info = info
        self._prepare = prepare
        self._clock = clock
        self._steps = count(FIRST_STEP)
        self._rng = np.random.default_rng(0)

    def measure(self, report: Report) -> StepTime | None:
        """Measures each of `shapes`, and returns the fit; None where the pool is too small for enough of them.

        The shapes and times are chosen to take two seconds with a model of 8B parameters on an H200, besides
        the kernels that are compiled.
        """
        chosen = shapes(self._info)
        if len(chosen) < LEAST_STEPS:
            report(f"step times are not measured: the pool has room for {len(chosen)} kinds of steps only")
            return None
        begun = self._clock()
        self._sample_tokens()
        work, seconds = zip(*map(self._time, chosen), strict=True)
        model = fit(work, seconds)
        source = model.source
        report(
            f"step times: {len(chosen)} kinds of steps measured in {self._clock() - begun:.1f} s; they take "
            f"{min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f} ms, and the fit is off by "
            f"{source['median_relative_error']:.1%} in the median, {source['max_relative_error']:.1%} at most"
        )
        return replace(model, source={"device": self._info.device, **source})

    def _sample_tokens(self) -> None:
        """Gives each row a last token of its own, so that decodes use different experts where a model has
        some."""
        limits = self._info.limits
        num = min(
            limits.max_num_seqs, limits.prefill_budget, self._info.capacity // self._info.groups.widths[0]
        )
        rows, starts, counts = list(range(1, num + 1)), [0] * num, [1] * num
        alloc = Alloc(tuple(rows), tuple(starts), tuple(counts))
        self._executor.launch(self._plan([alloc], rows, starts, counts, num))
        self._executor.collect()
        self._free([FreeRange(row, 0, 1) for row in rows])

    def _time(self, shape: Shape) -> tuple[Work, float]:
        """Returns what a step of this shape computes, and the median of its seconds while steps follow one
        another."""
        executor, plans = self._executor, self._plans(shape)
        launched: list[StepPlan] = []

        def launch() -> None:
            launched.append(next(plans))
            if len(launched) == 1:
                self._prepare(launched[0])
            executor.launch(launched[-1])

        for _ in range(IN_FLIGHT):
            launch()
        executor.collect()  # the first step, which may compile kernels, is not timed
        times: list[float] = []
        before = self._clock()
        while not _is_enough(times):
            launch()
            executor.collect()
            now = self._clock()
            times.append(now - before)
            before = now
        executor.collect()
        length = shape.context + len(launched)
        held = [FreeRange(row, 0, length) for row in range(1, shape.decodes + 1)]
        if shape.chunk:
            held.append(FreeRange(shape.decodes + 1, 0, shape.start + shape.chunk))
        self._free(held)
        return launched[1 + len(times) // 2].work, statistics.median(times)

    def _plans(self, shape: Shape) -> Iterator[StepPlan]:
        """Yields steps that follow one another: the decodes get longer, and the prompt's chunk is computed
        anew each time."""
        next(self._steps)  # no graph takes the rows of another shape for those of the step before
        decodes, context, start, chunk = shape
        rows = list(range(1, decodes + 1))
        edits: list[Edit] = []
        for row in rows:
            edits += self._alloc(row, context)
        prompt = [decodes + 1] if chunk else []
        if chunk:
            edits += self._alloc(decodes + 1, start)
        for number in count():
            if chunk:
                if number:
                    edits.append(FreeRange(decodes + 1, start, start + chunk))
                edits.append(Alloc((decodes + 1,), (start,), (chunk,)))
            starts = [start] * len(prompt) + [context + number] * decodes
            counts = [chunk] * len(prompt) + [1] * decodes
            yield self._plan(edits, prompt + rows, starts, counts, len(prompt))
            edits = []

    def _alloc(self, row: int, num_tokens: int) -> list[Edit]:
        """Returns the allocation of a row's first tokens, in chunks as a prompt's would be."""
        size = self._info.limits.prefill_budget
        return [
            Alloc((row,), (start,), (min(size, num_tokens - start),)) for start in range(0, num_tokens, size)
        ]

    def _plan(
        self, edits: list[Edit], rows: list[int], starts: list[int], counts: list[int], num_prefills: int
    ) -> StepPlan:
        vocabulary = self._info.limits.vocab_size
        ids = self._rng.integers(vocabulary, size=sum(counts[:num_prefills]), dtype=np.int32)
        return StepPlan(
            step=next(self._steps),
            edits=encode(edits),
            rows=rows,
            starts=starts,
            counts=counts,
            num_prefills=num_prefills,
            token_ids=ids.tobytes(),
            sample=list(range(len(rows))),
            kind=SamplerKind.GREEDY,
            logprobs={},
            new_rows=[],
            num_free=0,
        )

    def _free(self, held: list[FreeRange]) -> None:
        """Frees all that is held, and checks that the memory is empty. Raises CheckFailed."""
        self._executor.check(encode(held), ExpectedMemory(self._info.capacity, Holdings([], {})))


# --------------------------------------------------------------------------------
# From one start to the next


def measured_once(facts: Any, measure: Callable[[], StepTime | None]) -> tuple[StepTime | None, bool]:
    """Returns what `measure` returned in this or in an earlier start, and whether it was an earlier one.

    `facts`: all that the result depends on beside the GPU and the versions of torch and lightkv, in types that
    msgspec encodes. Where the file is missing, or holds no result, this measures and writes it again; where it
    cannot be written, each start measures.
    """
    from triton.runtime.cache import get_cache_manager  # torch may lack Triton on a CPU

    known = {"gpu": torch.cuda.get_device_name(), "torch": str(torch.__version__), "lightkv": __version__}
    key = hashlib.sha256(msgspec.json.encode([known, facts], order="sorted")).hexdigest()
    with suppress(OSError, msgspec.MsgspecError):
        if (path := get_cache_manager(key).get_file(_STEPS)) is not None:
            return msgspec.json.decode(Path(path).read_bytes(), type=StepTime | None), True
    result = measure()
    with suppress(OSError):
        get_cache_manager(key).put(msgspec.json.encode(result), _STEPS)
    return result, False
