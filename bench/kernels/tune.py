"""Finds the fastest launches: times every candidate on the rows of `bench.kernels.attention`.

    python -m bench.kernels.tune --out bench/results/tune-h200.json  decode, also with --queries 8
    python -m bench.kernels.tune --prefill --out bench/results/tune-prefill-h200.json  more head dims, too
    python -m bench.kernels.tune --v1 --out bench/results/tune-v1-h200.json  the classic kernel

The functions that choose a launch, such as `paged_attention_launch`, return the candidates that are the fastest
over all rows; the output shows them beside the fastest of each row. Each candidate is checked before it is
timed, as in `bench.kernels.attention`; candidates that do not fit on the device are left out.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from bench.common.device_clock import DEVICE, Clock, captured
from bench.common.report import parser, print_json, print_machine, print_table, refuse, save_json
from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.decode import decode_tuning
from lightkv.triton_kernels.attention.prefill import prefill_tuning
from lightkv.triton_kernels.classic import paged_attention_kernel
from lightkv.triton_kernels.tuning import Launch

from .attention_batches import Batch, Paged, check, make_batch, reference, scatter
from .attention_peers import (
    CLASSIC_FORMS,
    Functions,
    Side,
    classic_decode,
    ours_decode,
    ours_prefill,
    replaced,
)
from .attention_rows import DECODE, PREFILL, PREFILL_DIMS, Row, chosen

TILES = ((32, 2, 3), (32, 4, 3), (64, 4, 2), (64, 4, 3), (64, 8, 3), (128, 4, 2), (128, 8, 2))
WAVES = (2, 3, 4, 6)
PREFILL_TILES = (
    (128, 128, 8, 3),
    (128, 64, 8, 3),
    (128, 64, 8, 2),
    (64, 64, 4, 3),
    (64, 64, 4, 2),
    (64, 32, 4, 3),
)
# Keys and stages of `prefill_hopper` that fit beside q, by the head dims of K and V. Each takes seconds to
# compile.
HOPPER_TILES = {
    (64, 64): ((128, 3), (128, 4), (128, 6)),
    (80, 80): ((128, 3), (128, 5)),
    (96, 96): ((128, 3), (128, 4)),
    (128, 128): ((128, 2), (128, 3), (64, 6)),
    (192, 128): ((128, 2), (64, 4)),
    (256, 256): ((64, 2), (32, 5)),
}
CLASSIC_TILES = ((32, 2, 3), (32, 4, 2), (32, 4, 3), (64, 4, 2), (64, 4, 3), (128, 4, 2))
NUM_BEST = 5


class Kernel(NamedTuple):
    """A kernel to tune: a side of `bench.kernels.attention`, in one or several forms."""

    rows: Sequence[Row]
    shift: int
    candidates: Callable[[Row], dict[str, Functions]]
    forms: Mapping[str, Callable[[Batch, Paged], Side]]  # by a suffix of the row's name


def text(launch: Sequence[int]) -> str:
    return "x".join(map(str, launch))


def decode_candidates(row: Row) -> dict[str, Functions]:
    """Returns tiles and numbers of programs per multiprocessor, for tiles with as many query rows as there are,
    and with as many as Hopper's tensor cores need."""
    least = tuning.padded_dim(row.num_heads // row.num_kv_heads * row.q_lens[0])
    heights = [least] if least < 32 else sorted({least, max(64, least)})
    found: dict[str, Functions] = {}
    for height, tile, waves in product(heights, TILES, WAVES):
        launch = Launch(height, *tile)

        def num_workers(
            device: tuning.DeviceClass, _programs: int, num_kv_heads: int, waves: int = waves
        ) -> int:
            return max(1, waves * device.num_multiprocessors // num_kv_heads)

        found[f"{text(launch)} waves {waves}"] = {
            (decode_tuning, "decode_launch"): constant(launch),
            (decode_tuning, "decode_workers"): num_workers,
        }
    return found


def constant(value: Launch | None) -> Callable[..., Any]:
    return lambda *_: value


def prefill_functions(launch: Launch, hopper: Launch | None) -> Functions:
    return {
        (prefill_tuning, "prefill_launch"): constant(launch),
        (prefill_tuning, "hopper_prefill_launch"): constant(hopper),
    }


def prefill_candidates(row: Row) -> dict[str, Functions]:
    """Returns the candidates of the general kernel that fit, and those of Hopper's kernel where it runs."""
    device, size = tuning.device_class(DEVICE), row.dtype.itemsize
    dims = row.head_dim, row.dims - row.head_dim  # of K and of V
    found: dict[str, Functions] = {}
    for launch in (Launch(*tile) for tile in PREFILL_TILES):
        elements = launch.block_m * row.head_dim + launch.num_stages * launch.block_n * row.dims
        if elements * size < device.shared_memory:
            found[f"general {text(launch)}"] = prefill_functions(launch, None)
    usual = prefill_tuning.hopper_prefill_launch(device, *dims, size)
    if usual is not None:
        for block_n, num_stages in HOPPER_TILES[dims]:
            launch = usual._replace(block_n=block_n, num_stages=num_stages)
            found[f"hopper {text(launch)}"] = prefill_functions(launch, launch)
    return found


def classic_candidates(row: Row) -> dict[str, Functions]:
    rows = tuning.padded_dim(min(row.num_heads // row.num_kv_heads, 64))
    name = (paged_attention_kernel, "paged_attention_launch")
    return {text(tile): {name: constant(Launch(rows, *tile))} for tile in CLASSIC_TILES}


def time_us(side: Side, expected: torch.Tensor, clock: Clock) -> float:
    side.run()
    graph, out = captured(side.run)
    out.fill_(float("nan"))
    graph.replay()
    check(out, expected)
    return clock.replay(graph).median


def measure(row: Row, kernel: Kernel, clock: Clock) -> dict[str, Any]:
    """Times every candidate and the current choice, in µs, by the row's name, in each form."""
    batch = make_batch(row, DEVICE)
    expected, paged = reference(batch), scatter(batch, kernel.shift)
    results = {}
    for form, make in kernel.forms.items():
        name, found = row.name + form, {}
        for candidate, functions in kernel.candidates(row).items():
            with replaced(functions):
                try:
                    found[candidate] = time_us(make(batch, paged), expected, clock)
                except Exception as error:  # too much shared memory, too many registers
                    print(
                        f"{name}: {candidate} is left out: {type(error).__name__}: {error}"[:300], flush=True
                    )
        results[name] = {"table": time_us(make(batch, paged), expected, clock), "candidates": found}
    return results


def print_row(name: str, found: dict[str, Any]) -> None:
    best = sorted(found["candidates"].items(), key=lambda item: item[1])[:NUM_BEST]
    rows = [["current", f"{found['table']:.1f}"], *([launch, f"{took:.1f}"] for launch, took in best)]
    print_table([name, "µs"], rows)


def several_queries(rows: Sequence[Row], num_queries: int) -> list[Row]:
    """Returns the rows with `num_queries` queries per request."""
    return [
        row._replace(name=f"{row.name}, {num_queries} queries", q_lens=(num_queries,) * len(row.lengths))
        for row in rows
    ]


def kernel_of(options: Any) -> Kernel:
    """Returns the kernel and the rows that the command line names."""
    if options.prefill:
        rows = chosen((*PREFILL, *PREFILL_DIMS), options.rows)
        return Kernel(rows, 0, prefill_candidates, {"": ours_prefill})
    rows = chosen(DECODE, options.rows)
    if options.v1:
        forms = {f", {form}": partial(classic_decode, form=form) for form in CLASSIC_FORMS}
        return Kernel(rows, 4, classic_candidates, forms)
    if options.queries > 1:
        rows = several_queries(rows, options.queries)
    return Kernel(rows, 0, decode_candidates, {"": ours_decode})


def main() -> None:
    made = parser(__doc__)
    which = made.add_mutually_exclusive_group()
    which.add_argument("--prefill", action="store_true", help="prefill, not decode")
    which.add_argument("--v1", action="store_true", help="the classic kernel, not lightkv's decode")
    made.add_argument(
        "--rows", nargs="+", default=[], help="tune on rows whose names contain one of these texts"
    )
    made.add_argument("--queries", type=int, default=1, help="queries of each request in decode")
    made.add_argument("--repeats", type=int, default=10)
    options = made.parse_args()
    if not torch.cuda.is_available():
        refuse("this measures kernels, and needs a CUDA device")
    print_machine()
    clock = Clock(options.repeats)
    kernel = kernel_of(options)
    results = {}
    for row in kernel.rows:
        for name, found in measure(row, kernel, clock).items():
            results[name] = found
            print_row(name, found)
        torch.cuda.empty_cache()
        save_json("tune", results, options.out)
    print_json("tune", results, options.out)


if __name__ == "__main__":
    main()
