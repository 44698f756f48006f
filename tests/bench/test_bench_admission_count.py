"""The comparison of two counts of requests in prefill, on few of its random cases."""

import json
import sys
from pathlib import Path

import pytest

from bench.trace import admission_count
from bench.trace.admission_count import Case, FullCount, compare, run
from lightkv.router.engine.admission import Admission


def test_the_case_of_a_long_answer_and_a_short_one() -> None:
    """Counted in full, the second request waits until the first has ended."""
    case = Case(120, 120, [(0, 10, 91), (1, 50, 5)])
    assert run(case, Admission(), check=True) == (91, 0, 0)
    steps, refusals, would_fit = run(case, FullCount(), check=True)
    assert steps == 96
    assert (refusals, would_fit) == (90, 52)  # later the first one has grown too large beside it


def test_nothing_is_refused_that_would_fit_and_a_tenth_of_the_steps_is_saved() -> None:
    found = compare(num_cases=5, seed=1)
    assert found["by schedule"].refusals > 1000
    assert found["by schedule"].would_fit == 0
    assert found["by schedule"].steps < 0.9 * found["in full"].steps


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_cases() -> None:
    found = compare(num_cases=1000, seed=2)
    assert found["by schedule"].would_fit == 0
    assert found["by schedule"].steps < 0.9 * found["in full"].steps


def test_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["bench", "--cases", "1", "--out", str(out)])
    admission_count.main()
    results = json.loads(out.read_text())["results"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["results"] == results
    assert results["counts"]["by schedule"]["steps"] > 0
