"""Compares the kernels of layers with states, in the shape of Qwen3.5-9B's, with floors and with fla-core's.

    python -m bench.kernels.states --out bench/results/states-h100.json

The rows are a token of the gated delta rule for a batch, by lightkv and by fla-core's pooled kernel, which is
given q, k, v and a decay of each key dim ready made; the convolution of single tokens and of a prompt; the norm
after them; and a prompt's chunks by fla-core. A row's floor is the time to read and write its states, inputs
and outputs once. fla-core's sides are left out where it is not installed.
"""

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from bench.common.device_clock import DEVICE, CapturedStep, Ceiling, Clock, measure_ceiling
from bench.common.report import parser, print_json, print_machine, print_table, refuse
from lightkv.triton_kernels.states import causal_conv as conv
from lightkv.triton_kernels.states import gated_delta_decode as decode
from lightkv.triton_kernels.states.gated_norm import gated_norm, gated_norm_reference
from lightkv.triton_kernels.states.rows import StateRows

TOLERANCE = 0.02  # of the norm of the output, in bfloat16
CHECKED = 128  # tokens of a prompt that are compared with the recurrence
CHUNK = 64
# Values and warps of a program of decode; tokens and channels of one of the convolution.
TILES = (8, 1), (8, 2), (16, 1), (16, 2), (16, 4), (32, 2), (32, 4), (32, 8), (64, 4), (128, 8)
BLOCKS = (4, 128), (8, 128), (16, 128), (4, 256), (8, 256), (16, 256)
Side = Callable[[], Tensor]


class Shape(NamedTuple):
    """The heads of a layer of the gated delta rule."""

    num_k_heads: int
    num_v_heads: int
    key_dim: int
    value_dim: int
    width: int  # of the convolution

    @property
    def parts(self) -> list[int]:
        """The dims of q, k and v."""
        keys = self.num_k_heads * self.key_dim
        return [keys, keys, self.num_v_heads * self.value_dim]


QWEN = Shape(16, 32, 128, 128, 4)


def normal(*dims: int) -> Tensor:
    return torch.randn(dims, dtype=torch.bfloat16, device=DEVICE)


