"""Layer groups on a GPU: attention by Triton's kernels, steps as CUDA graphs, two of them in flight."""

from typing import Any

import pytest
import torch
from torch import nn

from lightkv.router import EngineConfig
from lightkv.router.model.build import assemble
from tests.support.model_worker import assert_idle
from tests.support.windowed_models import (
    FAMILIES,
    LONG,
    NUM_NEW,
    PROMPTS,
    expected,
    make_engine,
    request,
    run_all,
    text,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("pool", [2000, 120])
@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_transformers_own(name: str, pool: int) -> None:
    """Of prompts in chunks, after hits and turn-offs; a small pool runs them in turn."""
    torch.backends.cuda.matmul.allow_tf32 = False
    engine = make_engine(name, chunk=16, depth=2, device="cuda", pool=pool)
    requests = [request(str(idx), prompt, NUM_NEW) for idx, prompt in enumerate(PROMPTS)]
    assert run_all(engine, requests) == expected(name, PROMPTS)
    most = 30
    assert run_all(engine, [request("long", LONG, most)]) == expected(name, [LONG], most)
    places = [17, 40, 64, 79]
    for turn in range(2):
        prompts = [LONG[:at] + text(6, at + turn) for at in places]
        others = [
            request(f"{turn} {at}", prompt, NUM_NEW) for at, prompt in zip(places, prompts, strict=True)
        ]
        assert run_all(engine, others) == expected(name, prompts)
        if turn and pool == 2000:
            assert [one.num_hit for one in others] == places
    assert_idle(engine)


def _wait(module: nn.Module, args: Any, out: torch.Tensor) -> None:
    out.sum().item()


@pytest.mark.parametrize("is_captured", [True, False])
@pytest.mark.parametrize("name", ["gemma3n", "gpt-oss"])
def test_a_model_whose_code_waits_for_the_device_runs_without_graphs(name: str, is_captured: bool) -> None:
    """Gemma-3n makes constants on the host, which alone needs no waiting."""
    lines: list[str] = []
    config = EngineConfig(device="cuda", dtype="float32", max_total_tokens=500, max_num_seqs=2)
    model = FAMILIES[name].model().to("cuda")
    if not is_captured:
        model.get_output_embeddings().register_forward_hook(_wait)
    _, info = assemble(model, config, lines.append)
    assert (info.cuda_graphs, bool(info.graph_tokens)) == (is_captured, is_captured)
    said = [line for line in lines if line.startswith("no CUDA graphs")]
    assert len(said) == (not is_captured)
    assert all("waits for the device: " in line and "capture.py" not in line for line in said)
