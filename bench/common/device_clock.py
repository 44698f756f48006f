"""Times work on the device, and measures its ceiling: an empty kernel, reading memory, a matrix product.

The L2 cache is emptied before each replay of a graph.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .report import Spread, alternate, refuse
from .steady import Steadiness, Timing, until_steady

DEVICE = torch.device("cuda")


Events = tuple[torch.cuda.Event, torch.cuda.Event]  # before and after a replay


class CapturedStep:
    """A CUDA graph of a step, whose kernels have to be compiled already. It keeps the step, and with it the
    tensors that replays read and write: torch's graph holds none that were made outside the capture."""

    def __init__(self, step: Callable[[], object]) -> None:
        self._step = step
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            step()

    def replay(self) -> None:
        """Launches the graph."""
        self._graph.replay()


class Clock:
    """Measures times in microseconds. `repeats`: replays of a graph; half as many calls."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self._fill = torch.ones(2**26, dtype=torch.float32, device=DEVICE)  # 256 MiB

    def _queue(self, graph: CapturedStep) -> Events:
        """Queues a replay between two events. The L2 cache is empty when it begins."""
        self._fill.sum()
        torch.cuda._sleep(1_000_000)  # half a millisecond, so that the host gets ahead of the device
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        return start, end

    def replay(self, graph: CapturedStep) -> Spread:
        """Measures replays on the device. The L2 cache is empty, and each replay is queued before it begins."""
        pairs = [self._queue(graph) for _ in range(self.repeats + 3)]
        torch.cuda.synchronize()
        return Spread.of([start.elapsed_time(end) * 1e3 for start, end in pairs[3:]])

    def replay_in_turns(
        self, graphs: Mapping[str, CapturedStep], rule: Steadiness | None = None
    ) -> dict[str, Timing]:
        """Measures several graphs as `replay` does, in turns, until each is steady.

        `rule` says when that is; by default, when two windows of half of `repeats` agree.
        """
        rule = rule or Steadiness(window=max(1, self.repeats // 2))

        def settle(count: int) -> None:
            for _ in range(count):
                for graph in graphs.values():
                    self._fill.sum()
                    graph.replay()

        def rounds(count: int) -> dict[str, list[float]]:
            found: dict[str, list[Events]] = {side: [] for side in graphs}
            queue = {side: partial(self._queue, graph) for side, graph in graphs.items()}
            for events in alternate(count, queue):
                for side, pair in events.items():
                    found[side].append(pair)
            torch.cuda.synchronize()
            return {
                side: [start.elapsed_time(end) * 1e3 for start, end in pairs] for side, pairs in found.items()
            }

        return until_steady(settle, rounds, rule)

    def call(self, work: Callable[[], object]) -> float:
        """Measures the median from the call until the device has finished, with nothing queued before."""
        times = []
        for _ in range(self.repeats // 2 + 2):
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            work()
            torch.cuda.synchronize()
            times.append((time.perf_counter_ns() - start) / 1e3)
        return statistics.median(times[2:])


@triton.jit
def _empty_kernel(_out):
    pass


def empty_kernel() -> None:
    """Launches a kernel that does nothing."""
    _empty_kernel[(1,)](torch.empty(1, device=DEVICE))


def captured(run: Callable[[], Tensor]) -> tuple[CapturedStep, Tensor]:
    """Captures `run`, which has to have run once. Returns the graph and the tensor that its replays write."""
    outputs: list[Tensor] = []
    return CapturedStep(lambda: outputs.append(run())), outputs[0]


@triton.jit
def _read_kernel(source, sums, num_blocks, BLOCK: tl.constexpr):  # source: fewer than 2**31 words
    total = tl.zeros([BLOCK], tl.int32)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        total += tl.load(source + block * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _gather_kernel(
    pool,  # [num_slots, HEADS, WORDS] int32
    slots,  # [num_tokens]
    sums,  # [programs, HEADS]
    num_tokens,
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sums the rows of a program's tokens for one head. Loads the slots one tile ahead, as attention does."""
    words = tl.arange(0, WORDS)
    total = tl.zeros([BLOCK_N, WORDS], tl.int32)
    first = tl.program_id(1) * BLOCK_N
    tokens = first + tl.arange(0, BLOCK_N)
    here = tl.load(slots + tokens, mask=tokens < num_tokens, other=0)
    for start in range(first, num_tokens, tl.num_programs(1) * BLOCK_N):
        rows = pool + (here.to(tl.int64) * HEADS + tl.program_id(0)) * WORDS
        values = tl.load(rows[:, None] + words[None, :], mask=(tokens < num_tokens)[:, None], other=0)
        tokens = start + tl.num_programs(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        here = tl.load(slots + tokens, mask=tokens < num_tokens, other=0)
        total += values
    total = total.to(tl.int64)
    tl.store(sums + tl.program_id(1) * HEADS + tl.program_id(0), tl.sum(tl.sum(total, 1), 0))


def gather_us(
    pool: Tensor, slots: Tensor, clock: Clock, grids: Sequence[int] = (66, 132, 264, 1056)
) -> float:
    """Measures how fast scattered rows can be read: the microseconds of the fastest of several kernels.

    They read the rows of `pool` `[num_slots, heads, dims]` at `slots`, in that order, and do nothing else.
    `grids`: numbers of programs per head to try.
    """
    words = pool.view(torch.int32)
    slots = slots.int()
    expected = int(words[slots].sum()) % 2**32
    took = []
    for grid in grids:
        for block_n, num_warps in ((16, 4), (32, 4), (32, 8), (64, 8)):
            sums = torch.zeros(grid, words.shape[1], dtype=torch.int64, device=pool.device)

            def read(sums: Tensor = sums, block_n: int = block_n, num_warps: int = num_warps) -> Tensor:
                _gather_kernel[(words.shape[1], len(sums))](
                    words,
                    slots,
                    sums,
                    len(slots),
                    HEADS=words.shape[1],
                    WORDS=words.shape[2],
                    BLOCK_N=block_n,
                    num_warps=num_warps,
                )
                return sums

            if int(read().sum()) % 2**32 != expected:
                refuse("a kernel that reads rows did not read them all")
            took.append(clock.replay(captured(read)[0]).median)
    return min(took)


class Ceiling(NamedTuple):
    """The best that this device does, measured in this run."""

    empty_us: float  # a graph of one kernel that does nothing
    bytes_per_us: float
    flops_per_us: float

    def floor_us(self, num_bytes: int, num_flops: int = 0) -> float:
        """Returns the least microseconds of work that reads `num_bytes` and computes `num_flops`."""
        return self.empty_us + max(num_bytes / self.bytes_per_us, num_flops / self.flops_per_us)


def measure_ceiling(
    clock: Clock, num_words: int = 2**29, side: int = 8192, grids: Sequence[int] = (1024, 2048)
) -> tuple[Ceiling, dict[str, Any]]:
    """Measures the ceiling by reading `num_words` int32 and by a product of square bfloat16 matrices.

    Reads with each number of programs in `grids`, and with one program per block. Returns the ceiling, and the
    same for a report with the time of each kernel.
    """
    empty_kernel()
    empty = clock.replay(CapturedStep(empty_kernel))
    source = torch.ones(num_words, dtype=torch.int32, device=DEVICE)
    readers: dict[str, Callable[[], Tensor]] = {"torch.sum": lambda: source.sum()}
    for block in (2048, 4096, 8192):
        for programs in (*grids, num_words // block):
            sums = torch.zeros(programs, dtype=torch.int32, device=DEVICE)

            def read(block: int = block, sums: Tensor = sums) -> Tensor:
                _read_kernel[(len(sums),)](source, sums, num_words // block, BLOCK=block, num_warps=8)
                return sums

            readers[f"blocks of {block}, {programs} programs"] = read
    took = {}
    for name, reader in readers.items():
        if int(reader().sum()) != num_words:
            refuse(f"the reading kernel '{name}' did not read everything")
        took[name] = clock.replay(captured(reader)[0]).median
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    torch.mm(a, b)
    product = clock.replay(captured(lambda: torch.mm(a, b))[0])
    bytes_per_us = 4 * num_words / (min(took.values()) - empty.median)
    ceiling = Ceiling(empty.median, bytes_per_us, 2 * side**3 / (product.median - empty.median))
    return ceiling, {**ceiling._asdict(), "read_us": took, "read_bytes": 4 * num_words}
