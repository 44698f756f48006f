"""A model on several ranks answers, token for token, as it does on one."""

import random
from array import array
from pathlib import Path
from typing import Any

import pytest

from lightkv.integrations.ranks.group import RankGroup
from lightkv.router import EngineConfig, SamplingParams
from lightkv.router.engine.loop import LocalEngine, make_scheduler
from lightkv.router.engine.request import Request
from lightkv.router.model.build import build_runner
from tests.support.ranks import run_ranks
from tests.support.tiny_architectures import VOCABULARY, random_weights, tiny


def answers(ranks: RankGroup | None, directory: str, settings: dict[str, Any]) -> tuple[Any, ...]:
    """Runs requests with shared prefixes, chunks and sampling; returns tokens, free counts and the report."""
    config = EngineConfig(
        model=directory, device="cpu", dtype="float32", prefill_chunk=16, max_total_tokens=200, **settings
    )
    lines: list[str] = []
    runner, info = build_runner(config, lines.append, ranks=ranks)
    engine = LocalEngine(make_scheduler(info), runner)
    rng = random.Random(5)
    shared = [rng.randrange(3, VOCABULARY) for _ in range(20)]
    for i in range(8):
        prompt = shared[: rng.randint(0, 20)]
        prompt += [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 12))]
        params = SamplingParams(max_tokens=12, temperature=0.0 if i % 2 else 0.9, ignore_eos=True)
        engine.add(Request(str(i), array("i", prompt).tobytes(), params, seed=i))
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            if event.token is not None:
                tokens.setdefault(event.request_id, []).append(event.token)
    engine.check()
    return tokens, info.capacity, info.bytes_per_token, lines


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text", "gpt_oss", "olmo2", "phi3"])
def test_tokens_are_those_of_one_rank(family: str, tmp_path: Path) -> None:
    random_weights(tiny(family)).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    expected = answers(None, str(tmp_path), {})
    for size in (2, 4):
        found = run_ranks(size, answers, str(tmp_path), {})
        for tokens, _, _, _ in found:
            assert tokens == expected[0]
        print(size, found[0][1:], expected[1:])
