"""Times what a feature of attention adds: ALiBi, masks, trees of guesses, cross attention, rings, beams.

    python -m bench.kernels.attention_features --out bench/results/attention-features-h200.json
    python -m bench.kernels.attention_features --cases decode tree

Every case has the same requests with and without the feature, in bfloat16, at pages of one token in random
order, with 32 query heads and 8 K/V heads of 128 dims. Each side is captured in a CUDA graph, and the sides of
a case are replayed in turns until each is steady, with an empty L2 cache. The figure of a case is the ratio of
its times to that of its first side. `bytes` is the ratio that the mask's bytes alone would make of the first
side's time, at the bandwidth of the fastest kernel that only reads. The tests compare the results with float64.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.common.device_clock import DEVICE, CapturedStep, Clock, measure_ceiling
from bench.common.report import parser, print_json, print_machine, print_table, refuse, save_json
from lightkv.triton_kernels.attention.decode.decode_attention import decode_attention
from lightkv.triton_kernels.attention.decode.decode_plan import decode_plan
from lightkv.triton_kernels.attention.lookups import TOKEN_TABLE, BeamTable, RingRows
from lightkv.triton_kernels.attention.paged_kv import DEFAULT_OPTIONS, AttentionOptions, HeadShape, PagedKV
from lightkv.triton_kernels.attention.prefill.prefill_attention import prefill_attention
from lightkv.triton_kernels.attention.prefill.prefill_plan import prefill_plan
from lightkv.triton_kernels.attention.variants import Alibi, TreeMask, ValueMask
from lightkv.triton_kernels.attention.variants.alibi import alibi_slopes
from lightkv.triton_kernels.layout.ring import Ring

from .attention_batches import Batch, make_batch, offsets, scatter
from .attention_rows import Row, chunks, even

LAYERS = 8  # of a step with a ring, whose plan and rotation serve all layers
FULL = AttentionOptions(causal=False)

Step = Callable[[], object]


class Case(NamedTuple):
    """Steps by the names of their sides, the first without the feature; `mask_bytes` that the others read."""

    name: str
    sides: dict[str, Step]
    mask_bytes: int = 0


class Requests:
    """Requests of a row: their values, their K/V at pages of one token, and steps over them."""

    def __init__(self, row: Row) -> None:
        self.batch: Batch = make_batch(row, DEVICE)
        self.kv: PagedKV = scatter(self.batch, 0).kv
        self.rows = torch.arange(len(row.lengths), device=DEVICE)
        self.lengths = torch.tensor(row.lengths, dtype=torch.int32, device=DEVICE)
        self.out = self.batch.empty_out()

    def decode(self, options: AttentionOptions = DEFAULT_OPTIONS) -> Step:
        q, num_queries = self.batch.q, self.batch.q_lens[0]
        plan = decode_plan(self.rows, self.lengths, self.batch.heads, dtype=q.dtype, num_queries=num_queries)
        return lambda: decode_attention(
            q, self.kv, self.rows, self.lengths, options, num_queries=num_queries, plan=plan, out=self.out
        )  # fmt: skip

    def prefill(self, options: AttentionOptions = DEFAULT_OPTIONS) -> Step:
        q, starts = self.batch.q, offsets(self.batch.q_lens).to(DEVICE)
        plan = prefill_plan(
            self.rows, starts, self.lengths, HeadShape.of(q, self.kv), num_tokens=len(q), dtype=q.dtype,
            causal=options.causal,
        )  # fmt: skip
        return lambda: prefill_attention(
            q, self.kv, self.rows, starts, self.lengths, options, plan=plan, out=self.out
        )

    def ring_step(
        self, ring: Ring | None = None, position: int | None = None, beams: Tensor | None = None
    ) -> Step:
        """Returns the attention of `LAYERS` layers, with their plan and, for sinks, their rotation."""
        q, lengths = self.batch.q, self.lengths
        if position is not None:
            lengths = torch.full_like(lengths, position)
        lookup = TOKEN_TABLE if beams is None else BeamTable(beams)
        if ring is not None:
            lookup = RingRows(ring)
        limits = lookup.limits(())
        frequencies = 1e4 ** -(torch.arange(64, device=DEVICE, dtype=torch.float64) / 64)

        def step() -> None:
            plan = decode_plan(self.rows, lengths, self.batch.heads, dtype=q.dtype, limits=limits)
            kv = self.kv._replace(lookup=lookup.rotated(lengths, frequencies))
            for _ in range(LAYERS):
                decode_attention(q, kv, self.rows, lengths, plan=plan, out=self.out)

        return step


def alibi_cases() -> Iterator[Case]:
    options = AttentionOptions().plus(Alibi(alibi_slopes(32, device=DEVICE)))
    for name, row in (
        ("decode 64 × 4k", even("", 64, 4096)),
        ("decode 8 × 4k, 5 queries", chunks("", [5] * 8, [4091] * 8)),
    ):
        requests = Requests(row)
        yield Case(f"ALiBi, {name}", {"without": requests.decode(), "with": requests.decode(options)})
    for name, row in (
        ("4 × 4k", chunks("", [4096] * 4, [0] * 4)),
        ("2k after 30k", chunks("", [2048], [30720])),
        ("8 × 512 after 4k", chunks("", [512] * 8, [4096] * 8)),
    ):
        requests = Requests(row)
        yield Case(
            f"ALiBi, prefill {name}", {"without": requests.prefill(), "with": requests.prefill(options)}
        )


def mask_cases() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        requests = Requests(even("", 64, 4096))
        values = torch.randn(32, 64, 4096, device=DEVICE).to(dtype)
        masked = AttentionOptions().plus(ValueMask(values))
        sides = {"without": requests.decode(), "with": requests.decode(masked)}
        yield Case(f"mask [32, 64, 4096] {name}, decode 64 × 4k", sides, values.nbytes)
        requests = Requests(chunks("", [2048], [2048]))
        values = torch.randn(32, 2048, 4096, device=DEVICE).to(dtype)
        masked = AttentionOptions().plus(ValueMask(values))
        sides = {"without": requests.prefill(), "with": requests.prefill(masked)}
        yield Case(f"mask [32, 2048, 4096] {name}, prefill 2k after 2k", sides, values.nbytes)
    values = torch.rand(2048, 4096, device=DEVICE) < 0.9
    masked = AttentionOptions().plus(ValueMask(values))
    sides = {"without": requests.prefill(), "with": requests.prefill(masked)}
    yield Case("mask [2048, 4096] bool, prefill 2k after 2k", sides, values.nbytes)


def tree_cases() -> Iterator[Case]:
    for count in (1, 8):
        requests = Requests(chunks("", [64] * count, [8192] * count))
        below = torch.tril(torch.ones(64, 64, dtype=torch.int64, device=DEVICE), -1)
        bits = below * (torch.rand(64, 64, device=DEVICE) < 0.3) + torch.eye(
            64, dtype=torch.int64, device=DEVICE
        )
        words = (bits << torch.arange(64, device=DEVICE)).sum(1)
        options = AttentionOptions().plus(TreeMask(words[:, None].repeat(count, 1)))
        sides = {"in a line": requests.prefill(), "tree": requests.prefill(options)}
        yield Case(f"{count} × a tree of 64 after 8k", sides)


def cross_cases() -> Iterator[Case]:
    for queries in (1, 4):
        requests = Requests(chunks("", [queries] * 64, [1500 - queries] * 64))
        sides = {"decode": requests.decode(), "cross": requests.decode(FULL)}
        yield Case(f"cross attention, {queries} queries to each of 64 × 1,500", sides)


def full_cases() -> Iterator[Case]:
    requests = Requests(chunks("", [4096] * 4, [0] * 4))
    yield Case(
        "full attention, prefill 4 × 4k: 1.97 × the scores",
        {"causal": requests.prefill(), "full": requests.prefill(FULL)},
    )


def ring_cases() -> Iterator[Case]:
    for count, length in ((1, 2048), (1, 8192), (32, 2048), (64, 4096)):
        requests = Requests(even("", count, length))
        beams = torch.randint(count, (count, length), device=DEVICE, dtype=torch.int32)
        sides = {
            "dense": requests.ring_step(),
            "ring": requests.ring_step(Ring(0, length), 100_000),
            "ring, 4 rotated sinks": requests.ring_step(Ring(4, length - 4, 64), 100_063),
            "a beam for each position": requests.ring_step(beams=beams),
        }
        yield Case(f"{LAYERS} layers' attention, {count} × {length}", sides)


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "alibi": alibi_cases,
    "mask": mask_cases,
    "tree": tree_cases,
    "cross": cross_cases,
    "full": full_cases,
    "ring": ring_cases,
}


def measure(case: Case, clock: Clock, bytes_per_us: float) -> dict[str, Any]:
    """Captures the sides of a case, and times them in turns."""
    graphs = {}
    for name, step in case.sides.items():
        step()  # compiles
        graphs[name] = CapturedStep(step)
    found: dict[str, Any] = {}
    times = {name: timing._asdict() for name, timing in clock.replay_in_turns(graphs).items()}
    first = next(iter(times.values()))["median"]
    for timing in times.values():
        timing["ratio"] = timing["median"] / first
    found["sides"] = times
    if case.mask_bytes:
        found["bytes"] = 1 + case.mask_bytes / bytes_per_us / first
    return found


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments.add_argument("--repeats", type=int, default=20, help="replays whose median counts")
    options = arguments.parse_args()
    if not torch.cuda.is_available():
        refuse("this measures kernels, and needs a CUDA device")
    print_machine()
    torch.manual_seed(0)
    clock = Clock(options.repeats)
    ceiling, found = measure_ceiling(clock)
    results: dict[str, Any] = {"settings": {"repeats": options.repeats, "layers": LAYERS}, "ceiling": found}
    results["cases"] = rows = {}
    table = []
    for chosen in options.cases:
        for case in CASES[chosen]():
            rows[case.name] = measured = measure(case, clock, ceiling.bytes_per_us)
            sides = measured["sides"].items()
            times = ", ".join(
                f"{name} {timing['median']:.1f} ({timing['ratio']:.3f})" for name, timing in sides
            )
            table.append([case.name, times, f"{measured['bytes']:.3f}" if "bytes" in measured else ""])
            print(f"{case.name}: {times}", flush=True)
            save_json("attention-features", results, options.out)
    print_table(["case", "µs, and the ratio to the first", "by the mask's bytes"], table)
    print_json("attention-features", results, options.out)


if __name__ == "__main__":
    main()
