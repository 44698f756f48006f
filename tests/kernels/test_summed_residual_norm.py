"""Compares the sum over ranks with residual and norm with its reference. The other ranks' memory is this
process's, and they have signalled before, as ranks do that came first."""

import pytest
import torch

from lightkv.triton_kernels.layers.summed_residual_norm import (
    MAX_PROGRAMS,
    Terms,
    summed_residual_norm,
    summed_residual_norm_reference,
)
from lightkv.triton_kernels.norms import Norm
from tests.support.rounding import close


@pytest.mark.parametrize(
    ("num_rows", "num_ranks", "rank", "dim"),
    [
        (1, 2, 0, 64),
        (5, 2, 1, 100),
        (3, 4, 2, 48),
        pytest.param(MAX_PROGRAMS + 3, 2, 0, 32, marks=pytest.mark.slow),
    ],
)
def test_the_sum_is_added_and_normalised(
    device: torch.device, num_rows: int, num_ranks: int, rank: int, dim: int
) -> None:
    torch.manual_seed(dim)
    dtypes = [torch.float32, torch.float16] + ([torch.bfloat16] if device.type == "cuda" else [])
    for dtype in dtypes:
        terms = [torch.randn(num_rows, dim, device=device).to(dtype) for _ in range(num_ranks)]
        signals = [
            torch.zeros(MAX_PROGRAMS, num_ranks, dtype=torch.int32, device=device) for _ in range(num_ranks)
        ]
        weight = torch.randn(dim, device=device).to(dtype)
        for norm, post, scale in (
            (Norm(weight, None, 1e-5), None, 1.0),
            (None, Norm(weight, None, 1e-6, plus_one=True), 1.0),
            (Norm(weight, None, 1e-5), Norm(None, None, 1e-5), 0.22),
        ):
            residual = torch.randn(num_rows, dim, device=device).to(dtype)
            programs = min(num_rows, MAX_PROGRAMS)
            others = [other for other in range(num_ranks) if other != rank]
            for other in range(num_ranks):
                signals[other].zero_()
            signals[rank][:programs, others] = 1
            addresses = torch.tensor([term.data_ptr() for term in terms], device=device)
            pads = torch.tensor([signal.data_ptr() for signal in signals], device=device)
            given = Terms(terms[rank], addresses, pads, rank)
            hidden, normed = summed_residual_norm(given, residual, norm, post=post, scale=scale)
            wanted = summed_residual_norm_reference(terms, residual, norm, post=post, scale=scale)
            close(hidden, wanted[0])
            close(normed, wanted[1])
            assert not signals[rank].any(), "it has met every rank, and waits for the next sum"
            for other in others:
                assert signals[other][:programs, rank].all()
                assert int(signals[other].sum()) == programs


def test_terms_that_do_not_fit_are_refused(device: torch.device) -> None:
    residual = torch.zeros(3, 16, device=device)
    addresses = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="a term of"):
        summed_residual_norm(
            Terms(torch.zeros(2, 16, device=device), addresses, addresses, 0), residual, None
        )
