"""A step's prompt tokens bounded by time: the bound, the progress, and the same chunk for the same counts."""

import itertools
import math
import random
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from lightkv.ledger import TokenLedger
from lightkv.router.engine.admission import make_admission
from lightkv.router.engine.loop import (
    LEAST_SHARE,
    MOST_SHARE,
    MOST_WAIT,
    PLAN_SECONDS,
    LocalEngine,
    make_scheduler,
)
from lightkv.router.engine.prefill_budget import HURRIED, LEAST, LITTLE, MUCH, SPREAD, PrefillBudget
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import Limits, RunnerInfo, StepPlan
from lightkv.router.engine.step_time import PARAMETERS, StepTime, Work
from lightkv.router.sampling_params import SamplingParams
from lightkv.router.simulate import simulation, simulator
from lightkv.router.simulate.config import SimulationConfig
from lightkv.router.simulate.timed_engine import DEPTH
from tests.support.combinations import each_value, slow
from tests.support.model_worker import STOP, ModelWorker, assert_idle, run

H200 = StepTime.parse("")
# A device on which a hundred prompt tokens take as long as all else.
SMALL = StepTime(base=1e-3, per_decode=1e-5, per_kv=1e-7, prefill=0.0, per_prompt=1e-5, per_pair=2e-8)
LIMITS = Limits(max_num_seqs=16, max_model_len=700, prefill_chunk=300, vocab_size=300)


def random_model(rng: random.Random) -> StepTime:
    def about(value: float) -> float:
        return rng.choice((0.0, value * rng.uniform(0.1, 10)))

    return StepTime(rng.uniform(1e-3, 1e-2), about(1e-5), about(4e-8), about(0.02), about(2e-5), about(1e-9))


def with_prompt(work: Work, start: int, count: int) -> Work:
    decodes, kv, prompt, pairs = work
    return Work(decodes, kv, prompt + count, pairs + sum(range(start + 1, start + count + 1)))


@pytest.mark.parametrize("seed", range(20))
def test_the_most_prompt_tokens_are_those_that_brute_force_finds(seed: int) -> None:
    rng = random.Random(seed)
    model = replace(random_model(rng), prefill=0.0, per_decode=0.0)
    for _ in range(50):
        decodes = rng.randint(0, 300)
        work = with_prompt(Work(decodes, decodes * rng.randint(1, 4000), 0, 0), 0, rng.randint(0, 300))
        start, seconds = rng.randint(0, 8000), rng.uniform(0.0, 0.05)
        most = model.most_prompt_tokens(seconds, work, start)
        if most is None:
            assert model.per_prompt == model.per_pair == 0
            continue
        slack = 1e-12
        if most:
            assert model.seconds(with_prompt(work, start, most)) <= seconds + slack
        assert model.seconds(with_prompt(work, start, most + 1)) > seconds - slack


