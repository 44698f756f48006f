"""How an index finds tokens: kernels, plain torch and a loop by hand agree for every lookup."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels.attention.attend_keys import find_slots
from lightkv.triton_kernels.attention.attention_reference import slots_reference
from lightkv.triton_kernels.attention.lookups import CONTIGUOUS, LOOKUPS, BeamTable, Lookup, Pages, RingRows
from lightkv.triton_kernels.attention.lookups.ring_rows import SinkRotation
from lightkv.triton_kernels.attention.paged_kv import RECORDS, PagedKV
from lightkv.triton_kernels.attention.variants import Window
from lightkv.triton_kernels.layout.ring import Ring
from lightkv.triton_kernels.operators import Operator

POSITIONS = [0, 1, 2, 3, 4, 9, 15, 16, 17, 31, 33, 47]
TABLE = ((torch.arange(4)[:, None] + 7 * torch.arange(48)) % 4).int()


@triton.jit(do_not_specialize=["row"])  # a 1 would be a constant without a type
def _slots_kernel(index, row, positions, slots, num, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    valid = offsets < num
    found = find_slots(index, row.to(tl.int64), tl.load(positions + offsets, mask=valid, other=0), valid)
    tl.store(slots + offsets, found, mask=valid)


def by_hand(lookup: Lookup, index: list[list[int]], row: int, position: int) -> int:
    if isinstance(lookup, RingRows):
        sinks, size = lookup.ring.sinks, lookup.ring.size
        return index[row][position if position < sinks else sinks + (position - sinks) % size]
    page = 1 << lookup.page_shift
    if isinstance(lookup, BeamTable):
        row = int(lookup.indirection[row, position])
    return index[row][position // page] + position % page


LOOKED_UP = {
    "tokens": Pages(),
    "pages of 16": Pages(4),
    "one run": CONTIGUOUS,
    "ring": RingRows(Ring(3, 10, 2)),
    "ring without sinks": RingRows(Ring(0, 16)),
    "beams": BeamTable(TABLE),
    "beams over pages": BeamTable(TABLE, 2),
}


@pytest.mark.parametrize("name", LOOKED_UP)
def test_slots_are_found(name: str, device: torch.device) -> None:
    lookup = LOOKED_UP[name]
    if isinstance(lookup, BeamTable):
        wide = torch.zeros(4, 60, dtype=torch.int32, device=device)  # of which the table is a part
        wide[:, :48] = lookup.indirection
        lookup = BeamTable(wide[:, :48], lookup.shift)
    index = (1000 + torch.randperm(4 * 50).view(4, 50)[:, :48] * 64).int().to(device)
    cache = torch.zeros(1, 1, 16, device=device)
    kv = PagedKV(cache, cache, index, lookup)
    lookup.check(index, ())
    positions = torch.tensor(POSITIONS, device=device)
    for row in (0, 1, 3):
        expected = [by_hand(lookup, index.tolist(), row, position) for position in POSITIONS]
        assert slots_reference(kv, row, positions).tolist() == expected
        slots = torch.zeros(16, dtype=torch.int64, device=device)
        _slots_kernel[(1,)](kv.for_kernels()[1], row, positions, slots, len(POSITIONS), BLOCK=16)
        assert slots.tolist() == expected + [0] * (16 - len(POSITIONS))


def test_a_ring_is_what_it_was_after_an_operator() -> None:
    rotation = SinkRotation(torch.rand(2, 5), torch.rand(2, 5))
    found: list[RingRows] = []
    operator = Operator("test_rings", lambda lookup, out: found.append(lookup), ("out",), RECORDS)
    for lookup in (RingRows(Ring(3, 10, 2), rotation), RingRows(Ring(3, 10, 2)).of_layer((Window(4),))):
        operator.registered(*operator.flat(lookup, torch.zeros(1)))
    again, limited = found
    assert again.ring == Ring(3, 10, 2)
    assert again.rotation is not None
    assert all(torch.equal(a, b) for a, b in zip(again.rotation, rotation, strict=True))
    assert not again.is_limited
    assert (again.data().SEEN.value, again.data().PAIRS.value) == (3, 5)
    assert limited.is_limited
    assert limited.data().SEEN.value == 0


def test_what_lookups_refuse() -> None:
    index = torch.zeros(4, 48, dtype=torch.int32)

    def refused(match: str, lookup: Lookup, index: Tensor = index) -> None:
        with pytest.raises(ValueError, match=match):
            lookup.check(index, (Window(11),))

    refused("must be in 0..31; got 32", Pages(32))
    refused("must be in 0..31; got -1", BeamTable(TABLE, -1))
    refused(r"int32 \[rows, positions\].*rows 4", BeamTable(TABLE[:3]))
    refused("make it contiguous", BeamTable(TABLE.T.contiguous().T))
    refused("over 10 tokens", RingRows(Ring(3, 10)))
    RingRows(Ring(3, 11)).check(index, (Window(11),))
    assert [one for one in LOOKUPS if one.is_plain] == [Pages]
