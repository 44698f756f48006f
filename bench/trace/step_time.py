"""Measures what steps take, and fits the step-time model that `lightkv simulate` uses.

    python -m bench.trace.step_time --parameters FILE --out bench/results/step-time-h200.json
    python -m bench.trace.step_time --refit FILE --parameters router/engine/step_time.json --out FILE

A model of Llama-3-8B's shape with random weights runs through the real engine and runner. At each level,
prompts are computed in chunks beside the requests that decode already, and then all decode in CUDA graphs;
then single prompts of several lengths are added. Every step is timed from plan to tokens. Each step with
prompt tokens is a point of the fit, and so is the median of a level's steps of decodes alone. The benchmark
refuses to report where the median relative error is above a tenth. --refit measures nothing, and fits the
steps of the file again.

`router/engine/step_time.py` says what the parameters mean.
"""

import argparse
import gc
import json
import random
import statistics
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from bench.common.model_shapes import LLAMA_3_8B
from bench.common.random_model import random_model
from bench.common.report import (
    machine,
    parser,
    print_again,
    print_json,
    print_machine,
    print_table,
    read_json,
    refuse,
)
from lightkv.ledger import TokenLedger
from lightkv.router import EngineConfig, SamplingParams
from lightkv.router.engine.loop import LocalEngine
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import Captured, ExpectedMemory, StepPlan, StepResult
from lightkv.router.engine.step_time import PARAMETERS, StepTime, Work, fit
from lightkv.router.model.build import assemble
from lightkv.router.model.runner import ModelRunner

DECODE_STEPS = 12  # of a level, without prompts
SPARE_STEPS = 4
MAX_ERROR = 0.1


class Level(NamedTuple):
    """`batch` requests that decode, of about `context` tokens each."""

    batch: int
    context: int


LEVELS = tuple(
    Level(*level)
    for level in (
        (1, 512), (64, 2048), (256, 512), (16, 6000), (128, 1024), (1, 7000), (32, 256), (256, 1024), (8, 2048),
        (48, 5000),
    )
)  # fmt: skip
ADDED = (32, 128, 300, 700, 1500)  # prompt tokens of a request beside a level


class Point(NamedTuple):
    """A step, or the median of like steps, and its seconds."""

    work: Work
    seconds: float


class Watch:
    """An executor that notes what each step computes."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.work = Work(0, 0, 0, 0)

    @property
    def fatal(self) -> bool:
        """Says whether the runner has to be made anew."""
        return self._runner.fatal

    def launch(self, plan: StepPlan) -> None:
        """Launches the step, and notes what it computes."""
        self.work = plan.work
        self._runner.launch(plan)

    def collect(self) -> StepResult:
        """Returns the result of the step."""
        return self._runner.collect()

    def capture(self) -> Captured:
        """Captures a CUDA graph that is missing."""
        return self._runner.capture()

    def check(self, edits: bytes, expected: ExpectedMemory) -> None:
        """Recounts the runner's memory."""
        self._runner.check(edits, expected)


