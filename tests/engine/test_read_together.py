"""Requests that read a shared prefix together get the same tokens, and a decode graph is updated only when the
shared prefixes change."""

import random
from array import array
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace

from lightkv.attention import Batch, Step
from lightkv.ledger import TokenLedger
from lightkv.ledger.shared_prefixes import SharedPrefix
from lightkv.router import EngineConfig, SamplingParams
from lightkv.router.engine.loop import LocalEngine
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import StepPlan
from lightkv.router.model.build import assemble
from lightkv.router.model.cuda_graph import DecodeGraph, GraphKey, SharedLogits
from lightkv.router.model.parts import AppliedPlan, StepLogits
from lightkv.router.model.runner import ModelRunner
from lightkv.router.sampling_params import SamplerKind
from tests.support.capturing import capture_all
from tests.support.gpu_engine import no_waits, share_alike, take
from tests.support.model_worker import assert_idle
from tests.support.tiny_models import VOCABULARY, tiny_llama


def make(device: torch.device, **settings: object) -> tuple[LocalEngine, ModelRunner, list[StepPlan]]:
    """Returns an engine that reads every shared prefix together unless `settings` say otherwise, and its
    plans."""
    defaults = {"max_num_seqs": 4, "max_total_tokens": 600, "prefill_chunk": 96}
    given = {"device": str(device), "attention_backend": "triton"} | defaults | settings
    config = EngineConfig(**given)  # type: ignore[arg-type]
    runner, info = assemble(tiny_llama(device), config, lambda line: None)
    limits = replace(
        info.limits, prefix_sharing=info.limits.prefix_sharing._replace(min_tokens=8, min_saved=1, min_mean=0)
    )
    ledger = TokenLedger(info.capacity, limits.max_num_seqs, limits.max_model_len)
    plans: list[StepPlan] = []
    launch = runner.launch
    runner.launch = lambda plan: plans.append(plan) or launch(plan)  # type: ignore[method-assign, func-returns-value]
    return LocalEngine(Scheduler(ledger, limits), capture_all(runner)), runner, plans


