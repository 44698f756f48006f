"""The bench of published shapes: tiny ones on the CPU, one of which cannot run."""

import json
from pathlib import Path

import pytest
from transformers import DeepseekV3Config, LlamaConfig

from bench.common.published_shapes import PUBLISHED, Width
from bench.features import published_shapes


def test_a_run_tells_what_runs_and_what_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = {
        "tiny": Width(64, 16, 16, 2, 1, 8, tied=True).of(LlamaConfig),
        "latent": DeepseekV3Config(),
    }
    monkeypatch.setattr(published_shapes, "PUBLISHED", shapes)
    monkeypatch.setattr(published_shapes, "BATCHES", (1, 2))
    monkeypatch.setattr(published_shapes, "LONG_PROMPT", 64)
    monkeypatch.setattr(published_shapes, "PROMPT", 16)
    out = tmp_path / "shapes.json"
    monkeypatch.setattr("sys.argv", ["published_shapes", "--device", "cpu", "--out", str(out)])
    published_shapes.main()
    results = json.loads(out.read_text())["results"]["results"]
    assert list(results["tiny"]["decode_ms"]) == ["1", "2"]
    assert results["tiny"]["num_layers"] == 4
    assert "latent" in results["latent"]["error"]
    assert "tiny" in capsys.readouterr().out


def test_shapes_are_shortened_to_all_kinds_of_their_layers() -> None:
    for config in PUBLISHED.values():
        short = published_shapes.shortened(config)
        types = getattr(config, "layer_types", None) or []
        assert set(getattr(short, "layer_types", None) or []) == set(types)
        assert short.num_hidden_layers <= 6
