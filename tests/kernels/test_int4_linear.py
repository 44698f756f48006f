"""Products of a few tokens with weights of 4 bits, in the order of humming-kernels, equal the dense ones."""

import sys
from types import SimpleNamespace

import pytest
import torch

from lightkv.integrations.weights.humming import (
    HummingProduct,
    LibraryTensors,
    has_known_order,
    in_order,
    words_of,
)
from lightkv.triton_kernels.layers.int4_linear import (
    MAX_TOKENS,
    Int4Tensors,
    int4_launch,
    int4_linear,
    int4_linear_reference,
    tickets_for,
)
from lightkv.triton_kernels.tuning import DeviceClass


def _numbers(
    num_rows: int, dim: int, group: int, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(num_rows + dim + group)
    numbers = torch.randint(0, 16, (num_rows, dim), dtype=torch.uint8, device=device)
    zeros = torch.randint(0, 16, (num_rows, dim // group), dtype=torch.uint8, device=device)
    return numbers, zeros, torch.rand(num_rows, dim // group, device=device) * 0.02 + 0.001


def _dense(numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    group = numbers.shape[1] // scales.shape[1]
    zero = torch.full_like(scales, 8) if zeros is None else zeros.double()
    return ((numbers.unflatten(1, (-1, group)) - zero.unsqueeze(-1)) * scales.double().unsqueeze(-1)).flatten(
        1
    )


def _ordered(numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> Int4Tensors:
    """Puts a weight in order, one number after the other."""
    num_rows, dim = numbers.shape
    words = torch.zeros(dim // 16, num_rows * 2, dtype=torch.int64)
    for row in range(num_rows):
        block, r, lower, g = row // 64, row % 64 // 16, row % 16 // 8, row % 8
        for column in range(dim):
            u, far, t, second = column // 16, column % 16 // 8, column % 8 // 2, column % 2
            place = block * 128 + (g * 4 + t) * 4 + r
            words[u, place] |= int(numbers[row, column]) << 4 * (4 * second + 2 * lower + far)
    rows = [block * 64 + j * 8 + i for block in range(num_rows // 64) for i in range(8) for j in range(8)]
    ordered = None
    if zeros is not None:
        parts = zeros[rows].t().long().unflatten(1, (-1, 8))
        ordered = sum(parts[:, :, i] << 4 * i for i in range(8)).to(torch.uint32).view(torch.int32)
    return Int4Tensors(words.to(torch.uint32).view(torch.int32), scales[rows].t().contiguous(), ordered)


@pytest.mark.parametrize("has_zeros", [False, True])
def test_the_reference_knows_the_order(has_zeros: bool) -> None:
    numbers, zeros, scales = _numbers(128, 64, 32, "cpu")
    given = zeros if has_zeros else None
    x, bias = torch.randn(3, 64), torch.randn(128)
    found = int4_linear_reference(x, _ordered(numbers, scales, given), bias, 128)
    expected = x.double() @ _dense(numbers, scales, given).t() + bias.double()
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_rows", [64, 4096, 6144, 28672, 152064])
@pytest.mark.parametrize("num_groups", [1, 4, 28, 32, 112, 592])
def test_programs_that_share_rows_have_a_group_for_every_warp(num_rows: int, num_groups: int) -> None:
    num_warps, splits = int4_launch(DeviceClass(132, 227 * 1024, 9), num_rows, num_groups)
    assert splits == 1 or num_warps * splits <= num_groups
    assert splits == 1 or -(-num_rows // 64) * splits <= 3 * 132


@pytest.mark.parametrize(
    ("x", "out"),
    [
        (torch.zeros(2, 32), torch.zeros(2, 128)),
        (torch.zeros(2, 64).half(), torch.zeros(2, 128)),
        (torch.zeros(2, 64), torch.zeros(2, 256)),
        (torch.zeros(2, 64), torch.zeros(2, 256)[:, :128]),
        (torch.zeros(2, 128)[:, ::2], torch.zeros(2, 128)),
        (torch.zeros(9, 64), torch.zeros(9, 128)),
    ],
)
def test_what_does_not_fit_the_weight_is_refused(x: torch.Tensor, out: torch.Tensor) -> None:
    weight = Int4Tensors(torch.zeros(4, 256, dtype=torch.int32), torch.zeros(2, 128), None)
    with pytest.raises(ValueError, match="contiguous tokens of the weight's columns and type"):
        int4_linear(x, weight, None, tickets_for(128, torch.device("cpu")), out)


@pytest.mark.parametrize(
    ("version", "major", "is_known"), [("0.1.20", 9, True), ("0.1.21", 9, False), ("0.1.20", 10, False)]
)
def test_the_order_is_known_of_one_version_on_one_kind_of_gpu(
    monkeypatch: pytest.MonkeyPatch, version: str, major: int, is_known: bool
) -> None:
    monkeypatch.setitem(sys.modules, "humming", SimpleNamespace(__version__=version))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    assert has_known_order.__wrapped__(torch.device("cuda")) is is_known


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_rows", "dim", "group", "has_zeros", "has_bias"),
    [
        (6144, 4096, 128, False, False),
        (4096, 14336, 128, True, True),
        (152, 128, 32, True, True),
        (64, 64, 64, False, True),
        (192, 2048, 32, True, False),
        (256, 1088, 64, True, True),
        (3584, 18944, 64, False, False),
        (37888, 3584, 128, False, False),
    ],
)
def test_few_tokens_equal_the_numbers_and_the_library(
    num_rows: int, dim: int, group: int, has_zeros: bool, has_bias: bool, dtype: torch.dtype
) -> None:
    numbers, zeros, scales = _numbers(num_rows, dim, group, "cuda")
    scales = scales.to(dtype)
    given = zeros if has_zeros else None
    bias = torch.randn(num_rows, device="cuda", dtype=dtype) if has_bias else None
    packed = LibraryTensors(
        "uint4", words_of(numbers, 1), scales, (1, group), None if given is None else words_of(given, 0)
    )
    product = HummingProduct(in_order(packed, bias, dtype))
    assert product._few is not None
    weight = _dense(numbers, scales, given)
    for num_tokens in (1, 2, 5, MAX_TOKENS):
        x = torch.randn(num_tokens, dim, device="cuda", dtype=dtype)
        expected = x.double() @ weight.t() + (0 if bias is None else bias.double())
        reference = int4_linear_reference(x, product._few[0], bias, num_rows).double()
        torch.testing.assert_close(reference, expected, atol=1e-3 * float(expected.abs().max()), rtol=1e-3)
        found = [product.matmul(x) for _ in range(3)]
        assert all(torch.equal(found[0], one) for one in found)  # parts are added up in their order
        limit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-10
        assert (found[0].double() - expected).abs().max() <= limit * expected.abs().max()
    many = product.matmul(x.repeat(2, 1))  # by the library
    assert (many[:MAX_TOKENS].double() - expected).abs().max() <= 4 * limit * expected.abs().max()
    assert not product._few[2].any()


@pytest.mark.gpu
def test_products_in_a_graph_read_what_the_one_before_wrote() -> None:
    """They are launched while the one before still runs."""
    products = []
    for num_rows, dim in ((4096, 4096), (4096, 4096), (8192, 4096), (4096, 8192)):
        numbers, _, scales = _numbers(num_rows, dim, 128, "cuda")
        packed = LibraryTensors("uint4", words_of(numbers, 1), scales.bfloat16(), (1, 128))
        products.append(HummingProduct(in_order(packed, None, torch.bfloat16)))
    x = torch.zeros(3, 4096, device="cuda", dtype=torch.bfloat16)

    def chain(rows: torch.Tensor) -> torch.Tensor:
        for product in products:
            rows = product.matmul(rows) * 0.1
        return rows

    chain(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(x)
    for seed in range(20):
        torch.manual_seed(seed)
        x.copy_(torch.randn(3, 4096))
        graph.replay()
        replayed = found.clone()
        assert replayed.isfinite().all()
        assert torch.equal(replayed, chain(x))
