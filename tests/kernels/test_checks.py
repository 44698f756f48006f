"""Which tensors a text of `checks.Tensors` lets pass, and what it says of others."""

import pytest
import torch
from torch import Tensor

from lightkv.triton_kernels.checks import Tensors

TAKEN = Tensors(
    q="floats [T, 2, D] with a last stride of 1",
    lengths="contiguous int32 or int64 [B]",
    starts="contiguous int32 [B + 1]",
)
Q, LENGTHS, STARTS = (
    torch.zeros(5, 2, 8),
    torch.zeros(3, dtype=torch.int64),
    torch.zeros(4, dtype=torch.int32),
)


def test_sizes_are_returned_by_name_and_a_tensor_may_be_left_out() -> None:
    sizes = TAKEN.check({"D": 8}, q=Q, lengths=LENGTHS, starts=STARTS)
    assert {name: sizes[name] for name in "TDB"} == {"T": 5, "D": 8, "B": 3}
    assert TAKEN.check({}, q=None, starts=STARTS)["B"] == 3


@pytest.mark.parametrize(
    ("name", "tensor", "found"),
    [
        ("q", Q[0], r"q must be floats \[T, 2, D\] with a last stride of 1.*got torch.float32 \(2, 8\)"),
        ("q", Q[:, :1], r"with T 5, D 8; got torch.float32 \(5, 1, 8\)"),
        ("q", Q[..., :4], r"with T 5, D 8; got torch.float32 \(5, 2, 4\)"),
        ("q", Q.int(), "got torch.int32"),
        ("q", torch.zeros(5, 8, 2).transpose(1, 2), r"strides \(16, 1, 2\); make it contiguous"),
        ("lengths", LENGTHS.float(), r"lengths must be contiguous int32 or int64 \[B\].*got torch.float32"),
        (
            "starts",
            STARTS[:3],
            r"starts must be contiguous int32 \[B \+ 1\], with B 3; got torch.int32 \(3,\)",
        ),
        ("starts", STARTS.repeat(2)[::2], r"strides \(2,\); make it contiguous"),
        ("starts", [0, 1, 2, 3], r"got \[0, 1, 2, 3\]"),
    ],
)
def test_refuses(name: str, tensor: Tensor, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        TAKEN.check({"T": 5, "D": 8}, **{"q": Q, "lengths": LENGTHS, "starts": STARTS, name: tensor})
