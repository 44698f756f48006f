"""Finds a model in a directory, in a cache or on the Hugging Face hub, or has the default model converted."""

import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from . import convert
from .files import (
    DEFAULT_MODEL,
    DIRECTORY_REMEDY,
    HUB_ID,
    ModelNotFound,
    UnreadableWeights,
    list_some,
    missing_files,
    names_a_file,
    one_line,
    require_whole,
)

Report = Callable[[str], None]
T = TypeVar("T")

HUB_TIMEOUT = 10.0  # seconds in which the hub has to answer the first request
HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]  # *.bin and *.pt are pickle
HUB_IGNORED = ["*/*.safetensors", "*/*.json", "consolidated*"]  # other formats of the same weights


def resolve(model: str, report: Report, revision: str | None = None) -> Path:
    """Returns the directory that holds `model`.

    A local directory has its config.json, but may lack other files: `require_whole` raises for those later,
    once the architecture is known to run. A directory from any other place has all its files.

    These are tried in order: a local directory, lightkv's converted copies, the default model's package
    (converted once, about 5 s and 540 MB), the Hugging Face cache, the hub (unless HF_HUB_OFFLINE is set).

    Args:
        model: a directory, or an id of the Hugging Face hub such as "org/name".
        report: is called with each line of progress.
        revision: of a model of the hub, which no converted copy has.

    Raises:
        UnreadableWeights: the local directory has no config.json or is given a revision, `model` is a file, or
            the conversion failed.
        ModelNotFound: none of these places has it.
    """
    try:
        directory = Path(model).expanduser()
    except RuntimeError as error:
        raise ModelNotFound(model, [f"{model}: no such home directory"]) from error
    if os.path.isfile(directory):
        raise UnreadableWeights(directory, "is a file, not a model's directory", DIRECTORY_REMEDY)
    if os.path.isdir(directory):  # unlike Path.is_dir, this is False for a name that the system refuses
        if revision is not None:
            reason = f"is a directory, of which there is no revision {revision!r}"
            raise UnreadableWeights(directory, reason, "leave the revision out, or give an id of the hub")
        if not (directory / "config.json").is_file():
            require_whole(directory)
        return directory
    if names_a_file(model) or not HUB_ID.fullmatch(model):
        raise ModelNotFound(model, [f"{directory}: no such directory, and not an id of the Hugging Face hub"])
    tried = [f"{directory}: no such directory"]

    converted = _converted_dir(model)
    if revision is None and converted.is_dir() and not missing_files(converted):
        return converted
    tried.append(f"{converted}: no converted copy")

    if model == DEFAULT_MODEL and revision is None:
        source = convert.packaged_gguf()
        if source is not None:
            return convert.convert(source, converted, report)
        tried.append(f"package {convert.DEFAULT_MODEL_PACKAGE}: not installed")

    cached = _from_hub_cache(model, tried, revision)
    return cached if cached is not None else _from_hub(model, tried, report, revision)


def local_models() -> dict[str, Path]:
    """Returns the directories of the models that this machine has, by their ids: lightkv's converted copies,
    and of each model in the Hugging Face cache its main branch or, without one, its newest revision."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    found: dict[str, Path] = {}
    with suppress(CacheNotFound):
        for repo in scan_cache_dir().repos:
            revisions = sorted(repo.revisions, key=lambda one: ("main" in one.refs, one.last_modified))
            if repo.repo_type == "model" and revisions:
                found[repo.repo_id] = revisions[-1].snapshot_path
    converted = _converted_dir("any").parent
    whole = [one for one in converted.glob("[!.]*") if one.is_dir()]  # .X.partial is one that is being made
    found |= {one.name.replace("--", "/"): one for one in whole}
    return dict(sorted(found.items()))


def _converted_dir(model: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "lightkv" / "models" / model.replace("/", "--")


def _from_hub_cache(model: str, tried: list[str], revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        directory = Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        tried.append("Hugging Face cache: not present")
        return None
    if missing := missing_files(directory):
        tried.append(f"Hugging Face cache: {directory} lacks {list_some(missing)}")
        return None
    return directory


def _from_hub(model: str, tried: list[str], report: Report, revision: str | None) -> Path:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "TRUE", "YES", "ON"}:
        raise ModelNotFound(model, [*tried, "Hugging Face hub: not asked, since HF_HUB_OFFLINE is set"])
    from huggingface_hub import HfApi, snapshot_download

    report(f"asking the Hugging Face hub for {model} (at most {HUB_TIMEOUT:.0f} s)")
    api = HfApi()
    # The client raises the errors of its HTTP library, which differs by the client's version.
    try:
        asked = partial(api.model_info, model, revision=revision, timeout=HUB_TIMEOUT, files_metadata=True)
        info = _within(HUB_TIMEOUT, asked)
    except Exception as error:
        raise ModelNotFound(model, [*tried, f"Hugging Face hub: {one_line(error)}"]) from error
    files = [file for file in info.siblings or [] if "/" not in file.rfilename]
    weights = [file for file in files if re.fullmatch(r"model.*\.safetensors", file.rfilename)]
    if not weights:
        answer = "Hugging Face hub: has no safetensors of this model, and lightkv loads no pickle"
        raise ModelNotFound(model, [*tried, answer])
    num_bytes = sum(file.size or 0 for file in weights)
    report(f"downloading {model} from the Hugging Face hub ({num_bytes / 1e9:.2f} GB)")
    try:
        taken = snapshot_download(
            model, revision=revision, allow_patterns=HUB_FILES, ignore_patterns=HUB_IGNORED
        )
        directory = Path(taken)
    except Exception as error:
        answer = f"Hugging Face hub: the download failed ({one_line(error)}); start again to resume it"
        raise ModelNotFound(model, [*tried, answer]) from error
    if missing := missing_files(directory):
        raise ModelNotFound(model, [*tried, f"Hugging Face hub: lacks {list_some(missing)} of this model"])
    return directory


def _within(seconds: float, call: Callable[[], T]) -> T:
    """Returns the result of `call()`. Raises TimeoutError after `seconds`.

    HTTP timeouts do not cover the time that a name server takes to answer; this one does.
    """
    future: Future[T] = Future()

    def target() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(seconds)
    if not future.done():
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return future.result()
