"""Files that a command writes: refused before the work that they are to hold, and written whole or not at all.

Knows paths; knows nothing of what is in a file.
"""

import os
from pathlib import Path

from lightkv.errors import LightKVError


class UnwritableFile(LightKVError):
    """A path where no file can be written."""


def check_writable(path: Path, option: str) -> None:
    """Raises UnwritableFile where `write_whole` would fail, as far as can be told before; `option` is what the
    message calls the path. Leaves nothing behind."""
    target, staging = _places(path)
    reason = ""
    try:
        if target.is_dir():
            reason = "it is a directory"
        elif target.exists() and not os.access(target, os.W_OK):
            reason = "what is there may not be written"
        elif _is_replaced(target):
            staging.touch()
            staging.unlink()
    except OSError as error:
        reason = str(error.strerror)
    if reason:
        raise UnwritableFile(f"{option} {path}: {reason}; give a file in a directory that can be written")


def write_whole(path: Path, data: bytes) -> None:
    """The file at `path` has `data` afterwards; when that fails, or is interrupted, what it had before. A
    device or a pipe is written to as it is. Raises OSError."""
    target, staging = _places(path)
    if not _is_replaced(target):
        target.write_bytes(data)
        return
    try:
        staging.write_bytes(data)
        if target.exists():
            staging.chmod(target.stat().st_mode & 0o777)
        staging.replace(target)
    finally:
        staging.unlink(missing_ok=True)


def _places(path: Path) -> tuple[Path, Path]:
    """The file itself, links followed, and one beside it, so that the last step is a renaming."""
    target = Path(os.path.realpath(path))
    return target, target.with_name(f".lightkv-{os.getpid()}.part")


def _is_replaced(target: Path) -> bool:
    return target.is_file() or not target.exists()
