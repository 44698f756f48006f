"""Layer groups on a GPU: attention by Triton's kernels, steps as CUDA graphs, two of them in flight."""

import pytest
import torch

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
    graphs = name not in ("gpt-oss", "mimo-v2")  # transformers' experts in float32 copy numbers from the host
    engine = make_engine(name, chunk=16, depth=2, device="cuda", pool=pool, cuda_graphs=graphs)
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
