"""CUDA graphs that are captured between steps: all of them before a test begins, or one before each step."""

from itertools import count

from lightkv.router.engine.loop import Captures, LocalEngine
from lightkv.router.model.runner import ModelRunner


def capture_all(runner: ModelRunner) -> ModelRunner:
    """Captures every graph that is missing, so that no step lacks one of them."""
    while runner.num_missing_graphs:
        runner.capture()
    return runner


def capture_before_each_step(engine: LocalEngine, num_missing: int) -> None:
    """Makes the engine capture a graph before each of its steps, as long as one is missing."""
    engine.captures = Captures(num_missing, clock=map(float, count(step=1_000_000)).__next__)
