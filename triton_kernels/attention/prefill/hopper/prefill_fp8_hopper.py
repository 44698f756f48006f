"""Prefill in fp8 on compute capability 9: both products run on the tensor cores in e4m3 (Gluon).

The programs are those of `prefill_hopper_skeleton.py`; what differs from 16 bits is what Hopper's fp8 products
ask for.

- K and V come from the scratch of `fp8_scratch.py`, since these products read the keys of V next to each other:
  its V is transposed, and its keys are ordered as the tensor cores hold the scores, so that weights become an
  operand without being moved between threads.
- The tensor cores add fp8 products with few bits. Each tile's part of the output is a sum of its own, and
  float32 registers add it to those before (accumulation in two levels).
- Weights are 2**8 times as large as in 16 bits, since e4m3 has few numbers below 2**-6.

    loading            K j, V j │ K j-1, V j-1 │ …
                           │ full        ▲ empty
    computing          scores j │ ── part j+1 ──  wait │ add part j+1 │ scores j-1 │ ── part j ── …
                                │ ── softmax j ──      │              │            │ ── softmax j-1 ──
"""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions
from lightkv.triton_kernels.attention.prefill.prefill_plan import PrefillPlan
from lightkv.triton_kernels.attention.records import Outputs, heads_record, shape_record

from .hopper_features import features_of
from .prefill_fp8_tiles import begin_part, copy_tile, empty_output, pack_fours
from .prefill_hopper_items import ROWS
from .prefill_hopper_skeleton import Kind, Loading, Weighing, Work, run_program
from .prefill_hopper_tiles import allocate_tiles, begin_scores, copy_q

_COMPUTE_REGISTERS = gl.constexpr(224)  # of a thread that computes; with fewer, the loop spills
_EXTRA_BITS = gl.constexpr(8)  # by which weights are larger than in 16 bits


class Fp8Scales(NamedTuple):
    """`kv_scales`: float32 `[num_kv_heads, 2]`, of K and V; `q_scale`: of q; `out_factor`: multiplies the
    output."""

    kv_scales: Any
    q_scale: Any
    out_factor: Any


class Fp8Keys(NamedTuple):
    """A scratch: `k` e4m3 `[capacity, num_kv_heads, DK]`, `v` e4m3 `[num_kv_heads, DV, capacity]`, and where
    each request's keys begin in it, `begins` int32 `[P]`, multiples of BLOCK_N."""

    k: Any
    v: Any
    begins: Any
    stride_k_t: Any
    stride_v_d: Any


@gluon.jit
def _start_tiles(keys, tile, _range, tiles):
    begin = gl.load(keys.begins + tile[1]).to(gl.int64)
    k_head = keys.k + begin * keys.stride_k_t + tile[0] * tiles.k[0].shape[2]
    v_head = keys.v + tile[0] * tiles.v[0].shape[1] * keys.stride_v_d + begin
    return k_head, v_head


@gluon.jit
def _find_last(keys, place, _range, tiles):
    return ()


@gluon.jit
def _find_before(keys, place, _range, tiles, key_tile, exists, FROM_ZERO: gl.constexpr):
    return ()


@gluon.jit
def _copy_k(keys, place, _found, key_tile, target, full):
    first_key = (key_tile * target[0].shape[0]).to(gl.int64)
    copy_tile(place[0] + first_key * keys.stride_k_t, keys.stride_k_t, target[0], full)


@gluon.jit
def _copy_v(keys, place, _found, key_tile, target, full):
    copy_tile(place[1] + key_tile * target[0].shape[1], keys.stride_v_d, target[0], full)


@gluon.jit
def _unit(fp8_scales, tile):
    return gl.load(fp8_scales.kv_scales + 2 * tile[0]) * fp8_scales.q_scale


@gluon.jit
def _add_part(out, part):
    return (out[0] + part[0],)


@gluon.jit
def _finish(fp8_scales, tile, out):
    return (out[0] * (gl.load(fp8_scales.kv_scales + 2 * tile[0] + 1) * fp8_scales.out_factor),)


@gluon.jit(do_not_specialize=["num_kv_heads"], do_not_specialize_on_alignment=["items", "counters"])
def _fp8_kernel(
    q,  # `Heads`, e4m3
    keys,  # `Fp8Keys`
    items,  # of `Work`, as counters and num_kv_heads
    counters,
    outputs,  # `Outputs`
    num_kv_heads,
    score_scale,
    fp8_scales,  # `Fp8Scales`
    features,  # `HopperFeatures`
    shape,  # `Shape`
    STAGES: gl.constexpr,
    SHARES: gl.constexpr,
):
    run_program(
        q,
        allocate_tiles(gl.float8e4nv, shape.BLOCK_M // ROWS, ROWS, shape.DK),
        allocate_tiles(gl.float8e4nv, STAGES, shape.BLOCK_N, shape.DK),
        allocate_tiles(gl.float8e4nv, STAGES, shape.DV, shape.BLOCK_N),
        keys,
        fp8_scales,
        Work(items, counters, num_kv_heads),
        outputs,
        (score_scale, features.cap_scale),
        features,
        shape,
        Kind(
            Loading(_start_tiles, _find_last, _find_before, _copy_k, _copy_v, copy_q),
            Weighing(
                _unit, empty_output, begin_scores, pack_fours, begin_part, _add_part, _finish, True, 0,
                _EXTRA_BITS,
            ),
            False,
        ),
        STAGES,
        0,
        SHARES,
        _COMPUTE_REGISTERS,
    )  # fmt: skip


def launch_fp8_prefill(
    q: Tensor,
    keys: Fp8Keys,
    plan: PrefillPlan,
    outputs: Outputs,
    launch: tuning.Launch,
    fp8_scales: Fp8Scales,
    options: AttentionOptions,
) -> None:
    """Computes the items of a plan, whose tiles have to be as high as `launch` says, in fp8; the arguments are
    those of `fp8_prefill_attention`. Nothing is checked."""
    num_kv_heads, value_dim = keys.v.shape[:2]
    num_programs = min(num_kv_heads * plan.num_shares, tuning.device_class(q.device).num_multiprocessors)
    features, score_scale = features_of(options.variants, options.scale_for(q.shape[2]), options.causal)
    features = features._replace(ADDS_COLUMNS=gl.constexpr(False))  # its products are of 8 bits
    _fp8_kernel[(num_programs,)](
        heads_record(q),
        keys,
        plan.items,
        plan.counters,
        outputs,
        num_kv_heads,
        score_scale,
        fp8_scales,
        features,
        shape_record(q, num_kv_heads, value_dim, launch.block_m, launch.block_n, options.causal, 0),
        STAGES=launch.num_stages,
        SHARES=outputs.partial_out is not None,
        num_warps=4,  # of the first warpgroup
    )
