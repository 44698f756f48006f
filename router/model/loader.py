"""From a model's files to a model on a device.

Uses transformers' auto classes. Weights are read from safetensors files only: pickle is never loaded, and a
repository's own code is never run. Importing this module does not load torch; most of its functions do.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from lightkv.errors import LightKVError, UnsupportedModel
from lightkv.router.model_files import (
    UnreadableWeights,
    in_line,
    one_line,
    read_json,
    require_whole,
    weight_files,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

Report = Callable[[str], None]

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")  # as configurations call them
_MAX_LAYERS = 10_000
_MAX_HEADER_BYTES = 100_000_000  # of a safetensors file, by its own definition
CAST_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # the types in a safetensors file that loading casts


class ModelTooLarge(LightKVError):
    """A model's weights do not fit the memory of the device."""

    def __init__(self, path: Path, num_bytes: int, free: int, total: int) -> None:
        self.path = path
        super().__init__(
            f"{path}: {num_bytes / 1e9:.2f} GB of weights do not fit the device, which has {free / 1e9:.2f} GB "
            f"free of {total / 1e9:.2f}; stop what else runs on it, or give a smaller model or dtype"
        )


def load_config(directory: Path) -> PreTrainedConfig:
    """The configuration in `directory`.

    Raises:
        UnreadableWeights: config.json is missing or damaged.
        UnsupportedModel: the installed transformers does not know the architecture.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, __version__

    path = directory / "config.json"
    try:
        raw = read_json(path)
        model_type = raw["model_type"]
        architecture = (raw.get("architectures") or [model_type])[0]
        if not isinstance(model_type, str) or not isinstance(architecture, str):
            raise TypeError(f"model_type {model_type!r} and architectures {architecture!r} are to be names")
        # transformers writes out some fields for every layer, which for a wrong number takes all memory.
        if wrong := [name for name in _LAYER_COUNTS if name in raw and not _is_layer_count(raw[name])]:
            raise ValueError(f"{wrong[0]} is {raw[wrong[0]]!r}, and can be 1 to {_MAX_LAYERS}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnreadableWeights(path, f"is no model configuration ({one_line(error)})") from error
    if model_type not in CONFIG_MAPPING:
        hint = " (the code it brings along is never run)" if "auto_map" in raw else ""
        reason = f"transformers {__version__} does not know {model_type[:100]!r}{hint}"
        raise UnsupportedModel(in_line(architecture), reason)
    try:
        with _quiet_transformers():
            config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    # The hub's validators raise errors of their own for a field out of range.
    except Exception as error:
        raise UnreadableWeights(path, f"is refused by transformers ({one_line(error)})") from error
    # transformers would load this file, even a pickle, in place of those that `weight_files` names. It is read
    # from the configuration as transformers does, since an attribute_map can give it another name in the file.
    if getattr(config, "transformers_weights", None) is not None:
        raise UnreadableWeights(
            path, "names a file of weights (transformers_weights), which lightkv never follows"
        )
    # Where peft is installed, transformers would load an adapter, of which nothing is checked here.
    if (directory / "adapter_config.json").is_file():
        remedy = "merge the adapter into its base model and give that, or delete the file"
        raise UnreadableWeights(directory, "holds an adapter_config.json", remedy)
    return config


def check_supported(config: PreTrainedConfig) -> None:
    """Raises UnsupportedModel for an architecture that lightkv's attention cannot run; reads no weights."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    named = getattr(config, "architectures", None) or []
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] if known else None
    architecture = named[0] if named else getattr(model_class, "__name__", config.model_type)

    def refuse(reason: str) -> NoReturn:
        raise UnsupportedModel(in_line(architecture), in_line(reason))

    # First, for transformers raises on reading from such a configuration what differs between its layers.
    if getattr(config, "is_heterogeneous", False):
        refuse("its layers differ in shape")
    if config.is_encoder_decoder:
        refuse("it is an encoder-decoder")
    sub_configs = getattr(config, "sub_configs", {})
    if "text_config" in sub_configs or any("vision" in name or "audio" in name for name in sub_configs):
        refuse("it wraps a text model together with other modalities")
    if re.search(r"For(?!CausalLM)[A-Z]\w*$", architecture):
        refuse("it is no causal language model")
    if model_class is None:
        refuse("transformers has no causal language model of this type")
    if getattr(config, "is_decoder", None) is False and hasattr(config, "add_cross_attention"):
        refuse("it is an encoder")
    if getattr(config, "use_bidirectional_attention", False):
        refuse("its attention is bidirectional")
    if getattr(config, "kv_lora_rank", None):
        refuse("its attention is latent (kv_lora_rank)")
    if getattr(config, "num_kv_shared_layers", 0):
        refuse("some of its layers read another layer's K/V (num_kv_shared_layers)")
    if getattr(model_class, "_is_stateful", False):
        refuse("some of its layers keep a recurrent state")
    # Chunked attention reaches a kernel only through its mask, which a kernel over slots does not take.
    layer_types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    if other := set(layer_types) - {"full_attention", "sliding_attention"}:
        refuse(f"it has layers of type {', '.join(sorted(other))}")
    no_rope = getattr(config, "no_rope_layers", None) or []
    if getattr(config, "attn_temperature_tuning", False) and not all(no_rope):
        refuse("it scales queries by their place in the batch (attn_temperature_tuning)")
    if not getattr(model_class, "_supports_attention_backend", False):
        refuse("its transformers code does not take another attention (AttentionInterface)")


