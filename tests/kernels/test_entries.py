"""Entries of token tables: taken over from earlier ones, and read in all groups at once."""

import pytest
import torch

from lightkv.triton_kernels.slots.entries import (
    read_entries,
    read_entries_reference,
    reuse_entries,
    reuse_entries_reference,
)


def tables_of(num_groups: int, device: torch.device) -> torch.Tensor:
    """Returns tables of nine rows of 40 entries, each entry with a slot of its own."""
    return torch.randperm(num_groups * 9 * 40, device=device).int().view(num_groups, 9, 40)


def places(num: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns distinct places that have twenty entries before them: rows and positions."""
    at = torch.randperm(9 * 20, device=device)[:num]
    return at // 20, at % 20 + 20


@pytest.mark.parametrize("num", [0, 1, 64, 150])
def test_entries_take_the_slots_of_earlier_ones(num: int, device: torch.device) -> None:
    table = tables_of(1, device)[0]
    expected = table.clone()
    rows, positions = places(num, device)
    reuse_entries(table, rows, positions, 20)
    reuse_entries_reference(expected, rows, positions, 20)
    assert torch.equal(table, expected)
    assert (table[rows, positions] == table[rows, positions - 20]).all()


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("num", [0, 1, 64, 150])
def test_slots_are_read_in_every_group(num: int, num_groups: int, device: torch.device) -> None:
    tables = tables_of(num_groups, device)
    rows, positions = places(num, device)
    found = torch.full((num_groups, num), -1, device=device)
    expected = found.clone()
    read_entries(tables, rows, positions, found)
    read_entries_reference(tables, rows, positions, expected)
    assert torch.equal(found, expected)
    assert torch.equal(found, tables[:, rows, positions].long())
