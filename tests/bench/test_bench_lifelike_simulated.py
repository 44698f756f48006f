"""Loads like life in simulated time: the sums of steps, turns, and a comparison with figures of its own."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from bench.serving import lifelike_simulated as simulated
from bench.serving.lifelike import figures
from bench.serving.lifelike_cells import Session, Turn
from bench.serving.lifelike_simulated import MORE, SimulatedServer
from bench.serving.load_client import Answer
from bench.serving.workload import Lengths
from lightkv.router.engine.step_time import StepTime, Work
from tests.support.azure_traces import write_azure_traces

MODEL = StepTime(base=0.010, per_decode=1e-4, per_kv=1e-6, prefill=0.0, per_prompt=1e-4, per_pair=0.0)
OVERHEAD = 0.004


def make(model: StepTime = MODEL, prefill_chunk: int = 64) -> SimulatedServer:
    sizes = {"capacity": 9000, "max_num_seqs": 40, "vocab_size": 32_000, "max_length": 8192}
    return SimulatedServer(
        simulated.describe(model, Namespace(prefill_chunk=prefill_chunk, itl_target=None, **sizes)), OVERHEAD
    )


def test_the_times_of_an_answer_are_the_sums_of_its_steps() -> None:
    server, answers = make(), list[Answer]()
    server.at(1.0, lambda: server.complete([5] * 100, 3, answers.append))
    server.run()
    (answer,) = answers
    chunks = [MODEL.seconds(Work(0, 0, num, 0)) for num in (64, 36)]
    assert (answer.sent, answer.num_prompt, answer.num_output) == (1.0, 100, 3)
    assert answer.ttft == pytest.approx(sum(chunks) + OVERHEAD)
    assert answer.gaps == pytest.approx([MODEL.seconds(Work(1, 101 + i, 0, 0)) for i in range(2)])


def test_a_request_that_comes_early_in_a_step_is_in_the_next_one() -> None:
    """One that comes after the next step was planned waits for that, too."""
    server, answers = make(), dict[str, Answer]()
    step = MODEL.seconds(Work(1, 12, 0, 0))
    server.at(0.0, lambda: server.complete([5] * 10, 60, lambda answer: answers.update(long=answer)))

    def ask(name: str, at: float) -> None:
        server.at(at, lambda: server.complete([6] * 4, 1, lambda answer: answers.update({name: answer})))

    begun = MODEL.seconds(Work(0, 0, 10, 0)) + OVERHEAD / 2  # of the first step of decodes alone
    ask("early", begun - OVERHEAD / 2 + 0.1 * step)
    server.run()
    early = answers["early"].ttft
    assert early < OVERHEAD + step + MODEL.seconds(Work(1, 13, 4, 10)) + 1e-4
    server = make()
    server.at(0.0, lambda: server.complete([5] * 10, 60, lambda answer: None))
    ask("late", begun - OVERHEAD / 2 + 0.99 * step)
    server.run()
    assert answers["late"].ttft > early


def test_a_session_goes_on_with_what_was_answered_after_its_pause() -> None:
    server = make()
    session = Session(0.5, [Turn([7] * 30, 4), Turn([8] * 5, 2, pause=2.0), Turn([9], 1, pause=100.0)])
    first, second = (one.answer for one in simulated.play(server, [session], seconds=20.0))
    assert first is not None
    assert second is not None
    assert first.sent == 0.5
    assert first.ids == [MORE] * 4
    assert second.num_prompt == 30 + 4 + 5
    assert second.sent == pytest.approx(first.ended + 2.0)
    assert second.ttft < first.ttft  # most of its prompt is cached


def test_measured_figures_are_compared_cell_by_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The measured ones are simulated, too, with steps that take twice as long and twice the overhead."""
    write_azure_traces(tmp_path)
    monkeypatch.setattr("bench.serving.lifelike_cells.CLOSED_LENGTHS", Lengths(16, 4))
    monkeypatch.setattr("bench.serving.lifelike_cells.CLOSED_WAVES", 1)
    measured, out = tmp_path / "measured.json", tmp_path / "out.json"
    load = {"saturation": 2.0, "seconds": 30.0, "seed": 0}
    source = simulated.Source.read(tmp_path, 32_000, 16_384, 0)
    slow = StepTime(base=0.020, per_decode=0.0, per_kv=0.0, prefill=0.0, per_prompt=0.0, per_pair=0.0)
    server = make(slow, 4096)
    server._half = 0.004
    cell = next(cell for cell in simulated.CELLS if cell.name == "poisson-0.3")
    sent = simulated.play(server, source.sessions(cell, 2.0, 30.0), 30.0)
    closed = make(slow, 4096)
    closed._half = 0.004
    cells = {
        "poisson-0.3": figures(sent, 30.0),
        "32-clients": figures(simulated.play_closed(closed, source, "32-clients"), 1.0),
    }
    found = {"measurements": [{"engine": "vllm"}, {"engine": "lightkv", "cells": cells, "load": load}]}
    measured.write_text(json.dumps({"results": found}))
    argv = ["simulated", measured, "--traces", tmp_path, "--step-time", "base=0.010", "--out", out]
    monkeypatch.setattr(sys, "argv", [*map(str, argv)])
    simulated.main()
    results = json.loads(out.read_text())["results"]
    ratios = results["cells"]["32-clients"]["over_measured"]
    assert ratios == pytest.approx(dict.fromkeys(ratios, 0.5))
    ratios = results["cells"]["poisson-0.3"]["over_measured"]
    assert ratios["per token, p50"] == pytest.approx(0.5)
    assert 0.4 < ratios["first token, p50"] < 0.6
    assert "off by 50.0% in the median" in capsys.readouterr().out


def test_a_file_without_cells_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"results": {"measurements": [{"engine": "vllm", "cells": {}}]}}))
    argv = ["simulated", str(path), "--traces", str(tmp_path), "--step-time", "base=0.010"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit, match="has no cells of lightkv"):
        simulated.main()
