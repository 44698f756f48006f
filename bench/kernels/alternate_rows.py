"""The rows of `alternate.py` that time kernels. They are those of the tree's own benches of kernels.

This file is loaded in the process of each tree. It uses what both have.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from bench.kernels import attention_features as features
from bench.kernels import attention_quantised as in_formats
from bench.kernels.attention_batches import make_batch, offsets, scatter
from bench.kernels.attention_peers import ours_decode, ours_mixed, ours_prefill
from bench.kernels.attention_rows import (
    DECODE,
    GROUPS,
    MIXED,
    PREFILL,
    SEVERAL_QUERIES,
    Row,
    chosen,
    rows_to_measure,
    with_heads,
)
from lightkv import KVPool, KVSpec
from lightkv.router.engine.step import NewRow
from lightkv.router.model.sampler import Sampler
from lightkv.router.sampling_params import SamplingParams
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions
from lightkv.triton_kernels.attention.prefill.prefill_attention import prefill_attention
from lightkv.triton_kernels.attention.prefill.prefill_plan import prefill_plan
from lightkv.triton_kernels.attention.variants import SinkLogits, Variant, Window
from lightkv.triton_kernels.attention.variants.variant import limits
from lightkv.triton_kernels.quantised.kv_format import KVFormat
from lightkv.triton_kernels.write import write_kv as writing

SMALLER = 32  # a CPU, where nothing is timed, gets rows with so many times fewer tokens
TOKENS = (1, 64, 2048)  # of a write
WRITTEN_FORMATS = ("auto", "int8", "fp8-static", "int8-g8", "int4")
WRITES = 16  # in a graph: a single one takes about as long as an empty kernel
SAMPLED = (1, 32, 256)  # rows of logits
VOCAB_SIZE = 128_256
SETTINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 0.7},
    "top-p": {"top_p": 0.9},
    "top-k, cold": {"top_k": 50, "temperature": 0.1},
}
SLOTS = 2**18  # of a pool that is written to: more than fit the L2 cache

Sides = dict[str, Callable[[], Any]]


def rows(device: torch.device) -> dict[str, Callable[[], Sides]]:
    """Returns what makes the sides of each row, by `part: row`."""
    found: dict[str, Callable[[], Sides]] = {}
    small = SMALLER if device.type == "cpu" else 1
    for part, own in rows_to_measure((), (), quick=True).items():
        for row in own:
            found[f"{part}: {row.name}"] = partial(_attention, _smaller(row, small), device)
    for row in chosen(DECODE, ("B1 × 1k", "B1 × 8k", "B32 × 1k", "B64 skewed")):
        found[f"decode: {row.name}"] = partial(_attention, _smaller(row, small), device)
    for row in DECODE:
        if row.name in SEVERAL_QUERIES:
            count = SEVERAL_QUERIES[row.name]
            several = _smaller(row, small)._replace(q_lens=(count,) * len(row.lengths))
            found[f"queries: {count}, {row.name}"] = partial(_decode, several, device)
    for row in MIXED:
        found[f"mixed: {row.name}"] = partial(_mixed, _smaller(row, small), device)
    for row in GROUPS:
        found[f"groups: {row.name}"] = partial(_groups, _smaller(row, small), device)
    for case in features.CASES:
        found[f"features: {case}"] = partial(_features, case)
    for row in (PREFILL[0], with_heads(PREFILL[0], 64, 8, 64)):
        found[f"variants: {row.name}"] = partial(_variants, _smaller(row, small))
    for kind, own in ((in_formats.Decode, in_formats.DECODE), (in_formats.Prefill, in_formats.PREFILL)):
        for row in own:
            name = f"quantised: {kind.__name__.lower()} {row.name}"
            found[name] = partial(_quantised, kind, _smaller(row, small))
    for name in WRITTEN_FORMATS:
        found[f"write: {name}"] = partial(_writes, name, device)
    for count in SAMPLED:
        found[f"sample: {count}"] = partial(_samples, max(1, count // small), device)
    return found


def _smaller(row: Row, times: int) -> Row:
    def less(lengths: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-(-length // times) for length in lengths)

    return row._replace(lengths=less(row.lengths), q_lens=less(row.q_lens), shared=row.shared // times)


def _attention(row: Row, device: torch.device) -> Sides:
    batch = make_batch(row, device)
    ours = ours_prefill if row.is_prefill else ours_decode
    return {"": ours(batch, scatter(batch, 0)).run}


def _decode(row: Row, device: torch.device) -> Sides:
    batch = make_batch(row, device)
    return {"": ours_decode(batch, scatter(batch, 0)).run}


def _mixed(row: Row, device: torch.device) -> Sides:
    batch = make_batch(row, device)
    return {"": ours_mixed(batch, scatter(batch, 0)).run}


def _groups(row: Row, device: torch.device) -> Sides:
    batch = make_batch(row, device)
    return {"": ours_decode(batch, scatter(batch, 0), share=True).run}


def _features(name: str) -> Sides:
    cases: Iterator[Any] = features.CASES[name]()
    return {f"{case.name}, {side}": step for case in cases for side, step in case.sides.items()}


def _variants(row: Row) -> Sides:
    """Returns prefills whose launches depend on the head dim, and int8 that the general kernel reads."""
    requests, step = features.Requests(row), in_formats.Prefill(row)
    in_int8 = in_formats.quantised(step.batch, step.paged, "int8")
    own = {f"window {size}": Window(size) for size in (128, 1024, 4096)}
    sinks = SinkLogits(torch.zeros(row.num_heads, device=step.batch.q.device))
    return {
        "plain": requests.prefill(),
        **{name: _prefill(requests, window) for name, window in own.items()},
        "sinks": _prefill(requests, sinks),
        "int8, no scratch": partial(step.run_directly, in_int8, step.batch.empty_out()),
    }


def _prefill(requests: features.Requests, variant: Variant) -> Callable[[], Any]:
    batch, kv = requests.batch, requests.kv
    step = requests.rows, offsets(batch.q_lens).to(batch.q.device), requests.lengths
    options, out = AttentionOptions().plus(variant), batch.empty_out()
    plan = prefill_plan(
        step[0], step[1], step[2], batch.heads,
        num_tokens=len(batch.q), dtype=batch.q.dtype, limits=limits(options.variants),
    )  # fmt: skip
    return lambda: prefill_attention(batch.q, kv, *step, options, plan=plan, out=out)


def _quantised(kind: Any, row: Row) -> Sides:
    step = kind(row)
    sides: Sides = {}
    for name in in_formats.FORMATS:
        kv = in_formats.quantised(step.batch, step.paged, name)
        sides[name] = partial(step.run, kv, step.batch.empty_out())
        if name == "int8" and isinstance(step, in_formats.Prefill):
            sides[f"{name}, no scratch"] = partial(step.run_directly, kv, step.batch.empty_out())
    return sides


def _samples(count: int, device: torch.device) -> Sides:
    """Returns the sampling of so many tokens, as the steps of a model do it."""
    logits = torch.randn(count, VOCAB_SIZE, device=device).mul_(3).to(torch.bfloat16)
    rows = torch.arange(1, count + 1, device=device)
    sides: Sides = {}
    for name, fields in SETTINGS.items():
        params = SamplingParams(**fields)
        sampler = Sampler(count + 1, VOCAB_SIZE, device)
        sampler.set_rows([NewRow(row + 1, params, row) for row in range(count)])
        sampler.enable_logit_edits()
        sides[name] = lambda own=sampler, kind=params.kind: own.sample(logits, rows, rows, kind).tokens
    return sides


def _writes(name: str, device: torch.device) -> Sides:
    """Returns writes of steps of several sizes, with rotation and without."""
    spec = KVSpec(1, 8, 128, 128, torch.bfloat16, KVFormat.parse(name))
    pool = KVPool(spec, SLOTS if device.type == "cuda" else max(TOKENS) + 1, device)
    if spec.format.is_static:
        pool.set_static_scales(0, torch.tensor([0.01], device=device), torch.tensor([0.01], device=device))
    sides: Sides = {}
    for count in TOKENS:
        slots = 1 + torch.randperm(len(pool.k(0)) - 1, device=device)[:count]
        fused = torch.randn(count, 48, 128, device=device, dtype=torch.bfloat16)
        q, k, v = fused.split((32, 8, 8), 1)
        angles = torch.rand(count, 64, device=device)
        plain = _write(pool, k, v, slots)
        rotated = _write(pool, k, v, slots, q, (angles.cos(), angles.sin()))
        sides |= {
            f"{count} tokens": partial(_repeat, plain),
            f"{count} tokens, rotated": partial(_repeat, rotated),
        }
    return sides


def _repeat(write: Callable[[], Any]) -> None:
    for _ in range(WRITES):
        write()


def _write(
    pool: KVPool, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, q: Any = None, tables: Any = None
) -> Callable[[], Any]:
    """Returns a call that writes K and V, by the functions that the tree has."""
    stored, scales, layer_format = (pool.k(0), pool.v(0)), pool.scales(0), pool.format(0)
    if "stored" in inspect.signature(writing.write_kv).parameters:
        target = writing.StoredKV(*stored, scales, layer_format)
        rotation = None if tables is None else writing.Rotation(*tables)
        if "by" in inspect.signature(writing.write_kv).parameters:
            return lambda: writing.write_kv(k, v, target, slots, q, writing.Changes(rotation))
        return lambda: writing.write_kv(k, v, target, slots, q=q, rotation=rotation)
    named = {} if tables is None else {"q": q, "cos": tables[0], "sin": tables[1]}
    if scales is None:
        return lambda: writing.write_kv(k, v, *stored, slots, **named)
    # The tree from before one kernel wrote all formats.
    from lightkv.triton_kernels.write.write_quantised import write_quantised_kv

    return lambda: write_quantised_kv(k, v, *stored, scales, layer_format, slots, **named)
