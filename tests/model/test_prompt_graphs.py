"""Static batches of steps with prompts, run launch by launch, give the tokens and slots of eager steps."""

import random
import re
from array import array
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest
import torch

from lightkv.attention import Batch, BatchShape, StaticStep
from lightkv.ledger import TokenLedger
from lightkv.memory.capture import Capture
from lightkv.router import EngineConfig, SamplingParams
from lightkv.router.engine.loop import LocalEngine
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.model.build import _eager_plans, assemble
from lightkv.router.model.cuda_graph import PromptGraph
from lightkv.router.model.runner import ModelRunner
from lightkv.router.model.step_graphs import StepGraphs
from lightkv.router.model.token_buckets import FEW_PREFILLS, token_buckets
from tests.support.model_worker import assert_idle
from tests.support.tiny_models import VOCABULARY, tiny_llama

MAX_NUM_SEQS = 9
GREEDY = SamplingParams(temperature=0, max_tokens=12)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.9, max_tokens=9),
    SamplingParams(temperature=0.8, top_k=20, frequency_penalty=0.5, logprobs=3, max_tokens=7),
]


class Recomputed:
    """Stands in for a captured graph: each replay computes what was to be captured."""

    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        self.compute = compute
        self.num_replays = 0

    def replay(self) -> None:
        self.compute()
        self.num_replays += 1


