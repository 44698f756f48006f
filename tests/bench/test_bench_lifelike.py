"""Loads like life: what is drawn, how it is summarised and drawn, and a short run on a scripted service."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.common.report import load_pyplot
from bench.serving import lifelike, lifelike_plot, workload
from bench.serving.lifelike import Sent, figures
from bench.serving.lifelike_cells import (
    BURSTY,
    CELLS,
    SESSIONS,
    TRACES,
    Cell,
    LogNormal,
    Source,
    arrivals,
)
from bench.serving.load_client import Answer
from bench.serving.scripted_service import Script, scripted_service
from bench.serving.workload import Lengths
from lightkv.router.config import EngineConfig
from lightkv.router.model_files import resolve
from tests.support.azure_traces import write_azure_traces

TOOLS = Cell("tools", SESSIONS, 0.5)


def source(max_length: int = 16384, seed: int = 0) -> Source:
    lengths = [Lengths(8 + i % 50, 2 + i % 7) for i in range(100)]
    return Source({"conversation": lengths, "code": lengths}, 1000, max_length, seed)


# --------------------------------------------------------------------------------
# What is drawn


@pytest.mark.parametrize("cv", [1.0, 3.0])
def test_gaps_have_the_mean_and_the_deviation_that_are_asked_for(cv: float) -> None:
    times = workload.gamma(50.0, cv, 40_000, random.Random(0))
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 50, rel=0.05)
    assert deviation / mean == pytest.approx(cv, rel=0.05)


@pytest.mark.parametrize("cv", [1.0, BURSTY])
def test_as_many_requests_arrive_as_the_rate_says(cv: float) -> None:
    times = arrivals(7.5, cv, 40.0, random.Random(1))
    assert len(times) == 300
    assert times == sorted(times)
    assert 0.0 <= times[0] < times[-1] < 40.0


def test_a_cells_requests_follow_from_its_name_and_the_seed_alone() -> None:
    for cell in CELLS:
        drawn = source().sessions(cell, 10.0, 8.0)
        assert drawn == source().sessions(cell, 10.0, 8.0)
        assert drawn != source(seed=1).sessions(cell, 10.0, 8.0)
    twins = [cell for cell in CELLS if (cell.workload, cell.load) == ("conversation", 0.6)]
    first, second = (source().sessions(cell, 10.0, 8.0) for cell in twins)
    assert len(first) == len(second) == 48
    assert first != second
    asks = source().closed("32-clients")
    assert asks == source().closed("32-clients")
    assert [len(asks), len(asks[0].prompt_ids), asks[0].num_output] == [4 * 32, 512, 128]


def test_sessions_have_turns_whose_prompts_grow_to_the_longest_that_fits() -> None:
    sessions = source().sessions(TOOLS, 39.0, 40.0)
    assert len(sessions) == 0.5 * 39.0 / 6.5 * 40.0
    lengths = [sum(len(turn.ids) + turn.num_output for turn in own.turns) for own in sessions]
    assert 4_000 < sum(lengths) / len(lengths) < max(lengths) <= 16384
    assert {len(own.turns) for own in sessions} >= {5, 6, 7, 8}
    assert all(own.turns[0].pause == 0.0 for own in sessions)
    pauses = sorted(turn.pause for own in sessions for turn in own.turns[1:])
    assert pauses[len(pauses) // 2] == pytest.approx(2.0, rel=0.1)
    short = source(max_length=300).sessions(TOOLS, 13.0, 40.0)
    assert all(own.turns for own in short)
    assert max(sum(len(turn.ids) + turn.num_output for turn in own.turns) for own in short) <= 300


def test_prompts_of_a_trace_are_cut_at_what_fits(tmp_path: Path) -> None:
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,500,20\n2023-11-16 18:17:04,90,900\n"
    for file in TRACES.values():
        (tmp_path / file).write_text(rows)
    assert Source.read(tmp_path, 1000, 100, 0).traces["code"] == [(80, 20), (50, 50)]


# --------------------------------------------------------------------------------
# What is summarised


def answer(at: float, ttft: float, gap: float, num: int = 5, prompt: int = 10) -> Answer:
    pieces = [at + ttft + gap * i for i in range(num)]
    return Answer(at, pieces, pieces[-1], prompt, num, "")


def test_goodput_counts_what_was_answered_within_both_limits() -> None:
    sent = [
        Sent(1, 0.0, answer(0.0, 0.5, 0.01)),
        Sent(1, 0.002, answer(1.0, 1.5, 0.01)),  # the first token is late
        Sent(1, 0.0, answer(2.0, 0.5, 0.05)),  # its tokens are slow
        Sent(1, 0.0, None, "refused"),
        Sent(1, 0.0),
    ]
    found = figures(sent, 10.0)
    assert (found["sent"], found["completed"], found["failed"], found["cut_off"]) == (5, 3, 1, 1)
    assert (found["offered_per_s"], found["goodput_per_s"]) == (0.5, pytest.approx(0.1))
    assert found["met_share"] == pytest.approx(0.2)
    assert found["errors"] == ["refused"]
    assert found["ttft_ms"]["p50"] == pytest.approx(500.0)
    assert found["between_pieces_ms"]["p50"] == pytest.approx(10.0)
    assert found["per_token_ms"]["mean"] == pytest.approx(70 / 3)
    assert found["late_ms"]["p99"] < 2.0
    assert "turns" not in found
    assert figures([Sent(1, 0.0)], 10.0)["goodput_per_s"] == 0.0


def test_late_turns_are_reported_together() -> None:
    sent = [Sent(turn, 0.0, answer(0.0, 0.1 * turn, 0.01, prompt=100 * turn)) for turn in range(1, 8)]
    turns = figures(sent, 10.0)["turns"]
    assert turns["2"]["ttft_ms"]["p50"] == pytest.approx(200.0)
    late = turns["5 and later"]
    assert (late["sent"], late["prompt_tokens"]) == (3, 600.0)
    assert late["ttft_ms"]["p50"] == pytest.approx(600.0)


# --------------------------------------------------------------------------------
# A run


def test_it_measures_a_service_and_its_figures_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_azure_traces(tmp_path)
    monkeypatch.setattr(lifelike.signal, "signal", lambda *_: None)
    monkeypatch.setattr(lifelike, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(lifelike, "SATURATING_CLIENTS", 4)
    monkeypatch.setattr(lifelike, "WARM_UP_REQUESTS", 4)
    monkeypatch.setattr("bench.serving.lifelike_cells.CLOSED_LENGTHS", Lengths(16, 4))
    monkeypatch.setattr("bench.serving.lifelike_cells.CLOSED_WAVES", 1)
    monkeypatch.setattr("bench.serving.lifelike_cells.PAUSE", LogNormal(0.01, 0.1, 0.01, 0.02))
    monkeypatch.setattr("bench.serving.lifelike_cells.ANSWER", LogNormal(4, 0.1, 2, 6))
    out = tmp_path / "out.json"
    directory = Path(resolve(EngineConfig.model, report=lambda line: None))
    cells = ["poisson-0.6", "bursty-0.6", "sessions-0.6", "32-clients"]
    with scripted_service(Script(decode_ms=0.5, row_ms=0.0, prompt_ms=0.5), directory) as service:
        argv = ["--url", service.url, "--traces", tmp_path, "--vocab-size", 1000, "--max-length", 8192,
                "--saturation", 60, "--seconds", 1, "--drain", 20, "--out", out, "--cells", *cells,
                "--measure-saturation", "--saturation-seconds", 1.5]  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["lifelike", *map(str, argv)])
        lifelike.main()
    results = json.loads(out.read_text())["results"]
    assert results["saturation"]["requests_per_s"] > 0
    assert results["load"]["saturation"] == 60.0
    found: dict[str, Any] = results["cells"]
    assert list(found) == cells
    assert [found[name]["sent"] for name in cells if name != "sessions-0.6"] == [36, 36, 32]
    for name in cells:
        assert found[name]["completed"] == found[name]["sent"], found[name]["errors"]
        assert found[name]["ttft_ms"]["p99"] > 0
        assert found[name]["client_cores"] > 0
    turns = found["sessions-0.6"]["turns"]
    assert turns["2"]["prompt_tokens"] > turns["1"]["prompt_tokens"]
    assert "sessions-0.6" in capsys.readouterr().out
    engines = lifelike_plot.engines_of(json.loads(out.read_text()))
    lifelike_plot.plot(load_pyplot(), engines, tmp_path / "p.svg")
    assert (tmp_path / "p.svg").read_text().count("<svg") == 1


def test_loads_need_a_saturation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        lifelike.arguments(["--url", "http://127.0.0.1:1", "--traces", "t"])
    assert "give --saturation" in capsys.readouterr().err
