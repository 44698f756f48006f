"""Steps with prompts as CUDA graphs, against eager steps of the same plans, and what they may not do: wait for
the device, or compile a kernel while requests run."""

import random
from array import array
from collections import deque

import pytest
import torch
from msgspec.structs import replace
from triton.runtime.jit import JITFunction

from lightkv.ledger import TokenLedger
from lightkv.memory.capture import Capture
from lightkv.router import EngineConfig, SamplingParams
from lightkv.router.engine.loop import LocalEngine
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import StepPlan
from lightkv.router.model.build import assemble
from lightkv.router.model.cuda_graph import PromptGraph
from lightkv.router.model.runner import ModelRunner
from lightkv.router.model.step_graphs import StepGraphs
from tests.support.capturing import capture_all
from tests.support.model_worker import assert_idle
from tests.support.run_step import run_step
from tests.support.tiny_models import VOCABULARY, tiny_llama

pytestmark = pytest.mark.gpu

PARAMS = [
    SamplingParams(temperature=0, max_tokens=30),
    SamplingParams(temperature=0.9, max_tokens=12),
    SamplingParams(temperature=0.8, top_k=20, frequency_penalty=0.5, logprobs=3, max_tokens=20),
]
SYSTEM = [i * 7 % VOCABULARY for i in range(60)]


def make(depth: int = 1, **settings: object) -> tuple[LocalEngine, ModelRunner]:
    """Returns an engine with a model of its own, as graphs read the weights that were there at their capture.

    It is in float32, in which two ways to compute the same logits differ by little. No step is timed at the
    start, so that memories begin alike.
    """
    model = tiny_llama(torch.device("cuda"), context=400)
    defaults: dict[str, object] = {"device": "cuda", "max_num_seqs": 20, "max_total_tokens": 2500}
    defaults |= {"prefill_chunk": 96, "itl_target": 0.0}
    config = EngineConfig(**(defaults | settings))  # type: ignore[arg-type]
    runner, info = assemble(model, config, lambda line: None)
    # Short prefixes are worth reading together, too.
    sharing = info.limits.prefix_sharing._replace(min_tokens=8, min_saved=1, min_mean=0)
    limits = replace(info.limits, prefix_sharing=sharing)
    ledger = TokenLedger(info.capacity, limits.max_num_seqs, limits.max_model_len)
    return LocalEngine(Scheduler(ledger, limits, depth), capture_all(runner)), runner


class Traffic:
    """Adds requests to an engine as others end, in bursts and singly, and aborts some.

    Now and then it adds none until all have ended, so that prompts also run alone.
    """

    def __init__(self, engine: LocalEngine, seed: int) -> None:
        self._engine = engine
        self._rng = random.Random(seed)
        self._num = 0
        self._pauses = False

    def turn(self) -> None:
        rng = self._rng
        self._pauses = self._engine.has_work and (self._pauses or rng.random() < 0.03)
        if self._num and rng.random() < 0.05:
            self._engine.abort(str(self._num - rng.randint(1, 20)))
        if not self._pauses and self._engine.scheduler.num_waiting < 3 and rng.random() < 0.3:
            for _ in range(rng.choice([1, 1, 2, 15])):
                self.add()

    def add(self) -> None:
        rng = self._rng
        own = [rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 3, 30, rng.randint(1, 250)]))]
        ids = array("i", [*SYSTEM[: rng.choice([0, 30, 60])], *own]).tobytes()
        params = PARAMS[0] if rng.random() < 0.7 else rng.choice(PARAMS)
        self._engine.add(Request(str(self._num), ids, params, seed=self._num))
        self._num += 1


def graph_of(runner: ModelRunner, plan: StepPlan) -> object:
    assert isinstance(runner._graphs, StepGraphs)
    return runner._graphs.get(plan)


