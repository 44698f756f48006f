"""The demo: its answers with and without a terminal, its figures, and its report of wrong counts."""

import io

import pytest
from rich.console import Console

from bench.demo import QUESTIONS, Run, answer, faults, summary
from lightkv.router import LLM, EngineConfig
from lightkv.router.engine.loop import EngineStats
from tests.support.served import save_tiny_model


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    model = save_tiny_model(tmp_path_factory.mktemp("demo") / "tiny")
    return LLM(EngineConfig(str(model), device="cpu", max_total_tokens=2048))


def test_the_answers_are_lines_without_a_terminal_and_the_counts_agree(llm: LLM) -> None:
    out = io.StringIO()
    run = answer(llm, Console(file=out, width=40), max_tokens=5)
    lines = out.getvalue().splitlines()
    assert sorted(lines[:-1:2]) == sorted(QUESTIONS)
    assert all(line.startswith("    ") and line.strip() for line in lines[1:-1:2])
    assert "\x1b" not in out.getvalue()

    llm.check()
    stats = llm.stats()
    assert faults(stats, run) == []
    assert (stats.held, stats.free + stats.cached) == (0, stats.capacity)
    assert 0 < run.num_tokens <= 5 * len(QUESTIONS)
    assert 0 < run.seconds_to_first < run.seconds
    # The system prompt is computed once: every question but the first finds it in the cache.
    shared = stats.hit_tokens // (len(QUESTIONS) - 1)
    assert shared > 300
    assert stats.prompt_tokens - stats.hit_tokens < shared + 40 * len(QUESTIONS)
    told = summary(stats, run, llm.info.pool_bytes)
    assert told["capacity"] == "2,048 tokens (0.5 MiB)"
    assert told["held"] == "0 tokens"
    assert f"{stats.hit_tokens:,} of {stats.prompt_tokens:,}" in told["prefix tokens hit"]


def test_a_terminal_shows_all_eight_answers_at_once(llm: LLM) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=120, _environ={"TERM": "xterm"})
    answer(llm, console, max_tokens=3)
    last = out.getvalue().rpartition("\x1b[2K")[2]
    assert all(question in last for question in QUESTIONS)
    assert "\x1b[?25h" in last  # the cursor is visible again


@pytest.mark.parametrize(
    ("held", "free", "reached", "words"),
    [
        (3, 60, 20, "3 tokens are still held"),
        (0, 60, 20, "60 free + 37 cached is not the capacity of 100"),
        (0, 63, 51, "51 reached, 50 forecast"),
    ],
    ids=["held", "lost", "above-forecast"],
)
def test_wrong_counts_are_reported(held: int, free: int, reached: int, words: str) -> None:
    stats = EngineStats(
        capacity=100,
        free=free,
        held=held,
        cached=37,
        num_running=0,
        num_waiting=0,
        forecast_peak=0,
        reached_peak=reached,
        prompt_tokens=10,
        hit_tokens=5,
        num_steps=1,
        num_preemptions=0,
    )
    assert words in "\n".join(faults(stats, Run(8, 1.0, 0.1, forecast_peak=50)))
