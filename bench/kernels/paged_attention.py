"""Times the classic paged attention (v1 and v2) beside lightkv's decode, all at pages of 16 tokens.

    python -m bench.kernels.paged_attention --out bench/results/paged-attention-h200.json
    python -m bench.kernels.paged_attention --rows "B1 ×" --tiles

Each side attends to the same tokens in the same random order of pages; the classic sides read a copy in their
own layout: v1 in one partition and in partitions that fill the device, v2 in those of the original's 512
tokens. Every result is compared with float64, then a CUDA graph of the side is replayed with an empty L2 cache.
`--tiles` measures other tiles, too: keys, warps and stages.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.common.device_clock import DEVICE, Clock, captured, measure_ceiling
from bench.common.report import parser, print_json, print_machine, print_table, refuse, save_json
from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.classic import paged_attention_kernel
from lightkv.triton_kernels.classic.paged_attention_v2 import PARTITION_SIZE, paged_attention_v2
from lightkv.triton_kernels.tuning import Launch

from .attention_batches import Batch, Paged, check, make_batch, reference, scatter
from .attention_peers import (
    CLASSIC_FORMS,
    Functions,
    Side,
    classic_blocks,
    classic_decode,
    ours_decode,
    replaced,
)
from .attention_rows import Row, chosen, even, skewed

ROWS = (
    even("B1 × 1k", 1, 1024),
    even("B1 × 8k", 1, 8192),
    even("B8 × 4k", 8, 4096),
    even("B64 × 1k", 64, 1024),
    even("B64 × 8k", 64, 8192),
    even("B256 × 2k", 256, 2048),
    skewed("B64 skewed", 64, 4096, 0),
    even("32/32 heads, B1 × 8k", 1, 8192, 32, 32),
    even("32/32 heads, B32 × 4k", 32, 4096, 32, 32),
)
OURS = "lightkv p16"
TILES = ((32, 2, 3), (32, 2, 4), (64, 4, 2), (64, 4, 3))


def fixed_partitions(batch: Batch, paged: Paged, blocks: tuple[Tensor, Tensor]) -> Side:
    """Attends in partitions of the original's size."""
    lengths = torch.tensor(batch.lengths, dtype=torch.int32, device=batch.q.device)
    out = torch.empty_like(batch.q)
    return Side(
        lambda: paged_attention_v2(
            batch.q, *blocks, paged.table, lengths, scale=batch.scale, partition_size=PARTITION_SIZE,
            max_seq_len=max(batch.lengths), out=out,
        )
    )  # fmt: skip


def sides(batch: Batch, paged: Paged, tiles: bool) -> dict[str, tuple[Callable[[], Side], Functions]]:
    """Returns functions that make the sides, by name, and the functions that they replace."""
    blocks = classic_blocks(paged)
    made: dict[str, tuple[Callable[[], Side], Functions]] = {
        OURS: (partial(ours_decode, batch, paged), {}),
        "partitions of 512": (partial(fixed_partitions, batch, paged, blocks), {}),
    }
    for form in CLASSIC_FORMS:
        make = partial(classic_decode, batch, paged, form, blocks)
        made[form] = make, {}
        for tile in TILES if tiles else ():
            launch = Launch(tuning.padded_dim(batch.q.shape[1] // batch.num_kv_heads), *tile)
            other = {(paged_attention_kernel, "paged_attention_launch"): lambda *_, launch=launch: launch}
            made[f"{form}, {'x'.join(map(str, tile))}"] = make, other
    return made


def measure(row: Row, clock: Clock, tiles: bool) -> dict[str, Any]:
    """Checks and times the sides of a row: µs, and how many times as long as lightkv's decode."""
    batch = make_batch(row, DEVICE)
    expected, paged = reference(batch), scatter(batch, 4)
    found: dict[str, Any] = {}
    for name, (make, functions) in sides(batch, paged, tiles).items():
        with replaced(functions):
            side = make()
            side.run()  # compiles
            graph, out = captured(side.run)
        out.fill_(float("nan"))
        graph.replay()
        check(out, expected)
        found[name] = clock.replay(graph)._asdict()
        found[name]["ratio"] = found[name]["median"] / found[OURS]["median"]
    return {"bytes": row.bytes, "sides": found}


def main() -> None:
    made = parser(__doc__)
    made.add_argument(
        "--rows", nargs="+", default=[], help="measure rows whose names contain one of these texts"
    )
    made.add_argument("--tiles", action="store_true", help="measure other tiles, too")
    made.add_argument("--repeats", type=int, default=20, help="replays whose median counts")
    options = made.parse_args()
    if not torch.cuda.is_available():
        refuse("this measures kernels, and needs a CUDA device")
    print_machine()
    clock = Clock(options.repeats)
    ceiling, found = measure_ceiling(clock)
    results: dict[str, Any] = {"settings": {"repeats": options.repeats}, "ceiling": found, "rows": {}}
    table = []
    for row in chosen(ROWS, options.rows):
        results["rows"][row.name] = measured = measure(row, clock, options.tiles)
        measured["floor"] = ceiling.floor_us(row.bytes)
        for name, timing in measured["sides"].items():
            table.append([row.name, name, f"{timing['median']:.1f}", f"{timing['ratio']:.2f}"])
        print(f"{row.name}: the bytes take {measured['floor']:.1f} µs", flush=True)
        save_json("paged-attention", results, options.out)
    print_table(["row", "side", "µs", "times lightkv"], table)
    print_json("paged-attention", results, options.out)


if __name__ == "__main__":
    main()
