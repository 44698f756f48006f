"""Reads the scales of K and V in fp8 from a checkpoint's files, under the names that other projects give them.

| written by | names, after `….layers.N.` |
|---|---|
| compressed-tensors, llm-compressor | `self_attn.k_scale` and `.v_scale`, one, or one a K/V head |
| … of other versions | `self_attn.attn.k_scale`, `self_attn.k_proj.output_scale`, `self_attn.k_proj.k_scale` |
| TensorRT-LLM | `attention.kv_cache_scaling_factor`, one for K and V |

A checkpoint that asks for attention in fp8 has a scale of queries beside them, under the same names with `q`.
All of them lead from the stored number back: a value is about `element * scale`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig

from lightkv.errors import LightKVError
from lightkv.integrations.weights.config import quantization_config
from lightkv.memory.kv_pool import KVPool

# The parts of a layer's name that a scale is stored under, and which of q, K and V it is for.
_SPELLINGS = {
    "q_scale": "q",
    "q_proj.q_scale": "q",
    "q_proj.output_scale": "q",
    "k_scale": "k",
    "k_proj.k_scale": "k",
    "k_proj.output_scale": "k",
    "v_scale": "v",
    "v_proj.v_scale": "v",
    "v_proj.output_scale": "v",
    "kv_cache_scaling_factor": "kv",
}
_NAME = re.compile(
    r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,5})\.(?:self_attn|self_attention|attention|attn)\.(?:attn\.)?"
    rf"({'|'.join(map(re.escape, _SPELLINGS))})$"
)
_REMEDY = "choose --kv-dtype int8, which computes its scales"
_REMEDY_OF_QUERIES = "choose --prefill-dtype model, which needs none"


class BadScales(LightKVError, ValueError):
    """A checkpoint has no scales of K and V for a layer, or scales that cannot be used."""


class LayerScales(NamedTuple):
    """The scales of a layer, float32 `[1]` or `[num_kv_heads]` each, on the CPU. `q`: those of queries, `[n]`,
    if the checkpoint has some; n is not checked."""

    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor | None = None


def kv_scheme(config: PreTrainedConfig) -> Mapping[str, object] | None:
    """Returns what a checkpoint's configuration says of quantised K/V (compressed-tensors' `kv_cache_scheme`),
    None if it says nothing."""
    scheme = quantization_config(config).get("kv_cache_scheme")
    return scheme if isinstance(scheme, Mapping) else None


def read_kv_scales(
    files: Sequence[Path], layers: Iterable[int], *, of_queries: bool = True
) -> dict[int, LayerScales]:
    """Returns the scales of `layers` from safetensors files, of which nothing else is read. `of_queries`:
    whether those of queries are read, too.

    Raises BadScales for a layer without a scale of K or of V, for two that differ, for one that is not finite
    and above 0, and for a file that cannot be read.
    """
    found: dict[tuple[int, str], tuple[str, torch.Tensor]] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - a safe_open is no mapping
                    match = _NAME.search(name)
                    if match and (of_queries or _SPELLINGS[match[2]] != "q"):
                        _add(found, name, int(match[1]), _SPELLINGS[match[2]], tensors.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise BadScales(f"{path} cannot be read for scales of K/V ({error})") from error
    return {
        layer: LayerScales(
            _found(found, layer, "k"), _found(found, layer, "v"), found.get((layer, "q"), ("", None))[1]
        )
        for layer in layers
    }


def _add(
    found: dict[tuple[int, str], tuple[str, torch.Tensor]],
    name: str,
    layer: int,
    kinds: str,
    tensor: torch.Tensor,
) -> None:
    scale, remedy = tensor.float().flatten(), _REMEDY_OF_QUERIES if kinds == "q" else _REMEDY
    if not bool((scale.isfinite() & (scale > 0)).all()) or not len(scale):
        raise BadScales(f"{name} is {scale[:4].tolist()}, and has to be finite and above 0; {remedy}")
    for kind in kinds:
        other, known = found.setdefault((layer, kind), (name, scale))
        if not torch.equal(known, scale):
            raise BadScales(f"{other} and {name} differ, and both are the scale of {kind.upper()}; {remedy}")


def _found(found: dict[tuple[int, str], tuple[str, torch.Tensor]], layer: int, kind: str) -> torch.Tensor:
    if (layer, kind) in found:
        return found[layer, kind][1]
    names = ", ".join(f"…layers.{layer}.self_attn.{name}" for name in _SPELLINGS if _SPELLINGS[name] == kind)
    raise BadScales(
        f"the checkpoint has no scale of {kind.upper()} for layer {layer} (looked for {names}, "
        f"…layers.{layer}.attention.kv_cache_scaling_factor); {_REMEDY}, or leave layers out with "
        "--kv-skip-layers"
    )


def set_kv_scales(pool: KVPool, scales: Mapping[int, LayerScales]) -> None:
    """Sets the scales of every layer of `pool` that has static ones.

    Raises BadScales for a layer without scales, and for another number of them than one, or one a K/V head.
    """
    spec = pool.spec
    for layer in range(spec.num_layers):
        if not pool.format(layer).is_static or spec.holder(layer) != layer:
            continue
        if layer not in scales:
            raise BadScales(f"there are no scales for layer {layer}; {_REMEDY}")
        of_layer, num_kv_heads = scales[layer], spec.heads(layer).num_kv_heads
        for name, scale in (("K", of_layer.k), ("V", of_layer.v)):
            if len(scale) not in (1, num_kv_heads):
                raise BadScales(
                    f"layer {layer} has {len(scale)} scales of {name}, and {num_kv_heads} K/V heads; {_REMEDY}"
                )
        pool.set_static_scales(layer, of_layer.k, of_layer.v)
