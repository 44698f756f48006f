"""Products of a mixture of experts, which read the weights of each expert with rows once.

    x [T, K] ─► up_product: gate and up of each row, activated [R, n] ─► down_product [T, k, C]

A program multiplies a tile of one expert's rows with a block of its outputs, the weight as the left operand, as
in `linear.py`. The first product finds the rows of x by their pairs, so nothing is copied, and the second one
writes its rows in the order of the tokens. A few tokens, hardly any two of which have an expert in common, need
no order: each of their pairs is a tile of one row, a matrix times a vector.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning

from .clamped_gate import ClampedGate, clamped, clamped_gate_reference
from .expert_order import TILE_WORDS, ExpertRows, expert_order, most_tiles
from .gated_activation import activate, gated_activation_reference

Gate = ClampedGate | str | None
KERNEL_TYPES = (torch.bfloat16, torch.float16, torch.float32)  # of weights


class ExpertWeights(NamedTuple):
    """The weights of a product of E experts. `gate`: an activation of `gated_activation`, or a ClampedGate, of
    the two halves of the outputs; None for the outputs themselves."""

    weight: Tensor  # [E, N, K], of any strides; the last or the one before is 1 where it is fast
    bias: Tensor | None = None  # [E, N]
    gate: Gate = None


class ProductLaunch(NamedTuple):
    """Outputs of the weight and columns that a program multiplies in a turn, and launch options."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


class ExpertLaunch(NamedTuple):
    """The rows of a tile, and the launches of both products. With one row, pairs are computed one by one by a
    matrix times a vector. `is_ordered`: rows are ordered by expert; otherwise each pair is a tile."""

    block_t: int
    is_ordered: bool
    up: ProductLaunch
    down: ProductLaunch


class Load(NamedTuple):
    """What the launch of products depends on: the numbers of pairs and of experts, the dtype, and whether the
    outputs follow each other in memory (`[E, K, N]`)."""

    num_pairs: int
    num_experts: int
    dtype: torch.dtype
    is_transposed: bool


# The launches on a GPU, by the pairs of an expert on average, up to the first number. Those for 16 bits are
# measured on an H200 with Triton 3.6, for the shapes of Qwen3-30B-A3B and gpt-oss-20b.
_TILES = {
    4.0: ExpertLaunch(16, True, ProductLaunch(64, 64, 4, 6), ProductLaunch(64, 128, 4, 3)),
    8.0: ExpertLaunch(16, True, ProductLaunch(128, 128, 8, 3), ProductLaunch(64, 128, 4, 3)),
    24.0: ExpertLaunch(32, True, ProductLaunch(128, 64, 4, 3), ProductLaunch(128, 64, 4, 4)),
    56.0: ExpertLaunch(64, True, ProductLaunch(128, 64, 4, 3), ProductLaunch(128, 64, 4, 4)),
    float("inf"): ExpertLaunch(128, True, ProductLaunch(128, 64, 8, 3), ProductLaunch(128, 64, 8, 3)),
}
# So few pairs are computed one by one.
_SINGLE = {0.25: ExpertLaunch(1, False, ProductLaunch(4, 1024, 2, 1), ProductLaunch(16, 256, 4, 1))}
_SINGLE_TRANSPOSED = {
    0.125: ExpertLaunch(16, False, ProductLaunch(64, 64, 4, 6), ProductLaunch(32, 128, 4, 6)),
    0.25: ExpertLaunch(16, False, ProductLaunch(64, 128, 4, 3), ProductLaunch(64, 64, 4, 6)),
}
_WIDE = ProductLaunch(64, 32, 4, 2)  # float32, on ordinary cores
_INTERPRETER = ProductLaunch(16, 16, 4, 1)


def expert_launch(device: tuning.DeviceClass, load: Load) -> ExpertLaunch:
    """Returns the launch of both products."""
    rows = load.num_pairs / load.num_experts
    launches = (_SINGLE_TRANSPOSED if load.is_transposed else _SINGLE) | _TILES
    launch = next(one for most, one in launches.items() if rows <= most)
    if device is tuning.INTERPRETER:
        small = _INTERPRETER
        return launch._replace(block_t=min(16, launch.block_t), up=small, down=small)
    if load.dtype == torch.float32 and launch.block_t > 1:
        return launch._replace(block_t=16, up=_WIDE, down=_WIDE)
    up, down = (_fitting(one, launch.block_t, device) for one in (launch.up, launch.down))
    return launch._replace(up=up, down=down)


