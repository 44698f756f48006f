"""The serving benchmark from its command line to its plot."""

import argparse
import json
import random
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from bench.common.report import load_pyplot
from bench.serving import load as serving
from bench.serving.load_options import arguments, engine_config
from bench.serving.served import serve_arguments
from bench.serving.stats import NotSteady
from bench.serving.workload import Replayed
from lightkv.router.simulate.trace_files import TraceRequest
from tests.support.answers import decoding


def options(*argv: str) -> argparse.Namespace:
    return arguments(serving.__doc__, list(argv))


def test_the_engine_of_the_command_line_is_the_one_that_serves() -> None:
    typed = options(
        "--model", "m", "--dtype", "float32", "--max-num-seqs", "4", "--no-cuda-graphs", "--", "--uds"
    )
    config = engine_config(typed)
    assert (config.model, config.dtype, config.max_num_seqs, config.cuda_graphs) == ("m", "float32", 4, False)
    given = serve_arguments(config, typed.serve)
    assert given == ["m", "--dtype", "float32", "--max-num-seqs", "4", "--no-cuda-graphs", "--uds"]


@pytest.mark.parametrize(
    "argv",
    [
        ["--rate", "0"],
        ["--prompt", "16:8"],
        ["--url", "http://127.0.0.1:1", "--in-process"],
        ["--transformers", "--trace", "x.csv"],
        ["--transformers", "no-such-way"],
        ["--replay", "--rate", "1"],
        ["--rounds", "0"],
        ["--arrivals", "trace", "--rate", "1"],
        ["--arrivals", "trace", "--trace", "x.csv"],
        ["--concurrency", "1", "32", "256", "--requests", "8", "64"],
    ],
    ids=" ".join,
)
def test_options_that_make_no_sense_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options(*argv)
    assert "error" in capsys.readouterr().err


def test_a_traces_requests_come_in_its_order_and_at_its_times(tmp_path: Path) -> None:
    trace = Replayed("t", [TraceRequest(at, 5 + i, 3) for i, at in enumerate((0.0, 1.0, 4.0, 6.0))])
    trace.write(tmp_path / "t.jsonl")
    typed = options("--arrivals", "trace", "--rate", "2", "--trace", str(tmp_path / "t.jsonl"))
    asks, arrivals = serving.requests_of(typed, serving.Traffic(2.0, True), 3, 1000, random.Random(0))
    assert [(len(ask.prompt_ids), ask.num_output) for ask in asks] == [(5, 3), (6, 3), (7, 3)]
    assert arrivals == pytest.approx([0.0, 0.375, 1.5])
    typed.arrivals = "poisson"
    asks, arrivals = serving.requests_of(typed, serving.Traffic(2.0, False), 3, 1000, random.Random(0))
    assert (len(asks), arrivals) == (3, None)


def test_a_round_that_is_not_steady_is_left_out() -> None:
    short, long = [decoding(1.0, 10)], [decoding(1.0, 40)]
    answers = iter([short, long, long, short, short])
    target = SimpleNamespace(vocab_size=1000, watch=lambda asks: (next(answers), []))
    typed = options("--concurrency", "1", "--rounds", "3", "--replay")
    steps = serving.watch_steps(cast(serving.Target, target), typed, 1, random.Random(0))
    assert steps.context == 10 + 20
    found = steps.results(replay_ms=80.0)
    assert found["rounds"] == 2
    assert found["ratio"] == pytest.approx(1.25)
    typed.rounds = 2
    with pytest.raises(NotSteady, match="for 9 steps"):
        serving.watch_steps(cast(serving.Target, target), typed, 1, random.Random(0))


@pytest.mark.slow
def test_a_whole_run_keeps_its_figures_where_a_part_fails(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, drawn = tmp_path / "results.json", tmp_path / "results.svg"
    argv = ["--model", tiny_model, "--device", "cpu", "--max-total-tokens", 4096, "--concurrency", 3]
    argv += ["--requests", 6, "--prompt", 300, "--output", 24, "--rounds", 1, "--in-process", "--replay"]
    argv += ["--transformers", "flash-2", "sdpa-64", "--plot", drawn, "--out", out]
    monkeypatch.setattr(sys, "argv", ["serving", *map(str, argv)])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    pyplot = load_pyplot()
    monkeypatch.setitem(pyplot.rcParams, "svg.fonttype", "none")  # so that words are words
    with pytest.raises(SystemExit, match=r"--replay failed: .*CUDA graphs") as ended:
        serving.main()
    assert ended.value.code
    results = json.loads(out.read_text())["results"]
    assert results["settings"]["engine"]["model"] == "tiny"
    load = results["loads"]["3 clients"]
    assert (load["requests"], load["output_tokens"]) == (6, 144)
    assert load["host_core_at_100_tokens_per_s"] > 0
    at_once = results["at_once"]["3"]
    for peer in ("in_process", "transformers"):
        expected = at_once["http_tokens_per_s"]["median"] / at_once[f"{peer}_tokens_per_s"]["median"]
        assert at_once[f"http_over_{peer}"]["median"] == pytest.approx(expected)
    assert "FlashAttention2" in results["transformers"]["flash-2"]["error"]
    assert results["transformers"]["sdpa-64"]["error"] is None
    assert results["transformers"]["sdpa-64"]["batches"]["3"]["same_text"] == 1.0
    assert "CUDA graphs" in results["failures"]["replay"]
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1])["results"]["at_once"] == results["at_once"]
    assert "transformers, all at once" in drawn.read_text()


def test_figures_are_drawn_again_from_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = tmp_path / "again.png"
    results = Path(__file__).parents[2] / "bench" / "results" / "serving-h200.json"
    monkeypatch.setattr(sys, "argv", ["serving", "--replot", str(results), "--plot", str(drawn)])
    serving.main()
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert "256 clients" in capsys.readouterr().out


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        load_pyplot()
