"""Times lightkv's attention with pages of one token against FlashInfer, torch and the classic paged attention.

    python -m bench.kernels.attention --out bench/results/attention-h200.json --plot attention-h200.png
    python -m bench.kernels.attention --mixed --groups --peers flashinfer --out FILE
    python -m bench.kernels.attention --replot bench/results/attention-h200.json --plot attention-h200.png

All sides read the same K/V: head dim 128, bfloat16, pages of 1 and of 16 tokens in random order; lightkv's
kernels also read contiguous runs through their index. Every side is captured in a CUDA graph, its output is
compared element by element with float32, and its replay is timed: the median of 20, with the L2 cache flushed
before each by reading 256 MiB (writing would leave dirty lines, which are written back inside the timed
region). Plans are made before, and timed separately, from call to end, and lightkv's also in a graph. A side
that fails or is wrong is left out, with a line that says why.

Besides rows of decode and of prefill there are steps of both (mixed), where the decodes follow the chunks, and
requests that share a prefix (groups).

A row's floor is the time of an empty kernel in a graph plus its bytes (shared ones counted once) over the
bandwidth of the fastest kernel that only reads. For a prefill it is its operations over the rate of a large
matrix product, where that takes longer. FlashInfer needs its package, nvcc and ninja. The results file is
rewritten after every row.
"""

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from bench.common.device_clock import (
    DEVICE,
    Ceiling,
    Clock,
    capture,
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
from bench.kernels.attention_batches import (
    CONTIGUOUS,
    DECODE,
    GROUPS,
    MIXED,
    PREFILL,
    SEVERAL_QUERIES,
    WRITTEN,
    Batch,
    Row,
    check,
    chosen,
    make_batch,
    reference,
    scatter,
)
from bench.kernels.attention_figures import plot, print_figures
from bench.kernels.attention_peers import (
    PARTITIONS,
    FlashInfer,
    Side,
    classic_decode,
    ours_decode,
    ours_mixed,
    ours_prefill,
    sdpa_decode,
    sdpa_prefill,
)
from lightkv.triton_kernels.write_kv import write_kv

SHIFTS = (0, 4)  # pages of 1 and of 16
PEERS = ("flashinfer", "sdpa", "v1")
ROWS = {"decode": DECODE, "prefill": PREFILL, "mixed": MIXED, "groups": GROUPS}
FLASHINFER = {  # the kernels that each part needs
    "decode": ("decode", "fa2"),
    "prefill": ("fa2", "fa3"),
    "mixed": ("fa2", "fa3"),
    "groups": ("fa2", "fa3"),
}
SDPA = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
LAYERS = 32  # of the step in which writes are timed
LAYER_BYTES = 16 * 2**30  # the most K/V of all layers; beyond that, some layers share a pool

UNGROUPED = "lightkv p1 ungrouped"

Results = dict[str, Any]
Make = Callable[[], Side]


# --------------------------------------------------------------------------------
# A row


class Bench(NamedTuple):
    """The tools that measure every row."""

    clock: Clock
    ceiling: Ceiling
    peers: Sequence[str]  # of PEERS
    flashinfer: FlashInfer | None


def decode_sides(batch: Batch, bench: Bench) -> dict[str, Make]:
    made: dict[str, Make] = {}
    for shift in SHIFTS:
        paged, name = scatter(batch, shift), f"p{1 << shift}"
        made[f"lightkv {name}"] = partial(ours_decode, batch, paged)
        if bench.flashinfer is not None:
            made[f"FlashInfer {name}"] = partial(bench.flashinfer.decode, batch, paged, False)
            made[f"FlashInfer tc {name}"] = partial(bench.flashinfer.decode, batch, paged, True)
        if "v1" in bench.peers and shift == 4:
            for form, size in PARTITIONS.items():
                made[f"v1 {name} {form}"] = partial(classic_decode, batch, paged, size)
    made["lightkv contiguous"] = partial(ours_decode, batch, scatter(batch, CONTIGUOUS))
    if "sdpa" in bench.peers and batch.is_even():
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
    made["lightkv contiguous"] = partial(ours_prefill, batch, scatter(batch, CONTIGUOUS))
    if "sdpa" in bench.peers and batch.is_even() and batch.lengths == batch.q_lens:
        for name, backend in SDPA.items():
            made[f"SDPA {name}"] = partial(sdpa_prefill, batch, backend)
    return made


def mixed_sides(batch: Batch, bench: Bench) -> dict[str, Make]:
    """Returns the sides of a mixed step, with pages of 1 only; for FlashInfer a decode is a prefill of one
    token."""
    paged = scatter(batch, 0)
    made: dict[str, Make] = {"lightkv p1": partial(ours_mixed, batch, paged)}
    if bench.flashinfer is not None:
        for backend in ("fa2", "fa3"):
            made[f"FlashInfer {backend} p1"] = partial(bench.flashinfer.prefill, batch, paged, backend)
    return made


def group_sides(batch: Batch, bench: Bench) -> dict[str, Make]:
    """Returns the sides for a shared prefix, with pages of 1 only: each request reads it, or it is read
    once."""
    paged = scatter(batch, 0)
    made: dict[str, Make] = {
        UNGROUPED: partial(ours_decode, batch, paged),
        "lightkv p1": partial(ours_decode, batch, paged, share=True),
    }
    if bench.flashinfer is not None:
        made["FlashInfer tc p1"] = partial(bench.flashinfer.decode, batch, paged, True)
        for backend in ("fa2", "fa3"):
            made[f"FlashInfer cascade {backend} p1"] = partial(
                bench.flashinfer.cascade, batch, paged, backend
            )
    return made


def measure_side(make: Make, expected: Tensor, clock: Clock) -> Results:
    """Times a replay and its plan, in µs. Raises what the side raises, and ArithmeticError if its replay is
    wrong."""
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
    """Returns `sides`, the times, and `failed`, the reasons why sides are left out."""
    found: Results = {"sides": {}, "failed": {}}
    for name in list(sides):
        make = sides.pop(name)  # so that its tensors are freed after it was timed
        try:
            found["sides"][name] = measure_side(make, expected, clock)
        except Exception as error:
            found["failed"][name] = f"{type(error).__name__}: {str(error).strip()[:300]}"
            print(f"{row.name}: {name} is left out: {found['failed'][name]}", flush=True)
        del make
    return found


def measure_row(row: Row, make_sides: Callable[[Batch, Bench], dict[str, Make]], bench: Bench) -> Results:
    """Measures every side of a row."""
    batch = make_batch(row, DEVICE)
    found = measure_sides(row, make_sides(batch, bench), reference(batch), bench.clock)
    floor = bench.ceiling.floor_us(row.bytes, row.flops if row.is_prefill else 0)
    times = []
    for name, side in found["sides"].items():
        times.append(f"{name} {Spread(side['median'], side['low'], side['high']).text('.1f')}")
        work = {"tflop_per_s": row.flops} if row.is_prefill else {"tb_per_s": row.bytes}
        side |= {rate: amount / side["median"] / 1e6 for rate, amount in work.items()}
    print(f"{row.name}, µs: floor {floor:.1f}, {', '.join(times)}", flush=True)
    size = {"tokens": sum(row.lengths), "bytes": row.bytes, "flops": row.flops}
    return size | {"floor_us": floor} | found | beside_peers(found["sides"])


def beside_peers(sides: Results) -> Results:
    """Returns the time of lightkv at page 1, and at its best page, over that of the fastest peer at any page
    size."""
    ours = [found["median"] for name, found in sides.items() if name.startswith("lightkv p")]
    peers = {name: found["median"] for name, found in sides.items() if not name.startswith("lightkv")}
    if "lightkv p1" not in sides or not peers:
        return {}
    best = min(peers, key=lambda name: peers[name])
    page_1 = sides["lightkv p1"]["median"]
    return {"best_peer": best, "ratio": page_1 / peers[best], "ratio_of_best_page": min(ours) / peers[best]}


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
    return measure_row(row, mixed_sides, bench) | {"alone_us": alone}


def measure_groups(row: Row, bench: Bench) -> Results:
    """Measures every side of a row, and `speedups` over lightkv without a shared prefix."""
    found = measure_row(row, group_sides, bench)
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
        found[f"p{1 << shift}"] = gather_us(paged.pool, paged.slots, clock)
    return found


def measure_plan(row: Row, clock: Clock) -> Results:
    """Times lightkv's plan of a step, in a graph."""
    batch = make_batch(row, DEVICE)
    plan = ours_decode(batch, scatter(batch, 0)).plan
    assert plan is not None
    plan()
    return clock.replay(capture(plan))._asdict()


def measure_write(row: Row, clock: Clock) -> Results:
    """Measures what writing the newest token's K/V adds to a layer: LAYERS layers with and without, in a
    graph."""
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
            one.pool[slots] = float("nan")  # the check finds K/V that is not written in time
        graph.replay()
        check(out, expected)
        took["write + attend" if with_write else "attend"] = clock.replay(graph)._asdict()
    per_layer = (took["write + attend"]["median"] - took["attend"]["median"]) / LAYERS
    return took | {"pools": num_pools, "us_per_layer": per_layer}


# --------------------------------------------------------------------------------


def attempt(what: str, measure: Callable[[], Results]) -> Results:
    """Returns the measurement, or the error that prevented it."""
    try:
        return measure()
    except Exception as error:
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


def measure_decode(row: Row, bench: Bench, results: Results) -> None:
    clock = bench.clock
    parts = {
        "decode": partial(measure_row, row, decode_sides, bench),
        "reading": partial(measure_reading, row, clock),
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
    for part in ROWS:
        arguments.add_argument(f"--{part}", action="store_true", help="measure only these rows")
    arguments.add_argument(
        "--rows", nargs="+", default=[], help="measure rows whose names contain one of these texts"
    )
    arguments.add_argument("--peers", nargs="*", default=PEERS, choices=PEERS)
    arguments.add_argument("--repeats", type=int, default=20)
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
    parts = [part for part in ROWS if getattr(options, part)] or list(ROWS)
    rows = {part: chosen(ROWS[part], options.rows) for part in parts}
    if not any(rows.values()):
        refuse(f"no row has one of {options.rows} in its name")
    print_machine()
    flashinfer = None
    if "flashinfer" in options.peers:
        kernels = {kernel for part in parts if rows[part] for kernel in FLASHINFER[part]}
        flashinfer = load_flashinfer(options.flashinfer_cache, kernels)
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
    results |= {part: {} for part in (*ROWS, "reading", "plan", "queries", "write")}
    bench = Bench(clock, ceiling, options.peers, flashinfer)
    for row in rows.get("decode", ()):
        measure_decode(row, bench, results)
        save_json("attention", results, options.out)
    others: dict[str, Callable[[Row], Results]] = {
        "prefill": lambda row: measure_row(row, prefill_sides, bench),
        "mixed": lambda row: measure_mixed(row, bench),
        "groups": lambda row: measure_groups(row, bench),
    }
    for part, measure_part in others.items():
        for row in rows.get(part, ()):
            results[part][row.name] = attempt(row.name, partial(measure_part, row))
            save_json("attention", results, options.out)
    return results


if __name__ == "__main__":
    main()
