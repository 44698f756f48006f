"""The service beside `LLM.generate` and transformers: which figures count, and which errors are kept."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench.serving import peers
from bench.serving.continuous_batching import Answered, Run
from bench.serving.peers import Rounds, run_batches, run_transformers
from bench.serving.workload import Ask
from lightkv.router import EngineConfig
from lightkv.router.text.tokenizer import Tokenizer


def asks_of(num: int, num_output: int) -> list[Ask]:
    return [Ask([i], num_output) for i in range(num)]


def test_the_sides_of_a_comparison_take_turns_and_the_first_batch_does_not_count() -> None:
    order = []

    class Other:
        llm = SimpleNamespace(info=SimpleNamespace(dtype="bfloat16"))

        def run(self, asks: Sequence[Ask]) -> tuple[float, list[str]]:
            order.append("other")
            return 4.0, ["same", "x"]

    def serve(asks: Sequence[Ask]) -> tuple[float, list[str]]:
        order.append("service")
        return 5.0, ["same", "y"]

    rounds = run_batches(serve, cast(peers.InProcess, Other()), [asks_of(2, 10)] * 3)
    assert order == ["service", "other", "other", "service", "service", "other"]
    found = rounds.results()
    assert found["http_tokens_per_s"] == {"median": 4.0, "low": 4.0, "high": 4.0}
    assert found["http_over_in_process"]["median"] == pytest.approx(0.8)
    assert found["same_text"] == 0.5


# What each way does with two rounds of two requests of 10 tokens: seconds, ids, and its error.
GOOD, BAD = [[300] * 10, [301] * 10], [[300] * 10, [302] * 10]
DONE = {
    "flash-2": ([], [], "ImportError: no flash_attn"),
    "sdpa": ([9.0, 4.0, 2.0], GOOD, None),
    "sdpa-64": ([9.0, 1.0, 2.0], GOOD, None),
    "sdpa-128": ([9.0, 0.5, 0.5], BAD, None),
    "eager": ([9.0, 8.0], GOOD, "not done within 1 s"),
}


@pytest.mark.parametrize(
    ("ways", "tried", "speeds", "way"),
    [
        (
            ["flash-2", "sdpa", "sdpa-64", "sdpa-128"],
            ["flash-2", "sdpa", "sdpa-64", "sdpa-128"],
            [20.0, 10.0],
            "sdpa-64",
        ),
        (["flash-2", "sdpa-128"], ["flash-2", "sdpa-128", "eager"], [2.5], "eager"),
        (["eager"], ["eager"], [2.5], "eager"),
    ],
    ids=["the fastest that is right", "the last resort", "it alone"],
)
def test_the_best_way_of_transformers_counts_and_errors_are_kept(
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: Path,
    ways: list[str],
    tried: list[str],
    speeds: list[float],
    way: str,
) -> None:
    def run_way(name: str, config: EngineConfig, batches: object, seconds: float) -> Run:
        times, tokens, error = DONE[name]
        answered = {2: [Answered(seconds, tokens) for seconds in times]}
        return Run(answered if times else {}, error)

    monkeypatch.setattr(peers, "run_way", run_way)
    decode = Tokenizer(tiny_model).decode
    rounds = {2: Rounds([40.0, 40.0], [], [], [], [[decode(ids) for ids in GOOD]] * 2)}
    saved: list[dict[str, Any]] = []
    config = EngineConfig(model=str(tiny_model), device="cpu")
    reason = run_transformers(config, {2: [asks_of(2, 10)] * 3}, rounds, ways, 1.0, saved.append)
    assert not reason
    assert list(saved[-1]) == tried
    assert rounds[2].transformers == speeds
    assert rounds[2].way == way
    for name, found in saved[-1].items():
        if name == "sdpa-128":
            assert found["error"] == "2 at once: only 50% of its texts are the service's"
        else:
            assert found["error"] == DONE[name][2]


def test_a_peer_without_figures_is_a_failure_that_says_so(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    monkeypatch.setattr(peers, "run_way", lambda *_: Run({}, "RuntimeError: no"))
    rounds = {num: Rounds([40.0], [], [], [], [["a"] * num]) for num in (1, 2)}
    saved: list[dict[str, Any]] = []
    config = EngineConfig(model=str(tiny_model), device="cpu")
    reason = run_transformers(config, {1: [], 2: []}, rounds, ["sdpa"], 1.0, saved.append)
    assert "no figures for 1, 2 at once" in reason
    assert [found["error"] for found in saved[-1].values()] == ["RuntimeError: no"] * 2
