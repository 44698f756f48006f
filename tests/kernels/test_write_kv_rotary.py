"""Compares `write_kv` with biases and rotary positions, in every layout, with its reference, bit by bit, and
the reference with transformers, over tables of the common scalings."""

from itertools import product
from typing import Any

import pytest
import torch
from feature_table import covers
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.glm import modeling_glm
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama

from lightkv.triton_kernels.write.write_kv import split_qkv, write_kv
from lightkv.triton_kernels.write.write_kv_reference import rotate_reference, write_kv_reference

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
    in_place: bool = False,
    with_q: bool = True,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    position_dtype: torch.dtype = torch.int64,
    own_rows: bool = False,
    table_dtype: torch.dtype = torch.float32,
) -> None:
    """Compares a fused projection and its bias with the reference; other elements have to stay as they were."""
    sizes = (num_heads, num_kv_heads, key_dim, value_dim)
    width = num_heads * key_dim + num_kv_heads * (key_dim + value_dim)
    qkv = torch.randn(num_tokens, width).to(device, dtype)
    q_bias, k_bias, v_bias = split_qkv(torch.randn(width).to(device, dtype), *sizes)
    settings: dict[str, Any] = {"interleaved": interleaved}
    if num_pairs:
        cos, sin = tables(num_pairs, device)
        positions = torch.randint(NUM_POSITIONS, (num_tokens,), device=device).to(position_dtype)
        if own_rows:
            rows = torch.stack((cos, sin), 1)[positions.long()].to(table_dtype)
            settings |= {"cos": rows[:, 0], "sin": rows[:, 1]}
        else:
            settings |= {"positions": positions, "cos": cos.to(table_dtype), "sin": sin.to(table_dtype)}
    for name, bias in (("q", q_bias), ("k", k_bias), ("v", v_bias)):
        if name in biases:
            settings[f"{name}_bias"] = bias
    slots = (torch.randperm(NUM_SLOTS - 1, device=device)[:num_tokens] + 1).int()

    results = []
    for write in (write_kv, write_kv_reference):
        q, k, v = split_qkv(qkv.clone(), *sizes)
        shape = (NUM_SLOTS, num_kv_heads)
        k_cache = torch.full((*shape, key_dim), torch.nan, dtype=cache_dtype or dtype, device=device)
        v_cache = torch.full((*shape, value_dim), torch.nan, dtype=cache_dtype or dtype, device=device)
        q_out = torch.full((num_tokens + 2, *q.shape[1:]), torch.nan, dtype=out_dtype or dtype, device=device)
        if with_q:
            settings["q"] = q
            settings["q_out"] = None if in_place else q_out[:num_tokens]
        write(k, v, k_cache, v_cache, slots, **settings)
        results.append((q, k, v, k_cache, v_cache, q_out))
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=0.0, atol=0.0, equal_nan=True)
    q, k, v, k_cache, _, q_out = results[0]
    original = split_qkv(qkv, *sizes)
    assert torch.equal(k, original[1])
    assert torch.equal(v, original[2])
    assert not k_cache[slots.long()].isnan().any()
    if with_q and not in_place:
        assert torch.equal(q, original[0])
        assert not q_out[:num_tokens].isnan().any()


@covers("rotary, all dims", "NeoX", "GPT-J")
@pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "gptj"])
@pytest.mark.parametrize("in_place", [False, True], ids=["to_an_output", "in_place"])
@pytest.mark.parametrize("num_tokens", [0, 1, 16, 33], ids="T{}".format)
def test_rotates_q_and_k(device: torch.device, num_tokens: int, in_place: bool, interleaved: bool) -> None:
    torch.manual_seed(num_tokens)
    check_rotary(device=device, num_tokens=num_tokens, in_place=in_place, interleaved=interleaved)


