"""The benchmarks of attention's features and of a stream's step: their command line, and what they compute."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from bench.common.device_clock import Clock
from bench.features import stream_step
from bench.kernels import attention_features as features

BENCHMARKS = [features, stream_step]


@pytest.mark.parametrize("bench", BENCHMARKS, ids=lambda bench: bench.__name__)
def test_help(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--help"])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 0
    assert "--repeats" in capsys.readouterr().out


@pytest.mark.parametrize("bench", BENCHMARKS, ids=lambda bench: bench.__name__)
def test_without_a_gpu_there_are_no_figures(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["bench", "--out", str(out)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        bench.main()
    assert not out.exists()


def test_unknown_cases_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--cases", "rings"])
    with pytest.raises(SystemExit):
        features.main()
    assert "invalid choice: 'rings'" in capsys.readouterr().err


def test_a_case_is_measured_beside_its_first_side(monkeypatch: pytest.MonkeyPatch) -> None:
    class Timing(SimpleNamespace):
        def _asdict(self) -> dict[str, Any]:
            return dict(vars(self))

    run: list[str] = []
    monkeypatch.setattr(features, "CapturedStep", lambda step: step)
    clock = cast(
        Clock,
        SimpleNamespace(
            replay_in_turns=lambda graphs: {
                name: Timing(median=took) for name, took in zip(graphs, (10.0, 15.0), strict=True)
            }
        ),
    )
    case = features.Case(
        "mask", {"without": lambda: run.append("without"), "with": lambda: run.append("with")}, 400
    )
    found = features.measure(case, clock, 100.0)
    assert run == ["without", "with"]  # each is compiled before it is captured
    assert found == {
        "sides": {"without": {"median": 10.0, "ratio": 1.0}, "with": {"median": 15.0, "ratio": 1.5}},
        "bytes": 1.4,
    }
    assert "bytes" not in features.measure(case._replace(mask_bytes=0), clock, 100.0)


def test_the_stored_results_are_of_these_cases() -> None:
    results = Path(features.__file__).parents[1] / "results"
    stored = json.loads((results / "attention-features-h200.json").read_text())["results"]
    assert stored["settings"]["layers"] == features.LAYERS
    windows = json.loads((results / "stream-step-h200.json").read_text())["results"]["windows"]
    assert len(windows) == len(stream_step.WINDOWS)
    for window in windows.values():
        assert {str(position) for position in stream_step.POSITIONS} <= set(window["positions"])
