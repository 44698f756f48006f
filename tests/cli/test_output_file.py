"""Output files are written whole or not at all, and unwritable paths are refused early."""

import os
from pathlib import Path

import pytest

from lightkv.router.cli.output_file import UnwritableFile, check_writable, write_whole


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"before")
    path.chmod(0o640)

    def interrupted(self: Path, data: bytes) -> int:
        with open(self, "wb") as file:
            file.write(data[:2])
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(Path, "write_bytes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_whole(path, b"after")
    assert path.read_bytes() == b"before"
    assert [*tmp_path.iterdir()] == [path]
    write_whole(path, b"after")
    assert path.read_bytes() == b"after"
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_link_stays_a_link_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    link, target, pipe = tmp_path / "link", tmp_path / "target", tmp_path / "pipe"
    link.symlink_to(target)
    check_writable(link, "--x")
    write_whole(link, b"data")
    assert link.is_symlink()
    assert target.read_bytes() == b"data"
    os.mkfifo(pipe)
    check_writable(pipe, "--x")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, b"data")
    assert os.read(reader, 10) == b"data"
    os.close(reader)
    assert pipe.is_fifo()


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnwritableFile, match="too long"):
        check_writable(tmp_path / ("x" * 300), "--x")
