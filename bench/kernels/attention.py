"""Times lightkv's attention with pages of one token against FlashAttention 3, FlashInfer, torch and the classic
paged attention.

    python -m bench.kernels.attention --fa3 LIBRARY --out bench/results/attention-h200.json --plot attention.png
    python -m bench.kernels.attention --fa3 LIBRARY --quick          a minute: some rows, beside FA3 alone
    python -m bench.kernels.attention --turns --curve --rows "64 after" --peers fa3 --out FILE
    python -m bench.kernels.attention --replot bench/results/attention-h200.json --plot attention-h200.png

All sides read the same K/V: bfloat16, pages of 1 and of 16 tokens in random order; lightkv's kernels also read
contiguous runs through their index. Every side is captured in a CUDA graph, and its output is compared element
by element with a float64 reference. Then the sides of a row are replayed in turns until each is steady
(`bench/common/steady.py`), and the median of the last 20 replays counts. The L2 cache is flushed before each
by reading 256 MiB (writing would leave dirty lines, which are written back inside the timed region). Plans are
made before, and timed separately, from call to end, and lightkv's also in a graph. A side that fails or is
wrong is left out, with a line that says why.

The parts are decode and prefill, both also with other heads (decode-dims, prefill-dims), a few queries after a
long prefix (turns), from 1 to 512 queries after the same prefix (curve), steps of prefills and decodes, where
the decodes follow the chunks (mixed), and requests that share a prefix (groups).

A row's floor is the time of an empty kernel in a graph plus its bytes (shared ones counted once) over the
bandwidth of the fastest kernel that only reads. For a prefill it is its operations over the rate of a large
matrix product, where that takes longer. FlashAttention 3 is one library out of vLLM's wheel, and runs with the
best number of splits of a sweep for each row. FlashInfer needs its package, nvcc and ninja, and is measured at
head dim 128 alone. The results file is rewritten after every row.
"""

import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.common.device_clock import (
    DEVICE,
    CapturedStep,
    Clock,
    captured,
    gather_us,
    measure_ceiling,
)
from bench.common.report import (
    Spread,
    load_pyplot,
    parser,
    print_json,
    print_machine,
    refuse,
    save_json,
)
from lightkv.triton_kernels.write.inputs import StoredKV
from lightkv.triton_kernels.write.write_kv import write_kv

from .attention_batches import check, make_batch, reference, scatter, split_heads
from .attention_fa3 import FlashAttention3
from .attention_figures import plot, print_figures
from .attention_peers import FlashInfer, ours_decode, ours_prefill
from .attention_rows import ROWS, SEVERAL_QUERIES, WRITTEN, Row, rows_to_measure
from .attention_sides import PEERS, SHIFTS, SIDES, UNGROUPED, Bench, Make, sides_beside_fa3

FLASHINFER = {  # the kernels that each part needs
    "decode": ("decode", "fa2"),
    "prefill": ("fa2", "fa3"),
    "turns": ("fa2", "fa3"),
    "curve": ("fa2",),
    "mixed": ("fa2", "fa3"),
    "groups": ("fa2", "fa3"),
}
LAYERS = 32  # of the step in which writes are timed
LAYER_BYTES = 16 * 2**30  # the most K/V of all layers; beyond that, some layers share a pool
COMPILERS = 8  # threads; each holds the tensors of a row

Results = dict[str, Any]


# --------------------------------------------------------------------------------
# A row


def prepare(make: Make, expected: Tensor, clock: Clock) -> tuple[CapturedStep, Results]:
    """Captures a side, and checks what its replay writes. Returns the graph, and the time of its plan in µs and
    its setting, where it has these. Raises what the side raises, and ArithmeticError if its replay is wrong."""
    side = make()
    side.run()
    found: Results = {}
    if side.plan is not None:
        found["plan_us"] = clock.call(side.plan)
    if side.setting is not None:
        found["setting"] = dict(side.setting)
    graph, out = captured(side.run)
    out.fill_(float("nan"))
    graph.replay()
    check(side.tokens(out), expected)
    return graph, found


