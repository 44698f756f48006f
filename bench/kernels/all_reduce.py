"""The time of a sum over the ranks of a host, by size, each in a CUDA graph; one process a GPU.

    python -m bench.kernels.all_reduce --ranks 2 --out bench/results/all-reduce-h100.json

The floor of large tensors is the bytes that a rank receives over its links, and of small ones the latency of
one exchange. `TermRoom` joins sums of up to so many bytes, from figures measured so.
"""

import argparse
import json
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from bench.common.report import machine
from lightkv.integrations.ranks.group import RankGroup
from lightkv.triton_kernels.layers.residual_norm import residual_norm
from lightkv.triton_kernels.norms import Norm

SIZES = [8 << 10, 64 << 10, 256 << 10, 512 << 10, 2 << 20, 8 << 20, 32 << 20]
DIM = 4096  # of the rows that get a residual and a norm
TIMES, RUNS_A_GRAPH = 20, 10


def run_rank(rank: int, size: int, store: str, answers: Any) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    ranks = RankGroup(rank, size, dist.FileStore(store, size), device)
    times = {num_bytes: measure(ranks, num_bytes) for num_bytes in SIZES}
    wrong = [num_bytes for num_bytes in SIZES if not is_right(num_bytes, ranks)]
    answers.put((rank, times, ranks.lines, wrong))
    ranks.leave()


def measure(ranks: RankGroup, num_bytes: int) -> dict[str, float]:
    """Returns the milliseconds of a sum of `num_bytes`, of one with residual and norm after it, and of all
    three in one kernel."""
    x = torch.zeros(num_bytes // 2 // DIM or 1, DIM, dtype=torch.bfloat16, device=ranks.device)
    times = {"NCCL": graph_ms(lambda: ranks.sum(x))}
    residual, norm = torch.zeros_like(x), Norm(torch.ones_like(x[0]), None, 1e-5)
    times["with residual and norm"] = graph_ms(lambda: residual_norm(ranks.sum(x), residual, norm))
    if (room := ranks.room) is not None and num_bytes <= room.most_bytes:

        def joined() -> None:
            for place in room.places:
                place.add_and_norm(place.rows(*x.shape, x.dtype), residual, norm)

        times["joined"] = graph_ms(joined) / 2
    return times


def graph_ms(run: Callable[[], object]) -> float:
    """Returns the milliseconds of `run` in a CUDA graph, on the slowest rank. Every rank calls this."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(RUNS_A_GRAPH):
                run()
        times = []
        for _ in range(TIMES):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / RUNS_A_GRAPH)
    slowest = torch.tensor(median(times))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def is_right(num_bytes: int, ranks: RankGroup) -> bool:
    """Whether small whole numbers, which have no rounding, are added up."""
    x = torch.arange(num_bytes // 2, device=ranks.device).remainder(61).to(torch.bfloat16)
    expected = x * sum(range(1, ranks.size + 1))
    mine = x * (ranks.rank + 1)
    return torch.equal(ranks.sum(mine), expected)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        ranks = [
            context.Process(target=run_rank, args=(rank, given.ranks, store, answers))
            for rank in range(given.ranks)
        ]
        for process in ranks:
            process.start()
        found = [answers.get() for _ in ranks]
        for process in ranks:
            process.join()
    if wrong := [rank[3] for rank in found if rank[3]]:
        raise SystemExit(f"sums of {wrong} bytes are wrong")
    _, times, lines, _ = next(one for one in found if one[0] == 0)
    print(*lines, sep="\n")
    for num_bytes, by_way in times.items():
        print(f"{num_bytes:>10} bytes", *(f"{way} {1e3 * ms:.1f} µs" for way, ms in by_way.items()), sep="  ")
    report = {**machine(), "ranks": given.ranks, "chosen": lines, "ms": times}
    print(json.dumps(report))
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
