"""Models with recurrent layers on two ranks: each computes its heads of a mixer, and keeps their states."""

from array import array
from pathlib import Path
from typing import Any

import pytest

from lightkv.integrations.ranks.group import RankGroup
from lightkv.router import EngineConfig, SamplingParams
from lightkv.router.engine.loop import LocalEngine, make_scheduler
from lightkv.router.engine.request import Request
from lightkv.router.model.build import build_runner
from lightkv.router.model.info import model_info
from tests.support.combinations import slow_cases
from tests.support.ranks import run_ranks
from tests.support.tiny_architectures import NUM_NEW, own_answers, prompts, random_weights, tiny
from tests.support.windowed_models import run_all

# With room for the states of several running requests, and for snapshots of shared prefixes.
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_total_tokens": 400,
    "max_num_seqs": 4,
    "max_model_len": 100,
    "prefill_chunk": 16,
    "mamba_full_memory_ratio": 50.0,
}


def greedy(ranks: RankGroup | None, directory: str) -> tuple[list[list[int]], int, int, int]:
    """Returns the answers to prompts of which two share a prefix, the bytes of a state, the number of
    parameters, and the number of tokens that were hit when the prompts came again."""
    runner, info = build_runner(EngineConfig(directory, **SETTINGS), lambda line: None, ranks=ranks)
    engine = LocalEngine(make_scheduler(info), runner)
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    found, hits = [], []
    for turn in range(2):
        given = [array("i", prompt).tobytes() for prompt in prompts()]
        requests = [Request(f"{turn} {idx}", ids, params, seed=0) for idx, ids in enumerate(given)]
        found.append(run_all(engine, requests))
        hits.append(sum(one.num_hit for one in requests))
        engine.check()
    assert found[0] == found[1]
    num_parameters = sum(one.numel() for one in runner._parts.model.parameters())
    return found[0], info.bytes_per_state, num_parameters, hits[1]


def saved(family: str, fields: dict[str, Any], directory: Path) -> list[list[int]]:
    """Saves a tiny model, and returns transformers' own answers."""
    model = random_weights(tiny(family, fields=fields))
    model.save_pretrained(directory)
    (directory / "tokenizer.json").touch()
    return own_answers(model, prompts())


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        *slow_cases(
            ("nemotron_h", {}),
            ("qwen3_5_text", {}),
            ("bamba", {}),
            ("falcon_h1", {"mamba_rms_norm": True, "ssm_multipliers": [0.5, 2.0, 0.7, 1.3, 0.9]}),
            ("falcon_h1", {}),
            ("granitemoehybrid", {}),
            ("granitemoehybrid", {"num_local_experts": 0, "position_embedding_type": "nope"}),
            ("lfm2", {}),
            ("lfm2_moe", {}),
            ("lfm3", {}),
            ("olmo_hybrid", {"linear_key_head_dim": 12}),
            ("qwen3_5_moe_text", {}),
            ("qwen3_next", {}),
            ("zamba2", {}),
        ),
    ],
)
def test_each_rank_computes_its_heads_of_a_mixer(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    own = saved(family, fields, tmp_path)
    _, bytes_per_state, *_ = greedy(None, str(tmp_path))
    parts = run_ranks(2, greedy, str(tmp_path))
    told = model_info(EngineConfig(str(tmp_path), tensor_parallel=2, **SETTINGS), tmp_path)
    assert parts[0][2] == told["num_parameters"]
    for answers, rank_bytes, _, num_hit in parts:
        assert answers == own
        assert num_hit > 0
        assert rank_bytes == bytes_per_state // 2 == told["bytes_per_state"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "fields"),
    [("minimax", {}), ("nemotron_h", {"n_groups": 1}), ("qwen3_5_text", {"linear_num_key_heads": 1})],
)
def test_each_rank_computes_a_whole_mixer_that_is_not_divided(
    family: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """Its norm is of all heads together, or its groups of heads are fewer than the ranks."""
    own = saved(family, fields, tmp_path)
    _, bytes_per_state, *_ = greedy(None, str(tmp_path))
    for answers, rank_bytes, *_ in run_ranks(2, greedy, str(tmp_path)):
        assert (answers, rank_bytes) == (own, bytes_per_state)
