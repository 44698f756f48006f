"""The table of beams that a lookup reads, from TensorRT-LLM's."""

import pytest
import torch

from lightkv.triton_kernels.attention.lookups.beam_table import beam_indirection


def test_a_table_of_beams_names_rows(device: torch.device) -> None:
    torch.manual_seed(0)
    beams = torch.randint(3, (2, 3, 9), dtype=torch.int32, device=device)
    rows = torch.tensor([[5, 1, 4], [2, 7, 3]], device=device)
    out = torch.full((9, 9), -1, dtype=torch.int32, device=device)
    beam_indirection(beams, rows, out)
    for request in range(2):
        for beam in range(3):
            expected = [int(rows[request, other]) for other in beams[request, beam].tolist()]
            assert out[int(rows[request, beam])].tolist() == expected
    assert (out[[0, 6, 8]] == -1).all()
    before = out.clone()
    for wrong in (
        (beams.long(), rows, out),
        (beams, rows[:1], out),
        (beams, rows.int(), out),
        (beams, rows, out[:, :8]),
    ):
        with pytest.raises(ValueError, match="must be int"):
            beam_indirection(*wrong)
    assert torch.equal(out, before)
