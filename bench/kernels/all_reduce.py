"""The time of a sum over the ranks of a host, by size and way, each in a CUDA graph; one process a GPU.

    python -m bench.kernels.all_reduce --ranks 2 --out bench/results/all-reduce-h100.json

The floor of large tensors is the bytes that a rank receives over its links, and of small ones the latency of
one exchange. What lightkv takes for each size is what `AllReduce.measured` finds with these functions at
start.
"""

import argparse
import json
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.common.report import machine
from lightkv.integrations.ranks.all_reduce import AllReduce, measure_ways
from lightkv.integrations.ranks.group import RankGroup

SIZES = [8 << 10, 64 << 10, 256 << 10, 512 << 10, 2 << 20, 8 << 20, 32 << 20]


def run_rank(rank: int, size: int, store: str, answers: Any) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    ranks = RankGroup(rank, size, dist.FileStore(store, size), device)
    times = {num_bytes: measure_ways(ranks.sums, num_bytes) for num_bytes in SIZES}
    if ranks.room is not None:
        for num_bytes, by_way in times.items():
            joined, apart = ranks.room.measure(num_bytes, ranks.sums)
            by_way |= {"with residual and norm": apart, "joined": joined}
    wrong = [num_bytes for num_bytes in SIZES if not is_right(ranks.sums, num_bytes, ranks)]
    answers.put((rank, times, ranks.lines, wrong))
    ranks.leave()


def is_right(sums: AllReduce, num_bytes: int, ranks: RankGroup) -> bool:
    """Whether every way gives the sum of small whole numbers, which has no rounding."""
    x = torch.arange(num_bytes // 2, device=ranks.device).remainder(61).to(torch.bfloat16)
    expected = x * sum(range(1, ranks.size + 1))
    mine = x * (ranks.rank + 1)
    return all(torch.equal(way(mine.clone()), expected) for way in sums.ways.values())


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
