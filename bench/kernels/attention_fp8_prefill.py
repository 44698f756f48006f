"""Times prefill in fp8 against lightkv's own prefill in 16 bits, and over an fp8 pool that is restored to 16.

    python -m bench.kernels.attention_fp8_prefill --out bench/results/attention-fp8-prefill-h200.json

Every row has the same requests over pools of one layer, at pages of one token in random order. A step in fp8
rounds q, copies K and V to the scratch, with V transposed, and attends; "attention" is its last part alone.
Each side is captured in a CUDA graph, and the sides of a row are replayed in turns until each is steady, with
an empty L2 cache. Outputs are compared with those of 16 bits over the same rounded values: a weight in e4m3 has
four significant bits, so the mean error of a row must be below 4 % of its mean output.
"""

from functools import partial
from typing import Any

import torch

from bench.common.device_clock import DEVICE, CapturedStep, Clock
from bench.common.report import parser, print_json, print_machine, print_table, refuse, save_json
from lightkv.attention.restored_prefill import RestoredPrefill, scratch_tokens
from lightkv.triton_kernels.attention.paged_kv import DEFAULT_OPTIONS, PagedKV
from lightkv.triton_kernels.attention.prefill.fp8_prefill import fp8_prefill_attention, to_fp8
from lightkv.triton_kernels.attention.prefill.restore_kv import ALIGNMENT, FP8, Scratch, restore_kv

from .attention_quantised import Prefill, quantised
from .attention_rows import Row, chunks

ROWS = (
    chunks("16k", [16384], [0]),
    chunks("4 × 4k", [4096] * 4, [0] * 4),
    chunks("16 × 1k", [1024] * 16, [0] * 16),
    chunks("2k after 30k", [2048], [30720]),
    chunks("8 × 512 after 4k", [512] * 8, [4096] * 8),
    chunks("64 after 32k", [64], [32768]),
)
Q_SCALE = 0.02
SIDES = ("16 bits", "restored", "fp8", "fp8 output", "attention", "scratch", "q")


def measure(row: Row, clock: Clock) -> dict[str, Any]:
    """Checks a row, and times its sides in turns."""
    step = Prefill(row)
    batch, paged = step.batch, step.paged
    heads, kv = batch.heads, quantised(batch, paged, "fp8-static")
    rows = torch.arange(len(row.lengths), device=DEVICE)
    lengths = torch.tensor(row.lengths, dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, *row.q_lens], device=DEVICE).cumsum(0).int()
    in_fp8 = RestoredPrefill.make(
        rows,
        lengths,
        starts,
        heads,
        DEFAULT_OPTIONS,
        num_tokens=len(batch.q),
        dtype=batch.q.dtype,
        capacity=scratch_tokens(heads, FP8),
        alignment=ALIGNMENT,
    )
    assert kv.scales is not None
    scratch = Scratch.empty(in_fp8.capacity, heads, FP8, in_fp8.begins, kv.scales[0])
    q, out = to_fp8(batch.q, Q_SCALE), batch.empty_out()
    small = torch.empty_like(q)

    def attend(target: torch.Tensor) -> None:
        fp8_prefill_attention(
            q,
            scratch,
            in_fp8.q_starts,
            lengths,
            q_scale=Q_SCALE,
            out=target,
            out_scale=0.01,
            plan=in_fp8.plan,
        )

    check(step, kv, in_fp8, q.float() * Q_SCALE)
    works = {
        "16 bits": partial(step.run, paged.kv, batch.empty_out()),
        "restored": partial(step.run, kv, batch.empty_out()),
        "fp8": partial(in_fp8.attend, batch.q, kv, DEFAULT_OPTIONS, out, Q_SCALE),
        "fp8 output": partial(attend, small),
        "attention": partial(attend, out),
        "scratch": partial(restore_kv, kv, rows, lengths, scratch),
        "q": partial(to_fp8, batch.q, Q_SCALE),
    }
    for work in works.values():
        work()
    graphs = {name: CapturedStep(work) for name, work in works.items()}
    found: dict[str, Any] = {name: timing._asdict() for name, timing in clock.replay_in_turns(graphs).items()}
    plain = found["16 bits"]["median"]
    pairs = sum(n * (end - n) + n * (n + 1) // 2 for n, end in zip(row.q_lens, row.lengths, strict=True))
    flops = 4 * heads.num_heads * heads.key_dim * pairs
    for name in SIDES[:5]:
        found[name]["tflops"] = flops / found[name]["median"] / 1e6
        found[name]["rate"] = plain / found[name]["median"]
    return found


def check(step: Prefill, kv: PagedKV, in_fp8: RestoredPrefill, rounded_q: torch.Tensor) -> None:
    """Refuses to go on if the output in fp8 is not that of 16 bits over the rounded q, K and V."""
    found, expected = step.batch.empty_out(), step.batch.empty_out()
    in_fp8.attend(step.batch.q, kv, DEFAULT_OPTIONS, found, Q_SCALE)
    step.batch.q.copy_(rounded_q)
    step.run(kv, expected)
    error = (found.float() - expected.float()).abs().mean() / expected.float().abs().mean()
    if not float(error) < 0.04:
        refuse(f"the mean error of fp8 is {float(error):.1%} of the mean output, more than 4 %")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rows", help="only rows whose name contains this")
    arguments.add_argument("--repeats", type=int, default=20, help="replays whose median counts")
    options = arguments.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        refuse("this measures kernels, and needs a CUDA device of compute capability 9 (Hopper)")
    print_machine()
    clock = Clock(options.repeats)
    results: dict[str, Any] = {"settings": {"repeats": options.repeats}, "rows": {}}
    table = []
    for row in ROWS:
        if options.rows and options.rows not in row.name:
            continue
        found = results["rows"][row.name] = measure(row, clock)
        for name, side in found.items():
            rates = (f"{side['tflops']:.0f}", f"{side['rate']:.3f}") if "rate" in side else ("", "")
            table.append([row.name, name, f"{side['median']:.1f}", *rates])
            print(*table[-1], flush=True)
        save_json("attention-fp8-prefill", results, options.out)
        torch.cuda.empty_cache()
    print_table(["row", "side", "µs", "TFLOP/s", "rate"], table)
    print_json("attention-fp8-prefill", results, options.out)


if __name__ == "__main__":
    main()