def measure_sides(row: Row, sides: Mapping[str, Make], expected: Tensor, clock: Clock) -> Results:
    """Checks every side, then times those that are right, in turns. Returns `sides`, the times, and `failed`,
    the reasons why sides are left out."""
    graphs, found, failed = {}, {}, {}
    for name, make in sides.items():
        try:
            graphs[name], found[name] = prepare(make, expected, clock)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error).strip()[:300]}"
            print(f"{row.name}: {name} is left out: {failed[name]}", flush=True)
    for name, timing in clock.replay_in_turns(graphs).items():
        found[name] |= timing._asdict()
    return {"sides": found, "failed": failed}


def measure_row(row: Row, make_sides: Callable[[Any, Bench], dict[str, Make]], bench: Bench) -> Results:
    """Measures every side of a row."""
    batch = make_batch(row, DEVICE)
    found = measure_sides(row, make_sides(batch, bench), reference(batch), bench.clock)
    floor = bench.ceiling.floor_us(row.bytes, row.flops if row.is_prefill else 0)
    times = []
    for name, side in found["sides"].items():
        splits = f", splits {side['setting']['num_splits']}" if "setting" in side else ""
        unsteady = "" if side["steady"] else ", not steady"
        spread = Spread(side["median"], side["low"], side["high"])
        times.append(f"{name} {spread.text('.1f')}{splits}{unsteady}")
        side |= {
            "tb_per_s": row.bytes / side["median"] / 1e6,
            "tflop_per_s": row.flops / side["median"] / 1e6,
        }
    print(f"{row.name}, µs: floor {floor:.1f}, {', '.join(times)}", flush=True)
    size = {
        "tokens": sum(row.lengths),
        "queries": sum(row.q_lens),
        "bytes": row.bytes,
        "flops": row.flops,
    }
    return size | {"floor_us": floor} | found | beside_peers(found["sides"])


def beside_peers(sides: Results) -> Results:
    """Returns the time of lightkv over that of FlashAttention 3 with pages of the same size, and at page 1, and
    at its best page, over that of the fastest peer at any page size."""
    took = {name: found["median"] for name, found in sides.items()}
    pages = [name.removeprefix("FA3 ") for name in took if name.startswith("FA3 ")]
    over_fa3 = {
        page: took[f"lightkv {page}"] / took[f"FA3 {page}"] for page in pages if f"lightkv {page}" in took
    }
    found: Results = {"over_fa3": over_fa3} if over_fa3 else {}
    peers = {name: median for name, median in took.items() if not name.startswith("lightkv")}
    if "lightkv p1" not in took or not peers:
        return found
    best = min(peers, key=lambda name: peers[name])
    best_page = min(median for name, median in took.items() if name.startswith("lightkv p"))
    return found | {
        "best_peer": best,
        "ratio": took["lightkv p1"] / peers[best],
        "ratio_of_best_page": best_page / peers[best],
    }


def measure_mixed(row: Row, bench: Bench) -> Results:
    """Measures every side of a row, and in `alone_us` its prefills and its decodes by themselves."""
    count = sum(q_len > 1 for q_len in row.q_lens)
    alone: dict[str, float] = {}
    for part, requests, make in (
        ("prefills", slice(count), ours_prefill),
        ("decodes", slice(count, None), ours_decode),
    ):
        own = row._replace(
            name=f"{row.name}: {part}", lengths=row.lengths[requests], q_lens=row.q_lens[requests]
        )
        batch = make_batch(own, DEVICE)
        sides: dict[str, Make] = {part: partial(make, batch, scatter(batch, 0))}
        measured = measure_sides(own, sides, reference(batch), bench.clock)["sides"]
        alone |= {name: side["median"] for name, side in measured.items()}
    return measure_row(row, SIDES["mixed"], bench) | {"alone_us": alone}


def measure_groups(row: Row, bench: Bench) -> Results:
    """Measures every side of a row, and `speedups` over lightkv without a shared prefix."""
    found = measure_row(row, SIDES["groups"], bench)
    if UNGROUPED in found["sides"]:
        ungrouped = found["sides"][UNGROUPED]["median"]
        found["speedups"] = {name: ungrouped / side["median"] for name, side in found["sides"].items()}
    return found


def measure_queries(row: Row, num_queries: int, clock: Clock) -> Results:
    """Measures lightkv at page 1 with one query and with `num_queries` queries per request, over the same
    K/V."""
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


def measure_reading(row: Row, clock: Clock) -> Results:
    """Times a kernel that only reads the K/V, at page 1 and at page 16, in the order of the requests."""
    batch = make_batch(row, DEVICE)
    found = {}
    for shift in SHIFTS:
        paged = scatter(batch, shift)
        found[f"p{1 << shift}"] = gather_us(paged.blocks, paged.slots, clock)
    return found


