"""Compares the convolution of packed sequences with its reference and with transformers' own functions."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from lightkv.triton_kernels.states.causal_conv import Convolution, causal_conv, causal_conv_reference
from lightkv.triton_kernels.states.rows import StateRows
from tests.support.combinations import each_value
from tests.support.rounding import close, dtypes

# Tokens of each sequence, and of padding.
LENGTHS = [([0, 1, 2, 3, 12, 0, 7], 9), ([1, 1, 1], 0), ([18], 3), ([0, 0], 0)]


class Case:
    """Sequences of these lengths, with random numbers. Every other one writes the slot that it reads, and the
    first is padding."""

    def __init__(self, lengths: list[int], padding: int, dim: int, width: int, like: Tensor) -> None:
        torch.manual_seed(sum(lengths) + dim + width)
        count, num_tokens = len(lengths), sum(lengths) + padding
        self.x = like.new_empty(num_tokens, dim + 3)[:, :dim].normal_()
        self.weight = like.new_empty(dim, width).normal_()
        self.bias = like.new_empty(dim).normal_()
        self.states = like.new_empty(3 * count + 2, width - 1, dim).normal_()
        self.states[0] = 0.0
        reads = torch.arange(1, count + 1, device=like.device)
        self.reads = reads * (reads > 1)
        self.writes = torch.where(reads % 2 == 0, self.reads, self.reads + count) * (reads > 1)
        self.starts = torch.tensor([0, *lengths], device=like.device).cumsum(0).int()

    def run(self, function, states: Tensor, activation: str | None, has_bias: bool = True) -> Tensor:
        conv = Convolution(self.weight, self.bias if has_bias else None, activation)
        out = torch.full_like(self.x, torch.nan, memory_format=torch.contiguous_format)
        function(self.x, conv, states, StateRows(self.reads, self.writes, self.starts), out)
        return out


@each_value(
    sequences=LENGTHS,
    width=[2, 3, 4, 8],
    dim=[16, 40, 300],
    activation=[None, "silu"],
    has_bias=[True, False],
)
def test_the_kernel_computes_what_the_reference_does(
    device: torch.device,
    sequences: tuple[list[int], int],
    width: int,
    dim: int,
    activation: str | None,
    has_bias: bool,
) -> None:
    for dtype in dtypes(device):
        case = Case(*sequences, dim, width, torch.empty(0, dtype=dtype, device=device))
        states, wanted_states = case.states.clone(), case.states.clone()
        out = case.run(causal_conv, states, activation, has_bias)
        wanted = case.run(causal_conv_reference, wanted_states, activation, has_bias)
        close(out, wanted)
        assert torch.equal(states, wanted_states)  # a state is a copy of inputs
        assert not out[sum(sequences[0]) :].any()
        untouched = torch.ones(len(states), dtype=torch.bool)
        untouched[case.writes.cpu()] = False
        untouched[0] = True
        assert torch.equal(states[untouched], case.states[untouched])


def test_more_sequences_than_a_program_looks_at_at_once(device: torch.device) -> None:
    case = Case([0] * 300 + [9, 5], 2, 8, 2, torch.empty(0, device=device))
    states = case.states.clone()
    close(case.run(causal_conv, states, "silu"), case.run(causal_conv_reference, case.states, "silu"))
    assert torch.equal(states, case.states)


@pytest.mark.parametrize("bias", [True, False])
def test_the_reference_computes_what_transformers_does(bias: bool) -> None:
    """At once, and token by token from the state."""
    torch.manual_seed(0)
    x, weight, state = torch.randn(11, 24), torch.randn(24, 4), torch.randn(3, 24)
    terms = torch.randn(24) if bias else None
    whole = torch.cat([state, x]).T[None]
    wanted = qwen.causal_conv1d_fn(whole, weight, terms, "silu")[0, :, 3:].T
    for cuts in ([0, 11], list(range(12)), [0, 2, 9, 11]):
        states = torch.stack([torch.zeros_like(state), state])
        one = torch.ones(1, dtype=torch.int64)
        out = torch.empty_like(x)
        for first, end in pairwise(cuts):
            rows = StateRows(one, one, torch.tensor([0, end - first], dtype=torch.int32))
            conv = Convolution(weight, terms, "silu")
            causal_conv_reference(x[first:end], conv, states, rows, out[first:end])
        close(out, wanted)
        assert torch.equal(states[1], x[-3:])
    theirs = state.T[None].clone()
    steps = [
        qwen.causal_conv1d_update(row[None, :, None], theirs, weight, terms, "silu")[0, :, 0] for row in x
    ]
    close(wanted, torch.stack(steps))


def test_a_slot_of_a_pool_may_have_a_stride(device: torch.device) -> None:
    case = Case([3, 6, 1], 0, 16, 4, torch.empty(0, device=device))
    pool = torch.randn(len(case.states), 100, device=device)
    states = pool[:, 20 : 20 + 48].unflatten(1, (3, 16))
    before, wanted = pool.clone(), states.clone()
    weight = case.weight
    out = case.run(causal_conv, states, None)
    case.weight = weight.T.contiguous().T
    close(out, case.run(causal_conv_reference, wanted, None))
    assert torch.equal(states, wanted)
    before[:, 20 : 20 + 48] = wanted.flatten(1)
    assert torch.equal(pool, before)


def test_it_refuses_what_does_not_fit(device: torch.device) -> None:
    case = Case([3, 2], 0, 16, 4, torch.empty(0, device=device))
    with pytest.raises(ValueError, match="'silu' or None"):
        case.run(causal_conv, case.states, "gelu")
    with pytest.raises(ValueError, match="contiguous slots"):
        case.run(causal_conv, case.states[:, 1:], None)
    with pytest.raises(ValueError, match="float32"):
        case.run(causal_conv, case.states.half(), None)
    case.reads = case.reads.int()
    with pytest.raises(ValueError, match="reads must be contiguous int64"):
        case.run(causal_conv, case.states, None)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[1] * 256, [3, 2045], [700, 0, 2, 1346]])
def test_the_shapes_of_a_model_on_a_gpu(device: torch.device, lengths: list[int]) -> None:
    """In a CUDA graph, too, whose sequences change between replays."""
    case = Case(lengths, 0, 8192, 4, torch.empty(0, dtype=torch.bfloat16, device=device))
    states, wanted_states = case.states.clone(), case.states.clone()
    close(case.run(causal_conv, states, "silu"), case.run(causal_conv_reference, wanted_states, "silu"))
    assert torch.equal(states, wanted_states)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run(causal_conv, states, "silu")
    case.reads.copy_(case.reads.flip(0))
    case.writes.copy_(case.writes.flip(0))
    case.starts[1:-1] = len(case.x) - case.starts[1:-1].flip(0)
    graph.replay()
    close(out, case.run(causal_conv_reference, wanted_states, "silu"))
    assert torch.equal(states, wanted_states)
