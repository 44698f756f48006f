"""Compares one token of the gated delta rule, and the norm after it, with their references and with
transformers' own functions."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from lightkv.triton_kernels.states.gated_delta_decode import (
    DeltaGates,
    gated_delta_decode,
    gated_delta_decode_reference,
)
from lightkv.triton_kernels.states.gated_norm import gated_norm, gated_norm_reference
from lightkv.triton_kernels.states.rows import StateRows
from tests.support.combinations import each_value
from tests.support.rounding import close, dtypes


class Case:
    """Rows with random numbers. The first is padding; of the others every other one writes the slot that it
    reads. `heads`: of k, and of v; `dims`: of a key, and of a value."""

    def __init__(self, num_rows: int, heads: tuple[int, int], dims: tuple[int, int], like: Tensor) -> None:
        torch.manual_seed(num_rows + sum(heads) + sum(dims))
        self.heads, self.dims = heads, dims
        width = 2 * heads[0] * dims[0] + heads[1] * dims[1]
        self.qkv = like.new_empty(num_rows, width + 8)[:, :width].normal_()
        self.a, self.b = (like.new_empty(num_rows, 2 * heads[1]).normal_() * 3).chunk(2, 1)
        self.a_log = torch.rand(heads[1], device=like.device) * 2.7
        self.dt_bias = like.new_empty(heads[1]).normal_()
        self.states = torch.randn(2 * num_rows + 2, heads[1], *dims, device=like.device)
        self.states[0] = 0.0
        rows = torch.arange(1, num_rows + 1, device=like.device)
        self.reads = rows * (rows > 1)
        self.writes = torch.where(rows % 2 == 0, rows, rows + num_rows) * (rows > 1)

    def run(self, function, states: Tensor, beta_scale: float = 1.0) -> Tensor:
        out = self.qkv.new_full((len(self.qkv), self.heads[1], self.dims[1]), 7.0)
        rows = StateRows(self.reads, self.writes, None)
        if len(self.qkv) % 2:
            rows = rows._replace(starts=rows.bounds())
        gates = DeltaGates(self.a_log, self.dt_bias, beta_scale)
        function(self.qkv, self.a, self.b, gates, states, rows, out)
        return out

    def transformers(self, beta_scale: float) -> tuple[Tensor, Tensor]:
        """Returns outputs and last state of the rows as tokens of one sequence that begins at state 1."""
        sizes = [self.heads[0] * self.dims[0]] * 2 + [self.heads[1] * self.dims[1]]
        parts = zip(self.qkv[None].split(sizes, -1), (self.dims[0], self.dims[0], self.dims[1]), strict=True)
        g = -self.a_log.exp() * functional.softplus(self.a.float() + self.dt_bias)
        out, state = qwen.torch_recurrent_gated_delta_rule(
            *(part.unflatten(-1, (-1, dim)) for part, dim in parts),
            g=g[None],
            beta=beta_scale * self.b.sigmoid()[None],
            initial_state=self.states[1:2],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return out[0], state[0]


@each_value(
    num_rows=[1, 2, 5],
    heads=[(2, 4), (3, 3), (1, 2)],
    dims=[(16, 16), (24, 40), (8, 72)],
    beta_scale=[1.0, 2.0],
)
def test_the_kernel_computes_what_the_reference_does(
    device: torch.device,
    num_rows: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    beta_scale: float,
) -> None:
    for dtype in dtypes(device):
        case = Case(num_rows, heads, dims, torch.empty(0, dtype=dtype, device=device))
        states, wanted_states = case.states.clone(), case.states.clone()
        out = case.run(gated_delta_decode, states, beta_scale)
        wanted = case.run(gated_delta_decode_reference, wanted_states, beta_scale)
        assert not out[0].any()
        close(out, wanted)
        close(states, wanted_states)
        untouched = torch.ones(len(states), dtype=torch.bool)
        untouched[case.writes.cpu()] = False
        untouched[0] = True
        assert torch.equal(states[untouched], case.states[untouched])
        assert not states[0].any()


@pytest.mark.parametrize("beta_scale", [1.0, 2.0])
def test_rows_one_after_another_compute_what_transformers_does(
    device: torch.device, beta_scale: float
) -> None:
    """A row of the batch after the other, as tokens of one sequence, whose state moves from slot to slot."""
    num_rows = 6
    case = Case(num_rows, (2, 4), (16, 24), torch.empty(0, device=device))
    wanted, last = case.transformers(beta_scale)
    for function in (gated_delta_decode, gated_delta_decode_reference):
        states = case.states.clone()
        slots = torch.tensor([1, 1, 3, 3, 2, 5, 1], device=device)
        for row in range(num_rows):
            here, there = slots[row : row + 1].clone(), slots[row + 1 : row + 2].clone()
            rows = StateRows(here, there, torch.tensor([0, 1], dtype=torch.int32, device=device))
            one = (part[row : row + 1] for part in (case.qkv, case.a, case.b))
            out = torch.empty_like(wanted[row : row + 1])
            function(*one, DeltaGates(case.a_log, case.dt_bias, beta_scale), states, rows, out)
            close(out[0], wanted[row])
        close(states[1], last)


def test_decays_at_the_ends_of_their_range(device: torch.device) -> None:
    """The kernel's own softplus is torch's, also where it is the number itself and where it is tiny, and adds
    up over the tokens of a sequence."""
    case = Case(2, (8, 8), (8, 8), torch.empty(0, device=device))
    case.a[1] = torch.tensor([-90.0, -30.0, -17.0, -9.0, 0.0, 19.9, 20.1, 80.0], device=device)
    case.dt_bias.zero_()
    case.a_log.fill_(2.7)
    case.states[2] *= 1e6
    case.b.fill_(-80.0)  # beta 0: the new state is the old one's share
    states, wanted = case.states.clone(), case.states.double()
    case.run(gated_delta_decode, states)
    decay = torch.exp(-case.a_log.double().exp() * functional.softplus(case.a[1].double()))
    wanted = wanted[2] * decay[:, None, None]
    torch.testing.assert_close(states[2, :4].double(), wanted[:4], rtol=3e-7, atol=0.0)
    torch.testing.assert_close(states[2].double(), wanted, rtol=1e-5, atol=1e-30)


def test_decode_refuses_what_does_not_fit(device: torch.device) -> None:
    case = Case(2, (2, 4), (8, 8), torch.empty(0, device=device))
    with pytest.raises(ValueError, match="contiguous slots"):
        case.run(gated_delta_decode, case.states[:, :, ::2])
    with pytest.raises(ValueError, match="states must be float32"):
        case.run(gated_delta_decode, case.states.half())
    case.qkv = case.qkv[:, :-8]
    with pytest.raises(
        ValueError, match="need 32 columns of qkv and 16 more for each head of q and k; got 56"
    ):
        case.run(gated_delta_decode, case.states)


@each_value(num_tokens=[1, 3, 70], num_heads=[1, 3], dim=[16, 40, 128])
def test_gated_norm(device: torch.device, num_tokens: int, num_heads: int, dim: int) -> None:
    torch.manual_seed(dim)
    for dtype in dtypes(device):
        x, weight = torch.randn(num_tokens, num_heads, dim, device=device), torch.randn(dim, device=device)
        gate = torch.randn(num_tokens, num_heads * dim + 8, device=device).to(dtype)
        gate = gate[:, : num_heads * dim].unflatten(1, (num_heads, dim)) * 3
        module = qwen.Qwen3_5RMSNormGated(dim, 1e-5).to(device, dtype)
        module.weight.data.copy_(weight)
        x = (x * 3).to(dtype)
        out = gated_norm(x, gate, module.weight.data, 1e-5)
        assert torch.equal(gated_norm_reference(x, gate, module.weight.data, 1e-5), module(x, gate))
        close(out, module(x, gate))
        heads = gate[:, ::2]  # of other strides than packed heads
        root = torch.full((dim,), dim**-0.5, device=device, dtype=dtype)
        by_length = functional.normalize(heads.float(), dim=-1).to(dtype)
        close(gated_norm(heads, None, root, 1e-5 / dim), by_length)
        close(gated_norm_reference(heads, None, root, 1e-5 / dim), by_length)


def test_gated_norm_refuses_what_does_not_fit(device: torch.device) -> None:
    x = torch.randn(2, 3, 8, device=device)
    with pytest.raises(ValueError, match="gate must be"):
        gated_norm(x, x[:1], x[0, 0], 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [2, 32, 256])
def test_the_shapes_of_a_model_on_a_gpu(device: torch.device, num_rows: int) -> None:
    """In a CUDA graph, too, whose slots change between replays."""
    case = Case(num_rows, (16, 32), (128, 128), torch.empty(0, dtype=torch.bfloat16, device=device))
    states, wanted_states = case.states.clone(), case.states.clone()
    close(case.run(gated_delta_decode, states), case.run(gated_delta_decode_reference, wanted_states))
    torch.testing.assert_close(states, wanted_states, rtol=1e-4, atol=1e-4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run(gated_delta_decode, states)
    case.writes.copy_(case.writes.flip(0))
    case.reads.copy_(case.writes)
    graph.replay()
    close(out, case.run(gated_delta_decode_reference, wanted_states))
    torch.testing.assert_close(states, wanted_states, rtol=1e-4, atol=1e-4)
