"""The benchmark of a conversation's next turn, on a tiny model."""

import json
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from bench.serving import next_turn

TINY = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    head_dim=16,
)


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(next_turn, "SHAPES", {"llama-3-8b": TINY})
    monkeypatch.setattr(sys, "argv", ["next_turn", *words])
    next_turn.main()


def test_every_turn_finds_the_conversation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "turns.json"
    run(monkeypatch, "--prefix", "40", "90", "--turn", "3", "7", "--repeats", "2", "--out", str(out))
    found = json.loads(out.read_text())["results"]["milliseconds"]
    assert list(found) == ["3 after 40", "7 after 40", "3 after 90", "7 after 90"]
    assert all(len(case["turns"]) == 2 for case in found.values())


def test_a_turn_that_is_not_found_gives_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(next_turn.Conversation):
        def turn(self, new_ids: list[int]) -> tuple[float, int]:
            took, num_cached = super().turn(new_ids)
            return took, num_cached - 1

    monkeypatch.setattr(next_turn, "Conversation", Forgetful)
    with pytest.raises(SystemExit):
        run(monkeypatch, "--prefix", "40", "--turn", "3", "--repeats", "1")