@pytest.mark.parametrize("is_timed", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_prefill_is_computed_within_its_window(seed: int, is_timed: bool) -> None:
    """Whatever decodes in each step, and whether or not the prefills before it are aborted."""
    rng = random.Random(seed)
    for _ in range(60):
        limits = msgspec.structs.replace(LIMITS, prefill_chunk=rng.randint(1, 300), itl_target=None)
        model = StepTime(1e-3, rng.choice((0.0, 1e-3)), 1e-7, 0.0, rng.choice((1e-5, 1e-3)), 2e-8)
        budget = PrefillBudget(limits, model if is_timed else None)
        lefts = [rng.randint(1, 700) for _ in range(rng.randint(1, 3))]
        starts = [0] * len(lefts)
        windows = budget.windows(lefts)
        step = 0
        while any(lefts):
            decodes = rng.choice((0, 5, 100, 1000))
            use = budget.of_step(decodes, 500 * decodes)
            for i, left in enumerate(lefts):
                if left and i + 1 < len(lefts) and rng.random() < 0.02:  # aborted
                    lefts[i] = 0
                    continue
                if left and idx_of_first(lefts) == i:
                    others = [x for x in lefts if x]
                    now = use.windows(others, 0, starts[i])
                    assert now[0].now == use.tokens(starts[i], left)
                count = use.tokens(starts[i], left) if left else 0
                if not count:
                    continue
                window = windows[i]
                assert starts[i] + count <= window.now + step * window.most
                use.add(starts[i], count)
                starts[i] += count
                lefts[i] -= count
                if not lefts[i]:
                    assert window.first <= step <= window.last
            step += 1


def idx_of_first(lefts: list[int]) -> int:
    """Returns the index of the first prefill that is not computed."""
    return next(i for i, left in enumerate(lefts) if left)


def test_where_nothing_decodes_a_step_takes_the_full_chunk() -> None:
    limits = msgspec.structs.replace(LIMITS, itl_target=1e-9)
    step = PrefillBudget(limits, SMALL).of_step(0, 0)
    assert step.tokens(0, 700) == 300
    step.add(0, 200)
    assert step.tokens(400, 700) == 100


@pytest.mark.parametrize(("step_time", "target"), [(None, 0.001), (SMALL, 0.0), (None, None)])
def test_without_a_step_time_or_a_target_a_step_takes_the_full_chunk(
    step_time: StepTime | None, target: float | None
) -> None:
    limits = msgspec.structs.replace(LIMITS, itl_target=target)
    assert PrefillBudget(limits, step_time).of_step(10, 5000).tokens(0, 700) == 300


def test_a_chunk_without_limit_is_cut_by_a_given_target_alone() -> None:
    limits = msgspec.structs.replace(LIMITS, prefill_chunk=0)
    assert PrefillBudget(limits, SMALL).of_step(10, 5000).tokens(0, 700) == 700
    limits = msgspec.structs.replace(limits, itl_target=0.002)
    assert PrefillBudget(limits, SMALL).of_step(10, 5000).tokens(0, 700) < 700


def test_room_for_fewer_tokens_than_the_least_is_not_rounded_away() -> None:
    """256 decodes and 127 prompt tokens fit: a multiple of 128 would leave no prompt token."""
    model = StepTime(1e-3, 0.0, 0.0, 0.0, 1e-5, 0.0, prompt_base=0.0)
    assert model.most_prompt_tokens(0.003835, Work(256, 0, 0, 0), 0) == 127
    limits = msgspec.structs.replace(LIMITS, prefill_chunk=2048, itl_target=0.003835)
    assert PrefillBudget(limits, model).of_step(256, 0).tokens(0, 700) == 127


@pytest.mark.parametrize(("decodes", "is_alone_long"), [(1, False), (256, True)])
def test_the_default_target_grows_with_the_prompts_that_wait(decodes: int, is_alone_long: bool) -> None:
    model = replace(H200, base=0.002, prefill=0.0)
    budget, kv = PrefillBudget(msgspec.structs.replace(LIMITS, prefill_chunk=4096), model), decodes * 6000
    alone = model.seconds(Work(decodes, kv, 0, 0))
    spread, hurried = (max(pace.seconds, pace.times * alone) for pace in (SPREAD, HURRIED))
    assert (spread > SPREAD.seconds) == (hurried > HURRIED.seconds) == is_alone_long
    soon, late = (seconds / model.per_prompt for seconds in (LITTLE, MUCH))
    waiting = [0, int(soon), round((soon + late) / 2), math.ceil(late), 10**9]
    expected = [spread, spread, (spread + hurried) / 2, hurried, hurried]
    assert [budget.seconds(decodes, kv, num) for num in waiting] == pytest.approx(expected, rel=1e-3)
    assert budget.seconds(0, 0) == math.inf
    given = PrefillBudget(msgspec.structs.replace(LIMITS, itl_target=0.5), model)
    assert [given.seconds(decodes, kv, num) for num in waiting] == [0.5] * 5


def test_a_target_below_what_any_prompt_token_takes_counts_as_that() -> None:
    """Up to there, prompt tokens are free."""
    limits = msgspec.structs.replace(LIMITS, prefill_chunk=4096, itl_target=0.020)
    budget = PrefillBudget(limits, H200)
    assert budget.seconds(100, 200_000) == H200.prefill > 0.020
    work = with_prompt(Work(100, 200_000, 0, 0), 0, budget.of_step(100, 200_000).tokens(0, 4096))
    assert work.prompt > 900
    assert H200.seconds(work) == H200.prefill


def test_a_cut_chunk_fills_a_bucket_and_a_prompt_that_fits_is_not_cut() -> None:
    limits = msgspec.structs.replace(LIMITS, prefill_chunk=2048, max_model_len=9000, itl_target=0.040)
    model = replace(H200, prefill=0.0)
    for decodes in (1, 7, 64, 100):
        step = PrefillBudget(limits, model).of_step(decodes, decodes * 2000)
        cut = step.tokens(0, 5000)
        assert (decodes + cut) % 256 == 0
        fits = model.most_prompt_tokens(0.040, step.work, 0)
        assert fits is not None
        assert cut <= fits < cut + 256
        assert step.tokens(0, fits) == fits
        assert step.tokens(0, fits + 1) == cut
        step.add(0, cut)
        assert model.seconds(step.work) <= 0.040
    short = PrefillBudget(limits, replace(model, per_prompt=2e-4)).of_step(3, 3000)
    assert (3 + short.tokens(0, 5000)) % 16 == 0
    assert 64 < short.tokens(0, 5000) < 253


@pytest.mark.parametrize("seed", range(5))
def test_a_cut_chunk_fills_one_of_the_graphs_that_the_runner_has(seed: int) -> None:
    """Their sizes are chosen by measuring, so they are no multiples of any number."""
    rng = random.Random(seed)
    graphs = (*range(16, 128, 16), 192, 252, 320, 444, 512, 700, 800, 896, 1024, 1216, 1344, 1536)
    limits = msgspec.structs.replace(LIMITS, prefill_chunk=2048, max_model_len=9000, itl_target=0.040)
    found = set()
    for _ in range(100):
        model = replace(H200, prefill=0.0, per_prompt=rng.uniform(1e-5, 1e-4))
        decodes = rng.randrange(1, 100)
        step = PrefillBudget(limits, model, graphs).of_step(decodes, decodes * 2000)
        fits = model.most_prompt_tokens(0.040, step.work, 0)
        cut = step.tokens(0, 5000)
        assert fits is not None
        if 200 < fits < min(2048, 1536 - decodes):
            found.add(decodes + cut)
            assert decodes + cut == max(size for size in graphs if size <= decodes + fits)
            assert step.tokens(0, fits) == fits
        elif 1536 - decodes < fits < 2048:  # such steps run eagerly
            assert (decodes + cut) % 256 == 0
    assert len(found) > 3


def test_the_scheduler_knows_the_sizes_of_the_graphs() -> None:
    info = RunnerInfo(
        "", "", "", "", True, 3000, 1, 3000, "", LIMITS, step_time=SMALL, graph_tokens=(16, 100, 300)
    )
    info = msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=RunnerInfo)
    assert make_scheduler(info)._budget.rounded(299) == 100