def measure_plan(row: Row, clock: Clock) -> Results:
    """Times lightkv's plan of a step, in a graph."""
    batch = make_batch(row, DEVICE)
    plan = ours_decode(batch, scatter(batch, 0)).plan
    assert plan is not None
    plan()
    return clock.replay_in_turns({"plan": CapturedStep(plan)})["plan"]._asdict()


def measure_write(row: Row, clock: Clock) -> Results:
    """Measures what writing the newest token's K/V adds to a layer: LAYERS layers with and without, in a
    graph."""
    batch = make_batch(row, DEVICE)
    expected = reference(batch)
    paged = scatter(batch, 0)
    newest = torch.tensor(batch.lengths, device=DEVICE).cumsum(0) - 1
    slots = paged.slots[newest]
    k, v = split_heads(batch.kv[newest], batch.heads)
    num_pools = max(1, min(LAYERS, LAYER_BYTES // (paged.pool.numel() * paged.pool.element_size())))
    pools = [paged._replace(pool=paged.pool.clone()) for _ in range(num_pools)]
    layers = [ours_decode(batch, one) for one in pools]

    def step(with_write: bool) -> Tensor:
        outputs = []
        for layer in range(LAYERS):
            if with_write:
                write_kv(k, v, StoredKV(*pools[layer % num_pools].caches), slots)
            outputs.append(layers[layer % num_pools].run())
        return outputs[-1]

    graphs = {}
    for with_write in (True, False):
        step(with_write)
        graph, out = captured(partial(step, with_write))
        out.fill_(float("nan"))
        for one in pools if with_write else ():
            one.pool[slots] = float("nan")  # the check finds K/V that is not written in time
        graph.replay()
        check(out, expected)
        graphs["write + attend" if with_write else "attend"] = graph
    took: Results = {name: timing._asdict() for name, timing in clock.replay_in_turns(graphs).items()}
    per_layer = (took["write + attend"]["median"] - took["attend"]["median"]) / LAYERS
    return took | {"pools": num_pools, "us_per_layer": per_layer}


# --------------------------------------------------------------------------------


def attempt(what: str, measure: Callable[[], Results]) -> Results:
    """Returns the measurement, or the error that prevented it, whose traceback goes to stderr."""
    try:
        return measure()
    except Exception as error:
        traceback.print_exc()
        print(f"{what} is left out: {type(error).__name__}: {error}", flush=True)
        return {"failed": f"{type(error).__name__}: {error}"}
    finally:
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()


def load_flashinfer(cache: Path | None, kernels: set[str]) -> FlashInfer | None:
    """Returns FlashInfer with these kernels compiled; None, after printing why, if it is not available."""
    try:
        flashinfer = FlashInfer(DEVICE, cache)
    except Exception as error:  # its import may fail on compilers and versions, too
        print(f"FlashInfer is left out: {type(error).__name__}: {error}", flush=True)
        return None
    start = time.perf_counter()
    batch = make_batch(Row("one token", (1,), (1,)), DEVICE)
    for kernel, why in flashinfer.compile(sorted(kernels), batch).items():
        # A compiler's last lines say why.
        print(f"FlashInfer's {kernel} is left out: {why[-2000:]}", flush=True)
    print(f"FlashInfer {flashinfer.version}, compiled in {time.perf_counter() - start:.0f} s", flush=True)
    return flashinfer


def load_fa3(file: Path | None) -> FlashAttention3 | None:
    """Returns FlashAttention 3; None, after printing why, if it is not there."""
    try:
        fa3 = FlashAttention3.load(file)
    except Exception as error:  # a library for another torch may fail in many ways
        print(f"FlashAttention 3 is left out: {type(error).__name__}: {error}", flush=True)
        return None
    print(f"FlashAttention 3: {fa3.version}", flush=True)
    return fa3


def compile_ours(rows: Mapping[str, Sequence[Row]], bench: Bench) -> None:
    """Compiles lightkv's kernels for these rows, several at a time. What fails here fails again in its row,
    which then says why."""
    ours = bench._replace(peers=(), flashinfer=None, fa3=None)

    def run(part: str, row: Row) -> None:
        for make in sides_of(part, bench)(make_batch(row, DEVICE), ours).values():
            make().run()

    start = time.perf_counter()
    with ThreadPoolExecutor(COMPILERS) as threads:
        jobs = [threads.submit(run, part, row) for part in rows for row in rows[part]]
        failed = sum(job.exception() is not None for job in jobs)
    torch.cuda.empty_cache()
    print(
        f"lightkv's kernels, compiled in {time.perf_counter() - start:.0f} s; {failed} rows failed",
        flush=True,
    )


def sides_of(part: str, bench: Bench) -> Callable[[Any, Bench], dict[str, Make]]:
    """Returns what makes the sides of the part's rows; a quick run has those of lightkv and FA3 alone."""
    return sides_beside_fa3 if bench.quick else SIDES[part]


def measure_decode_extras(row: Row, bench: Bench, results: Results) -> None:
    """Measures what belongs to a row of decode: reading alone, the plan, several queries, writing K/V."""
    clock = bench.clock
    parts = {
        "reading": partial(measure_reading, row, clock),
        "plan": partial(measure_plan, row, clock),
    }
    if row.name in SEVERAL_QUERIES:
        parts["queries"] = partial(measure_queries, row, SEVERAL_QUERIES[row.name], clock)
    if row.name in WRITTEN:
        parts["write"] = partial(measure_write, row, clock)
    for part, measure_part in parts.items():
        results[part][row.name] = attempt(f"{row.name}: {part}", measure_part)


def measure_part(part: str, row: Row, bench: Bench) -> Results:
    """Measures a row of a part, and what belongs to it."""
    if part == "mixed":
        return measure_mixed(row, bench)
    if part == "groups":
        return measure_groups(row, bench)
    return measure_row(row, sides_of(part, bench), bench)


def main() -> None:
    arguments = parser(__doc__)
    for part in ROWS:
        arguments.add_argument(
            f"--{part.replace('_', '-')}", action="store_true", help="measure only these parts"
        )
    arguments.add_argument(
        "--rows", nargs="+", default=[], help="measure rows whose names contain one of these texts"
    )
    arguments.add_argument(
        "--quick", action="store_true", help="measure the rows of QUICK, at pages of 1, beside FA3 alone"
    )
    arguments.add_argument("--peers", nargs="*", default=PEERS, choices=PEERS)
    arguments.add_argument(
        "--fa3", type=Path, help="_vllm_fa3_C.abi3.so or its folder; without it an installed vLLM has it"
    )
    arguments.add_argument("--repeats", type=int, default=20, help="replays whose median counts")
    arguments.add_argument(
        "--flashinfer-cache", type=Path, help="directory for the kernels that FlashInfer compiles"
    )
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
    rows = rows_to_measure([part for part in ROWS if getattr(options, part)], options.rows, options.quick)
    if not rows:
        refuse(f"no row of these parts has one of {options.rows} in its name")
    print_machine()
    peers = ("fa3",) if options.quick else options.peers
    fa3 = load_fa3(options.fa3) if "fa3" in peers else None
    flashinfer = None
    if "flashinfer" in peers:
        kernels = {kernel for part in rows for kernel in FLASHINFER.get(part, ())}
        flashinfer = load_flashinfer(options.flashinfer_cache, kernels)
    clock = Clock(options.repeats)
    ceiling, found = measure_ceiling(clock)
    print(
        f"an empty kernel {ceiling.empty_us:.1f} µs, reading {ceiling.bytes_per_us / 1e6:.2f} TB/s, matrix "
        f"product {ceiling.flops_per_us / 1e6:.0f} TFLOP/s",
        flush=True,
    )
    bench = Bench(clock, ceiling, peers, flashinfer, fa3, (0,) if options.quick else SHIFTS, options.quick)
    results: Results = {
        "settings": {"repeats": options.repeats, "layers": LAYERS, "quick": options.quick},
        "flashinfer": flashinfer.version if flashinfer is not None else None,
        "fa3": fa3.version if fa3 is not None else None,
        "ceiling": found,
    }
    results |= {part: {} for part in (*ROWS, "reading", "plan", "queries", "write")}
    compile_ours(rows, bench)
    for part, own in rows.items():
        for row in own:
            results[part][row.name] = attempt(row.name, partial(measure_part, part, row, bench))
            if part == "decode" and not bench.quick:
                measure_decode_extras(row, bench, results)
            save_json("attention", results, options.out)
    return results


if __name__ == "__main__":
    main()
