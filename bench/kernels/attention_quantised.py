"""Times attention over quantised K/V against lightkv's own kernels over 16 bits.

    python -m bench.kernels.attention_quantised --out bench/results/attention-quantised-h200.json
    python -m bench.kernels.attention_quantised --rows decode --formats int8 int4

Prefill restores quantised keys to a scratch first, as the engine does; "no scratch" reads them by the general
kernel. Every row has the same requests over pools of each format, in bfloat16, at pages of one token in random
order. The output of each is compared with that of the 16-bit kernel over what the elements and scales stand
for. Each side is captured in a CUDA graph, and the sides of a row are replayed in turns until each is steady,
with an empty L2 cache. The figure of a side is the ratio of its time to that of 16 bits; `bytes` is the ratio
of the bytes that it reads, with scales.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.common.device_clock import DEVICE, CapturedStep, Clock
from bench.common.report import parser, print_json, print_machine, print_table, refuse, save_json
from lightkv import KVPool, KVSpec
from lightkv.attention.restored_prefill import RestoredPrefill, scratch_tokens
from lightkv.triton_kernels.attention.decode.decode_attention import decode_attention
from lightkv.triton_kernels.attention.decode.decode_plan import DecodePlan, decode_plan
from lightkv.triton_kernels.attention.paged_kv import DEFAULT_OPTIONS, PagedKV
from lightkv.triton_kernels.attention.prefill.prefill_attention import prefill_attention
from lightkv.triton_kernels.attention.prefill.prefill_plan import PrefillPlan, prefill_plan
from lightkv.triton_kernels.quantised.kv_format import KVFormat

from .attention_batches import Batch, Paged, check, make_batch, offsets, scatter
from .attention_rows import Row, chunks, even

FORMATS = ("int8", "fp8-static", "int8-g8", "int4", "int4-g32")
DECODE = (
    even("64 × 8k", 64, 8192),
    even("1 × 1k", 1, 1024),
    even("8 × 4k", 8, 4096),
    even("256 × 2k", 256, 2048),
)
PREFILL = (
    chunks("4 × 4k", [4096] * 4, [0] * 4),
    chunks("2k after 30k", [2048], [30720]),
    chunks("8 × 512 after 4k", [512] * 8, [4096] * 8),
    chunks("64 after 32k", [64], [32768]),
)
CHUNK = 2**16  # slots that are quantised at a time


def quantised(batch: Batch, paged: Paged, name: str) -> PagedKV:
    """Returns the batch's K/V in the slots of `paged`, in a pool of a format."""
    heads = batch.heads
    spec = KVSpec(1, heads.num_kv_heads, heads.key_dim, heads.value_dim, batch.q.dtype, KVFormat.parse(name))
    pool = KVPool(spec, len(paged.pool), DEVICE)
    if spec.format.is_static:
        pool.set_static_scales(0, torch.tensor([0.01], device=DEVICE), torch.tensor([0.01], device=DEVICE))
    keys, values = batch.keys_values
    for begin in range(0, len(keys), CHUNK):
        part = slice(begin, begin + CHUNK)
        pool.write(0, paged.slots[part], keys[part], values[part])
    return PagedKV(pool.k(0), pool.v(0), paged.first_slots, scales=pool.scales(0), format=pool.format(0))


def restored(batch: Batch, paged: Paged, kv: PagedKV) -> PagedKV:
    """Returns what the elements and scales of `kv` stand for, in 16 bits, in the same slots."""
    heads = batch.heads
    k = batch.q.new_zeros(len(paged.pool), heads.num_kv_heads, heads.key_dim)
    v = batch.q.new_zeros(len(paged.pool), heads.num_kv_heads, heads.value_dim)
    for slots in paged.slots.split(CHUNK):
        k[slots], v[slots] = (part.to(batch.q.dtype) for part in kv.read(slots))
    return PagedKV(k, v, paged.first_slots)


class Prefill:
    """A step of prefill over a row's requests: 16 bits, or quantised K/V that is restored to a scratch."""

    def __init__(self, row: Row) -> None:
        self.batch = make_batch(row, DEVICE)
        self.paged = scatter(self.batch, 0)
        self._rows = torch.arange(len(row.lengths), device=DEVICE)
        self._lengths = torch.tensor(row.lengths, dtype=torch.int32, device=DEVICE)
        self._starts = offsets(row.q_lens).to(DEVICE)
        heads, num_tokens, dtype = self.batch.heads, len(self.batch.q), self.batch.q.dtype
        self._plans: dict[KVFormat, PrefillPlan] = {}
        self._restored = RestoredPrefill.make(
            self._rows,
            self._lengths,
            self._starts,
            heads,
            DEFAULT_OPTIONS,
            num_tokens=num_tokens,
            dtype=dtype,
            capacity=scratch_tokens(heads, dtype),
        )

    def run(self, kv: PagedKV, out: Tensor) -> Tensor:
        """Attends over `kv`, whose index is that of the row."""
        if kv.format.is_quantised:
            self._restored.attend(self.batch.q, kv, DEFAULT_OPTIONS, out)
            return out
        return self.run_directly(kv, out)

    def run_directly(self, kv: PagedKV, out: Tensor) -> Tensor:
        """Attends over `kv` without a scratch."""
        q, requests = self.batch.q, (self._rows, self._starts, self._lengths)
        plan = self._plans.get(kv.format)
        if plan is None:
            plan = self._plans[kv.format] = prefill_plan(
                *requests,
                self.batch.heads,
                num_tokens=len(q),
                dtype=q.dtype,
                layer_format=kv.format,
            )
        return prefill_attention(q, kv, *requests, plan=plan, out=out)


