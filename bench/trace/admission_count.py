"""Compares two counts of requests in prefill: by their schedule, as admission does, and in full at all times.

    python -m bench.trace.admission_count --out bench/results/admission-count.json

Random cases, first come, first served, without a device and without shared prefixes, run to their ends under
both counts, one step in flight. The table has the steps that they take, and the refusals: the steps that
could begin another prompt while a request waits. A check that knows nothing of admission, and follows all
requests to their ends, says how many of the refused requests would have fit.
"""

import argparse
import math
import random
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bench.common.report import parser, print_json, print_machine, print_table, refuse
from lightkv.ledger import TokenLedger
from lightkv.router import SamplingParams, Scheduler
from lightkv.router.engine.admission import Admission, Running
from lightkv.router.engine.guarantees import Demand, peak_tokens
from lightkv.router.engine.request import Request
from lightkv.router.engine.step import Limits, StepResult


class Case(NamedTuple):
    """`requests`: the step in which each arrives, its prompt tokens and its `max_tokens`, in order."""

    capacity: int
    prefill_chunk: int
    requests: list[tuple[int, int, int]]


class Outcome(NamedTuple):
    """How many steps a case took, in how many of them a request was refused, and how many of these requests
    would have fit."""

    steps: int
    refusals: int
    would_fit: int


def random_case(rng: random.Random) -> Case:
    """Returns a case of 40 requests in a pool in which a few of them fit at a time."""
    capacity = rng.randint(60, 300)
    chunk = rng.choice((capacity // 16, capacity // 4, capacity))
    longest = capacity // 2
    step, requests = 0, []
    for _ in range(40):
        step += rng.randint(0, 2 * capacity // 40)
        requests.append((step, rng.randint(1, longest), rng.randint(1, longest)))
    return Case(capacity, chunk, requests)


@dataclass(frozen=True)
class FullCount(Admission):
    """Counts each request whose prefill is not computed with all its tokens, at all times."""

    def steps_to_wait(self, running: Running, request: Request) -> float:
        """Returns 0 if the request fits, and else infinity: its count falls only when another ends, or begins
        to decode."""
        demands = [Demand(0, request.final, [], False)]
        for other in [*running.prefilling, *running.decoding]:
            assert other.sequence is not None
            demands.append(Demand(other.sequence.length, other.remaining, [], other in running.decoding))
        return 0 if peak_tokens(demands) <= running.ledger.capacity else math.inf


class _Held(NamedTuple):
    """A request whose slots of the present step are allocated: the tokens that it holds, those of its prompt
    that are still to be computed, and the tokens that it will hold in the end."""

    num_tokens: int
    prompt_left: int
    final: int


def fits(requests: list[_Held], chunk: int, capacity: int) -> bool:
    """Follows the requests to their ends, the prompts in order with `chunk` tokens a step. Returns whether they
    never hold more than `capacity` tokens together.

    The steps are followed one by one while a prompt is left. After that every request takes one token a step,
    so that the total only rises until the next request ends.
    """
    while any(request.prompt_left for request in requests):
        if sum(request.num_tokens for request in requests) > capacity:
            return False
        budget, after = chunk, []
        for num_tokens, left, final in requests:
            if num_tokens == final:
                continue  # it has ended
            count = min(left, budget) if left else 1
            budget -= count if left else 0
            after.append(_Held(num_tokens + count, left - count if left else 0, final))
        requests = after
    total = sum(request.num_tokens for request in requests)
    step, num = 0, len(requests)
    for end, final in sorted((request.final - request.num_tokens, request.final) for request in requests):
        total += num * (end - step)  # what they hold when this one takes its last token
        if total > capacity:
            return False
        step, num, total = end, num - 1, total - final
    return True


def run(case: Case, admission: Admission, check: bool = False) -> Outcome:
    """Runs a case to its end. With `check` each refusal is compared with the exhaustive check."""
    num, chunk = len(case.requests), case.prefill_chunk
    limits = Limits(num, case.capacity, chunk, vocab_size=num)
    scheduler = Scheduler(TokenLedger(case.capacity, num, case.capacity), limits, admission=admission)
    living: list[Request] = []
    added = step = refusals = would_fit = 0
    while added < num or scheduler.has_work:
        while added < num and case.requests[added][0] <= step:
            _, prompt, max_tokens = case.requests[added]
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            ids = np.full(prompt, added, np.int32).tobytes()  # no two prompts share a token
            living.append(Request(str(added), ids, params, seed=1))
            scheduler.add(living[-1])
            added += 1
        step += 1
        plan = scheduler.plan()
        if plan is None:
            continue
        left = chunk - sum(plan.counts[: plan.num_prefills])
        head = next((request for request in living if request.sequence is None), None)
        if check and left and head is not None:
            refusals += 1
            held = [
                _Held(request.sequence.length, max(request.num_prefill_left, 0), request.final)
                for request in living
                if request.sequence is not None
            ]
            first = min(left, head.num_prompt)
            held.append(_Held(first, head.num_prompt - first, head.final))
            would_fit += fits(held, chunk, case.capacity)
        scheduler.complete(StepResult(plan.step, [0] * len(plan.sample), plan.num_free, 0))
        living = [request for request in living if request.finish_reason is None]
    scheduler.check()
    return Outcome(step, refusals, would_fit)


def random_cases(num_cases: int, seed: int) -> list[Case]:
    """Returns the cases of a seed."""
    rng = random.Random(seed)
    return [random_case(rng) for _ in range(num_cases)]


def run_all(cases: list[Case], admission: Admission, check: bool = False) -> Outcome:
    """Runs the cases. Returns the sums of their outcomes."""
    return Outcome(*(sum(column) for column in zip(*(run(c, admission, check) for c in cases), strict=True)))


def arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--cases", type=int, default=150)
    made.add_argument("--seed", type=int, default=0)
    return made.parse_args()


def main() -> None:
    options = arguments()
    print_machine()
    cases = random_cases(options.cases, options.seed)
    full, schedule = (run_all(cases, admission, check=True) for admission in (FullCount(), Admission()))
    if schedule.would_fit > 0.05 * schedule.refusals:
        refuse(f"{schedule.would_fit} of {schedule.refusals} refusals would have fit")
    found = {"in full": full, "by schedule": schedule}
    rows = [[name, *map(str, outcome)] for name, outcome in found.items()]
    print_table(["count", "steps", "refusals", "of these would have fit"], rows)
    print(f"\n{1 - schedule.steps / full.steps:.1%} fewer steps by schedule")
    settings = {"cases": options.cases, "seed": options.seed}
    counts = {name: outcome._asdict() for name, outcome in found.items()}
    print_json("admission_count", {"settings": settings, "counts": counts}, options.out)


if __name__ == "__main__":
    main()
