"""The benchmarks around the simulator run from end to end, small: its tables, and the step times of a model."""

import json
import sys
from pathlib import Path

import pytest
import torch

from bench.trace import simulate, step_time
from lightkv.router import EngineConfig
from lightkv.router.engine.step_time import StepTime, Work, fit
from lightkv.router.simulate.config import SIMULATED_ADMISSIONS
from tests.support.tiny_models import tiny_llama


@pytest.mark.slow
def test_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "out.json"
    options = ["--requests", "12", "--policy-requests", "12", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench", *options])
    monkeypatch.setattr(simulate, "FILES", {"azure-conv": "", "sharegpt": ""})
    monkeypatch.setattr(simulate, "POLICY_WORKLOADS", ("prefill-heavy", "chat"))
    monkeypatch.setattr(simulate, "GOODPUT_TRACES", ("sharegpt",))
    monkeypatch.setattr(simulate, "LOADS", (1.3,))
    simulate.main()
    results = json.loads(out.read_text())["results"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["results"] == results
    assert results["goodput"]["sharegpt"]["1.3"].keys() == {*SIMULATED_ADMISSIONS, simulate.PATIENT_ORACLE}
    assert results["policies"].keys() == {"prefill-heavy", "chat"}
    assert results["policies"]["chat"]["reserved"]["num_finished"] == 12
    shares = results["waste"]["azure-conv"]
    assert 0 < shares[0] < shares[-1] < 1


@pytest.mark.slow
def test_some_admissions_of_all_traces_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    options = ["--requests", "12", "--parts", "goodput", "--goodput-admissions", "timely", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench", *options])
    simulate.main()
    results = json.loads(out.read_text())["results"]
    goodput = results["goodput"]
    assert goodput.keys() == {"azure-conv", "sharegpt"}
    assert all(by.keys() == {"saturation", "0.7", "1.0", "1.3"} for by in goodput.values())
    assert goodput["azure-conv"]["0.7"].keys() == {"timely", "oracle", simulate.PATIENT_ORACLE}


def test_step_times_of_a_model() -> None:
    config = EngineConfig(
        device="cpu", max_num_seqs=12, max_model_len=200, max_total_tokens=4000, prefill_chunk=32
    )
    meter = step_time.Meter(tiny_llama(torch.device("cpu")), config)
    levels = [step_time.Level(1, 60), step_time.Level(6, 30), step_time.Level(9, 90)]
    points, count = step_time.measure(meter, levels, (5, 40), seconds=60.0)
    assert count == 3
    alone = [point.work for point in points if not point.work.prompt]
    assert {work.decodes for work in alone} >= {1, 6, 9}
    for work in alone:
        assert 15 * work.decodes < work.kv < 200 * work.decodes
    beside = [point.work for point in points if point.work.prompt]
    assert max(work.prompt for work in beside) == 32
    assert any(work.prompt == 5 and work.pairs == 15 and work.decodes == 9 for work in beside)
    for work in beside:
        assert work.pairs >= work.prompt * (work.prompt + 1) // 4
    model = fit([point.work for point in points], [point.seconds for point in points])
    report = step_time.report(points, model)
    assert len(report["points"]) == len(points) == model.source["steps"]
    assert StepTime(**report["parameters"]) == model


def test_a_refit_is_the_fit_of_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = StepTime(7e-3, 2e-5, 4e-8, 3e-2, 2.4e-5, 1.3e-9)
    work = [Work(n, 300 * n * n, 100 * (n % 3) * n, 5000 * (n % 3) * n) for n in range(1, 40)]
    points = [step_time.Point(own, model.seconds(own)) for own in work]
    before = StepTime(1.0, 0, 0, 0, 0, 0, source={"device": "a device", "steps": 1})
    document = {"benchmark": "step_time", "device": "a device", "results": step_time.report(points, before)}
    out, parameters = tmp_path / "out.json", tmp_path / "parameters.json"
    out.write_text(json.dumps(document))
    monkeypatch.setattr(
        sys, "argv", ["bench", *map(str, ("--refit", out, "--out", out, "--parameters", parameters))]
    )
    step_time.main()
    found = json.loads(out.read_text())
    again = StepTime.read(parameters)
    assert found["device"] == again.source["device"] == "a device"
    assert again.source["steps"] == len(points)
    assert again.per_decode == pytest.approx(2e-5)
    assert [row[-1] for row in found["results"]["points"]] == pytest.approx([p.seconds for p in points])

    document["results"]["points"] = [[n, 0, 0, 0, 0.1 * (1 + n % 2), 0.0] for n in range(20)]
    out.write_text(json.dumps(document))
    parameters.unlink()
    with pytest.raises(SystemExit, match="median relative error is 3"):
        step_time.main()
    assert not parameters.exists()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (None, "no result of a benchmark .FileNotFoundError"),
        ("figures", "JSONDecodeError"),
        ("{}", "KeyError"),
        (
            '{"benchmark": "serving"}',
            "is a result of the benchmark 'serving'; give a file written by --out of the benchmark 'step_time'",
        ),
    ],
    ids=["nothing", "no JSON", "no benchmark", "another's"],
)
def test_what_cannot_be_fitted_again_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, match: str
) -> None:
    file = tmp_path / "a.json"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(sys, "argv", ["bench", "--refit", str(file)])
    with pytest.raises(SystemExit, match=match):
        step_time.main()