@covers("rotary, some of the dims", "NeoX", "GPT-J")
@covers("QKV bias", "NeoX", "GPT-J")
@pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "gptj"])
@pytest.mark.parametrize(
    ("key_dim", "value_dim", "num_pairs"),
    [
        (64, 64, 16),
        (80, 80, 40),
        (80, 80, 16),
        (96, 96, 48),
        (128, 64, 64),
        (192, 128, 32),
        (256, 256, 32),
        (6, 3, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("biases", ["", "qkv"], ids=["plain", "bias"])
def test_partial_rotary_dims(
    device: torch.device, key_dim: int, value_dim: int, num_pairs: int, interleaved: bool, biases: str
) -> None:
    torch.manual_seed(key_dim)
    dims = {"key_dim": key_dim, "value_dim": value_dim, "num_pairs": num_pairs}
    for in_place in (False, True):
        check_rotary(device=device, interleaved=interleaved, biases=biases, in_place=in_place, **dims)


@covers("QKV bias", "NeoX", "not rotated")
@pytest.mark.parametrize("num_pairs", [0, 32], ids=["unrotated", "rotated"])
@pytest.mark.parametrize("biases", ["qkv", "q", "k", "v", "qk"])
def test_biases(device: torch.device, biases: str, num_pairs: int) -> None:
    torch.manual_seed(len(biases))
    check_rotary(device=device, biases=biases, num_pairs=num_pairs, with_q=bool(num_pairs) or "q" in biases)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(1, 1), (3, 1), (6, 3), (8, 8), (16, 4), (20, 4), (4, 16)], ids=str
)
def test_heads_are_divided_among_programs(device: torch.device, num_heads: int, num_kv_heads: int) -> None:
    torch.manual_seed(num_heads)
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    check_rotary(device=device, key_dim=16, value_dim=16, num_pairs=8, num_tokens=60, **heads)
    check_rotary(device=device, key_dim=16, value_dim=16, num_pairs=8, num_tokens=60, with_q=False, **heads)


def test_casts_each_result_once(device: torch.device) -> None:
    torch.manual_seed(6)
    for settings in (
        {"dtype": torch.float16, "in_place": True},
        {"dtype": torch.float16, "out_dtype": torch.float32, "cache_dtype": torch.float32},
        {"dtype": torch.float32, "out_dtype": torch.float16, "cache_dtype": torch.float16},
    ):
        check_rotary(device=device, biases="qkv", position_dtype=torch.int32, **settings)


@covers("tables with a row for each token", "NeoX", "GPT-J")
@pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "gptj"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
def test_tables_in_the_models_type_with_a_row_for_each_token(
    device: torch.device, dtype: torch.dtype, interleaved: bool
) -> None:
    for num_tokens in (1, 20, 33):
        for in_place in (False, True):
            torch.manual_seed(num_tokens)
            check_rotary(
                device=device,
                num_tokens=num_tokens,
                num_pairs=24,
                interleaved=interleaved,
                in_place=in_place,
                dtype=dtype,
                own_rows=True,
                table_dtype=dtype,
            )
    check_rotary(device=device, dtype=dtype, table_dtype=dtype)


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

    cos, sin, positions = cos[:, :32].to(device), sin[:, :32].to(device), positions.to(device)
    out = torch.full_like(q, torch.nan, device=device)
    cache = torch.full((NUM_SLOTS, 4, 64), torch.nan, device=device)
    slots = torch.randperm(NUM_SLOTS - 1, device=device)[:20] + 1
    q, k = q.to(device), k.to(device)
    rotary = {"positions": positions, "cos": cos, "sin": sin}
    write_kv(k, k, cache[:, :2], cache[:, 2:], slots, q=q, q_out=out, **rotary)
    torch.testing.assert_close(out.cpu(), wanted_q, rtol=1e-6, atol=1e-6)
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
        ours = rotate_reference(x, *per_token, interleaved=True)
        torch.testing.assert_close(ours, of_glm, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours, torch.cat((of_gptj[0], x[..., 32:]), 2), rtol=1e-6, atol=1e-6)

    out = torch.full_like(q, torch.nan, device=device)
    cache = torch.full((NUM_SLOTS, 4, 64), torch.nan, device=device)
    slots = torch.randperm(NUM_SLOTS - 1, device=device)[:10] + 1
    q, k, positions, cos, sin = (x.to(device) for x in (q, k, positions, cos, sin))
    rotary = {"positions": positions, "cos": cos, "sin": sin, "interleaved": True}
    write_kv(k, k, cache[:, :2], cache[:, 2:], slots, q=q, q_out=out, **rotary)
    torch.testing.assert_close(out.cpu(), glm[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(cache[slots, :2].cpu(), glm[1], rtol=1e-6, atol=1e-6)


def test_padding_tokens_write_slot_0_alone(device: torch.device) -> None:
    torch.manual_seed(9)
    q, k, v = torch.randn(3, 8, 2, 16, device=device)
    cos, sin = tables(8, device)
    cache = torch.zeros(NUM_SLOTS, 4, 16, device=device)
    slots = torch.tensor([7, 3, 0, 0, 0, 0, 0, 0], device=device)
    positions = torch.tensor([39, 5, 0, 0, 0, 0, 0, 0], device=device)
    expected = cache.clone()
    rotary = {"positions": positions, "cos": cos, "sin": sin}
    write_kv(k, v, cache[:, :2], cache[:, 2:], slots, q=q.clone(), **rotary)
    write_kv_reference(k, v, expected[:, :2], expected[:, 2:], slots, q=q.clone(), **rotary)
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
@pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "gptj"])
@pytest.mark.parametrize("num_pairs", [0, 12, 32], ids=["none", "partial", "whole"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["f32", "f16"])
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
    q_bias, k_bias, v_bias = split_qkv(bias, heads, kv_heads, dim)
    q_out = torch.empty(num_tokens, heads, dim, dtype=dtype, device=device)
    settings: dict[str, Any] = {"q_bias": q_bias, "k_bias": k_bias, "v_bias": v_bias}
    turn = torch.ones(num_tokens, 1, 0, dtype=torch.complex128, device=device)
    if num_pairs:
        cos, sin = tables(num_pairs, device)
        positions = torch.randint(len(cos), (num_tokens,), device=device)
        turn = torch.complex(cos.double(), sin.double())[positions][:, None]
        settings |= {"positions": positions, "cos": cos, "sin": sin, "interleaved": interleaved}
    write_kv(k, v, k_cache, v_cache, slots, q=q, q_out=q_out, **settings)

    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    for written, raw, added in ((q_out, q, q_bias), (k_cache[slots], k, k_bias)):
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
        v_cache[slots].double(), v.double() + v_bias.double(), atol=tolerance, rtol=tolerance
    )
    assert k_cache[num_tokens + 1].isnan().all()


def test_refuses_a_rotation_that_does_not_fit(device: torch.device) -> None:
    k = torch.randn(4, 2, 16, device=device)
    q = torch.randn(4, 6, 16, device=device)
    cache = torch.zeros(NUM_SLOTS, 4, 16, device=device)
    slots = torch.arange(1, 5, device=device)
    positions = torch.arange(4, device=device)
    cos, sin = tables(8, device)
    wide = torch.zeros(40, 9, device=device)
    good: dict[str, Any] = {"q": q, "positions": positions, "cos": cos, "sin": sin}
    before = q.clone()
    for match, change in [
        ("go together", {"sin": None}),
        ("need a row for each", {"positions": None, "q": None}),
        ("nothing is to be done", {"positions": None, "cos": None, "sin": None}),
        ("pass q as well", {"q": None, "q_out": q}),
        ("q must be", {"q": q[:3]}),
        ("q must be", {"q": q[..., :8]}),
        ("q must be", {"q": q.mT.contiguous().mT}),
        ("q_out must be", {"q_out": q[:, :4]}),
        ("need a row for each of the 4 tokens; cos has 40", {"positions": None}),
        ("cos and sin go together", {"positions": None, "cos": None, "q": None}),
        ("positions must be contiguous", {"positions": positions[:3]}),
        ("int32 or int64", {"positions": positions.float()}),
        ("cos must be float32", {"cos": cos.half()}),
        ("sin must be float32", {"sin": sin[0]}),
        ("sin must be float32", {"sin": sin.mT.contiguous().mT}),
        ("one shape", {"sin": sin[:, :4]}),
        ("at most 8 columns", {"cos": wide, "sin": wide}),
        ("q_bias must be", {"q_bias": q[0, :2]}),
        ("k_bias must be", {"k_bias": q[0]}),
        ("v_bias must be", {"v_bias": k[0].flatten()}),
        ("v_bias must be", {"v_bias": k[0].mT.contiguous().mT}),
        ("q_bias must be", {"q": None, "q_bias": q[0]}),
    ]:
        with pytest.raises(ValueError, match=match):
            write_kv(k, k, cache[:, :2], cache[:, 2:], slots, **good | change)
    assert not cache.any()
    assert torch.equal(q, before)


@pytest.mark.parametrize("in_place", [False, True], ids=["to_an_output", "in_place"])
def test_rotation_stays_one_operator_under_torch_compile(device: torch.device, in_place: bool) -> None:
    torch.manual_seed(10)
    qkv = torch.randn(6, 8 * 16, device=device)
    slots = torch.tensor([3, 1, 9, 2, 7, 8], device=device)
    positions = torch.arange(6, device=device)
    cos, sin = tables(8, device)
    buffer = torch.zeros(10, 4, 16, device=device)
    expected = buffer.clone()
    q, k, v = split_qkv(qkv.clone(), 4, 2, 16)
    q, out = (None, q.clone()) if in_place else (q, torch.empty_like(q))
    k_cache, v_cache = buffer.clone()[:, :2], buffer.clone()[:, 2:]
    arguments = (k, v, k_cache, v_cache, slots, q, out, positions, cos, sin, False, None, None, None)
    torch.library.opcheck(torch.ops.lightkv.write_kv.default, arguments)

    def step(qkv: Tensor, buffer: Tensor) -> Tensor:
        q, k, v = split_qkv(qkv * 2, 4, 2, 16)
        out = q if in_place else torch.empty_like(q)
        rotary = {"positions": positions, "cos": cos, "sin": sin}
        write_kv(k, v, buffer[:, :2], buffer[:, 2:], slots, q=q, q_out=out, **rotary)
        return out + buffer.sum()

    result = torch.compile(step, fullgraph=True, backend="aot_eager")(qkv, buffer)
    assert torch.equal(result, step(qkv, expected))
    assert torch.equal(buffer, expected)
    q, k, v = split_qkv(qkv * 2, 4, 2, 16)
    assert torch.equal(buffer[slots, :2], rotate_reference(k, cos[positions], sin[positions], False))


@pytest.mark.gpu
@pytest.mark.parametrize("in_place", [False, True], ids=["to_an_output", "in_place"])
def test_bfloat16_rotation_has_the_bits_of_the_reference(in_place: bool) -> None:
    torch.manual_seed(11)
    for num_tokens, key_dim, num_pairs in ((1, 128, 64), (60, 128, 32), (60, 80, 40), (60, 256, 128)):
        for interleaved, own_rows in product((False, True), (False, True)):
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
                in_place=in_place,
                dtype=torch.bfloat16,
                own_rows=own_rows,
                table_dtype=torch.bfloat16 if own_rows else torch.float32,
            )


