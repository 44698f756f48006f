"""Compares `write_kv` with norms of q and k with its reference, and the reference with torch's own norms."""

from typing import NamedTuple

import pytest
import torch

from lightkv.triton_kernels.norms import Norm, norm_reference
from lightkv.triton_kernels.quantised.kv_format import KVFormat
from lightkv.triton_kernels.write.inputs import NO_BIASES, Biases, Changes, HeadNorms, Rotation, StoredKV
from lightkv.triton_kernels.write.write_kv import write_kv, write_kv_reference
from tests.support.combinations import each_value

NUM_SLOTS = 400


class Case(NamedTuple):
    """Heads and what is done to them; `norm`: centred, 1 + weight, rounded before, over all heads."""

    heads: tuple[int, int] = (4, 2)
    dim: int = 32
    norm: tuple[bool, bool, bool, bool] = (False, False, True, False)
    pairs: int = 16
    interleaved: bool = False
    kv_format: str = ""
    weight: str = "dim"  # dim, heads or none
    biases: bool = False
    tokens: int = 5


CASES = {
    "qwen3": Case(tokens=17),
    "gemma3": Case(norm=(False, True, False, False), pairs=8),
    "cohere": Case(norm=(True, False, False, False), weight="heads", interleaved=True),
    "olmo": Case(norm=(False, False, False, True), weight="heads", heads=(6, 6), dim=24, pairs=12),
    "all heads, grouped": Case(norm=(True, False, True, True), weight="heads", interleaved=True, biases=True),
    "no weight, no positions": Case(weight="none", pairs=0, biases=True),
    "all heads, of one": Case(norm=(False, False, False, True), weight="heads", heads=(4, 1)),
    "int8": Case(kv_format="int8", tokens=1),
    "int8, partial": Case(kv_format="int8", norm=(False, True, True, False), pairs=8, interleaved=True),
    "int4, all heads": Case(kv_format="int4", norm=(False, False, True, True), weight="heads"),
    "int8, all heads": Case(
        kv_format="int8", norm=(False, False, False, True), weight="heads", heads=(3, 3), dim=24, pairs=12
    ),
}


def make_norms(case: Case, dtype: torch.dtype, device: torch.device) -> HeadNorms:
    def one(num_heads: int) -> Norm:
        shape = {"dim": (case.dim,), "heads": (num_heads, case.dim), "none": None}[case.weight]
        weight = None if shape is None else torch.randn(shape, device=device).to(dtype)
        return Norm(weight, None, 1e-6, *flags)

    *flags, over_all = case.norm
    return HeadNorms(*map(one, case.heads), over_all=over_all)


