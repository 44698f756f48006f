"""Prefill in 16 bits on compute capability 9: rows of K and V are gathered by index (Gluon).

The programs are those of `prefill_hopper_skeleton.py`. A tile's slots are found once for K and V, and a tile
ahead, since the copy of K needs them. A tile of K and the tile of V before it become empty together, since
their scores and their part of the output are computed together:

    gathering       slots j-1 │ K j, V j │ slots j-2 │ K j-1, V j-1 │ …          next item: K, q, V │ …
                                   │ full        ▲ empty
    shared memory      K: 3 stages    V: 3 stages    q: one tile    (at head dim 128)

`prefill_attention.py` and `prefill_tuning.py` say on which devices, for which shapes and strides this kernel
runs, and how large its tiles are.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions
from lightkv.triton_kernels.attention.prefill.prefill_plan import PrefillPlan
from lightkv.triton_kernels.attention.prefill.prefill_tuning import stages_beside
from lightkv.triton_kernels.attention.records import Cache, Index, Outputs, heads_record, shape_record
from lightkv.triton_kernels.attention.variants.variant import Variant

from .hopper_features import features_of
from .hopper_scores import COLUMN_DIMS
from .hopper_slots import in_gluon
from .prefill_hopper_items import ROWS
from .prefill_hopper_skeleton import Kind, Loading, Weighing, Work, run_program
from .prefill_hopper_tiles import (
    allocate_tiles,
    begin_output,
    begin_scores,
    copy_q,
    copy_rows,
    empty_output,
    find_inner_slots_of_pieces,
    find_slots_of_pieces,
    pack_pairs,
)

_SLACK_BITS = gl.constexpr(8)  # weights of 256 are far from the largest number of float16


@gluon.constexpr_function
def _compute_registers(key_dim, value_dim, block_m, has_values):
    """Returns the registers of a thread that computes; with more, the threads that gather spill. A tile of
    several pieces has slots of its own for each, and values have pointers of their own."""
    if int(block_m) == 192:
        return 160
    return 224 if key_dim == value_dim and key_dim in (128, 256) and not has_values else 208


class _Rows(NamedTuple):
    """Where rows of K and V are: what the hooks for loading get."""

    cache: Cache
    index: Index  # type: ignore[assignment]  # hides the method of tuples


@gluon.jit
def _start_rows(source, tile, keys, tiles):
    k_head = source.cache.k + tile[0] * source.cache.stride_k_head
    v_head = source.cache.v + tile[0] * source.cache.stride_v_head
    return tile[1], k_head, v_head


@gluon.jit
def _find_last(source, place, keys, tiles):
    return find_slots_of_pieces(source.index, place[0], keys[3], keys[0], keys[1], tiles.k)


@gluon.jit
def _find_before(source, place, keys, tiles, key_tile, exists, FROM_ZERO: gl.constexpr):
    if FROM_ZERO:
        slots = find_inner_slots_of_pieces(source.index, place[0], key_tile, exists, tiles.k)
    else:
        slots = find_slots_of_pieces(source.index, place[0], key_tile, keys[0], keys[1], tiles.k)
    return slots


@gluon.jit
def _copy_k(source, place, slots, key_tile, target, full):
    copy_rows(place[1], slots, source.cache.stride_k_slot, target, full)


@gluon.jit
def _copy_v(source, place, slots, key_tile, target, full):
    copy_rows(place[2], slots, source.cache.stride_v_slot, target, full)


@gluon.jit
def _no_unit(source, tile):
    return 1.0


@gluon.jit
def _add(out, products):
    """The products have `out` in them already."""
    return products


@gluon.jit
def _same_output(source, tile, out):
    return out


@gluon.jit(do_not_specialize=["num_kv_heads"], do_not_specialize_on_alignment=["items", "counters"])
def _hopper_kernel(
    q,  # `Heads`
    cache,  # `Cache`
    index,  # `Index`
    items,  # of `Work`, as counters and num_kv_heads
    counters,
    outputs,  # `Outputs`
    num_kv_heads,
    score_scale,
    features,  # `HopperFeatures`
    shape,  # `Shape`
    STAGES: gl.constexpr,
    VALUE_STAGES: gl.constexpr,
    SHARES: gl.constexpr,
):
    dtype: gl.constexpr = q.data.dtype.element_ty
    run_program(
        q,
        allocate_tiles(dtype, shape.BLOCK_M // ROWS, ROWS, shape.DK),
        allocate_tiles(dtype, STAGES, shape.BLOCK_N, shape.DK),
        allocate_tiles(dtype, STAGES, shape.BLOCK_N, shape.DV),
        _Rows(cache, index),
        (),
        Work(items, counters, num_kv_heads),
        outputs,
        (score_scale, features.cap_scale),
        features,
        shape,
        Kind(
            Loading(_start_rows, _find_last, _find_before, _copy_k, _copy_v, copy_q),
            Weighing(
                _no_unit,
                empty_output,
                begin_scores,
                pack_pairs,
                begin_output,
                _add,
                _same_output,
                False,
                _SLACK_BITS,
                0,
            ),
            True,
        ),
        STAGES,
        VALUE_STAGES,
        SHARES,
        _compute_registers(shape.DK, shape.DV, shape.BLOCK_M, features.added is not None),
    )


class _Stages(NamedTuple):
    """Tiles in shared memory: of K and V each, and of a mask of values."""

    keys: int
    values: int


def _stages_of(
    variants: Sequence[Variant], device: tuning.DeviceClass, launch: tuning.Launch, dims: tuple[int, int]
) -> _Stages:
    """Returns how many tiles a call has beside what its variants need. `dims`: of K and of V."""
    adds_columns = features_of(variants, 1.0, True)[0].ADDS_COLUMNS.value
    num_values, num_bytes = 0, 2 * COLUMN_DIMS.value * launch.block_n if adds_columns else 0
    for one in variants:
        if one.flags.has_load:
            num_values = 2 if one.loaded_bytes < 4 else 1
            num_bytes += num_values * launch.block_m * launch.block_n * one.loaded_bytes
    keys = stages_beside(device, launch, *dims, num_bytes) if num_bytes else launch.num_stages
    return _Stages(keys, num_values)


def knows_all(
    variants: Sequence[Variant], device: tuning.DeviceClass, launch: tuning.Launch, dims: tuple[int, int]
) -> bool:
    """Returns whether the kernel computes a call with these variants: all run on it, and two tiles of K and V
    fit beside what they need. `dims`: of K and of V."""
    if not all(one.runs_on_hopper(variants, 16) for one in variants):
        return False
    return _stages_of(variants, device, launch, dims).keys >= 2


def launch_hopper_prefill(
    q: Tensor,
    cache: Cache,
    index: Index,
    plan: PrefillPlan,
    outputs: Outputs,
    launch: tuning.Launch,
    options: AttentionOptions,
) -> None:
    """Computes the items of a plan, whose tiles have to be as high as `launch` says
    (`prefill_tuning.hopper_prefill_launch`).

    The tensors are as in `prefill_attention`, with q and the caches of one 16-bit type. The strides of q, the
    caches and out, except the last ones, and their addresses in bytes have to be multiples of 16. The variants
    have passed `knows_all`. Nothing is checked.
    """
    key_dim, (num_kv_heads, value_dim) = q.shape[2], cache.v.shape[1:]
    device = tuning.device_class(q.device)
    num_programs = min(num_kv_heads * plan.num_shares, device.num_multiprocessors)
    features, score_scale = features_of(options.variants, options.scale_for(key_dim), options.causal)
    stages = _stages_of(options.variants, device, launch, (key_dim, value_dim))
    _hopper_kernel[(num_programs,)](
        heads_record(q),
        cache,
        in_gluon(index),
        plan.items,
        plan.counters,
        outputs,
        num_kv_heads,
        score_scale,
        features,
        shape_record(q, num_kv_heads, value_dim, launch.block_m, launch.block_n, options.causal, 0),
        STAGES=stages.keys,
        VALUE_STAGES=stages.values,
        SHARES=outputs.partial_out is not None,
        num_warps=4,  # of the first warpgroup
    )
