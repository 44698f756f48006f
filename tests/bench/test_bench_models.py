"""The benchmarks of a model run from end to end, small and on random weights, and report what they should."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.common import report
from bench.features import embedding, eviction, generate, quality, speculation, streaming
from lightkv.triton_kernels.quantised.kv_format import Elements
from tests.support.served import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("bench") / "tiny")


@pytest.fixture
def run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a benchmark's `main` with these options, and returns its results."""

    def run_main(main: Callable[[], None], *options: object) -> Any:
        out = tmp_path / "out.json"
        arguments = ["--model", model, "--out", out, *options]
        monkeypatch.setattr(sys, "argv", ["bench", *map(str, arguments)])
        monkeypatch.setattr(generate, "read_bandwidth", lambda: 1e9)
        monkeypatch.setattr(speculation, "read_bandwidth", lambda: 1e9)
        main()
        return json.loads(out.read_text())["results"]

    return run_main


def test_sides_take_turns() -> None:
    order: list[str] = []

    def side(name: str) -> Callable[[], int]:
        def call() -> int:
            order.append(name)
            return len(order)

        return call

    found = list(report.alternate(3, {name: side(name) for name in "abc"}))
    assert "".join(order) == "abccbaabc"
    assert found == [{"a": 1, "b": 2, "c": 3}, {"a": 6, "b": 5, "c": 4}, {"a": 7, "b": 8, "c": 9}]
    assert [list(sides) for sides in found] == [["a", "b", "c"]] * 3


def test_generate(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[100 + row, *range(200, 210 + row)] for row in range(3)]
    monkeypatch.setattr(generate, "cases", lambda vocab_size: {"few": prompts})
    figures = run(generate.main, "--new-tokens", 6, "--rounds", 2)["few"]
    assert figures["same_text"] >= 0.9
    assert figures["lightkv_tokens_per_s"]["low"] > 0 < figures["transformers_tokens_per_s"]["low"]


def test_speculation(run: Callable[..., Any]) -> None:
    results = run(speculation.main, "--new-tokens", 8, "--rounds", 2)
    assert results.keys() == speculation.PROMPTS.keys()
    for figures in results.values():
        assert figures["new_tokens"] == 8
        assert 1 <= figures["passes"] <= 8
        assert figures["tokens_per_pass"] == 8 / figures["passes"]
        assert figures["passes"] + figures["accepted"] == 8


def test_speculation_refuses_another_text(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    guess = speculation.generate

    def wrong(*arguments: Any, num_proposed: int, **how: Any) -> Any:
        found = guess(*arguments, num_proposed=num_proposed, **how)
        return found._replace(token_ids=[1, *found.token_ids[1:]]) if num_proposed else found

    monkeypatch.setattr(speculation, "generate", wrong)
    with pytest.raises(SystemExit, match="other tokens than greedy decoding"):
        run(speculation.main, "--new-tokens", 4, "--rounds", 1)


@pytest.mark.slow
def test_embedding(run: Callable[..., Any]) -> None:
    results = run(embedding.main, "--new-tokens", 4, "--rounds", 2)
    assert results.keys() == embedding.CASES.keys()
    for name, figures in results.items():
        prompt = figures["prompt_tokens"]
        held = {side: figures[side]["most_tokens_held"] for side in (embedding.GATHERED, embedding.IN_PLACE)}
        beams = embedding.CASES[name].options.get("num_beams", 1)
        texts = len(embedding.CASES[name].texts)
        for num_held in held.values():
            assert prompt < num_held <= prompt + texts * beams * (4 + 10)
        assert figures[embedding.DYNAMIC]["most_tokens_held"] >= beams * prompt


@pytest.mark.slow
def test_streaming(run: Callable[..., Any]) -> None:
    sizes = {"tokens": 320, "window": 32, "stride": 8, "block": 80, "control": 2, "generate": 30}
    options = [part for name, value in sizes.items() for part in (f"--{name}", value)]
    results = run(streaming.main, *options)
    for name, figures in results["readings"].items():
        blocks = figures["perplexity_by_block"]
        assert len(blocks) == 4
        assert all(value > 1 for value in blocks), name
    held = results["generation"]
    assert (held["num_tokens"], held["last_position"]) == (30, 348)
    assert held["least_held"] == held["most_held"] == 32  # a ring, which is allocated once


def test_eviction(run: Callable[..., Any]) -> None:
    sizes = ["--texts", 2, "--prompt", 64, "--continuation", 33, "--chunk", 16, "--budgets", 32, 16]
    perplexity = run(eviction.main, *sizes)["perplexity"]
    assert len(perplexity) == 1 + 2 * 4
    assert all(value > 1 for value in perplexity.values())


@pytest.mark.slow
def test_quality(run: Callable[..., Any]) -> None:
    sizes = {"tokens": 200, "needles": 2, "prompts": 2, "new-tokens": 6, "made-tokens": 48, "chunk": 40}
    options = [part for name, value in sizes.items() for part in (f"--{name}", value)]
    names = ["int8", "int4", quality.BFLOAT16, *quality.OWN]
    results = run(quality.main, "--formats", *names, *options)
    formats = results["formats"]
    assert list(formats) == [quality.PLAIN, *names]
    for name, figures in formats.items():
        assert 0.5 < figures["perplexity_ratio"] < 2, name
        assert 0 <= figures["greedy_agreement"] <= 1
        assert 0 < figures["needle_probability"] < 1
        assert (abs(figures["divergence"]) < 1e-6) == (name == quality.PLAIN), name
    assert formats["int8"]["divergence"] < formats["int4"]["divergence"]
    assert formats["int8"]["bytes_per_token"] < formats[quality.PLAIN]["bytes_per_token"]
    assert results["models"].keys() == quality.MADE.keys()
    plain, scaled = (results["models"][name] for name in ("as it is", "K heads scaled"))
    assert scaled[quality.PLAIN] == pytest.approx(plain[quality.PLAIN], rel=1e-3)


def test_the_stored_quality_is_of_these_formats() -> None:
    path = Path(quality.__file__).parents[1] / "results/quality-cpu.json"
    stored = json.loads(path.read_text())["results"]
    assert set(stored["formats"]) >= set(quality.FORMATS)
    assert stored["models"].keys() == quality.MADE.keys()
    for name in ("int8", "int8-g8"):
        assert abs(stored["formats"][name]["perplexity_ratio"] - 1) < 0.005


def test_quality_refuses_an_unknown_format_first(run: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="int9"):
        run(quality.main, "--formats", "int9")


def test_greedy_texts_agree_up_to_the_first_difference() -> None:
    assert quality.agreement([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 3, 4], [5, 9, 7, 8]]) == 0.625


def test_rounding_with_the_scale_of_a_layer() -> None:
    x = torch.tensor([0.4, -1.0, 0.002])
    expected = torch.tensor([51.0, -127.0, 0.0]) / 127
    assert torch.allclose(quality.by_layer(Elements(8), {3: 1.0}, x, 3), expected)
    float8 = quality.by_layer(Elements(8, is_float=True), {3: 1.0}, x, 3)
    assert ((float8 - x).abs() <= x.abs() / 16 + 2**-9 / 448).all()