def make_store(case: Case, dtype: torch.dtype, device: torch.device) -> StoredKV:
    _, num_kv_heads = case.heads
    if not case.kv_format:
        k, v = (torch.zeros(NUM_SLOTS, num_kv_heads, case.dim, dtype=dtype, device=device) for _ in range(2))
        return StoredKV(k, v)
    layer = KVFormat.parse(case.kv_format)
    bits = layer.elements.bits
    k, v = (
        torch.zeros(NUM_SLOTS, num_kv_heads, case.dim * bits // 8, dtype=layer.elements.stored, device=device)
        for _ in range(2)
    )
    num_scales = layer.num_scales(case.dim, case.dim)
    scales = torch.zeros(NUM_SLOTS, num_kv_heads, num_scales, dtype=layer.scale_dtype, device=device)
    return StoredKV(k, v, scales, layer)


def check(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    num_heads, num_kv_heads = case.heads
    sizes = num_heads, num_kv_heads, num_kv_heads
    qkv = 3 * torch.randn(case.tokens, sum(sizes), case.dim, device=device).to(dtype)
    q, k, v = qkv.split(sizes, dim=1)
    norms = make_norms(case, dtype, device)
    rotation, biases = None, NO_BIASES
    if case.pairs:
        angles = torch.randn(case.tokens, case.pairs, device=device)
        rotation = Rotation(angles.cos(), angles.sin(), case.interleaved)
    if case.biases:
        biases = Biases(*(torch.randn(count, case.dim, device=device) for count in sizes))
    slots = torch.randperm(NUM_SLOTS - 1, device=device)[: case.tokens] + 1
    found = []
    for write in (write_kv, write_kv_reference):
        stored, own_q, before = make_store(case, dtype, device), q.clone(), k.clone()
        write(k, v, stored, slots, q=own_q, by=Changes(rotation, biases, norms))
        assert torch.equal(k, before)
        found.append((own_q, stored))
    (ours_q, ours), (expected_q, expected) = found
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(ours_q, expected_q, rtol=4 * eps, atol=16 * eps)
    if not case.kv_format:
        torch.testing.assert_close(ours.k, expected.k, rtol=4 * eps, atol=16 * eps)
        assert torch.equal(ours.v, expected.v)
        return
    for of_ours, of_expected in zip(ours[:2], expected[:2], strict=True):  # an element may be off by one
        assert (of_ours.view(torch.uint8) != of_expected.view(torch.uint8)).float().mean() < 0.02
    torch.testing.assert_close(ours.scales, expected.scales, rtol=0.01, atol=0.01)


@each_value(name=list(CASES), dtype=[torch.float32, torch.float16])
def test_norms_are_those_of_the_reference(name: str, dtype: torch.dtype, device: torch.device) -> None:
    check(CASES[name], dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 33, 300])
@pytest.mark.parametrize("name", CASES)
def test_norms_in_bf16_of_real_shapes(name: str, tokens: int) -> None:
    case = CASES[name]
    heads = (32, {1: 1, 2: 8}.get(case.heads[1], 32))
    check(
        case._replace(tokens=tokens, heads=heads, dim=128, pairs=4 * case.pairs),
        torch.bfloat16,
        torch.device("cuda"),
    )


def test_the_reference_is_torch_s_norm() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(3, 4, 8), torch.randn(4, 8)
    rms = torch.nn.functional.rms_norm
    ours = norm_reference(x, Norm(weight[0], None, 1e-5), x.dtype)
    torch.testing.assert_close(ours, rms(x, (8,), weight[0], 1e-5))
    ours = norm_reference(x, Norm(weight, None, 1e-5), x.dtype, (1, 2))
    torch.testing.assert_close(ours, rms(x.flatten(1), (32,), weight.flatten(), 1e-5).view(x.shape))
    ours = norm_reference(x, Norm(weight[0], None, 1e-5, centred=True), x.dtype)
    torch.testing.assert_close(ours, torch.nn.functional.layer_norm(x, (8,), weight[0], eps=1e-5))
    ours = norm_reference(x, Norm(weight[0], None, 1e-5, plus_one=True), x.dtype)
    torch.testing.assert_close(ours, rms(x, (8,), weight[0] + 1.0, 1e-5))


def test_norms_that_do_not_fit_are_refused(device: torch.device) -> None:
    q, k = torch.ones(2, 4, 8, device=device), torch.ones(2, 2, 8, device=device)
    stored = StoredKV(torch.zeros(9, 2, 8, device=device), torch.zeros(9, 2, 8, device=device))
    slots = torch.tensor([1, 2], device=device)
    plain = Norm(None, None, 1e-5)
    with pytest.raises(ValueError, match="no q; pass q"):
        write_kv(k, k, stored, slots, by=Changes(norms=HeadNorms(plain, plain)))
    biased = plain._replace(bias=torch.ones(8, device=device))
    with pytest.raises(ValueError, match="norm of k has a bias"):
        write_kv(k, k, stored, slots, q=q, by=Changes(norms=HeadNorms(plain, biased)))
    wrong = Norm(torch.ones(4, device=device), None, 1e-5)
    with pytest.raises(ValueError, match=r"norm of k must be \[dim\] \(8,\) or \[heads, dim\] \(2, 8\)"):
        write_kv(k, k, stored, slots, q=q, by=Changes(norms=HeadNorms(plain, wrong)))
    assert not stored.k.any()
    assert torch.equal(q, torch.ones_like(q))