def load_supported_config(directory: Path) -> PreTrainedConfig:
    """The configuration in `directory`, once everything that does not need the weights is checked.

    The model is built on the meta device, which takes no memory, and probed. A difference that shows only in
    computed numbers is found by `probe` after loading. The presence of the other files is checked last, so that
    an architecture which cannot run is refused first.

    Raises:
        UnsupportedModel: see `check_supported` and `probe`.
        UnreadableWeights: config.json is damaged, or `directory` lacks a file.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from lightkv.integrations.model.probe import NeedsNumbers, probe

    config = _load_checked_config(directory)
    try:
        # In 16 bits, the only type in which the meta device has every product of experts.
        with _quiet_transformers(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    # A field of a wrong type fails wherever the model's code first uses it.
    except Exception as error:
        reason = f"describes no model that can be made ({one_line(error)})"
        raise UnreadableWeights(directory / "config.json", reason) from error
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        raise UnsupportedModel(type(model).__name__, "it does not count a text's positions from 0")
    with suppress(NeedsNumbers), _quiet_transformers():
        probe(model)
    require_whole(directory)
    return config


def position_limit(config: PreTrainedConfig) -> int | None:
    """The number of positions within which a token's rotary embedding depends on its own position alone.

    None: the embedding never depends on other tokens.

    transformers' `dynamic` and `longrope` embeddings take their frequencies from the highest position of the
    whole batch (modeling_rope_utils.dynamic_rope_update): a request that passes the limit would change what
    is computed for every other. `dynamic` does so from max_position_embeddings on, whatever the original
    length; `longrope` from original_max_position_embeddings on. `config`: as `load_config` returns it.
    """
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    limits: list[int] = []
    # Of all layers, or of each type of layer by its name.
    for rope in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        rope_type = rope.get("rope_type", "default")
        if not isinstance(rope_type, str):
            raise TypeError(f"rope_type is {rope_type!r}, and has to be a name")
        if "dynamic" in rope_type:
            limits.append(text.max_position_embeddings)
        elif rope_type == "longrope":
            limits.append(rope["original_max_position_embeddings"])
    if wrong := [limit for limit in limits if type(limit) is not int or limit < 1]:
        raise ValueError(f"the rotary embedding is for {wrong[0]!r} positions")
    return min(limits, default=None)


def load_model(
    directory: Path, device: torch.device, dtype: torch.dtype | Literal["auto"], report: Report
) -> PreTrainedModel:
    """The model in `directory`, on `device`, in evaluation mode and without gradients.

    Args:
        directory: as `resolve` returns it.
        device: where every parameter is put, straight from the file.
        dtype: of the parameters. "auto": float32 on the CPU; on a GPU the checkpoint's own 16-bit type,
            bfloat16 for any other.
        report: takes progress, a line at a time.

    Raises:
        UnsupportedModel: see `check_supported`.
        UnreadableWeights: a file or tensor is missing, damaged, or does not fit the configuration.
        ModelTooLarge: the weights do not fit the device. This is checked before any is read, since Linux
            grants more CPU memory than it has and kills the process that uses it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = _load_checked_config(directory)
    stored = sum((_stored_bytes(directory / name) for name in weight_files(directory)), Counter[str]())
    if dtype == "auto":
        dtype = _auto_dtype(device, getattr(config, "dtype", None), set(stored))
    num_bytes = _loaded_bytes(stored, dtype.itemsize)
    free, total = _memory(device)
    if num_bytes > free and device.type != "meta":  # which stores nothing
        raise ModelTooLarge(directory, num_bytes, free, total)

    report(f"loading {num_bytes / 1e9:.2f} GB from {directory} onto {device} as {dtype}")
    started = time.perf_counter()
    try:
        with _quiet_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                device_map={"": device},
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # they are then listed, and refused below
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
            model, info = loaded
    except torch.OutOfMemoryError as error:
        raise ModelTooLarge(directory, num_bytes, free, total) from error
    # A field of a wrong type fails wherever the model's code first uses it.
    except Exception as error:
        raise UnreadableWeights(directory, f"cannot be loaded ({one_line(error)})") from error
    # transformers fills what is missing or of another shape with random numbers. Tied weights are not listed.
    if missing := sorted(info["missing_keys"]):
        raise UnreadableWeights(directory, f"lacks {len(missing)} of the model's tensors, {missing[0]} first")
    if mismatched := sorted(str(key[0]) for key in info["mismatched_keys"]):
        count = f"{len(mismatched)} tensors, {mismatched[0]} first"
        raise UnreadableWeights(directory, f"{count}, have another shape than config.json says")
    if unexpected := sorted(info["unexpected_keys"]):
        report(f"left out {len(unexpected)} tensors unknown to {type(model).__name__}, {unexpected[0]} first")
    report(f"loaded {type(model).__name__} in {time.perf_counter() - started:.1f} s")
    return model.requires_grad_(False).eval()


