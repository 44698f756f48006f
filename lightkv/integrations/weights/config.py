"""Reads what a checkpoint's configuration says of quantised weights and K/V (`quantization_config`).

transformers' quantisers are not used: they want packages or the hub, or make all weights dense. Which layers
are quantised is seen from the names of the stored tensors (`router/model/quantised_layers.py`).
"""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from .float4 import Mxfp4Format, Nvfp4Format
from .fp8 import Fp8Format
from .int4 import GROUPS, AwqFormat, GptqFormat, PackedFormat
from .quantised import Format

_KNOWN = (
    "lightkv reads fp8 with scales of 128 x 128 blocks (quant_method fp8), AWQ, GPTQ without act order, "
    "gpt-oss's mxfp4, modelopt's FP8 and NVFP4, and compressed-tensors' float-quantized and "
    "naive-quantized with floats of 8 bits, pack-quantized with 4 bits, and nvfp4-pack-quantized"
)
_GROUPED = f"lightkv reads 4 bits in groups of {GROUPS} inputs in their order"


class UnknownQuantisation(ValueError):
    """A configuration names a format of weights that is not read here; the message says which are."""


def quantization_config(config: PreTrainedConfig) -> Mapping[str, Any]:
    """Returns a configuration's `quantization_config` (`compression_config` of compressed-tensors before 0.7),
    that of its text model if it has none itself; an empty one if neither has one."""
    for one in (config, config.get_text_config()):
        found = getattr(one, "quantization_config", None) or getattr(one, "compression_config", None)
        if isinstance(found, Mapping):
            return found
        if found is not None and hasattr(found, "to_dict"):
            return dict(found.to_dict())
    return {}


def without_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns a configuration without its `quantization_config`, by which transformers would choose a
    quantiser."""
    for one in (config, config.get_text_config()):
        if hasattr(one, "quantization_config"):
            del one.quantization_config
    return config


def weight_format(config: PreTrainedConfig) -> Format | None:
    """Returns the format of the quantised weights; None if there are none. Raises UnknownQuantisation."""
    fields = quantization_config(config)
    method = fields.get("quant_method")
    if not fields:
        return None
    try:
        if method == "fp8":
            return _fp8(fields)
        if method == "mxfp4":
            return Mxfp4Format()
        if method in ("awq", "gptq"):
            return _awq_or_gptq(fields)
        if method == "modelopt":
            return _modelopt(fields)
        # Some files of compressed-tensors with K/V alone name no method.
        if method == "compressed-tensors" or (method is None and "kv_cache_scheme" in fields):
            return _compressed_tensors(fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise UnknownQuantisation(f"its quantization_config has no usable {error}; {_KNOWN}") from error
    raise UnknownQuantisation(f"its weights are quantised as {method!r}; {_KNOWN}")


def _fp8(fields: Mapping[str, Any]) -> Format:
    block, scheme = fields.get("weight_block_size"), fields.get("activation_scheme", "dynamic")
    if fields.get("fmt", "e4m3") != "e4m3" or (block is not None and list(block) != [128, 128]):
        raise UnknownQuantisation(
            f"its weights are fp8 of kind {fields.get('fmt')} in blocks of {block}, and have to be e4m3 in "
            "128 x 128"
        )
    blocks = (0, 0) if block is None else (128, 128)
    return Fp8Format(".weight_scale_inv", blocks, rounds_input=scheme == "dynamic")


def _awq_or_gptq(fields: Mapping[str, Any]) -> Format:
    method, group = fields["quant_method"], fields["group_size"]
    bits = fields.get("bits", fields.get("w_bit"))
    if bits != 4 or group not in GROUPS:
        raise UnknownQuantisation(f"its {method} weights have {bits} bits in groups of {group}; {_GROUPED}")
    if method == "awq":
        version = str(fields.get("version", "gemm")).lower()
        if version != "gemm" or not fields.get("zero_point", True):
            raise UnknownQuantisation(f"its AWQ weights are of version {version}, or without zeros; {_KNOWN}")
        return AwqFormat(group)
    if fields.get("desc_act") or fields.get("dynamic"):
        raise UnknownQuantisation(f"its GPTQ weights have act order (desc_act) or rules by layer; {_KNOWN}")
    version = fields.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise UnknownQuantisation(f"its GPTQ weights are stored as {version!r}; {_KNOWN}")
    return GptqFormat(group, added=1 if version == "gptq" else 0)


def _modelopt(fields: Mapping[str, Any]) -> Format:
    algorithm = fields.get("quant_algo")
    if algorithm == "NVFP4":
        return Nvfp4Format("weight", "weight_scale_2", divides=False)
    if algorithm == "FP8":
        return Fp8Format(".weight_scale", (0, 0), rounds_input=False)
    raise UnknownQuantisation(f"its weights are quantised by modelopt as {algorithm!r}; {_KNOWN}")


def _compressed_tensors(fields: Mapping[str, Any]) -> Format | None:
    if fields.get("transform_config"):
        raise UnknownQuantisation(f"its layers transform their inputs (transform_config); {_KNOWN}")
    sparse = (fields.get("sparsity_config") or {}).get("format", "dense")
    if sparse != "dense":
        raise UnknownQuantisation(f"its weights are stored without their zeros, as {sparse}; {_KNOWN}")
    groups = (fields.get("config_groups") or {}).values()
    formats = {_group_format(fields, one) for one in groups if one.get("weights", one) is not None}
    if len(formats) > 1:
        raise UnknownQuantisation(f"its weights are in {len(formats)} formats at once; {_KNOWN}")
    return formats.pop() if formats else None  # K/V or attention alone


def _group_format(fields: Mapping[str, Any], group: Mapping[str, Any]) -> Format:
    """Returns the format of a group of layers, as compressed-tensors describes it."""
    weights, inputs = group["weights"], group.get("input_activations")
    name = group.get("format") or fields.get("format")
    kind, bits, strategy = weights["type"], weights["num_bits"], weights.get("strategy")
    if name in ("float-quantized", "naive-quantized") and (kind, bits) == ("float", 8):
        blocks = {"tensor": (0, 0), "channel": (1, 0)}
        if strategy == "block" and weights.get("block_structure") == [128, 128]:
            blocks["block"] = (128, 128)
        if strategy in blocks:
            return Fp8Format(".weight_scale", blocks[strategy], bool((inputs or {}).get("dynamic")))
    if name == "pack-quantized" and (kind, bits, strategy) == ("int", 4, "group"):
        group_size, order = weights["group_size"], weights.get("actorder")
        if group_size not in GROUPS or order not in (None, False, "weight", "static"):
            raise UnknownQuantisation(
                f"its weights of 4 bits have groups of {group_size} and actorder {order!r}; {_GROUPED}"
            )
        return PackedFormat(group_size, has_zeros=not weights.get("symmetric", True))
    if name == "nvfp4-pack-quantized" and (kind, bits, weights.get("group_size")) == ("float", 4, 16):
        return Nvfp4Format("weight_packed", "weight_global_scale", divides=True)
    raise UnknownQuantisation(
        f"its weights are {name} of type {kind} with {bits} bits and scales by {strategy}; {_KNOWN}"
    )