@pytest.mark.parametrize("seed", range(5))
def test_a_prompt_that_can_begin_gets_tokens_wherever_its_cached_prefix_ends(seed: int) -> None:
    """Else a request would be admitted, and its row made known, in a step that computes nothing of it."""
    rng = random.Random(seed)
    answers = set()
    for _ in range(300):
        limits = Limits(300, 9000, rng.choice((0, 32, 512, 2048)), 300, itl_target=rng.uniform(0, 0.05))
        decodes = rng.randint(0, 200)
        graphs = rng.choice(((), (16, 24, 48, 96, 192, 252, 512, 700, 1300)))
        budget = PrefillBudget(limits, random_model(rng), graphs)
        step = budget.of_step(decodes, decodes * rng.randint(1, 4000))
        while True:
            length = rng.randint(1, 3000)
            can_begin = step.can_begin(length)
            answers.add(can_begin)
            starts = {0, length - 1, *(rng.randrange(length) for _ in range(20))}
            if can_begin:
                assert all(step.tokens(start, length - start) > 0 for start in starts)
            start = rng.choice(sorted(starts))
            count = step.tokens(start, length - start)
            assert 0 <= count <= length - start
            if not count:
                break
            step.add(start, count)
            assert step.work.prompt <= limits.prefill_budget
    assert answers == {True, False}


