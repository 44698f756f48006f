"""Measures the cost of slot management in a decode step and for a prompt, beside three re-implemented designs.

    python -m bench.memory.allocator --trace AzureLLMInferenceTrace_conv.csv --out FILE

A step allocates a slot for every sequence, writes the token table, and uploads what the host has to send.
Pools of several sizes are filled to several shares in three forms: `fresh` has one run in use and one free;
`fragmented` has its free slots at random; `spread` is the state that lowest-first allocation reaches in long
use, with one free slot in every 1,024 and the rest above. Three times are measured: on the host, from call to
return; on the device, by events around the step, behind a kernel that is long enough for the host to get
ahead; and, for lightkv, the same step in a CUDA graph, with a cold and with a hot L2 cache. The device's time
outside a graph is with a cold cache too: before each step the cache is emptied by reading, as a model's
weights empty it between two steps. The floor is an empty kernel in a graph.

The designs run in turn, round by round. A time is the median over the rounds of each round's median.

With `--trace`, its requests then run through lightkv's allocator first come, first served, as many at once as
fit the pool to their ends, and the prompts whose slots are one run are counted.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.common.device_clock import DEVICE, CapturedStep, empty_kernel
from bench.common.report import Spread, alternate, parser, print_json, print_machine, print_table, refuse
from bench.memory.allocator_peers import DESIGNS, PAGE, SMALLEST, BlockQueue, Design, Ours
from bench.serving.workload import Lengths, read_trace
from lightkv.edits import Alloc, FreeRange
from lightkv.memory.kv_memory import KVMemory
from lightkv.triton_kernels.slots.allocate import TableEntries

MAX_ENTRIES = 16384  # of a row of the table
BEFORE = 1008  # tokens of a sequence before the measured step: whole pages
FORMS = ("fresh", "fragmented", "spread")


# The columns of the table: a design, a heading, and the key of the time.
COLUMNS = [("lightkv", "graph, cold L2", "graph_cold_l2"), ("lightkv", "graph, hot L2", "graph_hot_l2")]
COLUMNS += [(make.name, key, key) for make in DESIGNS for key in ("device", "host")]


PEERS = [make.name for make in DESIGNS if make is not Ours]


class Cell(NamedTuple):
    """A pool and how it is filled."""

    num_slots: int
    share: float  # of the slots in use
    form: str

    @property
    def text(self) -> str:
        return f"{self.num_slots:,} {self.share:.0%} {self.form}"


def free_slots(cell: Cell, rng: np.random.Generator) -> np.ndarray:
    """Returns the free slots, int64, in the order in which they were freed."""
    num_free = round((cell.num_slots - 1) * (1 - cell.share))
    slots = np.arange(1, cell.num_slots)
    if cell.form == "fresh":
        return slots[len(slots) - num_free :]
    if cell.form == "fragmented":
        return rng.permutation(slots)[:num_free]
    holes = slots[511::1024][: num_free // 2]
    above = np.setdiff1d(slots, holes, assume_unique=True)
    return rng.permutation(np.concatenate((holes, above[len(above) - (num_free - len(holes)) :])))


class Clock:
    """Measures times on the device and on the host, in microseconds, as the median of some repeats."""

    def __init__(self, repeats: int, host_repeats: int) -> None:
        self.repeats = repeats
        self.host_repeats = host_repeats
        self._fill = torch.ones(2**28, dtype=torch.uint8, device=DEVICE).view(torch.float32)

    def device(self, step: Callable[[], object], undo: Callable[[], object], cold: bool = True) -> float:
        """Measures `step` by events around it. All of it is queued before the first event runs."""
        pairs = []
        for _ in range(self.repeats + 3):
            if cold:
                self._fill.sum()
            torch.cuda._sleep(1_000_000)  # half a millisecond
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step()
            end.record()
            undo()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return float(np.median([start.elapsed_time(end) for start, end in pairs[3:]]) * 1e3)

    def host(self, step: Callable[[], object], undo: Callable[[], object]) -> float:
        """Measures `step` from call to return, with nothing queued before it."""
        times = []
        for _ in range(self.host_repeats + 3):
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            step()
            times.append(time.perf_counter_ns() - start)
            undo()
        return float(np.median(times[3:]) / 1e3)


# --------------------------------------------------------------------------------
# Correctness


def expect(condition: bool, what: str) -> None:
    if not condition:
        refuse(what)


def check_design(design: Design, name: str, free: np.ndarray, batch: int, prompt: int) -> None:
    """Runs a step and a prompt, and exits unless the slots were free and distinct and all counts are right."""
    before, of_pages = design.num_free(), isinstance(design, BlockQueue)
    rows = list(range(1, batch + 1))
    design.load(rows, [BEFORE] * batch)
    for _ in range(2):  # freed slots can be allocated again
        design.decode()
        held = [design.slots(row, BEFORE, BEFORE + 1) for row in rows]
        design.prompt(batch + 1, prompt)
        slots = torch.cat((*held, design.slots(batch + 1, 0, prompt))).cpu().numpy()
        expect(len(np.unique(slots)) == len(slots) and slots.min() > 0, f"{name}: a slot has two owners")
        if of_pages:  # a page counts as free if one of its slots is
            expect(bool(np.isin(slots // PAGE, free // PAGE).all()), f"{name}: a page in use was allocated")
            num_taken = (batch + -(-prompt // PAGE)) * PAGE
        else:
            expect(bool(np.isin(slots, free).all()), f"{name}: a slot in use was allocated")
            num_taken = batch + prompt
        num_allocated = before - design.num_free()
        expect(num_allocated == num_taken, f"{name}: {num_allocated} slots were allocated, not {num_taken}")
        design.release(batch + 1, prompt)
        design.undo_decode()
        expect(design.num_free() == before, f"{name}: {before - design.num_free()} slots were lost")


def check_choice(ours: Ours, name: str, lowest: np.ndarray, batch: int, prompt: int) -> None:
    """Exits unless lightkv allocates the lowest free slots and the lowest run, which numpy finds too."""
    ours.load(list(range(1, batch + 1)), [BEFORE] * batch)
    ours.decode()
    is_lowest = bool((ours.slots_of_step.cpu().numpy() == lowest[:batch]).all())
    expect(is_lowest, f"{name}: not the {batch} lowest slots")
    ours.undo_decode()
    ours.prompt(1, prompt)
    runs = np.flatnonzero(lowest[prompt - 1 :] - lowest[: len(lowest) - prompt + 1] == prompt - 1)
    start = runs[0] if len(runs) else 0
    got = ours.slots(1, 0, prompt).cpu().numpy()
    expect(bool((got == lowest[start : start + prompt]).all()), f"{name}: not the lowest run of {prompt}")
    ours.release(1, prompt)
    ours.allocator.check()


# --------------------------------------------------------------------------------
# Measurements


def measure_graphs(ours: Ours, clock: Clock, batch: int) -> dict[str, float]:
    """Measures the fused allocation of a decode step in a graph. The slots are freed outside it."""
    allocator, table = ours.allocator, ours.table
    device = table.device
    rows = torch.arange(1, batch + 1, device=device)
    entries = TableEntries(table, torch.full((batch,), BEFORE, device=device), rows)
    out = torch.zeros(batch, dtype=torch.int32, device=device)
    count = torch.full((1,), batch, dtype=torch.int32, device=device)

    def alloc() -> None:
        allocator.alloc_into(out, count, entries)

    allocator.claim(batch)
    alloc()
    allocator.free(out)
    alloc_graph = CapturedStep(alloc)

    def step() -> None:
        allocator.claim(batch)
        alloc_graph.replay()

    def undo() -> None:
        allocator.free(out)

    found = {
        "graph_cold_l2": clock.device(step, undo),
        "graph_hot_l2": clock.device(step, undo, cold=False),
        "graph_host": clock.host(step, undo),
    }
    allocator.check()
    expect(torch.equal(table[rows, BEFORE], out), "the table holds other slots than were allocated")
    return found


def measure_prompt_graph(ours: Ours, clock: Clock, n: int) -> dict[str, float]:
    """Measures a graph that finds and allocates a run for a prompt, and the call that frees it."""
    allocator, table = ours.allocator, ours.table
    entries = TableEntries(table, torch.arange(MAX_ENTRIES, MAX_ENTRIES + n, device=table.device))  # row 1

    def alloc() -> Tensor:
        return allocator.alloc(n, contiguous=True, entries=entries)

    allocator.free(alloc())
    out: list[Tensor] = []
    graph = CapturedStep(lambda: out.append(alloc()))  # the host counts an allocation that has not run yet
    graph.replay()

    def free() -> None:
        allocator.free(out[0])

    free()

    def step() -> None:
        allocator.claim(n)
        graph.replay()

    found = {
        "graph_cold_l2": clock.device(step, free),
        "graph_hot_l2": clock.device(step, free, cold=False),
    }
    step()
    found["free"] = clock.device(free, step)
    free()
    allocator.check()
    return found


def measure_decode(design: Design, clock: Clock, n: int) -> dict[str, float]:
    times = {
        "host": clock.host(design.decode, design.undo_decode),
        "device": clock.device(design.decode, design.undo_decode),
    }
    if isinstance(design, Ours):
        times |= measure_graphs(design, clock, n)
    return times


def measure_prompt(design: Design, clock: Clock, row: int, n: int) -> dict[str, float]:
    alloc, free = partial(design.prompt, row, n), partial(design.release, row, n)
    times = {"host": clock.host(alloc, free), "device": clock.device(alloc, free)}
    alloc()
    times["free_host"] = clock.host(free, alloc)
    free()
    if isinstance(design, Ours):
        times |= measure_prompt_graph(design, clock, n)
    return times


def in_turns(
    designs: Sequence[Design], rounds: int, measure: Callable[[Design], dict[str, float]]
) -> dict[str, dict[str, float]]:
    """Measures the designs in turn. Returns the medians over the rounds, by design."""
    found = list(alternate(rounds, {design.name: partial(measure, design) for design in designs}))
    return {
        design.name: {
            key: float(np.median([one[design.name][key] for one in found])) for key in found[0][design.name]
        }
        for design in designs
    }


def measure_cell(
    cell: Cell, clock: Clock, rounds: int, batches: Sequence[int], prompts: Sequence[int]
) -> dict[str, Any]:
    """Measures one pool. Returns µs: `{what: {design: {host, device, …}}}`."""
    free = free_slots(cell, np.random.default_rng(cell.num_slots))
    lowest = np.sort(free)
    batch = min(max(batches), len(free) // (4 * PAGE))  # sequences that all need a new page
    row = max(batches) + 1
    designs: list[Design] = []
    for make in DESIGNS:
        table = torch.zeros(max(batches) + 2, MAX_ENTRIES, dtype=torch.int32, device=DEVICE)
        made = make(cell.num_slots, free, table)
        check_design(made, f"{cell.text}, {made.name}", free, batch, min(512, len(free) // 4))
        designs.append(made)
    ours = next(design for design in designs if isinstance(design, Ours))
    found: dict[str, Any] = {}
    for n in batches:
        check_choice(ours, cell.text, lowest, n, min(512, len(free) // 4))
        for design in designs:
            design.load(range(1, n + 1), [BEFORE + i % PAGE for i in range(n)])
        found[f"decode {n}"] = in_turns(designs, rounds, partial(measure_decode, clock=clock, n=n))
    for n in prompts:
        if n <= len(free) // 2:
            check_choice(ours, cell.text, lowest, 1, n)
            found[f"prompt {n}"] = in_turns(
                designs, rounds, partial(measure_prompt, clock=clock, row=row, n=n)
            )
    return found


# --------------------------------------------------------------------------------
# The share of prompts in one run


class _Running:
    """A request that holds a row, and ends after `left` more tokens."""

    def __init__(self, row: int, lengths: Lengths) -> None:
        self.row, self.lengths = row, lengths
        self.held, self.left = lengths.prompt, lengths.output


def contiguous_share(trace: Sequence[Lengths], num_slots: int, device: torch.device) -> dict[str, float]:
    """Runs the trace through an allocator, and counts the prompts whose slots are one run.

    First come, first served. A request starts when it and all running ones fit the pool to their ends.
    """
    num_rows = 1024
    memory = KVMemory(SMALLEST, num_slots, num_rows, MAX_ENTRIES, device)
    allocator = memory.allocator
    trace = [one for one in trace if sum(one) <= min(allocator.capacity, MAX_ENTRIES)]
    rows = list(range(num_rows, 0, -1))
    num_runs = torch.zeros((), dtype=torch.int64, device=device)
    running: list[_Running] = []
    waiting = iter(trace)
    following = next(waiting, None)
    reserved = most = steps = 0
    while running or following:
        while following and rows and reserved + sum(following) <= allocator.capacity:
            reserved += sum(following)
            request = _Running(rows.pop(), following)
            slots = memory.apply([Alloc((request.row,), (0,), (following.prompt,))])
            assert slots is not None
            num_runs += slots[-1] - slots[0] == following.prompt - 1
            running.append(request)
            following = next(waiting, None)
        batch = tuple(request.row for request in running), tuple(request.held for request in running)
        memory.apply([Alloc(*batch, (1,) * len(running))])
        most, steps = max(most, len(running)), steps + 1
        ended = []
        for request in running:
            request.held += 1
            request.left -= 1
            if not request.left:
                ended.append(request)
        for request in ended:
            rows.append(request.row)
            reserved -= sum(request.lengths)
        memory.apply([FreeRange(request.row, 0, request.held) for request in ended])
        if ended:
            running = [request for request in running if request.left]
    allocator.check()
    expect(allocator.num_free == allocator.capacity, "slots are still held after the trace")
    return {
        "requests": len(trace),
        "steps": steps,
        "most_at_once": most,
        "contiguous": int(num_runs) / len(trace),
    }


def ratios_of(fillings: Sequence[dict[str, dict[str, float]]]) -> list[str]:
    """Formats lightkv's host time over each other design's: median, lowest and highest over the fillings."""
    cells = []
    for peer in PEERS:
        ratios = [filling[Ours.name]["host"] / filling[peer]["host"] for filling in fillings]
        cells.append(Spread.of(ratios).text())
    return cells


def cells_of(fillings: Sequence[dict[str, dict[str, float]]]) -> list[str]:
    """Formats the lowest and the highest time of each column over the fillings."""
    cells = []
    for name, _, key in COLUMNS:
        times = [filling[name][key] for filling in fillings]
        cells.append(f"{min(times):.1f}-{max(times):.1f}")
    return cells


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--slots", type=int, nargs="+", default=[65_536, 1_000_000, 10_000_000])
    arguments.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.5, 0.95])
    arguments.add_argument("--forms", nargs="+", default=FORMS, choices=FORMS)
    arguments.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256])
    arguments.add_argument("--prompts", type=int, nargs="+", default=[512, 8192])
    arguments.add_argument("--rounds", type=int, default=3, help="each round measures every design")
    arguments.add_argument("--repeats", type=int, default=20, help="of a time on the device, in a round")
    arguments.add_argument("--host-repeats", type=int, default=100, help="of a time on the host, in a round")
    arguments.add_argument("--trace", type=Path, help="requests to run, such as the Azure conversation hour")
    arguments.add_argument("--trace-slots", type=int, nargs="+", default=[131_072, 1_000_000])
    options = arguments.parse_args()
    if not torch.cuda.is_available():
        refuse("this measures kernels, and needs a CUDA device")

    print_machine()
    clock = Clock(options.repeats, options.host_repeats)
    empty_kernel()
    graph = CapturedStep(empty_kernel)
    floor = {
        "graph_cold_l2": clock.device(graph.replay, lambda: None),
        "graph_hot_l2": clock.device(graph.replay, lambda: None, cold=False),
    }
    print(
        f"floor, an empty kernel in a graph: cold L2 {floor['graph_cold_l2']:.1f} µs, "
        f"hot L2 {floor['graph_hot_l2']:.1f} µs\n"
    )

    rows, ratios, results = [], [], {}
    for num_slots in options.slots:
        found: dict[str, list[dict[str, dict[str, float]]]] = {}  # by step, one of each filling
        for share in options.shares:
            for form in options.forms:
                cell = Cell(num_slots, share, form)
                results[cell.text] = measure_cell(
                    cell, clock, options.rounds, options.batches, options.prompts
                )
                for what, times in results[cell.text].items():
                    found.setdefault(what, []).append(times)
                print(f"measured {cell.text}", flush=True)
        rows += [[f"{num_slots:,}, {what}", *cells_of(times)] for what, times in found.items()]
        ratios += [[f"{num_slots:,}, {what}", *ratios_of(times)] for what, times in found.items()]
    print(
        "\nµs, lowest to highest over the fillings; host: from call to return; device: between events; both "
        "outside a graph"
    )
    print_table(["pool, step", *(f"{name} {what}" for name, what, _ in COLUMNS)], rows)

    print("\nlightkv's host time over each other design's: median (lowest to highest) over the fillings")
    print_table(["pool, step", *PEERS], ratios)

    replays = {}
    if options.trace:
        trace = read_trace(options.trace)
        for num_slots in options.trace_slots:
            found = contiguous_share(trace, num_slots, DEVICE)
            replays[str(num_slots)] = found
            print(
                f"\n{found['requests']:,} requests of {options.trace.name} through {num_slots:,} slots, at "
                f"most {found['most_at_once']:,} at once: {found['contiguous']:.1%} of prompts lie in one run"
            )
    settings = {
        "rounds": options.rounds,
        "repeats": options.repeats,
        "host_repeats": options.host_repeats,
        "max_entries": MAX_ENTRIES,
        "before": BEFORE,
    }
    print_json(
        "allocator", {"settings": settings, "floor_us": floor, "us": results, "trace": replays}, options.out
    )


if __name__ == "__main__":
    main()
