"""Runs a step on a runner, and waits for it."""

from lightkv.router.engine.step import StepPlan, StepResult
from lightkv.router.model.runner import ModelRunner


def run_step(runner: ModelRunner, plan: StepPlan) -> StepResult:
    """Launches a step when none is in flight, and returns its result."""
    runner.launch(plan)
    return runner.collect()