# --------------------------------------------------------------------------------
# The scheduler


def make(
    model: StepTime | None, target: float | None, depth: int = 1, clock: Callable[[], float] = lambda: 0.0
) -> tuple[LocalEngine, ModelWorker]:
    limits = msgspec.structs.replace(LIMITS, itl_target=target)
    worker = ModelWorker(3000, random.Random(0), stop_chance=0.02)
    ledger = TokenLedger(3000, limits.max_num_seqs, limits.max_model_len)
    budget = PrefillBudget(limits, model)
    return LocalEngine(Scheduler(ledger, limits, depth, clock=clock, budget=budget), worker), worker


def random_requests(seed: int, num: int) -> list[Request]:
    rng = random.Random(seed)
    system = [rng.randrange(100, 103) for _ in range(200)]
    made = []
    for number in range(num):
        tail = [rng.randrange(50) for _ in range(rng.choice((1, 20, 300, 450)))]
        ids = array("i", system[: rng.choice((0, 90, 200))] + tail).tobytes()
        params = SamplingParams(max_tokens=rng.randint(1, 40), temperature=0.0)
        made.append(Request(str(number), ids, params, seed=number, stop_ids=frozenset({STOP})))
    return made


def plans_of(engine: LocalEngine, worker: ModelWorker, requests: list[Request]) -> list[StepPlan]:
    """Adds the requests one after another, a few steps apart, and runs all of them."""
    rng = random.Random(1)
    for request in requests:
        engine.add(request)
        for _ in range(rng.choice((0, 1, 4))):
            engine.step()
        engine.scheduler.check()
    run(engine)
    assert_idle(engine)
    return worker.plans


def test_a_plan_waits_for_requests_only_while_a_step_is_in_flight_and_no_prompt_is_left() -> None:
    model = replace(SMALL, base=0.02)
    engine, worker = make(model, None, depth=2)
    decode = Request("d", array("i", [1, 2, 3]).tobytes(), SamplingParams(max_tokens=30), seed=0)
    prompt = Request("p", array("i", [4] * 500).tobytes(), SamplingParams(max_tokens=2), seed=0)
    assert engine.spare_seconds < 0  # nothing is in flight
    engine.add(decode)
    assert engine.spare_seconds < 0
    first = engine.plan()
    assert first is not None
    worker.launch(first)
    expected = MOST_SHARE * model.seconds(first.work) - PLAN_SECONDS
    assert engine.spare_seconds == pytest.approx(expected)
    assert expected > 0.01
    engine.add(prompt)
    assert engine.spare_seconds < 0  # it waits
    second = engine.plan()
    assert second is not None
    worker.launch(second)
    assert engine.scheduler.num_prefilling == 1
    assert engine.spare_seconds < 0  # the rest of it is computed next
    while engine.scheduler.num_in_flight:
        engine.complete(worker.collect())
    run(engine)
    assert_idle(engine)


def test_plans_wait_less_after_one_that_came_too_late_and_slowly_more_again() -> None:
    """A model that says ten times what a step takes makes few plans late, and none by more than MOST_WAIT."""
    true_seconds, model = 0.012, replace(SMALL, base=0.12)
    engine, worker = make(model, None, depth=2)
    engine.add(Request("d", array("i", [1, 2, 3]).tobytes(), SamplingParams(max_tokens=600), seed=0))
    late = list[bool]()
    for _ in range(150):
        plan = engine.plan()
        assert plan is not None
        worker.launch(plan)
        spare = engine.spare_seconds
        assert spare <= MOST_WAIT
        late.append(spare > true_seconds)
        engine.complete(msgspec.structs.replace(worker.collect(), had_ended=late[-1]))
    assert late[:2] == [True, True]
    assert 0 < sum(late[10:]) < 15
    run(engine)
    assert engine._share == MOST_SHARE
    assert_idle(engine)


