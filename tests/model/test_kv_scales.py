"""The scales of fp8 K/V in checkpoints: which names are read, what is refused, and engines that use them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightkv.integrations.model.kv_scales import BadScales, read_kv_scales
from lightkv.router import EngineConfig, InvalidConfig
from lightkv.router.model.build import build_runner, find_model
from lightkv.router.model.info import model_info
from tests.support.tiny_files import save_tiny

HALF, QUARTER = torch.tensor([0.5]), torch.tensor([0.25])
SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


def with_scales(directory: Path, scales: dict[str, torch.Tensor]) -> Path:
    """Saves a tiny model of two layers and two K/V heads whose file has these tensors, too."""
    save_tiny(directory)
    file = directory / "model.safetensors"
    save_file(load_file(file) | scales, file, {"format": "pt"})
    return directory


def of_layers(name: str, scale: torch.Tensor, layers: tuple[int, ...] = (0, 1)) -> dict[str, torch.Tensor]:
    return {f"model.layers.{layer}.{name}": scale.clone() for layer in layers}


def read(directory: Path, layers: tuple[int, ...] = (0, 1)) -> dict[int, tuple[list[float], list[float]]]:
    found = read_kv_scales([directory / "model.safetensors"], layers)
    return {layer: (scales.k.tolist(), scales.v.tolist()) for layer, scales in found.items()}


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_names_of_compressed_tensors_are_read(
    tmp_path: Path, k: str, v: str, shape: tuple[int, ...]
) -> None:
    scales = of_layers(k, HALF.reshape(shape)) | of_layers(v, QUARTER.reshape(shape).bfloat16())
    save_file(scales | {"model.layers.0.self_attn.q_scale": HALF.clone()}, tmp_path / "model.safetensors")
    assert read(tmp_path) == {0: ([0.5], [0.25]), 1: ([0.5], [0.25])}


def test_a_factor_of_tensorrt_llm_is_that_of_k_and_v(tmp_path: Path) -> None:
    names = [f"transformer.layers.{layer}.attention.kv_cache_scaling_factor" for layer in (0, 10)]
    save_file({name: HALF.clone() for name in names}, tmp_path / "model.safetensors")
    assert read(tmp_path, (10, 0)) == {0: ([0.5], [0.5]), 10: ([0.5], [0.5])}


@pytest.mark.parametrize(
    ("scales", "told"),
    [
        (
            {},
            r"no scale of K for layer 0 \(looked for .*self_attn.k_scale.*--kv-dtype int8.*--kv-skip-layers",
        ),
        (of_layers("self_attn.k_scale", HALF), "no scale of V for layer 0"),
        (
            of_layers("self_attn.k_scale", HALF) | of_layers("self_attn.v_scale", HALF, (0,)),
            "no scale of V for layer 1",
        ),
        (of_layers("self_attn.k_scale", torch.zeros(1)), r"k_scale is \[0.0\], .* finite and above 0"),
        (of_layers("self_attn.k_scale", torch.tensor(float("nan"))), "finite and above 0"),
        (of_layers("self_attn.v_scale", torch.empty(0)), "finite and above 0"),
        (
            of_layers("self_attn.k_scale", HALF) | of_layers("self_attn.k_proj.output_scale", QUARTER),
            "differ, and both are the scale of K",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_by_layer(
    tmp_path: Path, scales: dict[str, torch.Tensor], told: str
) -> None:
    save_file(scales, tmp_path / "model.safetensors")
    with pytest.raises(BadScales, match=told):
        read(tmp_path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(BadScales, match="cannot be read"):
        read(tmp_path)


def test_an_engine_stores_fp8_with_the_scales_of_its_checkpoint(tmp_path: Path) -> None:
    per_head = torch.tensor([0.5, 2.0])
    scales = of_layers("self_attn.k_scale", HALF) | of_layers("self_attn.v_scale", per_head[:, None, None])
    directory = with_scales(tmp_path / "tiny", scales)
    config = EngineConfig(str(directory), device="cpu", kv_dtype="fp8-static", max_total_tokens=40)
    lines: list[str] = []
    runner, info = build_runner(config, lines.append)
    assert info.bytes_per_token == 2 * 2 * (8 + 8)  # layers, heads, dims; no scales by token
    assert model_info(config, directory)["bytes_per_token"] == info.bytes_per_token
    pool = runner._parts.memory.pool
    for layer in (0, 1):
        found = pool.scales(layer)
        assert found is not None
        assert found[17].tolist() == [[0.5, 0.5], [0.5, 2.0]]  # K and V of each head
    assert any("40 tokens in fp8-static" in line for line in lines)


def test_a_missing_scale_is_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    scales = of_layers("self_attn.k_scale", HALF, (0,)) | of_layers("self_attn.v_scale", HALF, (0,))
    directory = with_scales(tmp_path / "tiny", scales)
    settings: dict[str, Any] = {"model": str(directory), "device": "cpu", "max_total_tokens": 40}
    config = EngineConfig(kv_dtype="fp8-static", **settings)
    for refuses in (lambda: find_model(config, str), lambda: model_info(config, directory)):
        with pytest.raises(InvalidConfig, match=r"--kv-dtype fp8-static: .* layer 1 .*--kv-dtype int8"):
            refuses()
    skipping = EngineConfig(kv_dtype="fp8-static", kv_skip_layers="1", **settings)
    _, info = build_runner(skipping, lambda line: None)
    assert info.bytes_per_token == 2 * (8 + 8) * (1 + 4)


def test_scales_of_another_number_than_the_heads_are_refused(tmp_path: Path) -> None:
    scales = of_layers("self_attn.k_scale", torch.ones(3)) | of_layers("self_attn.v_scale", HALF)
    directory = with_scales(tmp_path / "tiny", scales)
    config = EngineConfig(str(directory), device="cpu", kv_dtype="fp8-static", max_total_tokens=40)
    with pytest.raises(InvalidConfig, match="layer 0 has 3 scales of K, and 2 K/V heads; choose"):
        build_runner(config, lambda line: None)


def test_a_scheme_for_kv_alone_loads_without_its_library_and_is_told(tmp_path: Path) -> None:
    scales = of_layers("self_attn.k_scale", HALF) | of_layers("self_attn.v_scale", HALF)
    directory = with_scales(tmp_path / "tiny", scales)
    path = directory / "config.json"
    quantised = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantised}))
    lines: list[str] = []
    settings: dict[str, Any] = {"model": str(directory), "device": "cpu", "max_total_tokens": 40}
    _, info = build_runner(EngineConfig(**settings), lines.append)
    assert (info.kv_type, info.bytes_per_token) == ("float32", 2 * 2 * 16 * 4)
    assert sum("kv_cache_scheme" in line and "--kv-dtype auto does not use" in line for line in lines) == 1
    _, info = build_runner(EngineConfig(kv_dtype="fp8-static", **settings), lines.append)
    assert info.kv_type == "fp8-static"
    for field, what in (
        ({"type": "int"}, "int elements of 8 bits"),
        ({"symmetric": False}, "with zero points"),
    ):
        quantised["kv_cache_scheme"] = SCHEME | field
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantised}))
        with pytest.raises(InvalidConfig, match=rf"scales are for .*{what} \(kv_cache_scheme\); choose int8"):
            find_model(EngineConfig(kv_dtype="fp8-static", **settings), lines.append)


def test_scales_of_queries_are_read_and_ask_for_prefill_in_fp8(tmp_path: Path) -> None:
    scales = of_layers("self_attn.k_scale", HALF) | of_layers("self_attn.v_scale", HALF)
    scales |= of_layers("self_attn.q_scale", QUARTER, (0,)) | of_layers("self_attn.attn.q_scale", HALF, (1,))
    directory = with_scales(tmp_path / "tiny", scales)
    found = read_kv_scales([directory / "model.safetensors"], (0, 1))
    q_scales = [found[layer].q for layer in (0, 1)]
    assert [None if q_scale is None else q_scale.tolist() for q_scale in q_scales] == [[0.25], [0.5]]
    settings: dict[str, Any] = {"model": str(directory), "device": "cpu", "max_total_tokens": 40}
    for chosen in ("auto", "model"):  # a CPU computes it in the type of the model
        lines: list[str] = []
        build_runner(EngineConfig(kv_dtype="fp8-static", prefill_dtype=chosen, **settings), lines.append)
        told = [line for line in lines if "in fp8 in 0 of 2 layers" in line and "Hopper GPUs" in line]
        assert len(told) == (chosen == "auto")
    config = EngineConfig(kv_dtype="fp8-static", prefill_dtype="fp8", **settings)
    for refuses in (lambda: build_runner(config, str), lambda: model_info(config, directory)):
        with pytest.raises(InvalidConfig, match=r"--prefill-dtype fp8: .* Hopper GPUs; choose auto or model"):
            refuses()


@pytest.mark.parametrize("q_scale", [HALF, torch.ones(4)])
def test_scales_of_queries_that_prefill_in_fp8_does_not_take_are_told(
    tmp_path: Path, q_scale: torch.Tensor
) -> None:
    scales = of_layers("self_attn.k_scale", HALF) | of_layers("self_attn.v_scale", HALF)
    directory = with_scales(tmp_path / "tiny", scales | of_layers("self_attn.q_scale", q_scale, (1,)))
    settings: dict[str, Any] = {"model": str(directory), "device": "cpu", "max_total_tokens": 40}
    lines: list[str] = []
    build_runner(EngineConfig(kv_dtype="fp8-static", **settings), lines.append)
    reason = "has no prefill in fp8" if len(q_scale.flatten()) == 1 else "layer 1 has 4 scales of queries"
    assert any(reason in line for line in lines)
    # A layer that keeps 16 bits is not asked.
    lines.clear()
    build_runner(EngineConfig(kv_dtype="fp8-static", kv_skip_layers="1", **settings), lines.append)
    assert not any("attention of prompts" in line for line in lines)


def test_scales_of_queries_that_are_no_scales_are_refused_where_they_are_asked_for(tmp_path: Path) -> None:
    scales = of_layers("self_attn.k_scale", HALF) | of_layers("self_attn.v_scale", HALF)
    directory = with_scales(tmp_path / "tiny", scales | of_layers("self_attn.q_scale", -HALF))
    settings: dict[str, Any] = {"model": str(directory), "device": "cpu", "max_total_tokens": 40}
    with pytest.raises(InvalidConfig, match=r"q_scale is \[-0.5\], .*choose --prefill-dtype model"):
        find_model(EngineConfig(kv_dtype="fp8-static", **settings), str)
    find_model(EngineConfig(kv_dtype="fp8-static", prefill_dtype="model", **settings), str)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"prefill_dtype": "fp4"}, r"--prefill-dtype is 'fp4'; give one of auto, fp8, model"),
        ({"prefill_dtype": "fp8", "kv_dtype": "int8"}, r"--kv-dtype is int8; give --kv-dtype fp8-static"),
    ],
)
def test_prefill_types_that_do_not_exist_or_fit_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidConfig, match=told):
        EngineConfig("model", **settings)
