"""Writes the weights of a model in 8 or 4 bits, by the published layouts of the formats: the tools that make
such checkpoints are no dependency of benchmarks and tests."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

E4M3 = torch.float8_e4m3fn


class Quantised(NamedTuple):
    """The tensors of a layer by their names, and the weight that they stand for, float64 `[N, K]`."""

    tensors: dict[str, Tensor]
    dense: Tensor


def fp8_blocks(weight: Tensor, scale: str = "weight_scale_inv", block: int = 128) -> Quantised:
    """A float32 scale for each block of 128 x 128, of which the last ones may be smaller (DeepSeek)."""
    n, k = weight.shape
    padded = pad(weight, (0, -k % block, 0, -n % block))
    blocks = padded.unflatten(1, (-1, block)).unflatten(0, (-1, block))  # [rows, 128, columns, 128]
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-6) / 448
    numbers = (blocks / scales[:, None, :, None]).to(E4M3)
    dense = (numbers.double() * scales.double()[:, None, :, None]).flatten(2).flatten(0, 1)[:n, :k]
    data = numbers.float().flatten(2).flatten(0, 1)[:n, :k].to(E4M3).contiguous()
    return Quantised({"weight": data, scale: scales}, dense)


def fp8_channels(weight: Tensor) -> Quantised:
    """A bfloat16 scale for each output (compressed-tensors, float-quantized, channel)."""
    scales = (weight.abs().amax(1, keepdim=True).clamp(min=1e-6) / 448).bfloat16()
    numbers = (weight / scales.float()).clamp(-448, 448).to(E4M3)
    return Quantised({"weight": numbers, "weight_scale": scales}, numbers.double() * scales.double())


def fp8_tensor(weight: Tensor) -> Quantised:
    """One float32 scale (compressed-tensors, float-quantized, tensor)."""
    scale = (weight.abs().max() / 448).reshape(1)
    numbers = (weight / scale).to(E4M3)
    return Quantised({"weight": numbers, "weight_scale": scale}, numbers.double() * scale.double())


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    """Returns compressed-tensors' `quantization_config`."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _fp8_config(strategy: str) -> dict[str, Any]:
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    inputs = {**numbers, "strategy": "token", "dynamic": True}
    return compressed("float-quantized", {**numbers, "strategy": strategy}, inputs)


def _groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns numbers from 0 to 15 `[N, K]`, and scales, float16, and zeros, each `[N, K / group]`."""
    grouped = weight.unflatten(1, (-1, group))
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-4).half()
    zeros = (-low / scales.float()).round().clamp(1, 15)  # the first version of GPTQ cannot store 0
    numbers = (grouped / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
    return numbers.flatten(1).int(), scales, zeros.int()


def _dense(numbers: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    group = numbers.shape[1] // scales.shape[1]
    spread = [one.double().repeat_interleave(group, 1) for one in (scales, zeros)]
    return (numbers.double() - spread[1]) * spread[0]


def _packed(numbers: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Packs eight numbers along `dim` into a word: the number at `order[i]` into bits 4 i to 4 i + 3."""
    eights = pad(numbers, (0, 0, 0, -len(numbers) % 8) if dim == 0 else (0, 0)).long().unflatten(dim, (-1, 8))
    words = sum(eights.select(dim + 1, own) << 4 * place for place, own in enumerate(order))
    return (words & 0xFFFFFFFF).to(torch.uint32).view(torch.int32).contiguous()


