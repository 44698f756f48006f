"""Loads a model from its files onto a device with transformers' auto classes.

Weights are read from safetensors files only. Pickle is never loaded, and code that comes with a model is never
run.
"""

import json
import os
import re
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel

from lightkv.errors import LightKVError, UnsupportedModel, require_packages
from lightkv.integrations.ranks.group import RankGroup
from lightkv.integrations.ranks.sharded import divide_shapes, load_rank_part
from lightkv.integrations.weights.config import without_quantization
from lightkv.integrations.weights.quantised import CannotDivide
from lightkv.memory.kv_pool import free_bytes
from lightkv.router.model.loading.quantised_layers import quantised_layers
from lightkv.router.model.loading.text_half import TextHalf, is_wrapper, note_left_out, text_half
from lightkv.router.model_files import (
    INDEX,
    StoredTensor,
    UnreadableWeights,
    one_line,
    read_json,
    stored_tensors,
    weight_files,
)

from .model_config import load_checked_config, quiet_transformers, refusing

Report = Callable[[str], None]

_CAST_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # the types of a safetensors file that loading casts


class ModelTooLarge(LightKVError):
    """A model's weights do not fit the memory of the device."""

    def __init__(self, path: Path, num_bytes: int, free: int, total: int) -> None:
        self.path = path
        super().__init__(
            f"{path}: {num_bytes / 1e9:.2f} GB of weights do not fit the device, which has {free / 1e9:.2f} GB "
            f"free of {total / 1e9:.2f}; stop other programs on it, or give a smaller model or dtype"
        )


def load_model(
    directory: Path,
    device: torch.device,
    dtype: torch.dtype | Literal["auto"],
    report: Report,
    ranks: RankGroup | None = None,
    dequantise: bool = False,
) -> PreTrainedModel:
    """Loads the model in `directory` onto `device`, in evaluation mode and without gradients.

    Args:
        directory: as `resolve` returns it.
        device: where every parameter is put, straight from the file.
        dtype: of the parameters. "auto" is float32 on the CPU; on a GPU it is the checkpoint's own 16-bit type,
            and bfloat16 for any other type.
        report: is called with each line of progress.
        ranks: the group of this process, which then reads its own part of the weights; None reads all. On the
            meta device, `RankGroup.of_shapes`.
        dequantise: whether quantised weights become plain ones of `dtype`.

    Raises:
        UnsupportedModel: see `check_supported` and, with ranks, `load_rank_part`.
        UnreadableWeights: a file or tensor is missing, damaged, or does not fit the configuration.
        ModelTooLarge: the weights do not fit the device. This is checked before any weight is read, since Linux
            grants more CPU memory than it has and kills the process that uses it.
    """
    config = load_checked_config(directory)
    with refusing(directory, "cannot be loaded"), quiet_transformers():
        half = text_half(config) if is_wrapper(config) else None
    tensors: dict[str, StoredTensor] = {}
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] if half is None else half.model_class
    for name in weight_files(directory):
        tensors |= _known(stored_tensors(directory / name), model_class)
    stored, unread = _stored_bytes(tensors, half)
    if dtype == "auto":
        dtype = _auto_dtype(device, getattr(config, "dtype", None), set(stored))
    with refusing(directory, "cannot be loaded"), quiet_transformers():
        layers = quantised_layers(directory, config, tensors, half, dtype)
    config = without_quantization(config)
    if layers is not None and layers.needs_library and device.type == "cuda" and not dequantise:
        what = f"a model with weights in {layers.format.name} (unless it runs with --dequantise)"
        require_packages(what, "quantised", "humming")
    if layers is not None and not dequantise:
        layers.require_whole()
    num_bytes = _loaded_bytes(stored, dtype.itemsize)
    if layers is not None and dequantise:
        packed = sum(tensors[name].num_bytes for name in layers.names if name in tensors)
        num_bytes += layers.num_bytes(dtype.itemsize) - packed
    num_bytes //= 1 if ranks is None else ranks.size
    left_out = {name: _loaded_bytes(one, dtype.itemsize) for name, one in unread.items()}
    free, total = _memory(device)
    if num_bytes > free and device.type != "meta":  # the meta device stores nothing
        raise ModelTooLarge(directory, num_bytes, free, total)

    report(f"loading {num_bytes / 1e9:.2f} GB from {directory} onto {device} as {dtype}")
    if layers is not None:
        kept = "made dense" if dequantise else "kept so"
        experts = f" and the experts of {len(layers.experts)} products" if layers.experts else ""
        report(f"of them, {len(layers.weights)} linear layers{experts} are in {layers.format.name}, {kept}")
    if half is not None:
        parts = ", ".join(f"{name} ({one / 1e9:.2f} GB)" for name, one in left_out.items())
        report(f"of {half.model_class.__name__}, only texts run here; left out: {parts or 'nothing'}")
    started = time.perf_counter()
    try:
        with quiet_transformers(), _with_index_metadata(directory) as readable:
            settings: dict[str, Any] = {
                "dtype": dtype,
                "use_safetensors": True,
                "ignore_mismatched_sizes": True,  # they are then listed, and refused below
                "local_files_only": True,
                "trust_remote_code": False,
                "output_loading_info": True,
            }
            if layers is not None:
                model_class = layers.model_class(model_class)
            elif half is None:
                model_class = AutoModelForCausalLM
            if ranks is None or device.type == "meta":
                load = model_class.from_pretrained
                model, info = load(readable, config=config, device_map={"": device}, **settings)
                if ranks is not None:
                    divide_shapes(model, ranks)
            else:
                model, info = load_rank_part(readable, ranks, config, model_class, **settings)
            if layers is not None:
                layers.read(model, device, dtype, dequantise)
    except torch.OutOfMemoryError as error:
        raise ModelTooLarge(directory, num_bytes, free, total) from error
    except (UnsupportedModel, CannotDivide):
        raise
    except ImportError as error:  # of weights in fewer bits
        remedy = "give the model with weights in 16 bits (with that package, lightkv was not tried)"
        raise UnreadableWeights(directory, f"cannot be loaded ({one_line(error)})", remedy) from error
    # A field of a wrong type fails wherever the model's code first uses it.
    except Exception as error:
        raise UnreadableWeights(directory, f"cannot be loaded ({one_line(error)})") from error
    # transformers fills missing tensors, and those of another shape, with random numbers. Tied weights are not
    # listed as missing.
    if missing := sorted(info["missing_keys"]):
        reason = f"lacks {len(missing)} of the model's tensors, {missing[0]} first"
        head = model.get_output_embeddings()
        ties = [name for name, one in model.named_parameters() if head is not None and one is head.weight]
        remedy = 'if it ties them to its embedding, set "tie_word_embeddings": true in config.json'
        raise UnreadableWeights(directory, reason, remedy if missing == ties else None)
    if mismatched := sorted(str(key[0]) for key in info["mismatched_keys"]):
        count = f"{len(mismatched)} tensors, {mismatched[0]} first"
        # transformers does not divide all that it converts while it loads, such as transposed experts.
        where = "" if ranks is None else " or than a rank's part has (without --tensor-parallel it may load)"
        raise UnreadableWeights(directory, f"{count}, have another shape than config.json says{where}")
    known = {} if half is None else half.places(info["unexpected_keys"])
    names = frozenset[str]() if layers is None else layers.names
    if unexpected := sorted(set(info["unexpected_keys"]) - known.keys() - names):
        report(f"left out {len(unexpected)} tensors unknown to {type(model).__name__}, {unexpected[0]} first")
    note_left_out(model, left_out)
    report(f"loaded {type(model).__name__} in {time.perf_counter() - started:.1f} s")
    return model.requires_grad_(False).eval()