@pytest.mark.gpu
def test_captured_rotation_follows_its_positions() -> None:
    torch.manual_seed(12)
    q, k, v = torch.randn(3, 8, 2, 64, dtype=torch.bfloat16, device="cuda")
    cos, sin = tables(32, "cuda")
    cache = torch.zeros(NUM_SLOTS, 4, 64, dtype=torch.bfloat16, device="cuda")
    slots = torch.arange(1, 9, device="cuda")
    positions = torch.zeros(8, dtype=torch.int64, device="cuda")
    out = torch.empty_like(q)
    rotary = {"q": q, "q_out": out, "positions": positions, "cos": cos, "sin": sin}
    write_kv(k, v, cache[:, :2], cache[:, 2:], slots, **rotary)  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_kv(k, v, cache[:, :2], cache[:, 2:], slots, **rotary)
    positions.copy_(torch.tensor([39, 3, 20, 5, 0, 1, 0, 7], device="cuda"))
    cache.zero_()
    out.fill_(torch.nan)
    graph.replay()
    ours, expected = out.clone(), torch.zeros_like(cache)
    write_kv_reference(k, v, expected[:, :2], expected[:, 2:], slots, **rotary)
    assert torch.equal(cache[1:], expected[1:])
    assert torch.equal(ours, out)


