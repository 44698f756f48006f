"""Compares linear attention whose state decays, token by token, with its reference and with Mamba-2."""

import pytest
import torch
from torch import Tensor
from transformers.models.bamba import modeling_bamba as bamba

from lightkv.triton_kernels.states.decay_decode import decay_decode, decay_decode_reference
from lightkv.triton_kernels.states.rows import StateRows
from tests.support.combinations import each_value
from tests.support.rounding import close, dtypes


class Case:
    """Rows with random numbers. The first is padding; of the others every other one writes the slot that it
    reads. `heads`: of k, and of v; `dims`: of a key, and of a value."""

    def __init__(self, num_rows: int, heads: tuple[int, int], dims: tuple[int, int], like: Tensor) -> None:
        torch.manual_seed(num_rows + sum(heads) + sum(dims))
        keys = like.new_empty(num_rows, 2 * heads[0] * dims[0] + 8).normal_()  # beside each other, and others
        self.k, self.q = (
            keys[:, start : start + heads[0] * dims[0]].unflatten(1, (heads[0], dims[0]))
            for start in (0, heads[0] * dims[0])
        )
        self.v = like.new_empty(num_rows, heads[1], dims[1]).normal_()
        self.log_decay = -torch.rand(num_rows, heads[1], device=like.device)
        self.states = torch.randn(2 * num_rows + 2, heads[1], *dims, device=like.device)
        self.states[0] = 0.0
        rows = torch.arange(1, num_rows + 1, device=like.device)
        self.reads = rows * (rows > 1)
        self.writes = torch.where(rows % 2 == 0, rows, rows + num_rows) * (rows > 1)
        self.starts = torch.arange(num_rows + 1, dtype=torch.int32, device=like.device)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.log_decay

    def run(self, function, states: Tensor, *parts: Tensor) -> Tensor:
        """Computes a token of each row."""
        out = torch.full_like(self.v, 7.0)
        starts = self.starts if len(out) % 2 else None
        function(*(parts or self.parts), states, StateRows(self.reads, self.writes, starts), out)
        return out


@each_value(num_rows=[1, 2, 5], heads=[(2, 4), (3, 3), (1, 2)], dims=[(16, 16), (24, 40), (8, 72)])
def test_the_kernel_computes_what_the_reference_does(
    device: torch.device, num_rows: int, heads: tuple[int, int], dims: tuple[int, int]
) -> None:
    for dtype in dtypes(device):
        case = Case(num_rows, heads, dims, torch.empty(0, dtype=dtype, device=device))
        states, wanted_states = case.states.clone(), case.states.clone()
        out = case.run(decay_decode, states)
        wanted = case.run(decay_decode_reference, wanted_states)
        assert not out[0].any()
        close(out, wanted)
        close(states, wanted_states)
        is_written = torch.zeros(len(states), dtype=torch.bool)
        is_written[case.writes.cpu()] = True
        is_written[0] = False
        assert torch.equal(states[~is_written], case.states[~is_written])


@each_value(num_rows=[2, 5], places=[False, True])
def test_sequences_of_several_tokens_are_computed_one_after_the_other(
    device: torch.device, num_rows: int, places: bool
) -> None:
    """Row i has i tokens, and its sums are those of rows of one token each, whose state moves on."""
    num_tokens = num_rows * (num_rows - 1) // 2
    case = Case(num_tokens, (2, 4), (16, 24), torch.empty(0, device=device))
    starts = torch.arange(num_rows).cumsum(0)
    starts = torch.cat((starts[:1], starts)).to(device, torch.int32)
    order = torch.randperm(num_tokens, device=device) if places else torch.arange(num_tokens, device=device)
    slots = torch.arange(1, num_rows + 1, device=device)
    states, wanted_states = case.states.clone(), case.states.clone()
    wanted, places_of = torch.zeros_like(case.v), order if places else None
    for row in range(num_rows):
        for token in order[int(starts[row]) : int(starts[row + 1])].tolist():
            one = (part[token : token + 1] for part in case.parts)
            here = slots[row : row + 1]
            rows = StateRows(here, here, case.starts[:2])
            decay_decode_reference(*one, wanted_states, rows, wanted[token : token + 1])
    for function in (decay_decode, decay_decode_reference):
        found, out = states.clone(), torch.full_like(case.v, 7.0)
        function(*case.parts, found, StateRows(slots, slots, starts, places_of), out)
        close(out, wanted)
        close(found, wanted_states)


def test_a_decay_that_all_tokens_share_is_not_copied(device: torch.device) -> None:
    case = Case(4, (2, 2), (8, 8), torch.empty(0, device=device))
    decays, states, wanted_states = case.log_decay[:1].expand(4, -1), case.states.clone(), case.states.clone()
    out = case.run(decay_decode, states, *case.parts[:3], decays)
    close(out, case.run(decay_decode_reference, wanted_states, *case.parts[:3], decays.contiguous()))


def test_a_token_of_mamba2(device: torch.device) -> None:
    """transformers keeps a state as [head dim, state dim], the other way round."""
    num_rows, (groups, heads), (state_dim, head_dim) = 5, (2, 4), (16, 24)
    case = Case(num_rows, (groups, heads), (state_dim, head_dim), torch.empty(0, device=device))
    dt, a = torch.rand(num_rows, heads, device=device), -torch.rand(heads, device=device)
    own = case.states[case.reads].mT.contiguous()
    wide = (num_rows, heads, head_dim)
    wanted = bamba.mamba2_selective_state_update(
        own, case.v, dt[..., None].expand(wide), a[:, None, None].expand(*wide[1:], state_dim), case.k, case.q
    )
    out = case.run(decay_decode, case.states, case.q, case.k, case.v * dt[..., None], dt * a)
    close(out[1:], wanted[1:])
    close(case.states[case.writes[1:]].mT, own[1:])


def test_other_tensors_are_refused(device: torch.device) -> None:
    case = Case(2, (2, 4), (8, 8), torch.empty(0, device=device))
    rows, v = StateRows(case.reads, case.writes, case.starts), case.v[:, :3].contiguous()
    with pytest.raises(ValueError, match="and 3 heads"):
        decay_decode(case.q, case.k, v, case.log_decay[:, :3], case.states[:, :3], rows, v)
    with pytest.raises(ValueError, match="states"):
        case.run(decay_decode, case.states.double())
