"""The formats of K/V: names, sizes, what the plain quantiser stores, and pools that hold it."""

import pytest
import torch

from lightkv import KVCache, KVPool, KVSpec
from lightkv.triton_kernels.quantised.kv_format import AS_COMPUTED, Elements, KVFormat
from lightkv.triton_kernels.quantised.quantise_reference import (
    apply_hadamard,
    dequantise,
    hadamard,
    pack,
    quantise,
    unpack,
)

NAMES = ("int8", "int8-hadamard", "int8-g8", "int4", "int4-g16")


def spec_of(
    name: str, dim: int = 32, dtype: torch.dtype = torch.float32, skipped: tuple[int, ...] = ()
) -> KVSpec:
    return KVSpec(2, 3, dim, dim, dtype, KVFormat.parse(name, skipped))


def random_heads(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)) * 3 + 1


@pytest.mark.parametrize(
    ("name", "dim", "least"),
    [("int8", 128, 1.9), ("fp8-static", 128, 2.0), ("int8", 64, 1.85), ("int4", 128, 3.7), ("int4", 64, 3.5)],
)
def test_a_pool_holds_as_many_times_the_tokens(name: str, dim: int, least: float) -> None:
    plain = KVSpec(32, 8, dim, dim, torch.bfloat16)
    ratio = plain.bytes_per_token / spec_of(name, dim, torch.bfloat16).bytes_per_token * 2 * 3 / (32 * 8)
    assert ratio >= least


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_the_buffers(name: str) -> None:
    pool = KVPool(spec_of(name, skipped=(1,)), 11, torch.device("cpu"))
    assert pool.num_bytes == sum(buffer.nbytes for buffer in pool.buffers)
    assert pool.scales(1) is None
    assert pool.k(1).dtype == torch.float32