def _fitting(launch: ProductLaunch, block_t: int, device: tuning.DeviceClass) -> ProductLaunch:
    """Returns `launch` with as many stages as fit in the device's shared memory, for 16 bits."""
    stage = 2 * (launch.block_n + block_t) * launch.block_k
    return launch._replace(num_stages=max(1, min(launch.num_stages, device.shared_memory // stage)))


def order_rows(ids: Tensor, num_experts: int, launch: ExpertLaunch) -> ExpertRows:
    """Returns the rows for experts `ids`, int64 `[T, k]`, in the order and the tiles that `launch` takes."""
    ids = ids.contiguous()
    order = expert_order(ids, num_experts, launch.block_t) if launch.is_ordered else None
    return ExpertRows(ids, num_experts, order)


@triton.jit
def _finished(total, biases, by, ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr, DTYPE: tl.constexpr):
    """Returns the outputs, float32, of the sums of a program's rows of the weight."""
    total = total.to(DTYPE).to(tl.float32)
    if biases is not None:
        total = (total + biases.to(tl.float32)[:, None]).to(DTYPE).to(tl.float32)
    if ACTIVATION == "none":
        return total
    else:
        HALF: tl.constexpr = total.shape[0] // 2
        if INTERLEAVED:
            pairs = tl.permute(tl.reshape(total, [HALF, 2, total.shape[1]]), [0, 2, 1])
        else:
            pairs = tl.permute(tl.reshape(total, [2, HALF, total.shape[1]]), [1, 2, 0])
        gate, up = tl.split(pairs)
        if ACTIVATION == "clamped":
            gate, up = clamped(gate, up, by, DTYPE)
        else:
            gate = activate(gate, ACTIVATION).to(DTYPE).to(tl.float32)
        return gate * up


@triton.jit
def _product_kernel(
    x,  # [T, K] if IS_UP, else [R, K], in the order of `out` of the product before
    weight,  # [E, N, K]
    bias,  # [E, N], contiguous, or None
    out,  # [R, n] in the order of the rows if IS_UP, else [R, n] by pair
    ids,  # [T, TOP_K]
    pairs_at,  # of an `ExpertOrder`; None where each pair is a tile
    tiles,
    by,  # a `ClampedGate`, or None
    stride_x: tl.constexpr,  # constants, so that loads are vectors wherever the strides allow them
    stride_e: tl.constexpr,
    stride_n: tl.constexpr,
    stride_k: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_UP: tl.constexpr,
    ACTIVATION: tl.constexpr,  # "none" without a gate, "clamped"
    INTERLEAVED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVICTION: tl.constexpr,  # of weights
    EARLY: tl.constexpr,
):
    block = tl.program_id(0)
    tile = tl.program_id(1)
    DTYPE: tl.constexpr = out.dtype.element_ty
    NUM_OUT: tl.constexpr = N if ACTIVATION == "none" else N // 2
    BLOCK_OUT: tl.constexpr = BLOCK_N if ACTIVATION == "none" else BLOCK_N // 2
    IS_EVEN: tl.constexpr = NUM_OUT % BLOCK_OUT == 0 and K % BLOCK_K == 0
    if EARLY:
        # The second product begins once all programs of the first one are past this wait. So it needs to wait
        # for its rows alone: the experts, and their order, are there.
        if IS_UP:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tiles is None:
        expert = tl.load(ids + tile).to(tl.int64)
        begin = tile
        end = tile + 1
    else:
        expert = tl.load(tiles + tile * TILE_WORDS).to(tl.int64)
        begin = tl.load(tiles + tile * TILE_WORDS + 1)
        end = tl.load(tiles + tile * TILE_WORDS + 2)
    is_ours = expert < E
    # The rows of the weight: of a gate, half are its own, and half are up's.
    within = tl.arange(0, BLOCK_N)
    if ACTIVATION == "none" or INTERLEAVED:
        rows = block * BLOCK_N + within
        in_rows = rows < N
    else:
        rows = block * BLOCK_OUT + within % BLOCK_OUT
        in_rows = rows < NUM_OUT
        rows += within // BLOCK_OUT * NUM_OUT
    columns = tl.arange(0, BLOCK_K)
    source = weight + expert * stride_e + rows[:, None] * stride_n + columns[None, :] * stride_k
    if BLOCK_T == 1:
        inside = in_rows[:, None] & (columns < K)[None, :] & is_ours
        w = tl.load(source, mask=inside, other=0.0, eviction_policy=EVICTION)  # before the rows are there
    if EARLY and not IS_UP:
        tl.extra.cuda.gdc_wait()
    if is_ours:
        tokens = begin + tl.arange(0, BLOCK_T)
        in_tokens = tokens < end
        pairs = tokens
        if pairs_at is not None:
            pairs = tl.load(pairs_at + tokens, mask=in_tokens, other=0)
        if IS_UP:
            vectors = x + (pairs // TOP_K).to(tl.int64) * stride_x
            targets = out + tokens.to(tl.int64) * NUM_OUT
        else:
            vectors = x + tokens.to(tl.int64) * stride_x
            targets = out + pairs.to(tl.int64) * NUM_OUT
        if BLOCK_T == 1:
            vector = tl.load(vectors + columns, mask=columns < K, other=0.0)
            sums = tl.sum(w.to(tl.float32) * vector.to(tl.float32)[None, :], 1)
            for k in tl.static_range(BLOCK_K, K, BLOCK_K):
                inside = in_rows[:, None] & (columns < K - k)[None, :]
                more = tl.load(source + k * stride_k, mask=inside, other=0.0, eviction_policy=EVICTION)
                vector = tl.load(vectors + k + columns, mask=columns < K - k, other=0.0)
                sums += tl.sum(more.to(tl.float32) * vector.to(tl.float32)[None, :], 1)
            total = sums[:, None]
        else:
            vectors = vectors[None, :] + columns[:, None]
            total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
            for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
                if IS_EVEN:
                    w = tl.load(source + k * stride_k, eviction_policy=EVICTION)
                    vector = tl.load(vectors + k, mask=in_tokens[None, :], other=0.0)
                else:
                    inside = columns < K - k
                    w = tl.load(
                        source + k * stride_k,
                        mask=in_rows[:, None] & inside[None, :],
                        other=0.0,
                        eviction_policy=EVICTION,
                    )
                    vector = tl.load(vectors + k, mask=in_tokens[None, :] & inside[:, None], other=0.0)
                total = tl.dot(w, vector, total, input_precision="ieee")
        biases = None
        if bias is not None:
            biases = tl.load(bias + expert * N + rows, mask=in_rows, other=0.0)
        outputs = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        tl.store(
            targets[None, :] + outputs[:, None],
            _finished(total, biases, by, ACTIVATION, INTERLEAVED, DTYPE).to(DTYPE),
            mask=in_tokens[None, :] & (outputs < NUM_OUT)[:, None],
        )


def up_product(x: Tensor, weights: ExpertWeights, rows: ExpertRows, launch: ExpertLaunch) -> Tensor:
    """Returns the products `[R, n]` of the rows of x `[T, K]` with their experts' weights, in the order of
    `rows`: gate and up multiplied as the gate says, or all outputs without one. Rows of no expert of ours are
    undefined.

    x is contiguous in its last dim and of the dtype of the weights. `rows` are of `order_rows` with the same
    launch. Sums are float32, and rounded where modules round. Nothing synchronises, so a CUDA graph can capture
    it. A model on a CPU calls the reference.

    Raises:
        ValueError: the shapes or the dtypes do not fit, or the last stride of x is not 1.
    """
    if len(x) != len(rows.ids):
        raise ValueError(f"{len(x)} rows of x and {len(rows.ids)} of ids; give one for each token")
    out = x.new_empty((rows.ids.numel(), _num_outputs(weights)))
    _launch(x, weights, rows, (launch, launch.up, True), out)
    return out


def down_product(x: Tensor, weights: ExpertWeights, rows: ExpertRows, launch: ExpertLaunch) -> Tensor:
    """Returns the products `[T, k, N]`, by token, of the rows x `[R, K]` that `up_product` returned for `rows`.

    The rest is as for `up_product`.
    """
    if len(x) != rows.ids.numel():
        raise ValueError(f"{len(x)} rows of x and {rows.ids.numel()} ids; give a row for each")
    out = x.new_empty((*rows.ids.shape, _num_outputs(weights)))
    _launch(x, weights, rows, (launch, launch.down, False), out)
    return out


def _num_outputs(weights: ExpertWeights) -> int:
    return weights.weight.shape[1] // (1 if weights.gate is None else 2)


def _launch(
    x: Tensor,
    weights: ExpertWeights,
    rows: ExpertRows,
    by: tuple[ExpertLaunch, ProductLaunch, bool],
    out: Tensor,
) -> None:
    """Launches a product by the launch of both and its own, and whether it is the first one."""
    weight, bias, gate = weights
    both, launch, is_up = by
    num_experts, num_outputs, dim = weight.shape
    if x.dim() != 2 or x.stride(-1) != 1 or x.shape[1] != dim or x.dtype != weight.dtype:
        raise ValueError(
            f"x {x.dtype} {tuple(x.shape)}, stride {x.stride(-1)}, and weights {weight.dtype} "
            f"{tuple(weight.shape)}; give contiguous rows of the weights' dtype and last dim"
        )
    num_pairs, order = rows.ids.numel(), rows.order
    num_tiles = num_pairs if order is None else most_tiles(num_pairs, num_experts, both.block_t)
    has_tiles = order is None or (order.tiles is not None and len(order.tiles) == num_tiles)
    if rows.num_experts != num_experts or not has_tiles:
        raise ValueError(
            f"rows for {rows.num_experts} experts and weights of {num_experts}, in tiles of {both.block_t}; "
            "give rows that order_rows made for these weights with the same launch"
        )
    if not num_pairs:
        return
    by_clamp, activation = None, gate or "none"
    if isinstance(gate, ClampedGate):
        by_clamp, activation = gate._replace(interleaved=tl.constexpr(gate.interleaved)), "clamped"
    if both.block_t == 1:  # blocks of so many columns that `dim` has at most 16, which are unrolled
        times = max(1, triton.next_power_of_2(triton.cdiv(dim, 16 * launch.block_k)))
        launch = launch._replace(block_k=launch.block_k * times, block_n=max(2, launch.block_n // times))
    _product_kernel[(triton.cdiv(num_outputs, launch.block_n), num_tiles)](
        x,
        weight,
        None if bias is None else bias.contiguous(),
        out,
        rows.ids,
        None if order is None else order.pairs,
        None if order is None else order.tiles,
        by_clamp,
        x.stride(0),
        *weight.stride(),
        N=num_outputs,
        K=dim,
        E=num_experts,
        TOP_K=rows.ids.shape[1],
        IS_UP=is_up,
        ACTIVATION=activation,
        INTERLEAVED=isinstance(gate, ClampedGate) and gate.interleaved,
        BLOCK_T=both.block_t,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        STAGES=launch.num_stages,
        EVICTION="evict_first" if both.block_t <= 32 else "",
        num_warps=launch.num_warps,
        **tuning.early_options(x.device),
    )


def product_reference(x: Tensor, weights: ExpertWeights, rows: ExpertRows) -> Tensor:
    """Computes a product, `[T, k, n]` by token, in plain torch: of x `[T, K]`, or `[T, k, K]` by token, too.
    Rows of no expert of ours are 0."""
    weight, bias, gate = weights
    x = x[:, None].expand(*rows.ids.shape, -1) if x.dim() == 2 else x
    wanted = x.new_zeros((*rows.ids.shape, _num_outputs(weights)))
    for expert in range(rows.num_experts):
        is_here = rows.ids == expert
        y = x[is_here] @ weight[expert].T
        y = y if bias is None else y + bias[expert]
        if isinstance(gate, ClampedGate):
            y = clamped_gate_reference(y, gate, rows.ids[is_here], None)
        elif gate is not None:
            y = gated_activation_reference(y, gate)
        wanted[is_here] = y
    return wanted