def test_plans_wait_again_after_any_number_that_came_too_late() -> None:
    engine, worker = make(replace(SMALL, base=0.05), None, depth=2)
    engine.add(Request("d", array("i", [1, 2, 3]).tobytes(), SamplingParams(max_tokens=600), seed=0))
    for _ in range(200):
        plan = engine.plan()
        assert plan is not None
        worker.launch(plan)
        engine.complete(msgspec.structs.replace(worker.collect(), had_ended=True))
    assert engine._share == LEAST_SHARE
    run(engine)
    assert engine._share == MOST_SHARE
    assert_idle(engine)


@pytest.mark.parametrize("target", [0.0, None])
def test_no_plan_waits_where_times_are_not_known_or_no_target_is_set(target: float | None) -> None:
    engine, worker = make(replace(SMALL, base=1.0) if target == 0 else None, target, depth=2)
    engine.add(Request("d", array("i", [1, 2, 3]).tobytes(), SamplingParams(max_tokens=30), seed=0))
    plan = engine.plan()
    assert plan is not None
    worker.launch(plan)
    assert engine.spare_seconds < 0
    engine.complete(worker.collect())
    run(engine)
    assert_idle(engine)


@each_value(target=[1e-9, 0.0025, 0.004, None], depth=[1, 2])
def test_no_planned_step_takes_longer_than_the_target(target: float | None, depth: int) -> None:
    model = replace(SMALL, base=0.02, per_prompt=2e-4) if target is None else SMALL
    engine, worker = make(model, target, depth)
    plans = plans_of(engine, worker, random_requests(0, 30))
    budget = engine.scheduler._budget
    bound = short = 0
    for work in [plan.work for plan in plans]:
        if work.decodes and work.prompt:
            allowed = budget.seconds(work.decodes, work.kv, 10**9)
            assert work.prompt <= LEAST or model.seconds(work) <= allowed + 1e-12
            bound += work.prompt > LEAST
            short += work.prompt <= LEAST
    assert short if target == 1e-9 else bound
    assert engine.stats().num_preemptions == 0


@pytest.mark.parametrize("target", [1e-9, 0.0025, None])
def test_a_lone_prompt_takes_full_chunks(target: float | None) -> None:
    engine, worker = make(SMALL, target)
    engine.add(Request("p", array("i", [4] * 650).tobytes(), SamplingParams(max_tokens=2), seed=0))
    run(engine)
    assert [plan.counts for plan in worker.plans] == [[300], [300], [50], [1]]


def test_every_prompt_progresses_under_an_impossible_target() -> None:
    engine, worker = make(SMALL, 1e-9)
    decode = Request("d", array("i", [1, 2, 3]).tobytes(), SamplingParams(max_tokens=30), seed=0)
    prompt = Request("p", array("i", [4] * 300).tobytes(), SamplingParams(max_tokens=2), seed=0)
    engine.add(decode)
    engine.step()
    engine.add(prompt)
    run(engine)
    chunks = [plan.counts[0] for plan in worker.plans[1:] if plan.num_prefills]
    assert chunks == [64, 64, 64, 64, 44]
    assert_idle(engine)


def test_the_same_counts_give_the_same_steps_whatever_the_clock() -> None:
    slow = itertools.count(0.0, 1.0)
    fast = itertools.count(0.0, 1e-7)
    steps = []
    for clock in (slow, fast):
        engine, worker = make(SMALL, 0.0025, clock=lambda clock=clock: next(clock))  # type: ignore[misc]
        plans = plans_of(engine, worker, random_requests(3, 8))
        steps.append([msgspec.msgpack.encode(plan) for plan in plans])
    assert steps[0] == steps[1]