def packed_groups(weight: Tensor, group: int = 128, symmetric: bool = True) -> Quantised:
    """Numbers along inputs, zeros along outputs (compressed-tensors, pack-quantized)."""
    if symmetric:
        scales = (weight.unflatten(1, (-1, group)).abs().amax(-1) / 7).clamp(min=1e-4).bfloat16()
        grouped = weight.unflatten(1, (-1, group)) / scales.float()[..., None]
        numbers, zeros = (
            (grouped.round().clamp(-8, 7) + 8).flatten(1).int(),
            torch.full(scales.shape, 8, device=scales.device),
        )
    else:
        numbers, scales, zeros = _groups(weight, group)
    tensors = {
        "weight_packed": _packed(numbers, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = _packed(zeros, 0)
    return Quantised(tensors, _dense(numbers, scales, zeros))


def awq_groups(weight: Tensor) -> Quantised:
    """Numbers and zeros along outputs, in AWQ's order."""
    numbers, scales, zeros = _groups(weight, 128)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    words = {"qweight": _packed(numbers.t(), 1, order), "qzeros": _packed(zeros.t(), 1, order)}
    return Quantised({**words, "scales": scales.t().contiguous()}, _dense(numbers, scales, zeros))


def gptq_groups(weight: Tensor, subtracted: int) -> Quantised:
    """Numbers along inputs; of zeros the first version stores one less."""
    numbers, scales, zeros = _groups(weight, 64)
    tensors = {
        "qweight": _packed(numbers.t(), 0),
        "qzeros": _packed(zeros.t() - subtracted, 1),
        "scales": scales.t().contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // 64,
    }
    return Quantised(tensors, _dense(numbers, scales, zeros))


def mxfp4_blocks(weight: Tensor) -> Quantised:
    """Blocks of 16 bytes of two numbers each, and a power of two for each block (gpt-oss's experts)."""
    grouped = weight.double().unflatten(1, (-1, 32))
    exponents = grouped.abs().amax(-1).clamp(min=1e-6).log2().floor() - 2  # the largest number is 6
    blocks, dense = _float4(grouped, exponents.exp2()[..., None])
    return Quantised({"_blocks": blocks, "_scales": (exponents + 127).to(torch.uint8)}, dense)


def nvfp4_groups(weight: Tensor, numbers: str, factor: str, divides: bool) -> Quantised:
    """Two numbers a byte, a scale in e4m3 for each 16 inputs, and a factor for all (compressed-tensors, which
    stores the number that scales are divided by, and modelopt)."""
    grouped = weight.double().unflatten(1, (-1, 16))
    scales = grouped.abs().amax(-1).clamp(min=1e-6) / 6
    of_all = scales.amax() / 448
    stored = (scales / of_all).clamp(min=2**-6).to(E4M3)
    factors = of_all.float().reshape(1)
    if divides:
        factors = 1 / factors
    exact = stored.float() / factors if divides else stored.float() * factors
    bits, dense = _float4(grouped, exact.double()[..., None])
    return Quantised({numbers: bits.flatten(1), "weight_scale": stored, factor: factors}, dense)


def _float4(grouped: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Returns numbers e2m1 of `[N, groups, n]`, two a byte, and what they stand for, `[N, groups · n]`."""
    values = grouped.new_tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    scaled = grouped / scales
    numbers = (scaled.abs()[..., None] - values).abs().argmin(-1)
    signs = (scaled < 0).int()
    bits = (numbers + 8 * signs).to(torch.uint8).unflatten(-1, (-1, 2))
    return bits[..., 0] | bits[..., 1] << 4, (values[numbers] * (1 - 2 * signs) * scales).flatten(1)


class Written(NamedTuple):
    """How a format is written: a layer's tensors, and the configuration."""

    quantise: Callable[[Tensor], Quantised]
    config: dict[str, Any]


def _packed_config(group: int, symmetric: bool) -> dict[str, Any]:
    numbers = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
    return compressed("pack-quantized", numbers, None)


FORMATS: dict[str, Written] = {
    "fp8": Written(
        fp8_blocks,
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
        },
    ),
    "fp8-channel": Written(fp8_channels, _fp8_config("channel")),
    "fp8-tensor": Written(fp8_tensor, _fp8_config("tensor")),
    "w4a16": Written(packed_groups, _packed_config(128, True)),
    "w4a16-zeros": Written(partial(packed_groups, group=32, symmetric=False), _packed_config(32, False)),
    "awq": Written(
        awq_groups,
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    ),
    "gptq": Written(
        partial(gptq_groups, subtracted=1),
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False},
    ),
    "gptq-v2": Written(
        partial(gptq_groups, subtracted=0),
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 64,
            "desc_act": False,
            "checkpoint_format": "gptq_v2",
        },
    ),
    "nvfp4": Written(
        partial(nvfp4_groups, numbers="weight_packed", factor="weight_global_scale", divides=True),
        compressed(
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True},
            None,
        ),
    ),
    "nvfp4-modelopt": Written(
        partial(nvfp4_groups, numbers="weight", factor="weight_scale_2", divides=False),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    ),
}


def save_in(form: str, model: PreTrainedModel, directory: Path) -> None:
    """Saves `model` in `directory` in a format of FORMATS, with a plain head, or "mxfp4"."""
    if form == "mxfp4":
        save_mxfp4(model, directory)
    else:
        save_quantised(model, directory, form, ("lm_head", "gate", "router"))


def save_quantised(model: PreTrainedModel, directory: Path, form: str, left_out: tuple[str, ...]) -> None:
    """Saves `model` in `directory` with its linear layers in the format `form`, but for those whose name ends
    with one of `left_out`. The model's own weights become what the stored ones stand for."""
    written = FORMATS[form]
    stored, replaced = dict[str, Tensor](), list[str]()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith(left_out):
            quantised = written.quantise(module.weight.detach().float())
            stored |= {f"{name}.{own}": tensor for own, tensor in quantised.tensors.items()}
            replaced.append(f"{name}.weight")
            module.weight.data = quantised.dense.to(module.weight)
        for own in ("gate_up_proj", "down_proj"):
            experts = getattr(module, own, None)
            if isinstance(experts, nn.Parameter) and experts.dim() == 3:
                parts = ("gate_proj", "up_proj") if own == "gate_up_proj" else ("down_proj",)
                for number, expert in enumerate(experts.data):
                    for part, weight in zip(parts, expert.chunk(len(parts)), strict=True):
                        quantised = written.quantise(weight.float())
                        stem = f"{name}.{number}.{part}"
                        stored |= {f"{stem}.{one}": tensor for one, tensor in quantised.tensors.items()}
                        replaced.append(f"{stem}.weight")
                        weight.copy_(quantised.dense)
    _save(model, directory, stored, replaced, written.config)


def save_mxfp4(model: PreTrainedModel, directory: Path) -> None:
    """Saves a gpt-oss `model` in `directory` with its experts in MXFP4, as `save_quantised` does."""
    stored, replaced = dict[str, Tensor](), list[str]()
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            each = [mxfp4_blocks(expert.t()) for expert in parameter.data]  # one by one, to take less memory
            for end in ("_blocks", "_scales"):
                stored[f"{name}{end}"] = torch.stack([one.tensors[end] for one in each])
            replaced.append(name)
            parameter.data = torch.stack([one.dense.t().to(parameter) for one in each])
    _save(model, directory, stored, replaced, {"quant_method": "mxfp4"})


def _save(
    model: PreTrainedModel,
    directory: Path,
    stored: dict[str, Tensor],
    replaced: list[str],
    quantisation: dict[str, Any],
) -> None:
    owned = {name: one for name, one in model.named_parameters() if name in set(replaced)}
    kept = {name: one.data for name, one in owned.items()}
    for one in owned.values():
        one.data = one.data.new_empty(0)  # what is not kept need not be written
    model.save_pretrained(directory)
    for name, one in owned.items():
        one.data = kept[name]
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in replaced:
        del tensors[name]
    tensors |= {name: one.cpu().contiguous() for name, one in stored.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = quantisation
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").touch()
