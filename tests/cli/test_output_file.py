"""Unwritable paths are refused early."""

import os
from pathlib import Path

import pytest

from lightkv.router.cli.output_file import UnwritableFile, check_writable


def test_a_path_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    new, old, link, pipe = (tmp_path / name for name in ("new", "old", "link", "pipe"))
    old.write_bytes(b"before")
    link.symlink_to(old)
    os.mkfifo(pipe)  # opening it would wait for a reader
    for path in (new, old, link, pipe):
        check_writable(path, "--x")
    assert not new.exists()
    assert old.read_bytes() == b"before"
    with pytest.raises(UnwritableFile, match=r"--x .*directory"):
        check_writable(tmp_path, "--x")
    with pytest.raises(UnwritableFile, match="No such file"):
        check_writable(tmp_path / "nowhere" / "x", "--x")


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnwritableFile, match="too long"):
        check_writable(tmp_path / ("x" * 300), "--x")
