"""Random lives of the scheduler over a ledger of layer groups: no request is ever short of a slot."""

import random
from array import array

import pytest

from lightkv.layer_groups import FULL, LayerClass, LayerGroups, Lifetime
from lightkv.ledger import Sequence, TokenLedger
from lightkv.router.engine.admission import Admission, Running
from lightkv.router.engine.estimates import OutputLengths
from lightkv.router.engine.prefill_budget import StepBudget
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import Limits, StepPlan, StepResult
from lightkv.router.sampling_params import SamplingParams
from tests.support.combinations import each_value, slow
from tests.support.scheduled import random_budget

MAX_MODEL_LEN = 120
STOP = 7


def layers(*classes: tuple[Lifetime, int]) -> LayerGroups:
    """Returns layer groups of one layer each, from the lifetimes and numbers of groups of the classes."""
    found, layer = [], 0
    for lifetime, count in classes:
        found.append(LayerClass(lifetime, tuple(((layer + i,),) for i in range(count))))
        layer += count
    return LayerGroups(tuple(found), 1)


GROUPS = {
    "window": layers((FULL, 1), (Lifetime("window", 6), 2)),
    "two windows": layers((FULL, 2), (Lifetime("window", 4), 1), (Lifetime("window", 9), 3)),
    "chunk": layers((FULL, 1), (Lifetime("chunk", 8), 3)),
    "window and chunk": layers((FULL, 1), (Lifetime("window", 5), 1), (Lifetime("chunk", 7), 1)),
}


def random_request(rng: random.Random, number: int, families: list[list[int]], share: float) -> Request:
    prompt = rng.choice(families)[: rng.randint(1, 60)] if rng.random() < 0.8 else []
    prompt = prompt + [rng.randrange(50) for _ in range(1 if rng.random() < 0.5 else 61 - len(prompt))]
    params = SamplingParams(max_tokens=rng.randint(1, 50), temperature=0.0)
    ids = array("i", prompt).tobytes()
    priority = rng.randrange(3) if rng.random() < 0.3 else 0
    stated = rng.random() < share
    return Request(str(number), ids, params, 1, frozenset({STOP}), priority=priority, states_length=stated)


class Watched(Scheduler):
    """A scheduler that compares what is forecast with what was forecast before."""

    rises = 0  # how often a request has been admitted, or a tail kept, which alone may let a forecast rise
    compared = 0
    # `rises`, how many are estimated, then the most slots that later steps hold: of all, of the guaranteed.
    known: tuple[int, ...] = ()

    def watch_kept(self) -> None:
        """Counts the tails that are kept from now on, too."""
        forecast = self._forecasts.all
        note_kept = forecast.note_kept

        def noted(sequence: Sequence) -> None:
            self.rises += 1
            note_kept(sequence)

        forecast.note_kept = noted  # type: ignore[method-assign]

    def _admit(self, request: Request, budget: StepBudget, room: int, idx: int) -> bool:
        admitted = super()._admit(request, budget, room, idx)
        self.rises += admitted
        return admitted

    def compare(self, has_planned: bool = False) -> None:
        """Checks that no forecast has risen since the last call without a reason and, where a step has been
        planned, that no more is held than was forecast before."""
        later = [
            int(forecast._totals(self._prefills(), None)[1].max(initial=0))
            for forecast in (self._forecasts.all, self._forecasts.guaranteed)
        ]
        num_estimated = self._forecasts.num_estimated
        if self.known and self.known[0] == self.rises:
            self.compared += 1
            assert later[1] <= self.known[3]
            if not num_estimated and not self.known[1]:
                assert max(later[0], self.ledger.num_held * has_planned) <= self.known[2]
        self.known = (self.rises, num_estimated, *later)


def live(
    groups: LayerGroups, seed: int, steps: int, depth: int, chunk: int, timed: bool, share: float = 1.0
) -> Scheduler:
    """Runs random requests, a `share` of which state their length, and checks all counts in every step."""
    rng = random.Random(seed)
    capacity = int(rng.choice((1.0, 1.3, 2.0)) * groups.most_slots(MAX_MODEL_LEN, chunk))
    target = rng.choice((None, 0.002, 0.005)) if timed else 0.0
    limits = Limits(12, MAX_MODEL_LEN, chunk, 300, itl_target=target)
    ledger = TokenLedger(capacity, 12, MAX_MODEL_LEN, 0, groups)
    made = random_budget(rng, limits) if timed else None
    admission = None if share == 1.0 else Admission(OutputLengths(assumed=4))
    scheduler = Watched(ledger, limits, depth, admission, budget=made)
    scheduler.watch_kept()
    families = [[rng.randrange(100, 103) for _ in range(60)] for _ in range(4)]
    in_flight: list[StepPlan] = []
    alive: set[str] = set()
    added = 0

    def take() -> None:
        plan = in_flight.pop(0)
        tokens = [STOP if rng.random() < 0.02 else rng.randrange(10, 13) for _ in plan.sample]
        if rng.random() < 0.001:
            events = scheduler.fail("a failed step")
        else:
            events = scheduler.complete(StepResult(plan.step, tokens, plan.num_free, 0))
        alive.difference_update(event.request_id for event in events if event.finish_reason)

    while scheduler.step < steps or scheduler.has_work:
        if rng.random() < 0.25 and scheduler.num_waiting < 6 and scheduler.step < steps:
            scheduler.add(random_request(rng, added, families, share))
            alive.add(str(added))
            added += 1
        if alive and rng.random() < 0.02:
            name = rng.choice(sorted(alive))
            assert scheduler.abort(name)
            alive.remove(name)
        scheduler.check()
        scheduler.compare()
        plan = scheduler.plan()
        scheduler.check()
        scheduler.compare(has_planned=plan is not None)
        if plan is not None:
            in_flight.append(plan)
        if in_flight and (plan is None or scheduler.num_in_flight == depth or rng.random() < 0.2):
            take()
    assert not alive
    assert ledger.num_held == 0
    assert scheduler.peak_held > capacity // 3
    assert scheduler.compared > steps
    return scheduler