def recomputed_graphs(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> StepGraphs:
    """Gives the runner graphs of steps with prompts, which run launch by launch. Decodes run eagerly. No step
    waits for a GPU."""
    monkeypatch.setattr(StepGraphs, "_require_capturable", lambda graphs: None)
    capture = SimpleNamespace(graph=lambda compute: (Recomputed(compute), compute()))
    monkeypatch.setattr(StepGraphs, "_shared", capture)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    buckets = token_buckets(runner.limits.max_step_tokens, 0)
    graphs = StepGraphs(runner._parts, runner.limits, buckets)
    graphs._decodes.clear()
    graphs._missing = dict.fromkeys(graphs._ahead_of_time(), 0)
    runner._graphs = graphs
    return graphs


def capture_all(graphs: StepGraphs) -> list[str]:
    """Captures every graph. Returns what is reported of the first ones."""
    lines: list[str] = []
    graphs.capture_first(lines.append)
    while graphs.num_missing:
        graphs.capture_next()
    return lines


def replayed(graphs: StepGraphs) -> set[tuple[BatchShape, bool]]:
    """Returns the shapes that were replayed, and whether with shared prefixes."""
    return {
        (shape, shares_prefixes)
        for shapes in graphs._prompts.values()
        for shape, graph in shapes.items()
        for shares_prefixes, (captured, _) in graph._graphs.items()
        if captured.num_replays  # type: ignore[attr-defined]
    }


def make(backend: str, **settings: object) -> tuple[LocalEngine, ModelRunner]:
    model = tiny_llama(torch.device("cpu"), context=160)
    defaults: dict[str, object] = {
        "device": "cpu",
        "attention_backend": backend,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_total_tokens": 900,
        "prefill_chunk": 40,
    }
    runner, info = assemble(model, EngineConfig(**(defaults | settings)), lambda line: None)  # type: ignore[arg-type]
    ledger = TokenLedger(info.capacity, info.limits.max_num_seqs, info.limits.max_model_len)
    return LocalEngine(Scheduler(ledger, info.limits), runner), runner


def add_requests(engine: LocalEngine, count: int, params: list[SamplingParams]) -> None:
    """Adds requests: a long prompt, many short ones, then longer ones, some of which begin alike."""
    rng = random.Random(0)
    system = [rng.randrange(VOCABULARY) for _ in range(45)]
    for i in range(count):
        shared = system[: rng.choice([0, 20, 45]) if i > 10 else 0]
        least, most = (1, 50) if i > 10 else (1, 3) if i else (100, 100)
        own = [rng.randrange(VOCABULARY) for _ in range(rng.randint(least, most))]
        ids = [*shared, *own]
        engine.add(Request(str(i), array("i", ids).tobytes(), params[i % len(params)], seed=i))


def run(
    engine: LocalEngine, count: int, table: torch.Tensor, noted: list[torch.Tensor]
) -> dict[str, list[int]]:
    """Runs all requests to their ends and returns their tokens. Some are aborted on the way. Adds a copy of
    `table` to `noted` after each step."""
    rng, tokens = random.Random(1), dict[str, list[int]]()
    while engine.has_work:
        if rng.random() < 0.1:
            engine.abort(str(rng.randrange(count)))
        for event in engine.step():
            assert event.error is None
            if event.token is not None:
                tokens.setdefault(event.request_id, []).append(event.token)
        noted.append(table.clone())
    return tokens


def test_a_static_batch_has_decodes_first_and_padding_last(device: torch.device) -> None:
    _, runner = make("torch", cuda_graphs=False)
    memory = runner._parts.memory
    table = memory.table.req_to_token
    table[1:] = torch.arange(1, table[1:].numel() + 1, dtype=torch.int32).view(table[1:].shape) % 500
    static = StaticStep(BatchShape(16, 4, 3), memory)
    step = static.load(Batch.of([4, 2, 5, 1], [7, 0, 20, 30], [3, 2, 1, 1], 2))
    assert step.rows.tolist() == [4, 2, 0, 0, 5, 1, 0]
    assert step.kv_lens.tolist() == [10, 2, 0, 0, 21, 31, 0]
    assert step.q_starts.tolist() == [2, 5, 7, 7, 16]
    assert step.position_ids.tolist() == [20, 30, 7, 8, 9, 0, 1, *[0] * 9]
    places = [(5, 20), (1, 30), (4, 7), (4, 8), (4, 9), (2, 0), (2, 1)]
    assert step.slot_mapping.tolist() == [int(table[place]) for place in places] + [0] * 9
    host = step.host
    assert (host.num_prefills, host.num_decodes, host.num_tokens) == (4, 3, 16)
    assert (host.first_decode_token, host.first_prefill_token) == (0, 2)
    before = step.q_starts.data_ptr(), step.slot_mapping.data_ptr()
    step = static.load(Batch.empty())
    assert step.q_starts.tolist() == [0, 0, 0, 0, 16]
    assert not step.rows.any()
    assert not step.slot_mapping.any()
    assert before == (step.q_starts.data_ptr(), step.slot_mapping.data_ptr())
    for batch, message in (
        (
            ([1, 2, 3, 4], [0] * 4, [1] * 4, 4),
            "4 prefills and 0 decodes; there are places for 16 tokens, 3 pre",
        ),
        (
            ([1, 2, 3, 4], [9] * 4, [1] * 4, 0),
            "4 decodes; .* tokens, 3 prefills and 3 decodes here",
        ),
        (([1], [0], [17], 1), "17 tokens, 1 prefills"),
    ):
        with pytest.raises(ValueError, match=message):
            static.load(Batch.of(*batch))


@pytest.mark.parametrize("settings", [{}, {"max_total_tokens": 260}], ids=["", "small"])
def test_static_batches_give_the_tokens_and_slots_of_eager_steps(
    settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    compare("torch", 16, settings, monkeypatch)


@pytest.mark.slow  # in the interpreter
def test_static_batches_in_the_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    compare("triton", 14, {}, monkeypatch)


def compare(backend: str, count: int, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the same requests eagerly and in static batches; memory is full of NaN where nothing is held."""
    results: list[dict[str, list[int]]] = []
    tables: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for static, noted in enumerate(tables):
        engine, runner = make(backend, **settings)
        memory = runner._parts.memory
        for layer in range(2):
            memory.pool.kv(layer)[1:] = float("nan")
        if static:
            graphs = recomputed_graphs(runner, monkeypatch)
            graphs.rehearse()
            assert re.fullmatch(r"captured 5 CUDA graphs in .*; 10 more are .*", capture_all(graphs)[-1])
        add_requests(engine, count, PARAMS)
        results.append(run(engine, count, memory.table.req_to_token, noted))
        assert_idle(engine)
        assert not any(memory.pool.kv(layer)[0].isnan().any() for layer in range(2))
    assert results[0] == results[1]
    assert len(tables[0]) == len(tables[1])
    assert all(map(torch.equal, *tables))
    kinds = {(shape.num_prefills > FEW_PREFILLS, shape.num_decodes > 0) for shape, _ in replayed(graphs)}
    assert kinds == {(False, False), (False, True), (True, True)}


def test_every_kind_of_shape_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each power of two of tokens, though not every bucket has all kinds."""
    _, runner = make("torch", cuda_graphs=False)
    graphs = StepGraphs(runner._parts, runner.limits, [16, 24, 32, 36, 40, 44, 48])
    of_graph = {graph: shape for shapes in graphs._prompts.values() for shape, graph in shapes.items()}
    assert [len(shapes) for shapes in graphs._prompts.values()] == [3, 3, 3, 2, 2, 2, 3]
    rehearsed: list[BatchShape] = []
    monkeypatch.setattr(PromptGraph, "rehearse", lambda graph: rehearsed.append(of_graph[graph]))
    graphs._decodes.clear()
    graphs.rehearse()

    def kinds(shapes: Iterable[BatchShape]) -> set[tuple[int, bool, bool]]:
        return {
            ((shape.num_tokens - 1).bit_length(), shape.num_prefills > FEW_PREFILLS, shape.num_decodes > 0)
            for shape in shapes
        }

    assert kinds(rehearsed) == kinds(of_graph.values())
    assert len(rehearsed) == len(kinds(rehearsed))


def test_what_has_no_memory_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of sizes that were refused, at the start or later, and of sizes above all graphs."""
    capture = PromptGraph.capture

    def refusing(graph: PromptGraph, shares_prefixes: bool, shared: Capture) -> None:
        if graph.shape.num_tokens > 24:
            raise torch.OutOfMemoryError("no memory for this one")
        capture(graph, shares_prefixes, shared)

    monkeypatch.setattr(PromptGraph, "capture", refusing)
    engine, runner = make("torch")
    graphs = recomputed_graphs(runner, monkeypatch)
    capture_all(graphs)
    assert len(graphs._refused) == 9
    add_requests(engine, 24, [GREEDY])
    with_refusals = run(engine, 24, runner._parts.memory.table.req_to_token, [])
    assert_idle(engine)
    assert {shape.num_tokens for shape, _ in replayed(graphs)} == {16, 24}

    engine, runner = make("torch")
    graphs = recomputed_graphs(runner, monkeypatch)
    del graphs._prompts[max(graphs.buckets)]
    add_requests(engine, 24, [GREEDY])
    assert run(engine, 24, runner._parts.memory.table.req_to_token, []) == with_refusals


def test_an_error_in_a_capture_is_not_taken_for_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    _, runner = make("torch")
    graphs = recomputed_graphs(runner, monkeypatch)
    monkeypatch.setattr(PromptGraph, "capture", lambda *_: torch.empty(2).view(3))
    with pytest.raises(RuntimeError, match="shape"):
        graphs.capture_first(lambda line: None)


def test_warming_up_changes_nothing() -> None:
    """Steps of padding run eagerly at every size, and slots, counts and rows stay as they are."""
    engine, runner = make("torch", prefill_chunk=70)
    limits = engine.scheduler.limits
    plans = list(_eager_plans(limits, 0))
    assert max(plan.num_tokens for plan in plans) == limits.max_step_tokens
    assert {len(plan.rows) for plan in plans if not plan.num_prefills} == {1, 2, 4, 8, MAX_NUM_SEQS}
    assert {plan.num_tokens for plan in _eager_plans(limits, 32)} == {64, limits.max_step_tokens}
    sampler, memory = runner._parts.sampler, runner._parts.memory
    before = memory.table.req_to_token.clone(), sampler.next_token[1:].clone()
    runner.warm_up(plans)
    assert torch.equal(before[0], memory.table.req_to_token)
    assert torch.equal(before[1], sampler.next_token[1:])
    add_requests(engine, 3, PARAMS)
    run(engine, 3, memory.table.req_to_token, [])
    assert_idle(engine)
