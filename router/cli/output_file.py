"""Output files of commands: unwritable paths are refused before the work; files are written whole or not."""

import os
from pathlib import Path

from lightkv.errors import LightKVError


class UnwritableFile(LightKVError):
    """Raised for a path where no file can be written."""


def check_writable(path: Path, option: str) -> None:
    """Raises UnwritableFile if `write_whole` would fail, as far as this is known in advance.

    `option` names the path in the message. Leaves no file behind.
    """
    target, staging = _places(path)
    reason = ""
    try:
        if target.is_dir():
            reason = "it is a directory"
        elif target.exists() and not os.access(target, os.W_OK):
            reason = "the file is not writable"
        elif _is_replaced(target):
            staging.touch()
            staging.unlink()
    except OSError as error:
        reason = str(error.strerror)
    if reason:
        raise UnwritableFile(f"{option} {path}: {reason}; give a file in a directory that can be written")


def write_whole(path: Path, data: bytes) -> None:
    """Writes `data` to `path`. If this fails or is interrupted, the file keeps its old content.

    A device or a pipe is written to directly. Raises OSError.
    """
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
    """Returns the file itself, with links followed, and a temporary one beside it, which replaces it."""
    target = Path(os.path.realpath(path))
    return target, target.with_name(f".lightkv-{os.getpid()}.part")


def _is_replaced(target: Path) -> bool:
    return target.is_file() or not target.exists()