@each_value(name=list(GROUPS), depth=[1, 2], chunk=[5, 32], timed=[False, True])
def test_no_request_that_states_its_length_is_short_of_a_slot(
    name: str, depth: int, chunk: int, timed: bool
) -> None:
    scheduler = live(GROUPS[name], depth + chunk, 150, depth, chunk, timed)
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize("depth", [2, *slow(1)])
def test_nor_beside_requests_that_are_estimated(depth: int) -> None:
    assert live(GROUPS["two windows"], depth, 250, depth, 16, False, share=0.4).num_preemptions > 0


@pytest.mark.parametrize(("name", "common"), [*((name, 0) for name in GROUPS), ("window", 40)])
def test_decodes_are_counted_exactly(name: str, common: int) -> None:
    """Also those whose windows are not full yet, those that pass several chunks, and what prompts with a common
    beginning share."""
    scheduler = Scheduler(
        TokenLedger(5000, 8, MAX_MODEL_LEN, 0, GROUPS[name]), Limits(8, MAX_MODEL_LEN, 90, 300)
    )
    for number, (prompt, max_tokens) in enumerate(((1, 3), (3, 40), (12, 20), (20, 7), (30, 50), (9, 4))):
        ids = array("i", [9] * common + [number] * prompt).tobytes()
        scheduler.add(Request(str(number), ids, SamplingParams(max_tokens=max_tokens, temperature=0.0), 1))
    peaks, held = list[int](), list[int]()
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        if not plan.num_prefills:
            peaks.append(scheduler.forecast_peak())
            held.append(scheduler.ledger.num_held)
        scheduler.complete(StepResult(plan.step, [9] * len(plan.sample), plan.num_free, 0))
    assert len(held) > 40
    assert scheduler.num_hit_tokens == 5 * common
    assert peaks == [max(held[step:]) for step in range(len(held))]


def computed_in_a_burst(groups: LayerGroups, chunk: int, depth: int) -> int:
    """Returns how many prompt tokens five prompts compute that come at once and begin with the same 40."""
    scheduler = Scheduler(
        TokenLedger(5000, 8, MAX_MODEL_LEN, 0, groups), Limits(8, MAX_MODEL_LEN, chunk, 300), depth
    )
    params = SamplingParams(max_tokens=9, temperature=0.0)
    for number in range(5):
        ids = array("i", [1] * 40 + [number + 2] * (5 + 11 * number)).tobytes()
        scheduler.add(Request(str(number), ids, params, 1))
    computed, in_flight = 0, list[StepPlan]()
    while scheduler.has_work:
        if plan := scheduler.plan():
            in_flight.append(plan)
            computed += sum(plan.counts[: plan.num_prefills])
        if plan is None or len(in_flight) == depth:
            plan = in_flight.pop(0)
            scheduler.complete(StepResult(plan.step, [9] * len(plan.sample), plan.num_free, 0))
        scheduler.check()
    return computed


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [8, 32, 120])
@pytest.mark.parametrize("name", GROUPS)
def test_a_burst_computes_what_its_prompts_have_in_common_once(name: str, chunk: int, depth: int) -> None:
    assert computed_in_a_burst(GROUPS[name], chunk, depth) == 40 + sum(5 + 11 * number for number in range(5))


class AdmitsAll(Admission):
    def steps_to_wait(self, running: Running, request: Request) -> float:
        return 0


@pytest.mark.parametrize("capacity", range(310, 330))
def test_prompts_that_fill_the_pool_do_not_stop_each_other(capacity: int) -> None:
    """A step needs the slots of a whole token; and what a request has hit, as after a preemption, is not
    available any more."""
    ledger = TokenLedger(capacity, 4, MAX_MODEL_LEN, 0, GROUPS["two windows"])
    scheduler = Scheduler(ledger, Limits(4, MAX_MODEL_LEN, 5, 300), 1, AdmitsAll(OutputLengths(assumed=2)))
    params = SamplingParams(max_tokens=3, temperature=0.0)
    first, second = (
        Request(str(id), array("i", [id] * 60).tobytes(), params, 1, priority=-id, states_length=False)
        for id in (1, 2)
    )
    scheduler.add(first)
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.complete(StepResult(plan.step, [9] * len(plan.sample), plan.num_free, 0))
        scheduler.check()
        if scheduler.step == 7:
            scheduler.add(second)
    assert (len(first.output), len(second.output)) == (3, 3)
    assert scheduler.num_preemptions > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("timed", [False, True], ids=["fixed", "timed"])
@pytest.mark.parametrize("chunk", [5, 16, 32])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", GROUPS)
def test_nor_in_long_lives(name: str, depth: int, chunk: int, timed: bool) -> None:
    for seed in range(3):
        share = (1.0, 0.5)[seed % 2]
        live(GROUPS[name], 1000 * seed + 10 * depth + chunk, 3000, depth, chunk, timed, share)
