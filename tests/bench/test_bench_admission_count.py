"""The comparison of two counts of requests in prefill, on few of its random cases."""

import json
import random
import sys
from pathlib import Path

import pytest

from bench.trace import admission_count
from bench.trace.admission_count import Case, FullCount, _Held, fits, random_cases, run, run_all
from lightkv.router.engine.admission import Admission


def test_the_case_of_a_long_answer_and_a_short_one() -> None:
    """Counted in full, the second request waits until the first has ended."""
    case = Case(120, 120, [(0, 10, 91), (1, 50, 5)])
    assert run(case, Admission(), check=True) == (91, 0, 0)
    steps, refusals, would_fit = run(case, FullCount(), check=True)
    assert steps == 96
    assert (refusals, would_fit) == (90, 52)  # later the first one has grown too large beside it


def most_held(requests: list[_Held], chunk: int) -> int:
    """The most tokens that the requests ever hold together, step by step."""
    most = sum(request.num_tokens for request in requests)
    while requests := [request for request in requests if request.num_tokens < request.final]:
        budget, after = chunk, []
        for num_tokens, left, final in requests:
            count = min(left, budget) if left else 1
            budget -= count if left else 0
            after.append(_Held(num_tokens + count, left - count if left else 0, final))
        requests = after
        most = max(most, sum(request.num_tokens for request in requests))
    return most


def test_what_fits_is_what_never_holds_more() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        requests = []
        for _ in range(rng.randint(1, 6)):
            left = rng.choice((0, rng.randint(1, 20)))
            now = rng.randint(1, 20)
            requests.append(_Held(now, left, now + left + rng.randint(0, 30)))
        chunk = rng.randint(1, 15)
        most = most_held(requests, chunk)
        assert fits(requests, chunk, most)
        assert not fits(requests, chunk, most - 1)


def check_cases(num_cases: int, seed: int) -> None:
    """No refusal by schedule would have fit, and a tenth of the steps is saved."""
    cases = random_cases(num_cases, seed)
    schedule = run_all(cases, Admission(), check=True)
    assert schedule.refusals > 100 * num_cases
    assert schedule.would_fit == 0
    assert schedule.steps < 0.9 * run_all(cases, FullCount()).steps


def test_nothing_is_refused_that_would_fit_and_a_tenth_of_the_steps_is_saved() -> None:
    check_cases(5, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_cases() -> None:
    check_cases(1000, seed=2)


def test_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["bench", "--cases", "1", "--out", str(out)])
    admission_count.main()
    results = json.loads(out.read_text())["results"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["results"] == results
    assert results["counts"]["by schedule"]["steps"] > 0
