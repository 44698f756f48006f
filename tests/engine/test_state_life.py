"""Random lives of the engine over a ledger with states: no request is ever short of a state, and every piece
reads the state of all its tokens, whatever ends, is aborted, preempted or fails."""

import random
from array import array
from typing import Any

from lightkv.router.engine.admission import Admission
from lightkv.router.engine.estimates import LimitShares, OutputLengths
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import Limits
from lightkv.router.sampling_params import SamplingParams
from tests.support.combinations import each_value
from tests.support.model_worker import assert_idle
from tests.support.state_life import GROUPS
from tests.support.state_worker import STOP, make

MAX_MODEL_LEN = 120


class Counting(Scheduler):
    """A scheduler that recounts the states where one of its requests is admitted, or waits for one."""

    num_refused = num_admitted = 0

    def _admit(self, request: Request, *step: Any) -> bool:
        before, self.waits_for = self.waits_for, ""
        is_admitted = super()._admit(request, *step)
        ledger, cls = self.ledger, len(self.ledger.groups.classes)
        holds = [one.holds[-1] for one in ledger.sequences]
        read = {id(tail) for hold in holds for tail, _ in hold.tails()}  # a snapshot counts once
        taken, capacity = len(holds) + len(read), ledger.states.capacity
        if self.waits_for == "states":
            self.num_refused += 1
            path = ledger.match(request.prefill_ids, request.namespace).path
            reads_one = bool(path) and not path[0].tails[cls].holders
            assert taken + 1 + len(self.waiting.passed_by(request)) + reads_one > capacity
        elif is_admitted:
            self.num_admitted += 1
            takes_over = ledger.states.num_owed == 1 and request.open_sequence.holds[-1].may_take_over
            assert taken <= capacity + takes_over
        self.waits_for = self.waits_for or before
        return is_admitted


def random_requests(rng: random.Random, number: int, families: list[list[int]]) -> list[Request]:
    """Returns the answers to a prompt, which begins like others."""
    prompt = rng.choice(families)[: rng.randint(1, 60)] if rng.random() < 0.8 else []
    prompt = prompt + [rng.randrange(20, 50) for _ in range(1 if rng.random() < 0.5 else 61 - len(prompt))]
    params = SamplingParams(max_tokens=rng.randint(1, 50), temperature=0.0)
    ids, priority = array("i", prompt).tobytes(), rng.randrange(3) if rng.random() < 0.3 else 0
    boundary = rng.choice([0, 0, rng.randint(1, len(prompt))])
    return [
        Request(
            f"{number}-{answer}", ids, params, answer, frozenset({STOP}), priority=priority, boundary=boundary
        )
        for answer in range(rng.choice([1, 1, 1, 3]))
    ]


def live(name: str, seed: int, steps: int, depth: int, chunk: int, estimated: bool = True) -> Counting:
    rng = random.Random(seed)
    groups = GROUPS[name]
    capacity = int(rng.choice((1.0, 1.5, 3.0)) * groups.most_slots(MAX_MODEL_LEN, chunk))
    limits = Limits(10, MAX_MODEL_LEN, chunk, 1000, itl_target=0.0, session_share=0.3)
    admission = Admission(OutputLengths(assumed=4), LimitShares()) if estimated else None
    num_states = rng.randrange(1, 14)

    def sample(name: int) -> int:
        return STOP if rng.random() < 0.03 else rng.randrange(10, 13)

    engine, worker = make(capacity, num_states, limits, depth, groups, admission, sample, Counting)
    scheduler = engine.scheduler
    families = [[rng.randrange(100, 103) for _ in range(60)] for _ in range(4)]
    alive: set[str] = set()
    sessions = [scheduler.ledger.sessions.open(one) for one in "ab"]
    added = 0
    while scheduler.step < steps or engine.has_work:
        if rng.random() < 0.25 and scheduler.num_waiting < 6 and scheduler.step < steps:
            requests = random_requests(rng, added, families)
            for request in requests:
                request.session = rng.choice([None, *sessions])
            engine.add(*requests)
            alive.update(request.id for request in requests)
            added += 1
        if alive and rng.random() < 0.04:
            one = rng.choice(sorted(alive))
            assert engine.abort(one, rng.choice(["abort", "stop"]))
            alive.remove(one)
        worker.fails_next = rng.random() < 0.002
        scheduler.check()
        plan = scheduler.plan()
        scheduler.check()
        if plan is not None:
            worker.launch(plan)
            held = scheduler.ledger.holdings()
            worker.memory.check(held, scheduler.ledger.states, scheduler.ledger.num_free)
        if worker.results and (plan is None or scheduler.num_in_flight == depth or rng.random() < 0.2):
            events = engine._collect()
            alive.difference_update(event.request_id for event in events if event.finish_reason)
    assert not alive
    assert_idle(engine)
    assert scheduler.ledger.states.num_held == 0
    assert isinstance(scheduler, Counting)
    assert scheduler.num_admitted > 0
    return scheduler


@each_value(
    depth=[1, 2], layers=[("all", 5), ("all", 32), ("window", 16), ("chunk", 9)], estimated=[False, True]
)
def test_every_piece_reads_the_state_of_its_tokens(
    depth: int, layers: tuple[str, int], estimated: bool
) -> None:
    name, chunk = layers
    scheduler = live(name, depth + chunk, 200, depth, chunk, estimated)
    assert estimated or scheduler.num_preemptions == 0