class Meter:
    """An engine whose steps are timed."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        runner, self.info = assemble(model, config, lambda line: None)
        limits = self.info.limits
        self._watch = Watch(runner)
        self._ledger = TokenLedger(self.info.capacity, limits.max_num_seqs, limits.max_model_len)
        self._engine = LocalEngine(Scheduler(self._ledger, limits), self._watch)
        self._engine.capture_all()
        self._rng = random.Random(0)
        self._number = 0
        self._open: list[str] = []

    def level(self, level: Level, added: Sequence[int]) -> list[Point]:
        """Reaches the level, and times the steps on the way, at the level, and beside the prompts `added`."""
        points = []
        prompts = [max(round(level.context * self._rng.uniform(0.7, 1.3)), 1) for _ in range(level.batch)]
        # The first requests decode until the last step of the level.
        chunk = self.info.limits.prefill_budget
        steps = sum(prompts) // chunk + sum(added) // chunk + len(added) + DECODE_STEPS + SPARE_STEPS
        for prompt in prompts:
            self._add(prompt, steps)
        while self._engine.scheduler.num_waiting or self._engine.scheduler.num_prefilling:
            points.append(self._step())
        alone = [self._step() for _ in range(DECODE_STEPS)]
        if not any(point.work.prompt for point in alone):
            middle = alone[len(alone) // 2].work
            points.append(Point(middle, statistics.median(point.seconds for point in alone)))
        for length in added:
            self._add(length, steps)
            while self._engine.scheduler.num_waiting or self._engine.scheduler.num_prefilling:
                points.append(self._step())
        for name in self._open:
            self._engine.abort(name)
        self._open = []
        self._ledger.evict(self._ledger.num_cached)
        self._engine.check()
        return points

    def _add(self, prompt: int, steps: int) -> None:
        limits = self.info.limits
        prompt = min(prompt, limits.max_model_len - steps)
        ids = array("i", [self._rng.randrange(limits.vocab_size) for _ in range(prompt)]).tobytes()
        params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
        self._number += 1
        self._open.append(str(self._number))
        self._engine.add(Request(self._open[-1], ids, params, seed=self._number))

    def _step(self) -> Point:
        begun = time.perf_counter()
        events = self._engine.step()
        seconds = time.perf_counter() - begun
        for event in events:
            if event.error is not None:
                refuse(event.error)
        return Point(self._watch.work, seconds)


def measure(
    meter: Meter, levels: Sequence[Level], added: Sequence[int], seconds: float
) -> tuple[list[Point], int]:
    """Returns the points of the levels measured until the time is up, and the number of these levels."""
    meter.level(Level(2, 300), [*added, *added])  # compiles the kernels for these shapes
    meter.level(Level(min(40, meter.info.limits.max_num_seqs - 1), 100), added)
    points: list[Point] = []
    begun = time.perf_counter()
    for count, level in enumerate(levels):
        if time.perf_counter() - begun > seconds:
            return points, count
        points += meter.level(level, added)
    return points, len(levels)


def arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--parameters", type=Path, help="write the model's parameters to this file")
    made.add_argument("--layers", type=int, default=LLAMA_3_8B.num_hidden_layers)
    made.add_argument("--seconds", type=float, default=45.0, help="no level is begun after so many")
    made.add_argument("--prefill-chunk", type=int, default=2048)
    made.add_argument("--refit", type=Path, help="measure nothing: fit the steps of this file, as it was run")
    return made.parse_args()


def fit_and_report(
    points: Sequence[Point], source: dict[str, Any], parameters: Path | None
) -> dict[str, Any]:
    """Fits the model, prints it, writes it to the file `parameters`, and returns it for the results. `source`
    says where the steps come from. Refuses to report a bad fit."""
    model = fit([point.work for point in points], [point.seconds for point in points])
    model = replace(model, source=source | model.source)
    found = report(points, model)
    if model.source["median_relative_error"] > MAX_ERROR:
        refuse(f"the median relative error is {model.source['median_relative_error']:.1%}")
    if parameters is not None:
        parameters.write_text(json.dumps(model.as_dict(), indent=1) + "\n")
    return found


def report(points: Sequence[Point], model: StepTime) -> dict[str, Any]:
    """Prints the parameters and the steps that fit worst. Returns them for the results."""
    print_table(["parameter", "seconds"], [[name, f"{getattr(model, name):.4g}"] for name in PARAMETERS])
    ordered = sorted(points, key=lambda p: abs(model.seconds(p.work) / p.seconds - 1), reverse=True)
    print("\nthe steps that fit worst")
    print_table(
        ["decodes", "K/V tokens", "prompt", "pairs", "measured ms", "model ms"],
        [
            [*map(str, p.work), f"{p.seconds * 1e3:.2f}", f"{model.seconds(p.work) * 1e3:.2f}"]
            for p in ordered[:8]
        ],
    )
    return {
        "parameters": model.as_dict(),
        "points": [[*p.work, p.seconds, model.seconds(p.work)] for p in points],
        "columns": [*Work._fields, "seconds", "model_seconds"],
    }


def main() -> None:
    options = arguments()
    if options.refit is not None:
        document = read_json("step_time", options.refit)
        before = document["results"]
        points = [Point(Work(*row[:4]), row[4]) for row in before["points"]]
        document["results"] = fit_and_report(points, before["parameters"]["source"], options.parameters)
        print_again(document, options.out)
        return
    if not torch.cuda.is_available():
        refuse("torch sees no GPU; a step's time is measured where it will run")
    print_machine()
    LLAMA_3_8B.num_hidden_layers = options.layers
    torch.manual_seed(0)
    model = random_model(LLAMA_3_8B, torch.device("cuda"), torch.bfloat16)
    config = EngineConfig(
        device="cuda",
        max_num_seqs=max(level.batch for level in LEVELS) + len(ADDED) * 2,
        max_model_len=8192,
        prefill_chunk=options.prefill_chunk,
        itl_target=0.0,  # the steps are measured here
    )
    meter = Meter(model, config)
    gc.collect()
    gc.freeze()
    points, count = measure(meter, LEVELS, ADDED, options.seconds)
    source = {
        "model": "Llama-3-8B's shape, bfloat16",
        "layers": options.layers,
        "levels": count,
        "prefill_chunk": options.prefill_chunk,
        **machine(),
    }
    found = fit_and_report(points, source, options.parameters)
    print_json("step_time", found, options.out)


if __name__ == "__main__":
    main()
