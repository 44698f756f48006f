"""Compares `write_kv` with biases and rotary positions, in every layout, with its reference, bit by bit, and
the reference with transformers, over tables of the common scalings."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.glm import modeling_glm
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama

from lightkv.triton_kernels.norms import Norm
from lightkv.triton_kernels.write.inputs import Biases, Changes, HeadNorms, Rotation, StoredKV
from lightkv.triton_kernels.write.write_kv import (
    _write_kv,
    rotate_reference,
    split_qkv,
    write_kv,
    write_kv_reference,
)
from tests.support.attention.feature_table import covers
from tests.support.combinations import each_pair, slow_cases

NUM_SLOTS = 64
NUM_POSITIONS = 40


def tables(
    num_pairs: int, device: torch.device | str, num_positions: int = NUM_POSITIONS
) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of the plain frequencies, as views of one buffer, so that their rows are
    apart."""
    inverse = 10000.0 ** -(torch.arange(num_pairs, dtype=torch.float64) / num_pairs)
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * inverse
    both = torch.stack((angles.cos(), angles.sin()), dim=1).float().to(device)
    return both[:, 0], both[:, 1]


def rotation(
    num_tokens: int,
    num_pairs: int,
    device: torch.device | str,
    interleaved: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Rotation:
    """Returns the rotation by random positions, whose tables are views of one buffer."""
    positions = torch.randint(NUM_POSITIONS, (num_tokens,), device=device)
    rows = torch.stack(tables(num_pairs, device), 1)[positions].to(dtype)
    return Rotation(rows[:, 0], rows[:, 1], interleaved)


def check_rotary(
    *,
    device: torch.device | str,
    num_tokens: int = 20,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    key_dim: int = 64,
    value_dim: int = 64,
    num_pairs: int = 32,
    interleaved: bool = False,
    biases: str = "",
    with_q: bool = True,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    table_dtype: torch.dtype = torch.float32,
) -> None:
    """Compares a fused projection and its bias with the reference; other elements have to stay as they were."""
    sizes = (num_heads, num_kv_heads, key_dim, value_dim)
    width = num_heads * key_dim + num_kv_heads * (key_dim + value_dim)
    qkv = torch.randn(num_tokens, width).to(device, dtype)
    bias = split_qkv(torch.randn(width).to(device, dtype), *sizes)
    settings: dict[str, Any] = {
        "rotation": rotation(num_tokens, num_pairs, device, interleaved, table_dtype) if num_pairs else None,
        "biases": Biases(*(one if name in biases else None for name, one in zip("qkv", bias, strict=True))),
    }
    slots = (torch.randperm(NUM_SLOTS - 1, device=device)[:num_tokens] + 1).int()

    results = []
    for write in (write_kv, write_kv_reference):
        q, k, v = split_qkv(qkv.clone(), *sizes)
        shape = (NUM_SLOTS, num_kv_heads)
        k_cache = torch.full((*shape, key_dim), torch.nan, dtype=cache_dtype or dtype, device=device)
        v_cache = torch.full((*shape, value_dim), torch.nan, dtype=cache_dtype or dtype, device=device)
        write(k, v, StoredKV(k_cache, v_cache), slots, q if with_q else None, Changes(**settings))
        results.append((q, k, v, k_cache, v_cache))
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=0.0, atol=0.0, equal_nan=True)
    _, k, v, k_cache, _ = results[0]
    original = split_qkv(qkv, *sizes)
    assert torch.equal(k, original[1])
    assert torch.equal(v, original[2])
    assert not k_cache[slots.long()].isnan().any()


@covers("rotary, all dims", "NeoX", "GPT-J")
@pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "gptj"])
@pytest.mark.parametrize("num_tokens", [0, 1, 16, 33], ids="T{}".format)
def test_rotates_q_and_k(device: torch.device, num_tokens: int, interleaved: bool) -> None:
    torch.manual_seed(num_tokens)
    check_rotary(device=device, num_tokens=num_tokens, interleaved=interleaved)