class Decode:
    """A step of decode over a row's requests."""

    def __init__(self, row: Row) -> None:
        self.batch = make_batch(row, DEVICE)
        self.paged = scatter(self.batch, 0)
        self._rows = torch.arange(len(row.lengths), device=DEVICE)
        self._lengths = torch.tensor(row.lengths, dtype=torch.int32, device=DEVICE)
        self._plans: dict[KVFormat, DecodePlan] = {}

    def run(self, kv: PagedKV, out: Tensor) -> Tensor:
        """Attends over `kv`, whose index is that of the row."""
        plan = self._plans.get(kv.format)
        if plan is None:
            plan = self._plans[kv.format] = decode_plan(
                self._rows,
                self._lengths,
                self.batch.heads,
                dtype=self.batch.q.dtype,
                layer_format=kv.format,
            )
        return decode_attention(self.batch.q, kv, self._rows, self._lengths, plan=plan, out=out)


def token_bytes(kv: PagedKV) -> int:
    """Returns the bytes of a token that attention reads, with its own scales."""
    scales = kv.scales
    own = 0 if scales is None or not scales.stride(0) else scales[0].nbytes
    return kv.k[0].nbytes + kv.v[0].nbytes + own


def measure(step: Decode | Prefill, formats: list[str], clock: Clock) -> dict[str, Any]:
    """Checks the formats over a row, and times them in turns."""
    batch, paged = step.batch, step.paged
    sides, graphs = {"16 bits": paged.kv}, {}
    for name in formats:
        kv = sides[name] = quantised(batch, paged, name)
        expected = step.run(restored(batch, paged, kv), batch.empty_out()).float()
        check(step.run(kv, batch.empty_out()), expected)
    for name, kv in list(sides.items()):
        out = batch.empty_out()
        step.run(kv, out)  # compiles
        graphs[name] = CapturedStep(partial(step.run, kv, out))
        if name == "int8" and isinstance(step, Prefill):
            step.run_directly(kv, out)
            sides[f"{name}, no scratch"] = kv
            graphs[f"{name}, no scratch"] = CapturedStep(partial(step.run_directly, kv, out))
    found = {name: timing._asdict() for name, timing in clock.replay_in_turns(graphs).items()}
    plain, plain_bytes = found["16 bits"]["median"], token_bytes(paged.kv)
    for name, kv in sides.items():
        found[name]["ratio"] = found[name]["median"] / plain
        found[name]["bytes"] = token_bytes(kv) / plain_bytes
    return found


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--formats", nargs="+", default=list(FORMATS))
    arguments.add_argument("--rows", help="only rows whose name contains this")
    arguments.add_argument("--repeats", type=int, default=20, help="replays whose median counts")
    options = arguments.parse_args()
    if not torch.cuda.is_available():
        refuse("this measures kernels, and needs a CUDA device")
    print_machine()
    clock = Clock(options.repeats)
    results: dict[str, Any] = {"settings": {"repeats": options.repeats}, "decode": {}, "prefill": {}}
    table = []
    steps: tuple[tuple[str, type[Decode | Prefill], tuple[Row, ...]], ...]
    steps = (("decode", Decode, DECODE), ("prefill", Prefill, PREFILL))
    for part, kind, rows in steps:
        for row in rows:
            if options.rows and options.rows not in f"{part} {row.name}":
                continue
            found = results[part][row.name] = measure(kind(row), options.formats, clock)
            for name, side in found.items():
                figures = f"{side['median']:.1f}", f"{side['ratio']:.3f}", f"{side['bytes']:.3f}"
                table.append([f"{part} {row.name}", name, *figures])
                print(*table[-1], flush=True)
            save_json("attention-quantised", results, options.out)
            torch.cuda.empty_cache()
    print_table(["row", "format", "µs", "ratio", "bytes"], table)
    print_json("attention-quantised", results, options.out)


if __name__ == "__main__":
    main()
