"""Random lives of the scheduler with guaranteed and provisional requests, under estimates that are worth
nothing: every count is compared with a recount in every step, and the guarantees are kept."""

import random
from array import array

import pytest

from lightkv.layer_groups import FULL, ONE_GROUP, LayerGroups, Lifetime
from lightkv.ledger import TokenLedger
from lightkv.router.engine.admission import MOST_INTERRUPTIONS, Admission
from lightkv.router.engine.estimates import LimitShares, OutputLengths
from lightkv.router.engine.prefill_budget import PrefillBudget
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import Limits, StepPlan, StepResult
from lightkv.router.engine.step_time import StepTime
from lightkv.router.sampling_params import SamplingParams
from tests.support.combinations import each_value
from tests.support.model_worker import STOP
from tests.support.peaks import check_peaks

MAX_MODEL_LEN = 90
WINDOWS = LayerGroups.of([FULL, Lifetime("window", 4), Lifetime("window", 9)])


class Guesses(LimitShares):
    """Estimates that are drawn at random, many of them much too low."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def estimate(self, request: Request, generated: int) -> int:
        return min(generated + self._rng.choice((1, 1, 2, 5, 100)), request.max_tokens)


class Life:
    """A scheduler and its requests, and what they were promised."""

    def __init__(
        self, seed: int, depth: int, chunk: int, timed: bool, groups: LayerGroups, stated: float
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.depth, self.stated = depth, stated
        capacity = rng.choice((100, 130, 200))
        if groups is not ONE_GROUP:
            capacity = int(rng.choice((1.0, 1.3, 2.0)) * groups.most_slots(MAX_MODEL_LEN, chunk))
        target = rng.choice((None, 0.002, 0.005)) if timed else 0.0
        self.limits = Limits(12, MAX_MODEL_LEN, chunk, 300, itl_target=target)
        times = rng.choice((0.0, 1e-4, 1e-3)), rng.choice((1e-5, 1e-4, 5e-4))
        model = StepTime(1e-3, times[0], 1e-6, prefill=0.0, per_prompt=times[1], per_pair=2e-7)
        budget = PrefillBudget(self.limits, model) if timed else None
        self.ledger = TokenLedger(capacity, 12, MAX_MODEL_LEN, capacity // 3, groups)
        admission = Admission(OutputLengths(assumed=2), Guesses(rng), reserve=0.025)
        self.scheduler = Scheduler(self.ledger, self.limits, depth, admission, budget=budget)
        self.families = [[rng.randrange(100, 103) for _ in range(60)] for _ in range(4)]
        self.alive: dict[str, Request] = {}
        self.in_flight: list[StepPlan] = []
        self.num_added = self.num_guaranteed = self.num_later = 0
        # Request → those that may be guaranteed before it: from its first preemption on.
        self.before: dict[str, set[str]] = {}
        self.watch_preempted()

    def arrive(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.families)[: rng.randint(1, 55)] if rng.random() < 0.6 else []
        prompt = prompt + [rng.randrange(50) for _ in range(1 if rng.random() < 0.7 else 56 - len(prompt))]
        params = SamplingParams(max_tokens=rng.randint(1, MAX_MODEL_LEN - len(prompt)), temperature=0.0)
        one = Request(
            str(self.num_added),
            array("i", prompt).tobytes(),
            params,
            1,
            frozenset({STOP}),
            priority=rng.choice((0, 0, 0, 1, 2, -1)),
            session=self.ledger.sessions.open(str(rng.randrange(3))) if rng.random() < 0.2 else None,
            states_length=rng.random() < self.stated,
        )
        self.scheduler.add(one)
        self.alive[one.id] = one
        self.num_added += 1

    def watch_preempted(self) -> None:
        """Notes at each first preemption which requests may be guaranteed before that one."""
        preempt = self.scheduler._preempt

        def noted(request: Request) -> None:
            assert not request.is_guaranteed
            if request.can_be_guaranteed and not request.num_preemptions:
                self.before[request.id] = {
                    one.id
                    for one in self.alive.values()
                    if one.is_guaranteed or one.seniority < request.seniority
                }
            preempt(request)

        self.scheduler._preempt = noted  # type: ignore[method-assign]

    def plan(self) -> StepPlan | None:
        scheduler = self.scheduler
        num_preempted = {name: one.num_preemptions for name, one in self.alive.items()}
        were = {name for name, one in self.alive.items() if one.is_guaranteed}
        running = {name for name, one in self.alive.items() if one.sequence is not None}
        plan = scheduler.plan()
        scheduler.check()
        if self.ledger.groups.is_uniform:
            check_peaks(scheduler)
        for name, one in self.alive.items():
            if name in were:
                assert one.is_guaranteed
                assert one.num_preemptions == num_preempted[name]
            self.num_later += one.is_guaranteed and name in running - were
            if one.can_be_guaranteed:
                assert one.num_preemptions <= MOST_INTERRUPTIONS
        self.check_order()
        if plan is not None:
            self.in_flight.append(plan)
            is_fixed = scheduler._budget.step_time is None and self.ledger.groups.is_uniform
            if is_fixed and any(one.is_guaranteed and one.num_prefill_left for one in scheduler._prefilling):
                # No chunk is cut because others hold the pool.
                assert sum(plan.counts[: plan.num_prefills]) == self.limits.prefill_budget
        return plan

    def check_order(self) -> None:
        """Nothing is guaranteed before a request that was preempted and is before it in the order, and such a
        request is guaranteed when what may be before it has ended."""
        for name, before in self.before.items():
            one = self.alive.get(name)
            if one is None or one.is_guaranteed:
                continue
            for other in self.alive.values():
                assert not other.is_guaranteed or other.id in before or other.seniority < one.seniority
            older = any(other.seniority < one.seniority for other in self.alive.values())
            left = before & self.alive.keys()
            assert older or left or one.sequence is None or self.scheduler._finishing

    def take(self) -> None:
        plan, rng = self.in_flight.pop(0), self.rng
        tokens = [STOP if rng.random() < 0.02 else rng.randrange(10, 13) for _ in plan.sample]
        if rng.random() < 0.001:
            events = self.scheduler.fail("a failed step")
        else:
            events = self.scheduler.complete(StepResult(plan.step, tokens, plan.num_free, 0))
        for event in events:
            if event.finish_reason:
                one = self.alive.pop(event.request_id)
                self.num_guaranteed += one.is_guaranteed
                if event.finish_reason == "length":
                    assert len(one.output) == one.max_tokens

    def run(self, steps: int) -> None:
        rng, scheduler = self.rng, self.scheduler
        while scheduler.step < steps or scheduler.has_work:
            if rng.random() < 0.25 and scheduler.num_waiting < 6 and scheduler.step < steps:
                self.arrive()
            if self.alive and rng.random() < 0.02:
                name = rng.choice(sorted(self.alive))
                assert scheduler.abort(name)
                del self.alive[name]
            scheduler.check()
            plan = self.plan()
            if self.in_flight and (plan is None or len(self.in_flight) == self.depth or rng.random() < 0.2):
                self.take()
        assert not self.alive
        assert self.ledger.num_held == 0


@each_value(depth=[1, 2], chunk=[5, 32], timed=[False, True], groups=[ONE_GROUP, WINDOWS], stated=[0.5, 1.0])
def test_a_guaranteed_request_is_never_short_of_a_token(
    depth: int, chunk: int, timed: bool, groups: LayerGroups, stated: float
) -> None:
    life = Life(depth + chunk, depth, chunk, timed, groups, stated)
    life.run(250)
    assert life.num_guaranteed > 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("timed", [False, True], ids=["fixed", "timed"])
@pytest.mark.parametrize("chunk", [5, 16, 32])
@pytest.mark.parametrize("depth", [1, 2])
def test_nor_in_long_lives(depth: int, chunk: int, timed: bool) -> None:
    num_later = 0
    for seed in range(4):
        groups, steps = (WINDOWS, 2000) if seed == 3 else (ONE_GROUP, 6000)
        life = Life(1000 * seed + 10 * depth + chunk, depth, chunk, timed, groups, (1.0, 0.6)[seed % 2])
        life.run(steps)
        num_later += life.num_later
    assert num_later > 100
