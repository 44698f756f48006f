"""The stored results that the documents quote are of the cases that the benchmarks have now."""

import json
import sys
from pathlib import Path

import pytest

from bench.features import quality, stream_step
from bench.kernels import attention_features
from bench.serving import load

RESULTS = Path(quality.__file__).parents[1] / "results"


def test_quality() -> None:
    stored = json.loads((RESULTS / "quality-cpu.json").read_text())["results"]
    assert set(stored["formats"]) >= set(quality.FORMATS)
    assert stored["models"].keys() == quality.MADE.keys()
    for name in ("int8", "int8-g8"):
        assert abs(stored["formats"][name]["perplexity_ratio"] - 1) < 0.005


def test_attention_features_and_stream_step() -> None:
    stored = json.loads((RESULTS / "attention-features-h200.json").read_text())["results"]
    assert stored["settings"]["layers"] == attention_features.LAYERS
    windows = json.loads((RESULTS / "stream-step-h200.json").read_text())["results"]["windows"]
    assert len(windows) == len(stream_step.WINDOWS)
    for window in windows.values():
        assert {str(position) for position in stream_step.POSITIONS} <= set(window["positions"])


def test_a_load_is_drawn_again_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn, stored = tmp_path / "again.png", RESULTS / "serving-h200.json"
    monkeypatch.setattr(sys, "argv", ["serving", "--replot", str(stored), "--plot", str(drawn)])
    load.main()
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert "256 clients" in capsys.readouterr().out
