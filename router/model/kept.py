"""Keeps what a start has measured in files beside Triton's compiled kernels, so that later starts need not."""

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from lightkv import __version__

T = TypeVar("T")


def measured_once(name: str, facts: Any, kind: Any, measure: Callable[[], T]) -> tuple[T, bool]:
    """Returns what `measure` returned in this or in an earlier start, and whether it was an earlier one.

    `name`: of what is measured. `facts`: all that the result depends on beside the GPU and the versions of
    torch and lightkv, in types that msgspec encodes. `kind`: the type of the result. Where the file is missing,
    or holds something else than a result of this type for these facts, this measures and writes it again; where
    it cannot be written, each start measures.
    """
    known = {"gpu": torch.cuda.get_device_name(), "torch": str(torch.__version__), "lightkv": __version__}
    key = hashlib.sha256(msgspec.json.encode([known, facts], order="sorted")).hexdigest()
    path = _folder() / f"{name}-{key[:16]}.json"
    with suppress(OSError, msgspec.MsgspecError):
        found = msgspec.json.decode(path.read_bytes(), type=tuple[str, kind])
        if found[0] == key:
            return found[1], True
    result = measure()
    with suppress(OSError):
        _write(path, msgspec.json.encode((key, result)))
    return result, False


def _folder() -> Path:
    from triton import knobs  # which torch may lack on a CPU

    return Path(knobs.cache.dir, "lightkv")


def _write(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all: another process may read it, or write it too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
