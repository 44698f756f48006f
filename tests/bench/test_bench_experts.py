"""The bench of experts measures the sides that it names, on tiny layers and without a device."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, PreTrainedConfig, Qwen3MoeConfig

from bench.common.steady import Timing
from bench.kernels import experts
from tests.support.eager_models import SMALL

TINY = [
    Qwen3MoeConfig(**SMALL, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16),
    GptOssConfig(**SMALL, num_local_experts=8, num_experts_per_tok=2),
]


class RunningClock:
    """Runs each side once, and says that it took as many microseconds as its output has rows."""

    def replay_in_turns(self, sides: Mapping[str, Callable[[], torch.Tensor]]) -> dict[str, Timing]:
        return {
            name: Timing(*[float(len(side().flatten(0, -2)))] * 3, 1, True) for name, side in sides.items()
        }


@pytest.mark.parametrize("config", TINY, ids=lambda config: config.model_type)
def test_each_side_computes_all_tokens(config: PreTrainedConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(experts, "CapturedStep", lambda step: step)
    clock: Any = RunningClock()
    top_k = config.num_experts_per_tok
    expected = {num: {"products": top_k * num, "transformers": num, "lightkv": num} for num in (1, 64)}
    assert experts.measure(config, [1, 64], clock) == expected