def add_requests(engine: LocalEngine, count: int, max_tokens: int) -> None:
    """Adds two families of requests with one system prompt. They end at different times, and more requests wait
    than run."""
    rng = random.Random(0)
    system, *families = ([rng.randrange(VOCABULARY) for _ in range(n)] for n in (10, 15, 9))
    for i in range(count):
        own = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 9))]
        ids = [*own, *system] if i % 5 == 2 else [*system, *families[i // 2 % 2], *own]
        params = SamplingParams(temperature=0, max_tokens=rng.randint(2, max_tokens), ignore_eos=True)
        engine.add(Request(str(i), array("i", ids).tobytes(), params, seed=i))


def run(engine: LocalEngine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            take(tokens, event)
    assert_idle(engine)
    return tokens


@pytest.mark.slow
def test_the_tokens_are_those_of_reading_alone(device: torch.device) -> None:
    results = []
    for shared in (False, True):
        engine, _, plans = make(device, group_prefixes=shared, cuda_graphs=False)
        add_requests(engine, 6, 5)
        results.append(run(engine))
        kinds = {tuple(prefix.num_tokens for prefix in plan.prefixes) for plan in plans}
        assert (len(kinds) > 2) == shared  # the requests that share a prefix change as requests start and end
    assert share_alike(*results) == 1.0


def test_no_shared_prefix_is_planned_for_a_backend_that_cannot_read_one() -> None:
    engine, _, plans = make(torch.device("cpu"), attention_backend="torch")
    add_requests(engine, 5, 6)
    run(engine)
    assert len(plans) > 5
    assert not any(plan.prefixes for plan in plans)


@pytest.mark.parametrize("had_ended", [True, False])
def test_a_result_says_whether_the_device_had_waited_for_the_next_step(had_ended: bool) -> None:
    engine, runner, _ = make(torch.device("cpu"), attention_backend="torch")
    add_requests(engine, 5, 2)
    plan = engine.plan()
    assert plan is not None
    runner.launch(plan)
    event = SimpleNamespace(query=lambda: had_ended, synchronize=lambda: None)
    runner._in_flight[0].done = event  # type: ignore[assignment]
    result = runner.collect()
    assert result.had_ended == had_ended
    engine.complete(result)
    run(engine)


def decodes(step: int, rows: list[int], prefixes: list[SharedPrefix]) -> StepPlan:
    count = len(rows)
    starts = [50 + step] * count
    sample = list(range(count))
    kind = SamplerKind.GREEDY
    return StepPlan(step, b"", rows, starts, [1] * count, 0, b"", sample, kind, {}, [], 0, prefixes)


def test_a_graph_is_updated_only_when_the_shared_prefixes_change(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, runner, _ = make(device, cuda_graphs=False)
    graph = DecodeGraph(runner._parts, 4, runner.limits.prefix_sharing.max_members, SharedLogits(4))
    replayed: list[GraphKey] = []
    for form in (GraphKey(SamplerKind.GREEDY), GraphKey(SamplerKind.GREEDY, shares_prefixes=True)):
        stand_in = SimpleNamespace(replay=lambda form=form: replayed.append(form))
        graph._graphs[form] = (stand_in, None)  # type: ignore[assignment]
    told: list[object] = []
    load = graph._static.load

    def counted(batch: Batch) -> Step:
        reads = None if batch.shared is None else batch.shared.reads
        told.append(None if reads is None else [(len(decodes), count) for decodes, count in reads])
        return load(batch)

    monkeypatch.setattr(graph._static, "load", counted)
    three, two = [SharedPrefix((1, 2, 4), 40)], [SharedPrefix((1, 4), 40)]
    steps: list[tuple[list[int], list[SharedPrefix], bool]] = [
        ([1, 2, 4], three, True),
        ([1, 2, 4], list(three), False),
        ([1, 2, 4], two, True),
        ([1, 4], two, True),
        ([1, 4], two, False),
        ([1, 4], [], True),
        ([1, 4], [], False),
        ([1, 4], two, True),
    ]
    for step, (rows, prefixes, is_new) in enumerate(steps):
        told.clear()
        graph.replay(AppliedPlan(decodes(step, rows, prefixes), {}))
        expected = [(len(one.rows), one.num_tokens) for one in prefixes] or None
        assert told == ([expected] if is_new else [])
        assert replayed[-1].shares_prefixes == bool(prefixes)


def test_a_kind_of_sampling_without_a_graph_replays_the_forward_pass(device: torch.device) -> None:
    _, runner, _ = make(device, cuda_graphs=False)
    graph = DecodeGraph(runner._parts, 4, runner.limits.prefix_sharing.max_members, SharedLogits(4))
    edited = GraphKey(SamplerKind.EDITED)
    assert not graph.runs(edited)
    replays: list[str] = []
    forward = SimpleNamespace(replay=lambda: replays.append("forward"))
    inputs = SimpleNamespace(sample=lambda parts, logits, kind: (logits.tolist(), kind))
    graph._forwards[False] = forward, StepLogits(inputs, torch.zeros(4))  # type: ignore[assignment, arg-type]
    assert graph.runs(edited)
    assert not graph.runs(edited._replace(shares_prefixes=True))
    plan = replace(decodes(0, [1, 2], []), kind=SamplerKind.EDITED)
    assert graph.replay(AppliedPlan(plan, {})) == ([0.0] * 4, SamplerKind.EDITED)  # type: ignore[comparison-overlap]
    assert replays == ["forward"]


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_many_requests_start_and_end_while_they_read_together(graphs: bool) -> None:
    results = []
    for shared in (False, True):
        engine, runner, plans = make(
            torch.device("cuda"),
            group_prefixes=shared,
            cuda_graphs=graphs,
            max_num_seqs=24,
            max_total_tokens=4000,
        )
        add_requests(engine, 80, 60)
        results.append(run(engine))
        changes = [plan.prefixes for plan in plans if not plan.num_prefills and plan.prefixes]
        assert (len(changes) > 50) == shared
        if graphs:
            assert runner._graphs is not None
            forms = {
                form.shares_prefixes for graph in runner._graphs._decodes.values() for form in graph._graphs
            }
            assert forms == {False, shared}
    # A near-tie may be decided differently if keys are summed in another order.
    assert share_alike(*results) >= 0.9


@pytest.mark.gpu
def test_a_step_that_reads_together_waits_for_nothing_and_allocates_nothing() -> None:
    engine, runner, plans = make(torch.device("cuda"), max_num_seqs=8)
    add_requests(engine, 8, 60)
    while engine.scheduler.num_waiting or engine.scheduler.num_prefilling:
        engine.step()
    engine.step()  # the batch is loaded
    plan = engine.scheduler.plan()
    assert plan is not None
    assert not plan.num_prefills
    assert plan.prefixes
    assert runner._graphs is not None
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_waits(), torch.inference_mode():
        graph = runner._graphs.get(plan)
        assert graph is not None
        output = graph.replay(AppliedPlan(plan, {}))
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    engine.scheduler.complete(runner._read(plan, output))
    while engine.has_work:
        with no_waits(), torch.inference_mode():
            plan = engine.scheduler.plan()
            assert plan is not None
            runner.launch(plan)
        engine.scheduler.complete(runner.collect())
    assert len({tuple(plan.prefixes) for plan in plans}) > 1
    assert_idle(engine)