@pytest.mark.parametrize(
    "num_steps", [400, pytest.param(10_000, marks=pytest.mark.slow)], ids="{}_steps".format
)
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared_prefixes"])
def test_replays_equal_eager_steps(num_steps: int, shared: bool) -> None:
    """Two runners get the same plans, the one with graphs with two steps in flight, as an engine runs it.

    Slots, tables and counts are equal. Tokens are, too, but for a near-tie, which rounding may decide; the
    eager runner then goes on with the token of the graph.
    """
    engine, runner = make(depth=2, group_prefixes=shared)
    _, eager = make(group_prefixes=shared, cuda_graphs=False)
    traffic, in_flight = Traffic(engine, seed=num_steps), deque[StepPlan]()
    num_tokens = num_different = 0
    kinds = dict.fromkeys(("prompts", "mixed", "decodes", "prefixes beside prompts"), 0)

    def finish() -> None:
        nonlocal num_tokens, num_different
        plan, result = in_flight.popleft(), runner.collect()
        expected = run_step(eager, plan)
        assert (result.step, result.num_free, result.flags) == (expected.step, expected.num_free, 0)
        assert result.num_free == plan.num_free
        assert result.logprobs.keys() == expected.logprobs.keys()
        num_tokens += len(result.tokens)
        num_different += sum(a != b for a, b in zip(result.tokens, expected.tokens, strict=True))
        rows, tokens = ([plan.rows[i] for i in plan.sample], result.tokens)
        eager._parts.sampler.next_token[torch.tensor(rows, dtype=torch.int64, device="cuda")] = torch.tensor(
            tokens, dtype=torch.int64, device="cuda"
        )
        engine.scheduler.complete(result)

    for step in range(num_steps):
        traffic.turn()
        plan = engine.scheduler.plan()
        if plan is None and not in_flight:
            traffic.add()
            continue
        if plan is not None:
            has_decodes = plan.num_prefills < len(plan.rows)
            kinds["decodes" if not plan.num_prefills else "mixed" if has_decodes else "prompts"] += 1
            kinds["prefixes beside prompts"] += bool(plan.num_prefills and plan.prefixes)
            assert isinstance(graph_of(runner, plan), PromptGraph) == bool(plan.num_prefills)
            runner.launch(plan)
            in_flight.append(plan)
        if plan is None or len(in_flight) == 2:
            finish()
        if step % 50 == 0:
            while in_flight:
                finish()
            agree(runner, eager)
    while in_flight:
        finish()
    agree(runner, eager)
    assert num_different <= num_tokens / 5000
    least = num_steps / 20
    assert min(kinds["prompts"] * 5, kinds["mixed"], kinds["decodes"]) > least
    assert (kinds["prefixes beside prompts"] > 0) == shared
    while engine.has_work:
        engine.step()
    assert_idle(engine)


def agree(runner: ModelRunner, eager: ModelRunner) -> None:
    """Checks that the memories of both are equal: free slots, table and counters."""
    ours, other = runner._parts.memory, eager._parts.memory
    assert torch.equal(ours.allocator.mem_state, other.allocator.mem_state)
    assert torch.equal(ours.allocator.counters, other.allocator.counters)
    assert torch.equal(ours.table.req_to_token, other.table.req_to_token)
    for layer in range(2):
        assert not ours.pool.kv(layer)[0].isnan().any()  # padding is written there, and read


def test_steps_with_prompts_wait_for_nothing() -> None:
    engine, runner = make(group_prefixes=False)
    traffic = Traffic(engine, seed=0)
    num_mixed = 0
    for step in range(200):
        traffic.turn()
        plan = engine.scheduler.plan()
        if plan is None:
            traffic.add()
            continue
        num_mixed += 0 < plan.num_prefills < len(plan.rows)
        # The first rows with penalties make buffers for them, which waits.
        if step < 100 or graph_of(runner, plan) is None:
            runner.launch(plan)
        else:
            torch.cuda.set_sync_debug_mode("error")
            try:
                runner.launch(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        engine.scheduler.complete(runner.collect())
    assert num_mixed > 20


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_no_kernel_is_compiled_while_requests_run(monkeypatch: pytest.MonkeyPatch, graphs: bool) -> None:
    engine, _ = make(cuda_graphs=graphs, group_prefixes=False)
    compiled: list[str] = []
    do_compile = JITFunction._do_compile

    def noted(function: JITFunction, *arguments: object, **named: object) -> object:
        compiled.append(function.__name__)
        return do_compile(function, *arguments, **named)

    monkeypatch.setattr(JITFunction, "_do_compile", noted)
    traffic = Traffic(engine, seed=1)
    for _ in range(300):
        traffic.turn()
        engine.step() if engine.has_work else traffic.add()
    assert compiled == []


def test_what_does_not_fit_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory while a graph is captured at the start; its steps then run eagerly."""
    capture = PromptGraph.capture

    def refused(graph: PromptGraph, shares_prefixes: bool, shared: Capture) -> None:
        if graph.shape.num_tokens > 48:
            raise torch.OutOfMemoryError("no memory for this one")
        capture(graph, shares_prefixes, shared)

    monkeypatch.setattr(PromptGraph, "capture", refused)
    engine, runner = make()
    traffic = Traffic(engine, seed=2)
    for _ in range(100):
        traffic.turn()
        engine.step() if engine.has_work else traffic.add()
    assert isinstance(runner._graphs, StepGraphs)
    assert len(runner._graphs._refused) > 3
    while engine.has_work:
        engine.step()
    assert_idle(engine)
