"""Writes the weights of a model's linear layers in 8 or 4 bits, by the published layouts of the formats: the
tools that make such checkpoints are no dependency of the tests."""

import json
from collections.abc import Callable
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


class Written(NamedTuple):
    """How a format is written: a layer's tensors, and the configuration."""

    quantise: Callable[[Tensor], Quantised]
    config: dict[str, Any]


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
}


def save_quantised(
    model: PreTrainedModel, directory: Path, form: str, left_out: tuple[str, ...] = ("lm_head", "gate")
) -> None:
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
    model.save_pretrained(directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in replaced:
        del tensors[name]
    save_file(tensors | stored, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = written.config
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").touch()
