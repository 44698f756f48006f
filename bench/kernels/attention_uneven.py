"""Chunks of uneven length after prefixes of uneven length, beside FlashAttention 3.

    python -m bench.kernels.attention_uneven --fa3 _vllm_fa3_C.abi3.so --out FILE

The batches are one that was noted in a service, and random ones of 1 to 12 chunks of 32 to 2,048 queries, each
after 0 to 32,000 keys: 32 query heads, 8 K/V heads, head dim 128, bfloat16. The replays of the CUDA graphs
take turns, so that all sides meet the same clocks, and the medians count. FA3 has pages of 16, and runs with
the number of splits that it chooses, and with one; the better one counts.
"""

import statistics
from pathlib import Path
from random import Random
from typing import Any

import torch

from bench.common.device_clock import Clock, captured
from bench.common.report import parser, print_json, print_machine, print_table

from .attention_batches import make_batch, scatter
from .attention_fa3 import FlashAttention3, find_library
from .attention_peers import ours_prefill
from .attention_rows import Row, chunks

NOTED = chunks(
    "noted",
    [277, 1123, 261, 495, 212, 1496, 275, 464, 485, 660, 214, 745],
    [20000, 20000, 300, 0, 300, 300, 0, 20000, 20000, 300, 20000, 0],
)
PREFIXES = (0, 0, 300, 2000, 8000, 20000, 32000)
FA3_SHIFT = 4  # pages of 16
SPLITS = (0, 1)  # 0: as many as the library chooses


def random_rows(seed: int, count: int) -> list[Row]:
    """Returns `count` random batches."""
    rng, rows = Random(seed), []
    for number in range(count):
        size = rng.randint(1, 12)
        queries = [rng.randint(32, 2048) for _ in range(size)]
        rows.append(chunks(f"{seed}.{number}", queries, [rng.choice(PREFIXES) for _ in range(size)]))
    return rows


def measure(row: Row, fa3: FlashAttention3, clock: Clock) -> dict[str, float]:
    """Returns the microseconds of each side."""
    batch = make_batch(row, torch.device("cuda"))
    sides = {"lightkv": ours_prefill(batch, scatter(batch, 0))}
    for splits in SPLITS:
        sides[f"FA3, {splits or 'its own'} splits"] = fa3.attend(batch, scatter(batch, FA3_SHIFT), splits)
    for side in sides.values():
        side.run()
    graphs = {name: captured(side.run)[0] for name, side in sides.items()}
    return {name: timing.median for name, timing in clock.replay_in_turns(graphs).items()}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--fa3", type=Path, help="_vllm_fa3_C.abi3.so or its folder")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[7, 8])
    arguments.add_argument("--count", type=int, default=40, help="random batches of a seed")
    options = arguments.parse_args()
    print_machine()
    fa3, clock = FlashAttention3.load(find_library(options.fa3)), Clock(9)
    cells, results = [], dict[str, Any]()
    rows = [NOTED, *(row for seed in options.seeds for row in random_rows(seed, options.count))]
    for row in rows:
        us = measure(row, fa3, clock)
        own, *peers = us.values()
        results[row.name] = {
            "us": us,
            "ratio": own / min(peers),
            "lengths": row.lengths,
            "queries": row.q_lens,
        }
        cells.append([row.name, *(f"{one:.1f}" for one in us.values()), f"{own / min(peers):.3f}"])
        torch.cuda.empty_cache()
    print_table(["batch", *us, "lightkv / FA3"], cells)
    for seed in options.seeds:
        ratios = sorted(found["ratio"] for name, found in results.items() if name.startswith(f"{seed}."))
        worst = ratios[round(0.95 * len(ratios)) - 1]
        middle = statistics.median(ratios)
        print(f"seed {seed}: median {middle:.3f}, 95th percentile {worst:.3f}, worst {ratios[-1]:.3f}")
    print_json("attention_uneven", results, options.out)


if __name__ == "__main__":
    main()
