"""Which launches of decode are the fastest: every candidate, on the rows of `bench.attention`.

    python -m bench.tune --out bench/results/tune-h200.json

What comes out on top, over all rows, is what `triton_kernels/tuning.py` holds; it stands beside the fastest.
Each is checked before it is timed, as in `bench.attention`; those that do not fit are left out.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import torch

from bench.attention_batches import DECODE, Batch, Row, check, chosen, make_batch, reference, scatter
from bench.attention_peers import ours_decode
from bench.device_clock import DEVICE, Clock, captured
from bench.report import parser, print_json, print_machine, print_table, refuse
from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.tuning import DecodeLaunch

TILES = ((32, 2, 3), (32, 4, 3), (64, 4, 2), (64, 4, 3), (64, 8, 3), (128, 4, 2), (128, 8, 2))
WAVES = (2, 3, 4, 6)
NUM_BEST = 5


class Candidate(NamedTuple):
    """A launch, and how many programs there are for each multiprocessor."""

    launch: DecodeLaunch
    waves: int


@contextmanager
def launched_as(candidate: Candidate) -> Iterator[None]:
    """Within, decode is launched so, whatever the table says."""
    launch, workers = tuning.decode_launch, tuning.decode_workers

    def num_workers(
        device: tuning.DeviceClass, num_requests: int, num_queries: int, num_kv_heads: int
    ) -> int:
        return max(1, candidate.waves * device.num_multiprocessors // num_kv_heads)

    tuning.decode_launch, tuning.decode_workers = lambda *_: candidate.launch, num_workers
    try:
        yield
    finally:
        tuning.decode_launch, tuning.decode_workers = launch, workers


def candidates(num_rows: int) -> list[Candidate]:
    """For tiles of so many query rows: as they are, and as wide as the matrix units of Hopper want them."""
    least = tuning.padded_dim(num_rows)
    heights = [least] if least < 32 else sorted({least, max(64, least)})
    launches = [DecodeLaunch(height, *tile) for height, tile in product(heights, TILES)]
    return [Candidate(launch, waves) for launch, waves in product(launches, WAVES)]


def time_us(batch: Batch, expected: torch.Tensor, paged: Any, clock: Clock) -> float:
    side = ours_decode(batch, paged)
    graph, out = captured(side.run)
    out.fill_(float("nan"))
    graph.replay()
    check(out, expected)
    return clock.replay(graph).median


def measure(row: Row, clock: Clock) -> dict[str, Any]:
    """µs of every candidate and of what the table picks."""
    batch = make_batch(row, DEVICE)
    expected, paged = reference(batch), scatter(batch, 0)
    found: dict[str, float] = {}
    for candidate in candidates(row.num_heads // row.num_kv_heads * row.q_lens[0]):
        with launched_as(candidate):
            try:
                took = time_us(batch, expected, paged, clock)
            except Exception as error:  # too much shared memory, too many registers
                print(f"{row.name}: {candidate} is left out: {type(error).__name__}", flush=True)
                continue
        found[f"{'x'.join(map(str, candidate.launch))} waves {candidate.waves}"] = took
    return {"table": time_us(batch, expected, paged, clock), "candidates": found}


def print_row(name: str, found: dict[str, Any]) -> None:
    best = sorted(found["candidates"].items(), key=lambda item: item[1])[:NUM_BEST]
    rows = [["the table's", f"{found['table']:.1f}"], *([launch, f"{took:.1f}"] for launch, took in best)]
    print_table([name, "µs"], rows)


def several_queries(rows: Sequence[Row], num_queries: int) -> list[Row]:
    """The rows again, with so many queries a request."""
    return [
        row._replace(name=f"{row.name}, {num_queries} queries", q_lens=(num_queries,) * len(row.lengths))
        for row in rows
    ]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--rows", nargs="+", default=[], help="texts that stand in the names of rows")
    made.add_argument("--queries", type=int, default=1, help="of each request")
    made.add_argument("--repeats", type=int, default=10)
    options = made.parse_args()
    if not torch.cuda.is_available():
        refuse("this measures kernels, and needs a CUDA device")
    print_machine()
    clock = Clock(options.repeats)
    rows = chosen(DECODE, options.rows)
    if options.queries > 1:
        rows = several_queries(rows, options.queries)
    results = {}
    for row in rows:
        results[row.name] = measure(row, clock)
        print_row(row.name, results[row.name])
        torch.cuda.empty_cache()
    print_json("tune", results, options.out)


if __name__ == "__main__":
    main()
