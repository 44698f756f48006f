"""The load of structured output: its requests, its checks, each of which fails on a wrong figure, and a run."""

import argparse
import json
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest

from bench.serving import structured_load
from bench.serving.load_client import Endpoint
from bench.serving.structured_load import LOADS, Load, Part, arguments, failures
from tests.support.served import save_tiny_model

PART = {"lost": [], "answers": 9, "longest_gap_s": 0.1, "health": {"200": 3}, "statuses": {"200": 5}}
RESULTS = {
    "loads": dict.fromkeys(LOADS, PART),
    "memory": {"router": {"before": 10**8, "after": 10**8 + 10**7}},
    "restarts": 0,
    "held": 0,
    "is_exact": True,
}


def changed(path: tuple[str, ...], value: object) -> dict[str, Any]:
    """Returns RESULTS with another value at `path`."""
    results: dict[str, Any] = json.loads(json.dumps(RESULTS))
    inner = results
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return results


def test_a_harmless_load_is_not_complained_of() -> None:
    assert failures(RESULTS) == []


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (("loads", "grammars", "longest_gap_s"), 0.51, "the longest gap was 0.51 s with grammars, 0.10 s"),
        (("loads", "ordinary", "lost"), ["it ended"], "ordinary: 1 streams were lost, the first: it ended"),
        (("loads", "alone", "answers"), 0, "alone: no stream was answered"),
        (("loads", "grammars", "health"), {"200": 3, "503": 1}, "grammars: /health answered"),
        (("loads", "grammars", "statuses"), {"500": 1}, "grammars: clients got 500"),
        (("memory", "router", "after"), 2 * 10**8, "the router grew by 100 MB"),
        (("restarts",), 1, "'restarts': 1"),
        (("held",), 5, "'held': 5"),
        (("is_exact",), False, "'is_exact': False"),
    ],
)
def test_what_is_wrong_is_named(path: tuple[str, ...], value: object, complaint: str) -> None:
    (found,) = failures(changed(path, value))
    assert complaint in found


@pytest.mark.parametrize("name", ["alone", "ordinary"])
def test_a_gap_that_comes_without_grammars_too_is_not_theirs(name: str) -> None:
    results = changed(("loads", "grammars", "longest_gap_s"), 0.9)
    results["loads"][name] = {**PART, "longest_gap_s": 0.95}
    assert failures(results) == []


def test_clients_with_and_without_grammars_ask_for_the_same_amounts() -> None:
    options = argparse.Namespace(seed=0, without_lists=False)
    load = Load(cast("Endpoint", None), options, "m", 100)
    sizes = ("n", "min_tokens", "max_tokens", "hangs_up")
    with_grammars, ordinary = (list(islice(load._bodies(kind), 200)) for kind in (True, False))
    assert [[body[name] for name in sizes] for body in with_grammars] == [
        [body[name] for name in sizes] for body in ordinary
    ]
    assert all(body.keys() == set(sizes) for body in ordinary)
    assert all(len(body.keys() - set(sizes)) == 1 for body in with_grammars)
    assert any("allowed_token_ids" in body for body in with_grammars)


def test_the_longest_gap_of_a_part_is_that_of_all_its_rounds() -> None:
    assert Part(gaps=[0.1, 0.7, 0.2]).results()["longest_gap_s"] == 0.7
    assert Part().results()["longest_gap_s"] == 0.0


@pytest.mark.slow
def test_a_whole_run_on_a_small_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its figures are those of a busy machine, so a gap or a memory that is judged too large is let pass."""
    out = tmp_path / "out.json"
    given = ["--model", str(save_tiny_model(tmp_path / "model")), "--streams", "2", "--clients", "2"]
    given += ["--seconds", "6", "--rounds", "2", "--warm-up", "0.5", "--rest", "0.5", "--tokens", "8"]
    monkeypatch.setattr(structured_load, "arguments", lambda: arguments([*given, "--out", str(out)]))
    monkeypatch.setattr(structured_load.signal, "signal", lambda *_: None)
    with suppress(SystemExit):  # its reasons are in the results
        structured_load.main()
    assert "longest gap s" in capsys.readouterr().out
    results = json.loads(out.read_text())["results"]
    assert all(line.startswith("the longest gap") or " grew by " in line for line in results["failures"])
    assert results["loads"].keys() == set(LOADS)
    assert not results["loads"]["alone"]["statuses"]
    for name in ("ordinary", "grammars"):
        assert results["loads"][name]["statuses"]["200"] > 0
    assert results["memory"].keys() == {"launcher", "router", "worker", "api", "checker"}
