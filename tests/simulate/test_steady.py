"""Compares many equal steps taken at once with as many single steps."""

from array import array

import pytest

from lightkv.ledger import TokenLedger
from lightkv.router.engine.request import Request
from lightkv.router.engine.step import Limits, StepResult
from lightkv.router.sampling_params import SamplingParams
from lightkv.router.simulate.admissions import make_simulated
from lightkv.router.simulate.steady import SteadyScheduler


@pytest.mark.parametrize("admission", ["exact", "watermark"])
def test_steps_taken_at_once_leave_the_counts_of_as_many_single_steps(admission: str) -> None:
    pair = []
    for at_once in (False, True):
        limits = Limits(12, 90, 0, vocab_size=300)
        scheduler = SteadyScheduler(
            TokenLedger(400, 12, 90), limits, admission=make_simulated(admission, 0, 0)
        )
        for i in range(5):
            prompt = array("i", [40 + i] * (3 + i)).tobytes()
            scheduler.add(Request(str(i), prompt, SamplingParams(max_tokens=40, temperature=0.0), seed=1))

        def step(scheduler: SteadyScheduler = scheduler) -> None:
            plan = scheduler.plan()
            assert plan is not None
            scheduler.complete(StepResult(plan.step, [10] * len(plan.sample), plan.num_free, 0))

        assert scheduler.steady_steps() == 0  # nothing runs
        step()
        assert scheduler.steady_steps() == 39
        if at_once:
            scheduler.repeat(30, 10)
        else:
            for _ in range(30):
                step()
        scheduler.check()
        ledger = scheduler.ledger
        outputs = [r.output.tolist() for r in scheduler._decoding.values()]
        pair.append(
            (scheduler.step, ledger.num_free, scheduler.peak_held, scheduler.num_output_tokens, outputs)
        )
        with pytest.raises(ValueError, match="9 are alike"):
            scheduler.repeat(10, 10)
        while scheduler.has_work:
            step()
        scheduler.check()
    assert pair[0] == pair[1]