@contextmanager
def _with_index_metadata(directory: Path) -> Iterator[Path]:
    """Yields `directory`, or where its index of shards has no object `metadata`, a temporary directory of links
    whose index has one. transformers does not load shards without it, and needs nothing that it says."""
    shards = weight_files(directory)
    index = {} if shards == ["model.safetensors"] else read_json(directory / INDEX)
    if not index or isinstance(index.get("metadata"), dict):
        yield directory
        return
    with tempfile.TemporaryDirectory() as links:
        for path in directory.iterdir():
            if path.name != INDEX:
                (Path(links) / path.name).symlink_to(path.absolute())
        (Path(links) / INDEX).write_text(json.dumps(index | {"metadata": {}}), encoding="utf-8")
        yield Path(links)


def _known(stored: Mapping[str, StoredTensor], model_class: Any) -> dict[str, StoredTensor]:
    """Returns the tensors that a class of models builds. Released models have layers that transformers does not
    build, as those that predict several tokens."""
    ignored = [re.compile(one) for one in model_class._keys_to_ignore_on_load_unexpected or ()]
    return {name: one for name, one in stored.items() if not any(one.search(name) for one in ignored)}


def _stored_bytes(
    tensors: Mapping[str, StoredTensor], half: TextHalf | None
) -> tuple[Counter[str], dict[str, Counter[str]]]:
    """Returns the bytes of each element type in a model's files: of the weights that are read, and of those of
    each module that is left out."""
    read, left_out = Counter[str](), defaultdict[str, Counter[str]](Counter)
    places = {} if half is None else half.places(tensors)
    for name, one in tensors.items():
        counter = left_out[places[name]] if name in places else read
        counter[one.dtype] += one.num_bytes
    return read, left_out


def _auto_dtype(device: torch.device, declared: torch.dtype | None, stored: set[str]) -> torch.dtype:
    if device.type == "cpu":
        return torch.float32
    if declared is None and stored == {"F16"}:
        declared = torch.float16
    return torch.float16 if declared == torch.float16 else torch.bfloat16


def _loaded_bytes(stored: Counter[str], itemsize: int) -> int:
    """Returns the bytes of the weights once they are loaded in a type of `itemsize` bytes.

    `stored`: the bytes of each element type in the files.
    """
    return sum(
        num_bytes * itemsize // _CAST_BYTES[name] if name in _CAST_BYTES else num_bytes
        for name, num_bytes in stored.items()
    )


def _memory(device: torch.device) -> tuple[int, int]:
    """Returns the free and the total bytes of `device`."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that torch caches without using it is free too
        return torch.cuda.mem_get_info(device)
    return free_bytes(device), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