class Inputs:
    """Random inputs of a layer for so many tokens, and pools of states for `num_sequences`, whose slots are in
    no order."""

    def __init__(self, shape: Shape, num_tokens: int, num_sequences: int) -> None:
        torch.manual_seed(num_tokens)
        self.shape, heads = shape, shape.num_v_heads
        self.qkv, self.weight = normal(num_tokens, sum(shape.parts)), normal(shape.width, sum(shape.parts)).T
        self.a, self.b = normal(num_tokens, heads), normal(num_tokens, heads)
        self.gates = decode.DeltaGates(
            torch.rand(heads, device=DEVICE), torch.rand(heads, device=DEVICE), 1.0
        )
        slots = torch.randperm(num_sequences, device=DEVICE) + 1
        starts = torch.arange(num_sequences + 1, dtype=torch.int32, device=DEVICE)
        self.rows = StateRows(slots, slots, starts * (num_tokens // num_sequences))
        dims = heads, shape.key_dim, shape.value_dim
        self.states = torch.randn(num_sequences + 1, *dims, device=DEVICE)
        self.windows = normal(num_sequences + 1, shape.width - 1, sum(shape.parts))

    def decode(self, function: Any, states: Tensor) -> Tensor:
        out = self.qkv.new_empty(len(self.qkv), *self.states.shape[1::2])
        rows = self.rows._replace(starts=None)  # one token each
        function(self.qkv, self.a, self.b, self.gates, states, rows, out)
        return out

    def convolve(self, function: Any, windows: Tensor) -> Tensor:
        out = torch.empty_like(self.qkv)
        function(self.qkv, conv.Convolution(self.weight, None, "silu"), windows, self.rows, out)
        return out

    def split(self) -> list[Tensor]:
        """Returns q, k and v `[1, T, heads, dim]`, contiguous."""
        dims = self.shape.key_dim, self.shape.key_dim, self.shape.value_dim
        parts = self.qkv[None].split(self.shape.parts, -1)
        return [part.unflatten(-1, (-1, dim)).contiguous() for part, dim in zip(parts, dims, strict=True)]


class Row(NamedTuple):
    """What is measured: its name, its bytes that have to be moved, and the sides; and for other tiles of
    lightkv's kernel, by name, the attributes of its module that choose them."""

    name: str
    num_bytes: int
    sides: dict[str, Side]
    module: Any = None
    tiles: Mapping[str, Mapping[str, Any]] = {}


def check(name: str, actual: Tensor, wanted: Tensor) -> None:
    """Refuses figures of a wrong output."""
    error = float((actual.float() - wanted.float()).norm() / wanted.float().norm())
    if not error < TOLERANCE:
        refuse(f"{name} is off by {error}")


def nbytes(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def decode_row(shape: Shape, batch: int, peers: bool) -> Row:
    inputs = Inputs(shape, batch, batch)
    sides: dict[str, Side] = {"lightkv": partial(inputs.decode, decode.gated_delta_decode, inputs.states)}
    if peers:
        sides["fla-core"] = pooled_side(inputs)
    for name, side in sides.items():
        wanted = inputs.decode(decode.gated_delta_decode_reference, inputs.states.clone())
        check(f"{name}'s decode at {batch}", side().view_as(wanted), wanted)
    num_bytes = 2 * nbytes(inputs.states[1:]) + nbytes(inputs.qkv) + batch * shape.parts[2] * 2
    tiles = {
        f"{values} values, {warps} warps": {"_tile": constant((values, warps))} for values, warps in TILES
    }
    return Row(f"decode, batch {batch}", num_bytes, sides, decode, tiles)


def constant(value: Any) -> Callable[..., Any]:
    return lambda *_: value


def pooled_side(inputs: Inputs) -> Side:
    """Returns fla-core's kernel, which reads and writes the same slot."""
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    q, k, v = inputs.split()
    g = -inputs.gates.a_log.exp() * functional.softplus(inputs.a.float() + inputs.gates.dt_bias)
    starts = torch.arange(len(inputs.qkv) + 1, device=DEVICE)
    run = partial(
        fused_recurrent_kda_fwd,
        q,
        k,
        v,
        g[None, :, :, None].expand(-1, -1, -1, inputs.shape.key_dim).contiguous(),
        inputs.b[None].float().sigmoid(),
        initial_state=inputs.states,
        inplace_final_state=True,
        cu_seqlens=starts,
        ssm_state_indices=inputs.rows.reads,
        use_qk_l2norm_in_kernel=True,
        out=torch.empty_like(v),
    )
    return lambda: run()[0]


def conv_row(shape: Shape, batch: int, num_tokens: int) -> Row:
    inputs = Inputs(shape, batch * num_tokens, batch)
    wanted = inputs.convolve(conv.causal_conv_reference, inputs.windows.clone())
    side = partial(inputs.convolve, conv.causal_conv, inputs.windows)
    check(f"the convolution of {batch} x {num_tokens}", side(), wanted)
    num_bytes = 2 * nbytes(inputs.qkv, inputs.windows[1:])
    tiles = {f"{t} tokens, {d} channels": {"_BLOCK_T": t, "_BLOCK_D": d} for t, d in BLOCKS}
    return Row(f"convolution, {batch} x {num_tokens}", num_bytes, {"lightkv": side}, conv, tiles)


def norm_row(shape: Shape, num_tokens: int) -> Row:
    dims = num_tokens, shape.num_v_heads, shape.value_dim
    x, gate = normal(2, *dims).unbind(0)
    arguments = x, gate, normal(shape.value_dim), 1e-6
    side = partial(gated_norm, *arguments)
    check(f"the norm of {num_tokens}", side(), gated_norm_reference(*arguments))
    return Row(f"gated norm, {num_tokens}", 3 * nbytes(x), {"lightkv": side})


def chunk_row(shape: Shape, num_tokens: int) -> Row:
    """One prompt by fla-core's chunks, from a state and to a state. The numbers of chunks are given."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    inputs = Inputs(shape, num_tokens, 1)
    q, k, v = inputs.split()
    numbers = torch.arange(-(-num_tokens // CHUNK), device=DEVICE)
    run = partial(
        chunk_gated_delta_rule,
        q,
        k,
        v,
        inputs.a[None],
        inputs.b[None],
        initial_state=inputs.states[1:],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        cu_seqlens=torch.tensor([0, num_tokens], device=DEVICE),
        chunk_indices=torch.stack([torch.zeros_like(numbers), numbers], 1),
        use_gate_in_kernel=True,
        A_log=inputs.gates.a_log,
        dt_bias=inputs.gates.dt_bias,
    )
    first = [one[:CHECKED] for one in (inputs.qkv, inputs.a, inputs.b)]
    wanted = inputs.qkv.new_empty(len(first[0]), *inputs.states.shape[1::2])
    rows = inputs.rows._replace(starts=inputs.rows.bounds().clamp(max=CHECKED))
    decode.gated_delta_decode_reference(*first, inputs.gates, inputs.states.clone(), rows, wanted)
    check(f"chunks of {num_tokens}", run()[0][0, : len(wanted)], wanted)
    num_bytes = nbytes(inputs.qkv, v) + 2 * nbytes(inputs.states[1:])
    return Row(f"chunks, 1 x {num_tokens}", num_bytes, {"fla-core": lambda: run()[0]})


def measure(row: Row, clock: Clock, ceiling: Ceiling, sweep: bool) -> dict[str, float]:
    """Returns the microseconds of the floor and of each side, with `sweep` of other tiles of lightkv's, too."""
    graphs = {name: CapturedStep(side) for name, side in row.sides.items()}
    for name, values in row.tiles.items() if sweep else ():
        with mock.patch.multiple(row.module, **values):
            row.sides["lightkv"]()
            graphs[name] = CapturedStep(row.sides["lightkv"])
    found = clock.replay_in_turns(graphs)
    return {"floor": ceiling.floor_us(row.num_bytes)} | {
        name: timing.median for name, timing in found.items()
    }


@torch.no_grad()
def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    arguments.add_argument("--prompts", type=int, nargs="+", default=[512, 2048, 8192])
    arguments.add_argument(
        "--sweep", action="store_true", help="also measure other tiles of lightkv's kernels"
    )
    options = arguments.parse_args()
    print_machine()
    clock = Clock(40)
    ceiling, ceiling_record = measure_ceiling(clock)
    print(f"bandwidth {ceiling.bytes_per_us / 1e6:.2f} TB/s, an empty kernel {ceiling.empty_us:.1f} us\n")
    peers = find_spec("fla") is not None
    makers: list[Callable[[], Row]] = []
    for batch in options.batches:
        makers += [partial(decode_row, QWEN, batch, peers), partial(conv_row, QWEN, batch, 1)]
    for num_tokens in options.prompts:
        makers += [partial(conv_row, QWEN, 1, num_tokens), partial(norm_row, QWEN, num_tokens)]
        if peers:
            makers.append(partial(chunk_row, QWEN, num_tokens))
    table, results = [], dict[str, Any]()
    for make in makers:
        row = make()
        us = results[row.name] = measure(row, clock, ceiling, options.sweep)
        ratios = (
            f"{name} {took:.1f} ({took / us['floor']:.2f})" for name, took in us.items() if name != "floor"
        )
        table.append([row.name, f"{us['floor']:.1f}", "; ".join(ratios)])
    print_table(["row", "floor us", "us (times the floor)"], table)
    print_json("states", {"ceiling": ceiling_record, "us": results}, options.out)


if __name__ == "__main__":
    main()