def test_steps_of_decodes_alone_do_not_ask_for_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, worker = make(SMALL, 0.0025)
    budget = engine.scheduler._budget
    asked = []
    monkeypatch.setattr(
        budget, "of_step", lambda *counts: asked.append(counts) or PrefillBudget.of_step(budget, *counts)
    )
    params = SamplingParams(max_tokens=20, temperature=0.0)
    engine.add(Request("a", array("i", [1, 2, 3]).tobytes(), params, seed=0))
    run(engine)
    assert asked == [(0, 0, 3)]
    assert len(worker.plans) == 20


def test_prompts_count_as_waiting_where_they_may_be_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in prefill with what is left of them, and those of the queue unless its head was refused."""
    engine, _ = make(SMALL, None)
    budget, scheduler, asked = engine.scheduler._budget, engine.scheduler, []
    monkeypatch.setattr(
        budget, "of_step", lambda *counts: asked.append(counts[-1]) or PrefillBudget.of_step(budget, *counts)
    )

    def add(number: int, length: int, max_tokens: int) -> None:
        ids = array("i", [number] * length).tobytes()
        engine.add(Request(str(number), ids, SamplingParams(max_tokens=max_tokens, temperature=0.0), seed=0))

    add(0, 10, 600)
    engine.step()
    for number in range(1, 5):  # the last one does not fit beside the others
        add(number, 400, 300)
    engine.step()
    assert asked == [10, 1600]
    left = sum(request.num_prefill_left for request in scheduler._prefilling)
    assert left
    left += scheduler.waiting.num_tokens
    engine.step()
    assert asked[2] == left
    while scheduler.num_prefilling or scheduler.num_waiting > 1:
        engine.step()
    assert asked[-1] == 2 * 400  # more than what is left: a long prompt counts twice
    for _ in range(3):  # the first looks at it again
        engine.step()
    assert (asked[-1], scheduler.num_waiting, scheduler.waiting.num_tokens) == (0, 1, 400)


def test_a_request_is_admitted_in_a_step_that_computes_a_part_of_it() -> None:
    engine, worker = make(SMALL, 0.0020)
    for plan in plans_of(engine, worker, random_requests(5, 40)):
        assert {new.row for new in plan.new_rows} <= set(plan.rows[: plan.num_prefills])


@pytest.mark.parametrize("target", [0.0025, *slow(0.0, 1e-9)])
def test_the_simulator_plans_the_same_steps_as_the_engine(
    target: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(7)
    lengths = [(rng.randint(1, 500), rng.randint(1, 30)) for _ in range(40)]
    path = tmp_path / "trace.csv"
    path.write_text("ContextTokens,GeneratedTokens\n" + "".join(f"{p},{o}\n" for p, o in lengths))
    simulated: list[StepPlan] = []

    class Engine(simulation.TimedEngine):
        def plan(self) -> StepPlan | None:
            planned = super().plan()
            simulated.extend([planned] if planned is not None else [])
            return planned

    monkeypatch.setattr(simulation, "TimedEngine", Engine)
    config = SimulationConfig(
        capacity=3000, max_num_seqs=16, prefill_chunk=300, max_new=40, admission="oracle", rate=math.inf,
        itl_target=target,
        step_time=",".join(f"{name}={value}" for name, value in SMALL.as_dict().items() if name in PARAMETERS),
    )  # fmt: skip
    simulator.simulate(str(path), config)

    limits = msgspec.structs.replace(LIMITS, max_model_len=3001, itl_target=target)
    info = RunnerInfo("", "", "", "", False, 3000, 1, 3000, "", limits, SMALL)
    worker = ModelWorker(3000, random.Random(0))
    # Limits are the lengths of the answers, as the simulator's oracle counts them.
    engine = LocalEngine(make_scheduler(info, make_admission("reserved"), DEPTH), worker)
    for number, (prompt, output) in enumerate(lengths):
        ids = array("i", [number] + [299] * (prompt - 1)).tobytes()
        engine.add(Request(str(number), ids, SamplingParams(max_tokens=output, temperature=0.0), seed=number))
    run(engine)
    ours, theirs = ([(p.rows, p.starts, p.counts) for p in plans] for plans in (worker.plans, simulated))
    assert ours == theirs
    assert any(plan.num_prefills and plan.work.decodes for plan in simulated)
