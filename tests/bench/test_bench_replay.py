"""Graphs of decode steps replayed over sequences of a given length."""

from pathlib import Path
from typing import cast

import pytest
import torch

from bench.common import random_checkpoint
from bench.common.random_model import random_model
from bench.serving import replay
from bench.serving.replay import Decoding, Level, NoReplay, replays
from lightkv.router import EngineConfig
from lightkv.router.model.build import assemble
from tests.support.two_layers import TWO_LAYERS


@pytest.mark.slow
def test_sequences_are_brought_to_the_length_of_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(TWO_LAYERS, torch.device("cpu"), torch.float32)
    config = EngineConfig(device="cpu", max_total_tokens=1200, max_num_seqs=8, prefill_chunk=64)
    runner, info = assemble(model, config, lambda line: None)

    def replay_ms(runner: object, batch: int, times: int) -> float:
        """Allocates slots as the replay of a graph does, without the ledger counting them."""
        memory = cast(replay.ModelRunner, runner)._parts.memory
        memory.allocator.alloc(batch * times * replay.REPLAY_ROUNDS)
        return 1.0

    monkeypatch.setattr(replay, "replay_ms", replay_ms)
    levels = [Level(2, 90.0), Level(5, 70.5), Level(8, 300.0)]
    decoding = Decoding(runner, info, levels)
    for level in levels[:2]:
        # The first replay is over one token more than were computed before it, the last over 29 more.
        assert decoding.bring(level) + 1 + 14.5 == pytest.approx(level.context, abs=1.0)
        assert decoding.replay_ms(level.batch) == 1.0
        decoding.end(level.batch)
    with pytest.raises(NoReplay, match="of 8 sequences of 300 tokens were there"):
        decoding.bring(levels[2])


def test_sequences_shorter_than_the_replays_are_refused() -> None:
    model = random_model(TWO_LAYERS, torch.device("cpu"), torch.float32)
    runner, info = assemble(model, EngineConfig(device="cpu", max_total_tokens=500), lambda line: None)
    with pytest.raises(NoReplay, match="cannot be brought to 20 tokens"):
        Decoding(runner, info, [Level(2, 20.0)]).bring(Level(2, 20.0))
    with pytest.raises(NoReplay, match="take 600 tokens, of 500"):
        Decoding(runner, info, [Level(20, 90.0)])


@pytest.mark.gpu
def test_graphs_are_replayed_at_each_level(tmp_path: Path) -> None:
    random_model(TWO_LAYERS, torch.device("cpu"), torch.bfloat16).save_pretrained(tmp_path)
    random_checkpoint.save_tokenizer(tmp_path, TWO_LAYERS.vocab_size)
    config = EngineConfig(model=str(tmp_path), max_total_tokens=2000, max_num_seqs=8)
    levels = [Level(5, 70.5), Level(1, 90.0), Level(8, 100.0)]
    found = dict(replays(config, levels, 300.0))
    assert set(found) == set(levels)
    assert all(milliseconds > 0 for milliseconds in found.values())
