"""Models whose layers keep states, in bfloat16 on a GPU: every step is a CUDA graph, and the tokens are those
of transformers' own forward pass, but for rounding."""

import random
from array import array
from typing import Any

import pytest
import torch

from lightkv.edits import decode
from lightkv.router import EngineConfig, SamplingParams
from lightkv.router.engine.loop import LocalEngine, make_scheduler
from lightkv.router.engine.request import Request
from lightkv.router.engine.step import TokenEvent
from lightkv.router.model.build import assemble
from lightkv.router.model.parts import AppliedPlan
from lightkv.router.model.runner import ModelRunner
from tests.support.capturing import capture_all
from tests.support.gpu_engine import no_waits
from tests.support.hybrid_models import hybrid
from tests.support.model_worker import assert_idle

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "max_position_embeddings": 4096,
}
LINEAR = {"linear_num_key_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "head_dim": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3_5ForCausalLM": LINEAR,
    "Qwen3NextForCausalLM": LINEAR,
    "Lfm2ForCausalLM": {},
    "FalconH1ForCausalLM": {"mamba_d_head": 32, "mamba_d_state": 32, "mamba_d_ssm": 256, "head_dim": 32},
    "NemotronHForCausalLM": {"mamba_head_dim": 32, "ssm_state_size": 32, "head_dim": 32},
    "MiniMaxForCausalLM": {"head_dim": 32},
}


def build(name: str, **settings: object) -> tuple[LocalEngine, ModelRunner]:
    model: Any = hybrid(name, **SIZES, **FAMILIES[name]).to("cuda", torch.bfloat16)
    defaults: dict[str, Any] = {
        "device": "cuda",
        "dtype": "bfloat16",
        "max_num_seqs": 8,
        "max_model_len": 1024,
        "max_total_tokens": 6000,
        "prefill_chunk": 256,
        "mamba_full_memory_ratio": 20.0,
    }
    runner, info = assemble(model, EngineConfig(**(defaults | settings)), lambda line: None)
    return LocalEngine(make_scheduler(info, max_in_flight=1), capture_all(runner)), runner


def request(name: str, prompt: list[int], boundary: int) -> Request:
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    return Request(name, array("i", prompt).tobytes(), params, seed=1, boundary=boundary)


def prompts() -> list[list[int]]:
    """Every second one goes on from another."""
    rng, found = random.Random(0), list[list[int]]()
    for number in range(16):
        begin = rng.choice(found) if number % 2 else []
        found.append([*begin, *(rng.randrange(3, 512) for _ in range(rng.randint(1, 200)))])
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_the_likeliest_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots stand inside prompts, whose steps are graphs, too."""
    engine, runner = build(name)
    assert runner._graphs is not None
    monkeypatch.setattr(runner, "_forward", None)  # an eager step fails
    asked, events = prompts(), list[TokenEvent]()
    for number, prompt in enumerate(asked):
        engine.add(request(str(number), prompt, max(len(prompt) - 12, 0) if number % 3 == 0 else 0))
        for _ in range(number % 4):
            events += engine.step()
    while engine.has_work:
        events += engine.step()
    assert_idle(engine)
    assert not [event.error for event in events if event.error]
    assert sum(event.num_cached or 0 for event in events) > 300
    model: Any = hybrid(name, **SIZES, **FAMILIES[name]).to("cuda", torch.bfloat16)
    has_experts = name in ("Qwen3NextForCausalLM", "MiniMaxForCausalLM")  # which a rounding may exchange
    num_same = num = 0
    for number, prompt in enumerate(asked):
        answer = [one.token for one in events if one.request_id == str(number) and one.token is not None]
        assert len(answer) == 16
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *answer]], device="cuda")
            scores = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        likely = scores.log_softmax(-1)
        chosen = likely[torch.arange(16), torch.tensor(answer)]
        assert float((likely.amax(-1) - chosen).max()) < (2.0 if has_experts else 0.5)
        num_same += int((likely.argmax(-1).cpu() == torch.tensor(answer)).sum())
        num += 16
    assert num_same >= (0.85 if has_experts else 0.9) * num


def test_decode_steps_wait_for_nothing_and_allocate_nothing() -> None:
    engine, runner = build("Qwen3_5ForCausalLM")
    engine.add(*[request(str(number), [5 + number] * 40, 0) for number in range(4)])
    while engine.scheduler.num_waiting or engine.scheduler.num_prefilling:
        engine.step()
    for _ in range(2):  # the batch is in the graph's tensors, and each row reads the state that it writes
        engine.step()
    plan = engine.scheduler.plan()
    assert plan is not None
    assert not plan.num_prefills
    assert not decode(plan.edits)
    assert runner._graphs is not None
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_waits(), torch.inference_mode():
        graph = runner._graphs.get(plan)
        assert graph is not None
        output = graph.replay(AppliedPlan(plan, {}))
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    engine.scheduler.complete(runner._read(plan, output))
    while engine.has_work:
        engine.step()
    assert_idle(engine)