@pytest.mark.parametrize("num_tokens", [0, 1, 3], ids="T{}".format)
@pytest.mark.parametrize("own_rows", [False, True], ids=["positions", "own_rows"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "gptj"])
def test_a_single_pair_whose_tables_have_any_stride(
    device: torch.device, num_tokens: int, own_rows: bool, interleaved: bool
) -> None:
    torch.manual_seed(0)
    columns = torch.randn(NUM_POSITIONS, 2, device=device)
    cos, sin = columns[:, :1].expand(-1, 1), columns[:, ::2].cos()
    cos = cos.as_strided(cos.shape, (2, 2))  # the strides of a slice of every other column
    positions = torch.randint(NUM_POSITIONS, (num_tokens,), device=device)
    tables = {"cos": cos, "sin": sin, "positions": positions}
    if own_rows:
        tables = {"cos": cos[:num_tokens], "sin": sin[:num_tokens]}
    slots = torch.arange(1, num_tokens + 1, device=device)
    k, v, q = (torch.randn(num_tokens, heads, 2, device=device) for heads in (1, 1, 2))
    results = []
    for write in (write_kv, write_kv_reference):
        k_cache, v_cache = torch.zeros(2, 8, 1, 2, device=device)
        q_out = torch.empty_like(q)
        write(k, v, k_cache, v_cache, slots, q=q, q_out=q_out, interleaved=interleaved, **tables)
        results.append((k_cache, v_cache, q_out))
    for ours, reference in zip(*results, strict=True):
        assert torch.equal(ours, reference)


def test_no_tokens_of_any_stride_and_heads_of_one_dim(device: torch.device) -> None:
    none = torch.empty(0, 8, 2, device=device).transpose(1, 2)
    slots = torch.arange(1, 4, device=device)
    k = torch.randn(3, 2, 4, device=device)[:, :, ::4]
    for write in (write_kv, write_kv_reference):
        cache = torch.zeros(9, 2, 8, device=device)
        write(none, none, cache, cache, slots[:0])
        assert not cache.any()
        cache = torch.zeros(9, 2, 1, device=device)
        write(k, k, cache, cache.clone(), slots)
        assert torch.equal(cache[1:4], k)
