"""Describes the machine and the model of an engine without loading weights, for `lightkv info`.

The sizes are those that `sizes.py` would choose, with several ranks those of rank 0. No memory is used for the
weights or the pool.
"""

import platform
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from transformers import PreTrainedModel

import lightkv
from lightkv.attention.select import make_backends, pick_backend
from lightkv.integrations.model.adapters.adapt import adapt
from lightkv.integrations.model.fused_layers import unplanned_layers
from lightkv.integrations.model.linears import size_of
from lightkv.integrations.model.mixers.mixer import mixers_of
from lightkv.integrations.model.probe import ModelShape, NeedsNumbers, find_shape, probe
from lightkv.integrations.ranks.group import RankGroup
from lightkv.memory.kv_spec import KVSpec
from lightkv.router.config import EngineConfig
from lightkv.router.model.loading.text_half import left_out_of

from .build import kv_scales, use_fp8_prefill
from .loader import load_model
from .model_config import load_supported_config
from .sizes import EngineSizes, kv_text, pick_dtype, pick_rank_device

_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "numpy")

_LENGTHS = (2_048, 8_192, 32_768)  # of the requests whose slots are told


class MachineInfo(msgspec.Struct, frozen=True):
    """The device, and the installed versions. The bytes are those of the device's memory, and 0 on a CPU."""

    device: str
    device_name: str
    total_bytes: int
    free_bytes: int
    versions: dict[str, str]


def machine_info(config: EngineConfig) -> MachineInfo:
    """Returns the device that `config` names and the installed versions. Raises InvalidConfig."""
    device = pick_rank_device(config, 0)
    name, free, total = f"{torch.get_num_threads()} threads", 0, 0
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        free, total = torch.cuda.mem_get_info(device)
    versions = {"lightkv": lightkv.__version__, "python": platform.python_version()}
    versions |= {package: _version(package) for package in _PACKAGES}
    return MachineInfo(str(device), name, total, free, versions)


def model_info(config: EngineConfig, directory: Path) -> dict[str, Any]:
    """Returns the shape of the model in `directory`, and the K/V pool that would fit beside it on its
    device, each figure by its name; with several ranks, of the part of one. Lengths are in tokens. Takes
    seconds for billions of parameters.

    Every file is checked as if it were loaded. Raises what the engine would: InvalidConfig, UnreadableWeights,
    UnsupportedModel, OutOfMemory.
    """
    device = pick_rank_device(config, 0)
    dtype = pick_dtype(config.dtype)
    if dtype == "auto" and device.type == "cpu":
        dtype = torch.float32  # on the meta device, "auto" is a GPU's type
    scales = kv_scales(config, directory, load_supported_config(directory))
    meta = torch.device("meta")
    with (
        RankGroup.of_shapes(config.tensor_parallel) if config.tensor_parallel > 1 else nullcontext() as ranks
    ):
        model = load_model(directory, meta, dtype, lambda line: None, ranks, config.dequantise)
        num_parameters, num_bytes = size_of(cast(torch.nn.Module, model))
        shape = _shape(model)  # may change the type of the parameters
    sizes = EngineSizes(config, device, model.config.get_text_config())
    limits = sizes.limits
    shape = sizes.with_format(shape)
    # On the meta device the weights are not on the GPU yet.
    plan = sizes.memory(shape, num_bytes if device.type == "cuda" else 0)
    spec, pool = shape.spec, plan.pool
    backends = make_backends(config.attention_backend, device, shape.layers)
    use_fp8_prefill(backends, spec, device, scales, config.prefill_dtype, lambda line: None)
    return {
        "model": config.model,
        "directory": str(directory),
        "architecture": type(model).__name__,
        "num_ranks": config.tensor_parallel,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "num_parameters": num_parameters,
        "weight_bytes": num_bytes,
        "left_out": left_out_of(model),
        "unfused": unplanned_layers(model) if config.fuse else {"--no-fuse": spec.num_layers},
        "num_layers": spec.num_layers,
        "num_kv_heads": spec.num_kv_heads,
        "k_dim": spec.k_dim,
        "v_dim": spec.v_dim,
        "kv_heads": _kv_heads(spec),
        "bytes_per_token": spec.bytes_per_token,
        "bytes_per_slot": spec.bytes_per_slot,
        "layer_groups": asdict(spec.groups),
        "layer_classes": list(map(str, spec.groups.classes)),
        "unused_lanes": spec.unused_share,
        "slots_of_request": {
            length: spec.groups.slots(length)
            for length in dict.fromkeys(min(length, limits.max_model_len) for length in _LENGTHS)
        },
        "kv_dtype": kv_text(config, shape),
        "attention_backend": pick_backend(config.attention_backend, device).__name__,
        "max_num_seqs": limits.max_num_seqs,
        "max_model_len": limits.max_model_len,
        "prefill_chunk": limits.prefill_chunk,
        "pool_slots": pool.num_tokens,
        "pool_bytes": pool.num_bytes,
        "pool_reason": pool.why,
        "bytes_per_state": spec.bytes_per_state,
        "num_states": plan.num_states,
        "state_bytes": plan.state_bytes(spec),
    }


def _kv_heads(spec: KVSpec) -> list[dict[str, int]]:
    """Returns the K/V heads that layers hold, and of how many layers."""
    found = Counter(spec.heads(layer) for layer in range(spec.num_layers) if spec.holder(layer) == layer)
    return [{"num_layers": count, **heads._asdict()} for heads, count in found.items()]


def _shape(model: PreTrainedModel) -> ModelShape:
    """Returns the K/V and the attention of a model on the meta device. Raises UnsupportedModel."""
    dtype, module = model.dtype, cast(torch.nn.Module, model)
    try:
        # In bfloat16: on the meta device, products over experts exist in 16 bits only.
        module.to(torch.bfloat16)
        adapt(model)
        shape = probe(model)
        module.to(dtype)
        states = tuple(mixer.tensors for mixer in mixers_of(model))
        return replace(shape, spec=replace(shape.spec, dtype=dtype, states=states))
    except NeedsNumbers:
        # Untouched memory is only reserved, not used, and the values in it do not matter here.
        module.to(dtype).to_empty(device="cpu")
        return find_shape(model)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
