"""Attention by page-size-one index against FlashInfer and torch's own, in one run on the same K/V values.

    python -m bench.attention --out bench/results/attention-h200.json --plot attention-h200.png
    python -m bench.attention --replot bench/results/attention-h200.json --plot attention-h200.png

Head dim 128, bfloat16, pages (of 1 and of 16 tokens) in random order. Every side is captured in a CUDA graph,
its output checked element by element against float32, and its replay timed: the median of 20, the L2 cache
emptied before each by reading 256 MiB (written, its lines would be written back inside the timed region). What
a side plans for a step is planned before, and timed apart: from call to end, and lightkv's in a graph too. A
side that fails or is wrong is left out with a line.

A row's floor is an empty kernel in a graph and the bytes over the best of some kernels that only read; of a
prefill, the operations over the rate of a large matrix product where that is longer. FlashInfer needs its
package, nvcc and ninja. The file is written anew after every row.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend

from bench.allocator import capture, empty_kernel
from bench.attention_peers import (
    DECODE,
    PREFILL,
    Batch,
    FlashInfer,
    Row,
    Side,
    check,
    make_batch,
    ours_decode,
    ours_prefill,
    reference,
    scatter,
    sdpa_decode,
    sdpa_prefill,
)
from bench.report import Spread, parser, print_json, print_machine, print_table, refuse, save_json
from bench.serving_figures import load_pyplot
from lightkv.triton_kernels.write_kv import write_kv

DEVICE = torch.device("cuda")
SHIFTS = (0, 4)  # pages of 1 and of 16
PEERS = ("flashinfer", "sdpa")
SDPA = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
SEVERAL_QUERIES = dict.fromkeys(("B1 × 8k", "B32 × 1k", "B64 × 8k"), 8)
WRITTEN = ("B1 × 1k", "B32 × 1k", "B256 × 2k")
LAYERS = 32  # of a step whose writes are timed
LAYER_BYTES = 16 * 2**30  # of K/V in all of them, at most: then some share a pool

Results = dict[str, Any]
Make = Callable[[], Side]


# --------------------------------------------------------------------------------
# Time


class Clock:
    """Times in microseconds."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self._fill = torch.ones(2**26, dtype=torch.float32, device=DEVICE)  # 256 MiB

    def replay(self, graph: torch.cuda.CUDAGraph) -> Spread:
        """A graph's replays on the device, each with the L2 cache emptied, queued before it begins."""
        pairs = []
        for _ in range(self.repeats + 3):
            self._fill.sum()
            torch.cuda._sleep(1_000_000)  # half a millisecond
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return Spread.of([start.elapsed_time(end) * 1e3 for start, end in pairs[3:]])

    def call(self, work: Callable[[], object]) -> float:
        """From the call until the device has done it, nothing being queued before it."""
        times = []
        for _ in range(self.repeats // 2 + 2):
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            work()
            torch.cuda.synchronize()
            times.append((time.perf_counter_ns() - start) / 1e3)
        return statistics.median(times[2:])


def captured(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of `run`, which has run once before, and the tensor that its replays write to."""
    outputs: list[Tensor] = []
    return capture(lambda: outputs.append(run())), outputs[0]


@triton.jit
def _read_kernel(source, sums, num_blocks, BLOCK: tl.constexpr):  # fewer than 2**31 words
    total = tl.zeros([BLOCK], tl.int32)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        total += tl.load(source + block * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


class Ceiling(NamedTuple):
    """What this device does at best, measured in this run."""

    empty_us: float  # a kernel that does nothing, in a graph
    bytes_per_us: float
    flops_per_us: float

    def floor_us(self, row: Row) -> float:
        work = row.bytes / self.bytes_per_us
        if row.is_prefill:
            work = max(work, row.flops / self.flops_per_us)
        return self.empty_us + work


def measure_ceiling(
    clock: Clock, num_words: int = 2**29, side: int = 8192, grids: Sequence[int] = (1024, 2048)
) -> tuple[Ceiling, Results]:
    """By reading `num_words` int32, with `grids` and one program a block, and by a bfloat16 product of square
    matrices; and what each kernel took."""
    empty_kernel()
    empty = clock.replay(capture(empty_kernel))
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


# --------------------------------------------------------------------------------
# A row


class Bench(NamedTuple):
    """What every row is measured with."""

    clock: Clock
    ceiling: Ceiling
    with_sdpa: bool
    flashinfer: FlashInfer | None


def decode_sides(batch: Batch, bench: Bench) -> dict[str, Make]:
    made: dict[str, Make] = {}
    for shift in SHIFTS:
        paged, name = scatter(batch, shift), f"p{1 << shift}"
        made[f"lightkv {name}"] = partial(ours_decode, batch, paged)
        if bench.flashinfer is not None:
            made[f"FlashInfer {name}"] = partial(bench.flashinfer.decode, batch, paged, False)
            made[f"FlashInfer tc {name}"] = partial(bench.flashinfer.decode, batch, paged, True)
    if bench.with_sdpa and batch.is_even():
        for name, backend in SDPA.items():
            made[f"SDPA {name}"] = partial(sdpa_decode, batch, backend)
    return made


def prefill_sides(batch: Batch, bench: Bench) -> dict[str, Make]:
    made: dict[str, Make] = {}
    for shift in SHIFTS:
        paged, name = scatter(batch, shift), f"p{1 << shift}"
        made[f"lightkv {name}"] = partial(ours_prefill, batch, paged)
        if bench.flashinfer is not None:
            for backend in ("fa2", "fa3"):
                made[f"FlashInfer {backend} {name}"] = partial(
                    bench.flashinfer.prefill, batch, paged, backend
                )
    if bench.with_sdpa and batch.is_even() and batch.lengths == batch.q_lens:
        for name, backend in SDPA.items():
            made[f"SDPA {name}"] = partial(sdpa_prefill, batch, backend)
    return made


def measure_side(make: Make, expected: Tensor, clock: Clock) -> Results:
    """µs: of a replay, of its plan. Raises where it fails, ArithmeticError where its replay is wrong."""
    side = make()
    side.run()
    found: Results = {}
    if side.plan is not None:
        found["plan_us"] = clock.call(side.plan)
    graph, out = captured(side.run)
    out.fill_(float("nan"))
    graph.replay()
    check(side.tokens(out), expected)
    return clock.replay(graph)._asdict() | found


def measure_sides(row: Row, sides: dict[str, Make], expected: Tensor, clock: Clock) -> Results:
    """`sides`, and `failed`: why some are left out."""
    found: Results = {"sides": {}, "failed": {}}
    for name in list(sides):
        make = sides.pop(name)  # with it goes what it holds
        try:
            found["sides"][name] = measure_side(make, expected, clock)
        except Exception as error:
            found["failed"][name] = f"{type(error).__name__}: {str(error).strip()[:300]}"
            print(f"{row.name}: {name} is left out: {found['failed'][name]}", flush=True)
        del make
    return found


def measure_row(row: Row, make_sides: Callable[[Batch, Bench], dict[str, Make]], bench: Bench) -> Results:
    """Every side of a row."""
    batch = make_batch(row, DEVICE)
    found = measure_sides(row, make_sides(batch, bench), reference(batch), bench.clock)
    floor = bench.ceiling.floor_us(row)
    times = []
    for name, side in found["sides"].items():
        times.append(f"{name} {Spread(side['median'], side['low'], side['high']).text('.1f')}")
        work = {"tflop_per_s": row.flops} if row.is_prefill else {"tb_per_s": row.bytes}
        side |= {rate: amount / side["median"] / 1e6 for rate, amount in work.items()}
    print(f"{row.name}, µs: floor {floor:.1f}, {', '.join(times)}", flush=True)
    size = {"tokens": sum(row.lengths), "bytes": row.bytes, "flops": row.flops}
    return size | {"floor_us": floor} | found | beside_peers(found["sides"])


def beside_peers(sides: Results) -> Results:
    """lightkv at page 1, and at its best page, over the peer that is fastest at any."""
    ours = [found["median"] for name, found in sides.items() if name.startswith("lightkv")]
    peers = {name: found["median"] for name, found in sides.items() if not name.startswith("lightkv")}
    if "lightkv p1" not in sides or not peers:
        return {}
    best = min(peers, key=lambda name: peers[name])
    page_1 = sides["lightkv p1"]["median"]
    return {"best_peer": best, "ratio": page_1 / peers[best], "ratio_of_best_page": min(ours) / peers[best]}


def measure_queries(row: Row, num_queries: int, clock: Clock) -> Results:
    """lightkv alone, page 1: some queries a request beside one. The K/V is the same."""
    found: Results = {}
    for count in (1, num_queries):
        one = row._replace(q_lens=(count,) * len(row.lengths))
        batch = make_batch(one, DEVICE)
        sides: dict[str, Make] = {str(count): partial(ours_decode, batch, scatter(batch, 0))}
        measured = measure_sides(one, sides, reference(batch), clock)
        found |= measured["sides"]
    if len(found) == 2:
        found["ratio"] = found[str(num_queries)]["median"] / found["1"]["median"]
    return found


def measure_plan(row: Row, clock: Clock) -> Results:
    """lightkv's plan of a step, in a graph."""
    batch = make_batch(row, DEVICE)
    plan = ours_decode(batch, scatter(batch, 0)).plan
    assert plan is not None
    plan()
    return clock.replay(capture(plan))._asdict()


def measure_write(row: Row, clock: Clock) -> Results:
    """What writing the newest token's K/V adds to a layer: LAYERS layers with it and without it, in a graph."""
    batch = make_batch(row, DEVICE)
    expected = reference(batch)
    paged = scatter(batch, 0)
    newest = torch.tensor(batch.lengths, device=DEVICE).cumsum(0) - 1
    slots = paged.slots[newest]
    k, v = batch.kv[newest].chunk(2, dim=1)
    num_pools = max(1, min(LAYERS, LAYER_BYTES // (paged.pool.numel() * paged.pool.element_size())))
    pools = [paged._replace(pool=paged.pool.clone()) for _ in range(num_pools)]
    layers = [ours_decode(batch, one) for one in pools]

    def step(with_write: bool) -> Tensor:
        outputs = []
        for layer in range(LAYERS):
            if with_write:
                write_kv(k, v, *pools[layer % num_pools].caches, slots)
            outputs.append(layers[layer % num_pools].run())
        return outputs[-1]

    took = {}
    for with_write in (True, False):
        step(with_write)
        graph, out = captured(partial(step, with_write))
        out.fill_(float("nan"))
        for one in pools if with_write else ():
            one.pool[slots] = float("nan")  # what is not written in time is seen
        graph.replay()
        check(out, expected)
        took["write + attend" if with_write else "attend"] = clock.replay(graph)._asdict()
    per_layer = (took["write + attend"]["median"] - took["attend"]["median"]) / LAYERS
    return took | {"pools": num_pools, "us_per_layer": per_layer}


# --------------------------------------------------------------------------------
# Figures for people


def print_rows(rows: dict[str, Results], unit: str, rate: str) -> None:
    """µs of every side; the other columns are of lightkv at page 1, but for the last."""
    rows = {row: found for row, found in rows.items() if "sides" in found}
    names = list(dict.fromkeys(name for found in rows.values() for name in found["sides"]))
    table = []
    for row, found in rows.items():
        sides, floor = found["sides"], found["floor_us"]
        cells = [f"{sides[name]['median']:.1f}" if name in sides else "" for name in names]
        ours = sides.get("lightkv p1")
        cells += [f"{ours['median'] / floor:.2f}", f"{ours[rate]:.3g}"] if ours else ["", ""]
        cells += [f"{found[key]:.2f}" if key in found else "" for key in ("ratio", "ratio_of_best_page")]
        table.append([row, f"{floor:.1f}", *cells])
    print(
        "\nµs, medians; over the floor, the rate, over the best peer: lightkv at page 1, and at its best page"
    )
    print_table(["row", "floor", *names, "over floor", unit, "over peer", "best page"], table)


def print_figures(results: Results) -> None:
    for part, unit, rate in (("decode", "TB/s", "tb_per_s"), ("prefill", "TFLOP/s", "tflop_per_s")):
        if results.get(part):
            print_rows(results[part], unit, rate)
    for row, found in results.get("plan", {}).items():
        if "median" in found:
            print(f"{row}: the plan of a step takes {Spread(**found).text('.1f')} µs in a graph")
    for row, found in results.get("queries", {}).items():
        if "ratio" in found:
            print(f"{row}: {SEVERAL_QUERIES[row]} queries a request cost {found['ratio']:.2f} of one")
    for row, found in results.get("write", {}).items():
        if "us_per_layer" in found:
            print(f"{row}: writing K/V adds {found['us_per_layer']:.2f} µs a layer")


def over_floor(found: Results) -> dict[str, float]:
    """Of lightkv's sides, and of each peer at its best, the time over the floor."""
    best: dict[str, float] = {}
    for name, side in found["sides"].items():
        key = name if name.startswith("lightkv") else name.split()[0]
        best[key] = min(best.get(key, float("inf")), side["median"] / found["floor_us"])
    return best


def plot(pyplot: Any, results: Results, path: Path) -> None:
    """Bars of the time over the floor, row by row; peers at their best."""
    parts = [part for part in ("decode", "prefill") if results.get(part)]
    figure, axes = pyplot.subplots(
        len(parts), 1, figsize=(15, 5 * len(parts)), layout="constrained", squeeze=False
    )
    for part, axis in zip(parts, axes[:, 0], strict=True):
        rows = {row: over_floor(found) for row, found in results[part].items() if "sides" in found}
        names = list(dict.fromkeys(name for ratios in rows.values() for name in ratios))
        for i, name in enumerate(names):
            at = [j + (i - (len(names) - 1) / 2) * 0.8 / len(names) for j in range(len(rows))]
            heights = [ratios.get(name, float("nan")) for ratios in rows.values()]
            axis.bar(at, heights, 0.8 / len(names), label=name)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_xticks(range(len(rows)), list(rows), rotation=15, ha="right", fontsize="small")
        axis.set(title=part, ylabel="time over the floor")
        axis.grid(axis="y", alpha=0.3)
        axis.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


# --------------------------------------------------------------------------------


def chosen(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """The rows in whose names one of the texts stands, × being x too; all without any."""
    texts = [name.replace("×", "x").lower() for name in names]
    return [
        row for row in rows if not texts or any(text in row.name.replace("×", "x").lower() for text in texts)
    ]


def attempt(what: str, measure: Callable[[], Results]) -> Results:
    """What is measured, or why not."""
    try:
        return measure()
    except Exception as error:
        print(f"{what} is left out: {type(error).__name__}: {error}", flush=True)
        return {"failed": f"{type(error).__name__}: {error}"}
    finally:
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()


def load_flashinfer(cache: Path | None, decode: bool, prefill: bool) -> FlashInfer | None:
    """With its kernels compiled; None, and a line, where it is not there."""
    try:
        flashinfer = FlashInfer(DEVICE, cache)
    except Exception as error:  # it looks at compilers and versions when it is imported
        print(f"FlashInfer is left out: {type(error).__name__}: {error}", flush=True)
        return None
    start = time.perf_counter()
    batch = make_batch(Row("one token", (1,), (1,)), DEVICE)
    kernels = {"decode", "fa2"} if decode else set()
    kernels |= {"fa2", "fa3"} if prefill else set()
    for kernel, why in flashinfer.compile(sorted(kernels), batch).items():
        print(f"FlashInfer's {kernel} is left out: {why[-2000:]}", flush=True)  # a compiler says why last
    print(f"FlashInfer {flashinfer.version}, compiled in {time.perf_counter() - start:.0f} s", flush=True)
    return flashinfer


def measure_decode(row: Row, bench: Bench, results: Results) -> None:
    clock = bench.clock
    parts = {
        "decode": partial(measure_row, row, decode_sides, bench),
        "plan": partial(measure_plan, row, clock),
    }
    if row.name in SEVERAL_QUERIES:
        parts["queries"] = partial(measure_queries, row, SEVERAL_QUERIES[row.name], clock)
    if row.name in WRITTEN:
        parts["write"] = partial(measure_write, row, clock)
    for part, measure_part in parts.items():
        results[part][row.name] = attempt(f"{row.name}: {part}", measure_part)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--decode", action="store_true", help="these rows alone")
    arguments.add_argument("--prefill", action="store_true", help="these rows alone")
    arguments.add_argument("--rows", nargs="+", default=[], help="texts that stand in the names of rows")
    arguments.add_argument("--peers", nargs="*", default=PEERS, choices=PEERS)
    arguments.add_argument("--repeats", type=int, default=20)
    arguments.add_argument("--flashinfer-cache", type=Path, help="below it FlashInfer keeps what it compiles")
    arguments.add_argument("--plot", type=Path, help="draw the figures into this file, a PNG or SVG")
    arguments.add_argument("--replot", type=Path, help="measure nothing: draw and print this file's figures")
    options = arguments.parse_args()
    pyplot = load_pyplot() if options.plot else None
    if options.replot is not None:
        results = json.loads(options.replot.read_text())["results"]
    else:
        if not torch.cuda.is_available():
            refuse("this measures kernels, and needs a CUDA device")
        results = measure(options)
    print_figures(results)
    if pyplot is not None:
        plot(pyplot, results, options.plot)
    if options.replot is None:
        print_json("attention", results, options.out)


def measure(options: Any) -> Results:
    both = options.decode == options.prefill
    decode = chosen(DECODE, options.rows) if both or options.decode else []
    prefill = chosen(PREFILL, options.rows) if both or options.prefill else []
    if not decode and not prefill:
        refuse(f"no row has one of {options.rows} in its name")
    print_machine()
    flashinfer = None
    if "flashinfer" in options.peers:
        flashinfer = load_flashinfer(options.flashinfer_cache, bool(decode), bool(prefill))
    clock = Clock(options.repeats)
    ceiling, found = measure_ceiling(clock)
    print(
        f"an empty kernel {ceiling.empty_us:.1f} µs, reading {ceiling.bytes_per_us / 1e6:.2f} TB/s, matrix "
        f"product {ceiling.flops_per_us / 1e6:.0f} TFLOP/s",
        flush=True,
    )
    results: Results = {
        "settings": {"repeats": options.repeats, "layers": LAYERS},
        "flashinfer": flashinfer.version if flashinfer is not None else None,
        "ceiling": found,
    }
    results |= {part: {} for part in ("decode", "plan", "queries", "write", "prefill")}
    bench = Bench(clock, ceiling, "sdpa" in options.peers, flashinfer)
    for row in decode:
        measure_decode(row, bench, results)
        save_json("attention", results, options.out)
    for row in prefill:
        measure_part = partial(measure_row, row, prefill_sides, bench)
        results["prefill"][row.name] = attempt(row.name, measure_part)
        save_json("attention", results, options.out)
    return results


if __name__ == "__main__":
    main()