@pytest.mark.parametrize("has_hadamard", [False, True])
@pytest.mark.parametrize("group", [0, 8])
def test_values_with_a_zero_point_are_finite_in_float16(group: int, has_hadamard: bool) -> None:
    """K/V beyond the largest number of float16 is cut off, and rounding puts nothing beyond it."""
    elements = Elements(4, group=group, has_zero_point=True, has_hadamard=has_hadamard)
    torch.manual_seed(0)
    signs = torch.randn(500, 64).sign()
    for heads in (
        torch.randn(500, 64) * 1e5,
        signs * (65_280 + 400 * torch.rand(500, 64)),
        65_280 - 4000 * torch.rand(500, 1) * torch.rand(500, 64),
        torch.full((1, 64), torch.inf) if not has_hadamard else torch.full((1, 64), 1e37),
        torch.full((1, 64), -65_504.0),
    ):
        stored, scales = quantise(heads, elements, torch.float16)
        found = dequantise(stored, scales, elements)
        expected = (apply_hadamard(heads) if has_hadamard else heads).clamp(-65_280, 65_280)
        assert scales.isfinite().all()
        assert found.half().isfinite().all()
        steps = scales.float()[..., : elements.groups(64)].repeat_interleave(64 // elements.groups(64), -1)
        # The zero point is rounded to a multiple of up to 32, and the scale by 2^-11 of itself.
        assert ((found - expected).abs() <= 0.51 * steps + 16 + 1).all()


@pytest.mark.parametrize("name", ["fp8", "int4-sym-g8", "k16v8", "int8-g0", "fp8-static-g8", "int8-", ""])
def test_an_unknown_name_is_refused_with_those_that_there_are(name: str) -> None:
    with pytest.raises(ValueError, match=r"choose one of auto, int8, int8-hadamard, .*int4-gN"):
        KVFormat.parse(name)


@pytest.mark.parametrize(
    ("name", "dim", "skipped", "told"),
    [
        ("int8-g8", 12, (), "12 K dims do not fit 8 elements"),
        ("int8", 5, (), "5 K dims do not fit 2 elements"),
        ("int4", 6, (), "6 K dims do not fit 4 elements"),
        ("int8", 8, (0, 7), r"layers \[7\] .* the model has 2"),
    ],
)
def test_a_format_that_does_not_fit_the_model_is_refused(
    name: str, dim: int, skipped: tuple[int, ...], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        spec_of(name, dim, skipped=skipped)
    with pytest.raises(ValueError, match="counted from 0"):
        KVFormat.parse("int8", (-1,))


@pytest.mark.parametrize("name", NAMES)
def test_values_are_off_by_half_a_step_at_most(name: str) -> None:
    elements = KVFormat.parse(name).elements
    x = random_heads(50, 3, 32)
    stored, scales = quantise(x, elements, torch.float32)
    found = dequantise(stored, scales, elements)
    expected = apply_hadamard(x) if elements.has_hadamard else x
    groups = elements.groups(32)
    step = scales[..., :groups].repeat_interleave(32 // groups, -1)
    assert ((found - expected).abs() <= step * 0.5001).all()


def test_fp8_is_off_by_a_sixteenth_at_most() -> None:
    elements = KVFormat.parse("fp8-static").elements
    x, scale = random_heads(50, 3, 32), torch.full((50, 3, 1), 0.05)
    stored, scales = quantise(x, elements, torch.float32, scale)
    error = (dequantise(stored, scales, elements) - x).abs()
    assert (error <= x.abs() / 16 + scale * 2**-9).all()
    assert stored.dtype == torch.float8_e4m3fn


def test_four_bits_put_the_even_element_in_the_low_nibble() -> None:
    packed = pack(torch.tensor([1.0, -2.0, 7.0, -9.0]), Elements(4))
    assert packed.tolist() == [0xE1, 0x97]
    assert unpack(packed, Elements(4)).tolist() == [1.0, -2.0, 7.0, -7.0]


def test_heads_of_zeros_and_of_one_value_stay_what_they_are() -> None:
    for name in NAMES:
        elements = KVFormat.parse(name).elements
        for value in (0.0, 2.0):
            x = torch.full((2, 16), value)
            stored, scales = quantise(x, elements, KVFormat.parse(name).scale_dtype)
            found = dequantise(stored, scales, elements)
            if elements.has_hadamard:
                found = apply_hadamard(found)
            assert torch.allclose(found, x, atol=1e-2 if value else 0.0), name


@pytest.mark.parametrize("dim", [16, 80, 96, 128])
def test_the_hadamard_transform_keeps_lengths_and_is_its_own_inverse(dim: int) -> None:
    matrix = hadamard(dim)
    assert torch.allclose(matrix @ matrix, torch.eye(dim), atol=1e-6)
    assert torch.equal(matrix, matrix.T)


@pytest.mark.parametrize("name", NAMES)
def test_a_pool_reads_what_the_quantiser_wrote_and_leaves_other_slots(
    name: str, device: torch.device
) -> None:
    spec = spec_of(name, skipped=(0,))
    pool = KVPool(spec, 20, device)
    k, v = (random_heads(2, 4, 3, 32).to(device)).unbind()
    slots = torch.tensor([3, 17, 5, 9], device=device)
    for buffer in pool.buffers:
        buffer.zero_()
    for layer_idx in (0, 1):
        pool.write(layer_idx, slots, k, v)
    found = pool.read(0, slots)
    assert torch.equal(found[0], k)
    assert torch.equal(found[1], v)
    elements = spec.format.elements
    for found, x in zip(pool.read(1, slots), (k, v), strict=True):
        x = dequantise(*quantise(x, elements, spec.format.scale_dtype), elements)
        assert torch.equal(found, apply_hadamard(x) if elements.has_hadamard else x)
    others = torch.tensor([slot for slot in range(20) if slot not in slots.tolist()], device=device)
    for buffer in pool.buffers:
        assert not buffer.view(torch.uint8)[others].any()


def test_static_scales_have_to_be_set_and_are_those_of_every_slot() -> None:
    spec = spec_of("fp8-static", dtype=torch.float16)
    pool = KVPool(spec, 20, torch.device("cpu"))
    assert spec.bytes_per_token == 2 * 3 * 64
    slots = torch.tensor([4, 2])
    k, v = random_heads(2, 2, 3, 32).unbind()
    for use in (lambda: pool.write(1, slots, k, v), lambda: pool.read(1, slots), lambda: pool.scales(1)):
        with pytest.raises(ValueError, match=r"scales of layer 1 are not set: .*choose a format"):
            use()
    for layer_idx in (0, 1):
        pool.set_static_scales(layer_idx, torch.tensor([0.5]), torch.tensor([0.25, 0.5, 1.0]))
    pool.write(1, slots, k, v)
    found = pool.read(1, slots)
    assert torch.equal(found[0], ((k / 0.5).to(torch.float8_e4m3fn).float() * 0.5).half())
    for wrong in (0.0, float("nan"), -1.0):
        with pytest.raises(ValueError, match=r"scales of layer 0 .*choose a format"):
            pool.set_static_scales(0, torch.tensor([wrong]), torch.tensor([1.0]))
    with pytest.raises(ValueError, match="no static scales"):
        KVPool(spec_of("int8"), 5, torch.device("cpu")).set_static_scales(0, torch.ones(1), torch.ones(1))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_what_is_exported_is_imported_bit_for_bit(name: str) -> None:
    caches = [KVCache(spec_of(name), 40, 4, 32, device="cpu") for _ in range(2)]
    sequence = caches[0].open([5, 6, 7, 8])
    slots = caches[0].extend([sequence], [4]).long()
    pool = caches[0].memory.pool
    for layer_idx in (0, 1):
        pool.write(layer_idx, slots, *random_heads(2, 4, 3, 32).unbind())
    exported = caches[0].export(sequence)
    there = caches[1].import_sequence([5, 6, 7, 8, 9], exported)
    for ours, theirs in zip(pool.buffers, caches[1].memory.pool.buffers, strict=True):
        assert torch.equal(ours[slots], theirs[caches[1].slots(there).long()])
    other = KVCache(spec_of("auto"), 40, 4, 32, device="cpu")
    with pytest.raises(ValueError, match="give the ids"):
        other.import_sequence([5, 6, 7, 8, 9], exported)
    for cache, one in zip(caches, (sequence, there), strict=True):
        cache.close(one)
        cache.check()


def test_the_format_of_a_plain_pool_is_as_computed() -> None:
    assert KVFormat.parse("auto") == AS_COMPUTED == spec_of("auto").format
    assert not AS_COMPUTED.is_quantised
