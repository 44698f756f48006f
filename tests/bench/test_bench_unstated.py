"""The simulations of requests that do not state max_tokens, on a small workload."""

import json
import sys
from pathlib import Path

import pytest

from bench.trace import unstated


@pytest.mark.slow
def test_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "out.json"
    small = ["--trace", "chat", "--requests", "60", "--capacity", "8000", "--max-new", "2000"]
    argv = ["bench", *small, "--loads", "1.3", "--fairness-loads", "1.3", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", argv)
    unstated.main()
    results = json.loads(out.read_text())["results"]
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1])["results"] == results
    found = results["unstated"]["1.3"]
    assert [found[name]["num_unstated"] for name in ("none stated", "all stated")] == [60, 0]
    assert 0 < found["half stated"]["num_unstated"] < 60
    assert all(figures["num_finished"] == 60 for figures in found.values())
    assert found["all stated"]["num_preemptions"] == found["oracle"]["num_preemptions"] == 0
    assert found["none stated"]["memory_used_share"] > found["all stated"]["memory_used_share"]
    fair = results["fairness"]["1.3"]
    assert fair["none stated"]["max_overtaken"] == 0  # first come, first served
    assert fair["none stated, priorities"]["max_overtaken"] > 0
    assert fair["none stated, priorities"]["low_ttft_max"] > 0


def test_a_preempted_request_with_a_limit_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--trace", "chat", "--requests", "80", "--capacity", "6000",
                                      "--max-new", "2000", "--loads", "1.0"])  # fmt: skip
    monkeypatch.setattr(unstated, "POLICIES", {"oracle": unstated.SimulationConfig(admission="watermark")})
    with pytest.raises(SystemExit, match="requests with max_tokens were preempted"):
        unstated.main()
