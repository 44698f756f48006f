"""What a start has measured is kept for later ones: which starts, and which files are not used."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightkv.router.engine.step_time import StepTime
from lightkv.router.model import step_timing
from lightkv.router.model.step_timing import measured_once

pytest.importorskip("triton", exc_type=ImportError)

TIMES = StepTime(6e-3, 2e-5, 4e-8, 0.0, 2.4e-5, 1e-9, {"device": "a GPU"})


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    return tmp_path / "cache"


def start(facts: Any = (1, "x")) -> bool:
    """Asks for the times as a start does. Returns whether they were measured."""
    measured: list[int] = []

    def measure() -> StepTime:
        measured.append(1)
        return TIMES

    times, is_kept = measured_once(facts, measure)
    assert times == TIMES
    assert is_kept != bool(measured)
    return not is_kept


def test_a_later_start_does_not_measure(cache: Path) -> None:
    assert [start(), start(), start()] == [True, False, False]
    assert len(list(cache.glob("*/*"))) == 1


def test_other_facts_versions_and_gpus_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start()
    assert start((2, "x"))
    for owner, name, other in (
        (torch, "__version__", "2.0"),
        (step_timing, "__version__", "0.0"),
        (torch.cuda, "get_device_name", lambda: "another GPU"),
    ):
        monkeypatch.setattr(owner, name, other)
        assert [start(), start()] == [True, False]
    assert not start((1, "x"))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"base": "fast"}'])
def test_a_damaged_file_is_measured_and_written_again(content: bytes, cache: Path) -> None:
    start()
    (file,) = cache.glob("*/*")
    file.write_bytes(content)
    assert [start(), start()] == [True, False]
    assert list(cache.glob("*/*")) == [file]


def test_a_file_of_invalid_step_times_is_measured_again(cache: Path) -> None:
    assert [start(), start()] == [True, False]
    (file,) = cache.glob("*/*")
    file.write_bytes(file.read_bytes().replace(b"0.006", b"-1.0"))
    assert start()


def test_where_nothing_can_be_written_each_start_measures(cache: Path) -> None:
    cache.write_text("a file in the place of the folder")
    assert [start(), start()] == [True, True]
