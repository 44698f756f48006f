"""Output files of commands: unwritable paths are refused before the work."""

from pathlib import Path

from lightkv.errors import LightKVError


class UnwritableFile(LightKVError):
    """Raised for a path where no file can be written."""


def check_writable(path: Path, option: str) -> None:
    """Raises UnwritableFile if no file can be written at `path`, which `option` names in the message. Leaves no
    new file behind, and opens no pipe and no device."""
    try:
        is_there = path.exists()
        if path.is_file() or path.is_dir() or not is_there:
            path.open("ab").close()
        if not is_there:
            path.unlink()
    except OSError as error:
        reason = f"{error.strerror}; give a file in a directory that can be written"
        raise UnwritableFile(f"{option} {path}: {reason}") from error