@covers("rotary, some of the dims", "NeoX", "GPT-J")
@covers("QKV bias", "NeoX", "GPT-J")
@each_pair(
    dims=[
        (64, 64, 16),
        (80, 80, 40),
        (80, 80, 16),
        (96, 96, 48),
        (128, 64, 64),
        (192, 128, 32),
        (256, 256, 32),
        (6, 3, 1),
    ],
    interleaved=[False, True],
    biases=["", "qkv"],
)
def test_partial_rotary_dims(
    device: torch.device, dims: tuple[int, int, int], interleaved: bool, biases: str
) -> None:
    key_dim, value_dim, num_pairs = dims
    torch.manual_seed(key_dim)
    given = {"key_dim": key_dim, "value_dim": value_dim, "num_pairs": num_pairs}
    check_rotary(device=device, interleaved=interleaved, biases=biases, **given)


@covers("QKV bias", "NeoX", "not rotated")
@pytest.mark.parametrize("num_pairs", [0, 32], ids=["unrotated", "rotated"])
@pytest.mark.parametrize("biases", ["qkv", "q", "k", "v", "qk"])
def test_biases(device: torch.device, biases: str, num_pairs: int) -> None:
    torch.manual_seed(len(biases))
    check_rotary(device=device, biases=biases, num_pairs=num_pairs, with_q=bool(num_pairs) or "q" in biases)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"),
    [(1, 1), (6, 3), (20, 4), (4, 16), *slow_cases((3, 1), (8, 8), (16, 4))],
    ids=str,
)
def test_heads_are_divided_among_programs(device: torch.device, num_heads: int, num_kv_heads: int) -> None:
    torch.manual_seed(num_heads)
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    check_rotary(device=device, key_dim=16, value_dim=16, num_pairs=8, num_tokens=20, **heads)
    check_rotary(device=device, key_dim=16, value_dim=16, num_pairs=8, num_tokens=20, with_q=False, **heads)


def test_casts_each_result_once(device: torch.device) -> None:
    torch.manual_seed(6)
    for settings in (
        {"dtype": torch.float16},
        {"dtype": torch.float16, "cache_dtype": torch.float32},
        {"dtype": torch.float32, "cache_dtype": torch.float16},
    ):
        check_rotary(device=device, biases="qkv", **settings)


@covers("tables with a row for each token", "NeoX", "GPT-J")
@pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "gptj"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
def test_tables_in_the_models_type_with_a_row_for_each_token(
    device: torch.device, dtype: torch.dtype, interleaved: bool
) -> None:
    for num_tokens in (1, 20, 33):
        torch.manual_seed(num_tokens)
        check_rotary(
            device=device,
            num_tokens=num_tokens,
            num_pairs=24,
            interleaved=interleaved,
            dtype=dtype,
            table_dtype=dtype,
        )


SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=[scaling["rope_type"] for scaling in SCALINGS])
def test_every_scaling_of_transformers_is_a_table(device: torch.device, scaling: dict[str, Any]) -> None:
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64 if scaling["rope_type"] == "dynamic" else 256,
        rope_parameters={"rope_theta": 10000.0, **scaling},
    )
    embedding = modeling_llama.LlamaRotaryEmbedding(config)
    every = torch.arange(200)[None]
    q, k = torch.randn(20, 4, 64), torch.randn(20, 2, 64)
    positions = torch.randint(200, (20,))
    positions[0] = 199
    cos, sin = (table[0] for table in embedding(q, every))  # [200, 64], both halves alike
    wanted_q, wanted_k = modeling_llama.apply_rotary_pos_emb(q, k, cos[positions], sin[positions])

    by = Rotation(cos[positions, :32].to(device), sin[positions, :32].to(device))
    cache = torch.full((NUM_SLOTS, 4, 64), torch.nan, device=device)
    slots = torch.randperm(NUM_SLOTS - 1, device=device)[:20] + 1
    q, k = q.to(device), k.to(device)
    write_kv(k, k, StoredKV(cache[:, :2], cache[:, 2:]), slots, q=q, by=Changes(by))
    torch.testing.assert_close(q.cpu(), wanted_q, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(cache[slots, :2].cpu(), wanted_k, rtol=1e-6, atol=1e-6)
    assert torch.equal(cache[slots, 2:], k)


def test_interleaved_pairs_are_those_of_gptj_and_glm(device: torch.device) -> None:
    torch.manual_seed(8)
    q, k = torch.randn(10, 4, 64), torch.randn(10, 2, 64)
    cos, sin = tables(16, "cpu")  # 32 of the 64 dims are rotated
    positions = torch.randint(NUM_POSITIONS, (10,))
    per_token = cos[positions], sin[positions]
    glm = modeling_glm.apply_rotary_pos_emb(q, k, *(torch.cat((half, half), 1) for half in per_token))
    for x, of_glm in zip((q, k), glm, strict=True):
        of_gptj = modeling_gptj.apply_rotary_pos_emb(
            x[None, ..., :32], per_token[1][None], per_token[0][None]
        )
        ours = rotate_reference(x, Rotation(*per_token, interleaved=True))
        torch.testing.assert_close(ours, of_glm, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours, torch.cat((of_gptj[0], x[..., 32:]), 2), rtol=1e-6, atol=1e-6)

    cache = torch.full((NUM_SLOTS, 4, 64), torch.nan, device=device)
    slots = torch.randperm(NUM_SLOTS - 1, device=device)[:10] + 1
    q, k, cos, sin = (x.to(device) for x in (q, k, *per_token))
    by = Rotation(cos, sin, interleaved=True)
    write_kv(k, k, StoredKV(cache[:, :2], cache[:, 2:]), slots, q=q, by=Changes(by))
    torch.testing.assert_close(q.cpu(), glm[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(cache[slots, :2].cpu(), glm[1], rtol=1e-6, atol=1e-6)


def test_padding_tokens_write_slot_0_alone(device: torch.device) -> None:
    torch.manual_seed(9)
    q, k, v = torch.randn(3, 8, 2, 16, device=device)
    cache = torch.zeros(NUM_SLOTS, 4, 16, device=device)
    slots = torch.tensor([7, 3, 0, 0, 0, 0, 0, 0], device=device)
    expected = cache.clone()
    by = rotation(8, 8, device)
    write_kv(k, v, StoredKV(cache[:, :2], cache[:, 2:]), slots, q=q.clone(), by=Changes(by))
    write_kv_reference(k, v, StoredKV(expected[:, :2], expected[:, 2:]), slots, q=q.clone(), by=Changes(by))
    assert torch.equal(cache[1:], expected[1:])


def test_splits_a_fused_projection_without_a_copy(device: torch.device) -> None:
    qkv = torch.arange(2.0 * (4 * 6 + 2 * (6 + 3)), device=device).view(2, -1)
    q, k, v = split_qkv(qkv, 4, 2, 6, 3)
    assert (q.shape, k.shape, v.shape) == ((2, 4, 6), (2, 2, 6), (2, 2, 3))
    assert torch.equal(torch.cat([part.flatten(1) for part in (q, k, v)], 1), qkv)
    assert {part.untyped_storage().data_ptr() for part in (q, k, v)} == {qkv.untyped_storage().data_ptr()}
    with pytest.raises(ValueError, match="must have 48 dims"):
        split_qkv(qkv, 4, 2, 6)


@covers("fused QKV input and bias", "NeoX", "GPT-J", "not rotated")
@each_pair(interleaved=[False, True], num_pairs=[0, 12, 32], dtype=[torch.float32, torch.float16])
def test_a_fused_projection_with_its_fused_bias(
    device: torch.device, interleaved: bool, num_pairs: int, dtype: torch.dtype
) -> None:
    """Compares q, K and V with complex numbers in float64; dims beyond the rotary ones only get the bias."""
    torch.manual_seed(num_pairs)
    heads, kv_heads, dim, num_tokens = 4, 2, 64, 9
    width = (heads + 2 * kv_heads) * dim
    qkv, bias = torch.randn(num_tokens, width).to(device, dtype), torch.randn(width).to(device, dtype)
    slots = 1 + torch.randperm(num_tokens, device=device)
    k_cache, v_cache = torch.full((2, num_tokens + 2, kv_heads, dim), torch.nan, dtype=dtype, device=device)
    q, k, v = split_qkv(qkv, heads, kv_heads, dim)
    biases = Biases(*split_qkv(bias, heads, kv_heads, dim))
    q_before, by = q.clone(), None
    turn = torch.ones(num_tokens, 1, 0, dtype=torch.complex128, device=device)
    if num_pairs:
        by = rotation(num_tokens, num_pairs, device, interleaved)
        turn = torch.complex(by.cos.double(), by.sin.double())[:, None]
    write_kv(k, v, StoredKV(k_cache, v_cache), slots, q=q, by=Changes(by, biases))

    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    for written, raw, added in ((q, q_before, biases.q), (k_cache[slots], k, biases.k)):
        expected = raw.double() + added.double()
        turned = expected[..., : 2 * num_pairs]
        if interleaved:
            pairs = torch.view_as_complex(turned.unflatten(2, (num_pairs, 2)).contiguous()) * turn
            turned = torch.view_as_real(pairs).flatten(2)
        else:
            pairs = torch.complex(turned[..., :num_pairs], turned[..., num_pairs:]) * turn
            turned = torch.cat((pairs.real, pairs.imag), 2)
        expected = torch.cat((turned, expected[..., 2 * num_pairs :]), 2)
        torch.testing.assert_close(written.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(
        v_cache[slots].double(), v.double() + biases.v.double(), atol=tolerance, rtol=tolerance
    )
    assert k_cache[num_tokens + 1].isnan().all()


def test_refuses_a_rotation_that_does_not_fit(device: torch.device) -> None:
    k = torch.randn(4, 2, 16, device=device)
    q = torch.randn(4, 6, 16, device=device)
    cache = torch.zeros(NUM_SLOTS, 4, 16, device=device)
    slots = torch.arange(1, 5, device=device)
    cos, sin, _ = by = rotation(4, 8, device)
    wide = torch.zeros(4, 9, device=device)
    good: dict[str, Any] = {"q": q, "rotation": by}
    before = q.clone()
    for match, change in [
        ("nothing is to be done", {"rotation": None}),
        ("nothing is to be done", {"rotation": None, "biases": Biases(k=k[0])}),
        ("q must be", {"q": q[:3]}),
        ("q must be", {"q": q[..., :8]}),
        ("q must be", {"q": q.mT.contiguous().mT}),
        (r"cos must be .* T 4; got .*\(40, ", {"rotation": Rotation(*tables(8, device))}),
        ("cos must be float32", {"rotation": Rotation(cos.half(), sin)}),
        ("sin must be float32", {"rotation": Rotation(cos, sin[0])}),
        ("sin must be float32", {"rotation": Rotation(cos, sin.mT.contiguous().mT)}),
        ("sin must be", {"rotation": Rotation(cos, sin[:, :4])}),
        ("9 columns, and 16 dims", {"rotation": Rotation(wide, wide)}),
        ("bias_q must be", {"biases": Biases(q=q[0, :2])}),
        ("bias_k must be", {"biases": Biases(k=q[0])}),
        ("bias_v must be", {"biases": Biases(v=k[0].flatten())}),
        ("bias_v must be", {"biases": Biases(v=k[0].mT.contiguous().mT)}),
        ("bias_q must be floats", {"biases": Biases(q=q[0].int())}),
        ("a bias of q is given, and no q", {"q": None, "biases": Biases(q=q[0])}),
    ]:
        others = good | change
        queries = others.pop("q")
        for write in (write_kv, write_kv_reference):
            with pytest.raises(ValueError, match=match):
                write(k, k, StoredKV(cache[:, :2], cache[:, 2:]), slots, queries, Changes(**others))
    assert not cache.any()
    assert torch.equal(q, before)


def test_rotation_stays_one_operator_under_torch_compile(device: torch.device) -> None:
    torch.manual_seed(10)
    qkv = torch.randn(6, 8 * 16, device=device)
    slots = torch.tensor([3, 1, 9, 2, 7, 8], device=device)
    by = rotation(6, 8, device)
    buffer = torch.zeros(10, 4, 16, device=device)
    expected = buffer.clone()
    q, k, v = split_qkv(qkv.clone(), 4, 2, 16)
    k_cache, v_cache = buffer.clone()[:, :2], buffer.clone()[:, 2:]
    norms = HeadNorms(Norm(k[0, 0], None, 1e-6), Norm(None, None, 1e-6))
    stored = StoredKV(k_cache, v_cache)
    arguments = _write_kv.flat(k, v, stored, slots, q.clone(), Changes(by, Biases(k=k[0]), norms))
    torch.library.opcheck(torch.ops.lightkv.write_kv.default, arguments)

    def step(qkv: Tensor, buffer: Tensor) -> Tensor:
        q, k, v = split_qkv(qkv * 2, 4, 2, 16)
        write_kv(k, v, StoredKV(buffer[:, :2], buffer[:, 2:]), slots, q=q, by=Changes(by))
        return q + buffer.sum()

    result = torch.compile(step, fullgraph=True, backend="aot_eager")(qkv, buffer)
    assert torch.equal(result, step(qkv, expected))
    assert torch.equal(buffer, expected)
    q, k, v = split_qkv(qkv * 2, 4, 2, 16)
    assert torch.equal(buffer[slots, :2], rotate_reference(k, by))


@pytest.mark.gpu
def test_bfloat16_rotation_has_the_bits_of_the_reference() -> None:
    torch.manual_seed(11)
    for num_tokens, key_dim, num_pairs in ((1, 128, 64), (60, 128, 32), (60, 80, 40), (60, 256, 128)):
        for interleaved, table_dtype in product((False, True), (torch.float32, torch.bfloat16)):
            check_rotary(
                device="cuda",
                num_tokens=num_tokens,
                num_heads=32,
                num_kv_heads=8,
                key_dim=key_dim,
                value_dim=key_dim,
                num_pairs=num_pairs,
                interleaved=interleaved,
                biases="qkv",
                dtype=torch.bfloat16,
                table_dtype=table_dtype,
            )


@pytest.mark.gpu
def test_captured_rotation_follows_its_tables() -> None:
    torch.manual_seed(12)
    before, k, v = torch.randn(3, 8, 2, 64, dtype=torch.bfloat16, device="cuda")
    cache = torch.zeros(NUM_SLOTS, 4, 64, dtype=torch.bfloat16, device="cuda")
    slots = torch.arange(1, 9, device="cuda")
    q, by = before.clone(), rotation(8, 32, "cuda")
    stored = StoredKV(cache[:, :2], cache[:, 2:])
    write_kv(k, v, stored, slots, q=q, by=Changes(by))  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_kv(k, v, stored, slots, q=q, by=Changes(by))
    for table, other in zip(by[:2], rotation(8, 32, "cuda")[:2], strict=True):
        table.copy_(other)
    cache.zero_()
    q.copy_(before)
    graph.replay()
    expected = torch.zeros_like(cache)
    write_kv_reference(k, v, StoredKV(expected[:, :2], expected[:, 2:]), slots, q=before, by=Changes(by))
    assert torch.equal(cache[1:], expected[1:])
    assert torch.equal(q, before)


@pytest.mark.parametrize("num_tokens", [0, 1, 3], ids="T{}".format)
@pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "gptj"])
def test_a_single_pair_whose_tables_have_any_stride(
    device: torch.device, num_tokens: int, interleaved: bool
) -> None:
    torch.manual_seed(0)
    columns = torch.randn(NUM_POSITIONS, 2, device=device)
    cos, sin = columns[:, :1].expand(-1, 1), columns[:, ::2].cos()
    cos = cos.as_strided(cos.shape, (2, 2))  # the strides of a slice of every other column
    by = Rotation(cos[:num_tokens], sin[:num_tokens], interleaved)
    slots = torch.arange(1, num_tokens + 1, device=device)
    k, v, q = (torch.randn(num_tokens, heads, 2, device=device) for heads in (1, 1, 2))
    results = []
    for write in (write_kv, write_kv_reference):
        k_cache, v_cache = torch.zeros(2, 8, 1, 2, device=device)
        queries = q.clone()
        write(k, v, StoredKV(k_cache, v_cache), slots, q=queries, by=Changes(by))
        results.append((k_cache, v_cache, queries))
    for ours, reference in zip(*results, strict=True):
        assert torch.equal(ours, reference)


def test_no_tokens_of_any_stride_and_heads_of_one_dim(device: torch.device) -> None:
    none = torch.empty(0, 8, 2, device=device).transpose(1, 2)
    slots = torch.arange(1, 4, device=device)
    k = torch.randn(3, 2, 4, device=device)[:, :, ::4]
    for write in (write_kv, write_kv_reference):
        cache = torch.zeros(9, 2, 8, device=device)
        write(none, none, StoredKV(cache, cache), slots[:0])
        assert not cache.any()
        cache = torch.zeros(9, 2, 1, device=device)
        write(k, k, StoredKV(cache, cache.clone()), slots)
        assert torch.equal(cache[1:4], k)
