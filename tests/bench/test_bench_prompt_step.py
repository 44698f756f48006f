"""The benchmark of steps with prompts: its cases, and a small run."""

import json
import sys
from array import array
from pathlib import Path

import pytest

from bench.serving import prompt_step
from bench.serving.prompt_step import Case


def test_cases_are_read_and_planned() -> None:
    assert Case.of("700") == Case(700)
    case = Case.of("700+100x2048")
    assert (case, case.num_tokens, case.text()) == (Case(700, 100, 2048), 800, "700 + 100 x 2,048")
    with pytest.raises(ValueError, match="invalid literal"):
        Case.of("700x8")
    plan = Case(5, 2, 30).plan(1000)
    assert (plan.rows, plan.starts, plan.counts) == ([1, 2, 3], [0, 30, 30], [5, 1, 1])
    assert (plan.num_prefills, plan.sample) == (1, [0, 1, 2])
    assert max(array("i", plan.token_ids)) < 1000
    assert plan.decode_alloc is not None


@pytest.mark.gpu
def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "steps.json"
    words = [
        "--layers",
        "1",
        "--rounds",
        "1",
        "--steps",
        "2",
        "--cases",
        "20",
        "100+4x64",
        "2600",
        "--out",
        str(out),
    ]
    monkeypatch.setattr(sys, "argv", ["prompt_step", *words])
    prompt_step.main()
    cases = json.loads(out.read_text())["results"]["cases"]
    assert [case["bucket_tokens"] for case in cases.values()] == [24, 128, 2600]
