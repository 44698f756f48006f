"""The load under which the router's part of a step is timed."""

import pytest

from bench.serving import router_step


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("churn", [False, True], ids=["steady", "churn"])
def test_the_load_of_the_router_is_the_one_that_it_claims(churn: bool, depth: int) -> None:
    load = router_step.Load(num_running=60, num_queued=100, prompt=8, shared=4, churn=churn, depth=depth)
    router = router_step.Router(load, steps=200)
    router.measure(60)
    admitted = router.scheduler.num_prompt_tokens
    router.measure(120)
    assert abs(router.scheduler.num_running - 60) <= 1
    assert router.scheduler.num_waiting == 100
    assert (router.scheduler.num_prompt_tokens - admitted) / 8 == pytest.approx(120 * churn, abs=2)
    assert all(len(times) == 120 for times in router.times.values())