def random_model(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model of `config`'s shape with random weights, made on `device`, for benchmarks and tests.

    Matrices are normal with standard deviation 1/sqrt(fan-in), so that activations keep their size; biases
    are zero, norms one; buffers (the rotary frequencies) are those of a real model. Repeatable after
    `torch.manual_seed`.
    """
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    check_supported(config)
    with init_empty_weights(include_buffers=False):  # no memory for the parameters yet; buffers for real
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    made: dict[int, torch.nn.Parameter] = {}  # by the id of the parameter replaced: a tied one stays one
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                if data.dim() >= 2:
                    data.normal_(std=data.shape[-1] ** -0.5)
                else:
                    data.fill_(0.0 if name.endswith("bias") else 1.0)
                made[id(parameter)] = torch.nn.Parameter(data, requires_grad=False)
            setattr(module, name, made[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
    return model.eval()


def _load_checked_config(directory: Path) -> PreTrainedConfig:
    """The configuration in `directory`, after `check_supported` and `position_limit` have read it.

    Raises UnsupportedModel, and UnreadableWeights for a damaged file or a field of a wrong type.
    """
    from transformers import PreTrainedConfig

    config = load_config(directory)
    try:
        check_supported(config)
        if not isinstance(config.get_text_config(), PreTrainedConfig):
            raise TypeError("a field that stands for the text model's configuration is something else")
        position_limit(config)
    except LightKVError:
        raise
    except Exception as error:
        reason = f"has a field of a wrong type ({one_line(error)})"
        raise UnreadableWeights(directory / "config.json", reason) from error
    return config


def _is_layer_count(value: Any) -> bool:
    return value is None or (type(value) is int and 1 <= value <= _MAX_LAYERS)


def _auto_dtype(device: torch.device, declared: torch.dtype | None, stored: set[str]) -> torch.dtype:
    import torch

    if device.type == "cpu":
        return torch.float32
    if declared is None and stored == {"F16"}:
        declared = torch.float16
    return torch.float16 if declared == torch.float16 else torch.bfloat16


def _stored_bytes(path: Path) -> Counter[str]:
    """Bytes of each type of number in a safetensors file.

    Raises UnreadableWeights for a file that is damaged, or whose size is not the one that its header gives.
    """
    num_bytes: Counter[str] = Counter()
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            if 8 + header_size > size:
                raise UnreadableWeights(path, f"is cut off within its header ({size} bytes)")
            if header_size > _MAX_HEADER_BYTES:
                raise ValueError(f"its header has {header_size} bytes, and can have {_MAX_HEADER_BYTES}")
            header = json.loads(file.read(header_size))
        header.pop("__metadata__", None)
        expected = 8 + header_size
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
                raise ValueError(f"tensor {name[:100]!r} is from byte {begin!r} to {end!r}")
            num_bytes[str(entry["dtype"])] += end - begin
            expected = max(expected, 8 + header_size + end)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableWeights(path, f"is no safetensors file ({one_line(error)})") from error
    if size != expected:
        raise UnreadableWeights(path, f"has {size} bytes and should have {expected}")
    return num_bytes


def _loaded_bytes(stored: Counter[str], itemsize: int) -> int:
    """Bytes that weights take once they are loaded in a type of `itemsize` bytes.

    `stored`: their bytes in the files, by type.
    """
    return sum(
        num_bytes * itemsize // CAST_BYTES[name] if name in CAST_BYTES else num_bytes
        for name, num_bytes in stored.items()
    )


def _memory(device: torch.device) -> tuple[int, int]:
    """The free and the total bytes of `device`."""
    import torch

    from lightkv.memory.kv_pool import _free_bytes

    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that torch caches without using it is free too
        return torch.cuda.mem_get_info(device)
    return _free_bytes(device), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silences transformers' warnings and progress bars: lightkv reports progress itself."""
    from transformers.utils import logging

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
