"""Measures the replay of a decode step's CUDA graph at given batch sizes and lengths.

The steps of a service are compared with it: the same settings give the same graphs, and nothing happens
between one replay and the next. It runs in a process of its own (`child.py`) after the service has ended.
"""

import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import ceil
from typing import Any, NamedTuple

from msgspec.structs import replace

from bench.common.child import ask, serve
from bench.serving.decode_step import REPLAY_ROUNDS, replay_ms
from lightkv.errors import LightKVError
from lightkv.ledger import TokenLedger
from lightkv.router import EngineConfig, SamplingParams
from lightkv.router.engine.loop import LocalEngine
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import Captured, ExpectedMemory, RunnerInfo, StepPlan, StepResult
from lightkv.router.model.build import build_runner
from lightkv.router.model.runner import ModelRunner

REPLAYS = 10  # in a row, REPLAY_ROUNDS times
NUM_REPLAYS = REPLAYS * REPLAY_ROUNDS
SPARE_STEPS = 16


class Level(NamedTuple):
    """`batch` sequences that decode, of `context` tokens in the mean over the sequences and the replays."""

    batch: int
    context: float


class NoReplay(LightKVError):
    """There are no graphs to replay here, or the sequences do not fit."""


def replays(config: EngineConfig, levels: Sequence[Level], seconds: float) -> Iterator[tuple[Level, float]]:
    """Yields the milliseconds of each level, the smallest batch first. Raises ChildFailed."""
    ordered = sorted(levels)
    request = {"config": asdict(config), "levels": ordered}
    yield from zip(ordered, ask(__spec__.name, request, seconds), strict=True)


# --------------------------------------------------------------------------------
# In the child process


class _SparingExecutor:
    """A runner whose `num_spare` free slots, which replays will take, are not counted."""

    def __init__(self, runner: ModelRunner, num_spare: int) -> None:
        self._runner = runner
        self.num_spare = num_spare
        self.last_plan: StepPlan | None = None

    @property
    def fatal(self) -> bool:
        """Says whether the runner has to be made anew."""
        return self._runner.fatal

    def launch(self, plan: StepPlan) -> None:
        """Launches the step."""
        self.last_plan = plan
        self._runner.launch(plan)

    def collect(self) -> StepResult:
        """Returns the step's result without the spare slots."""
        result = self._runner.collect()
        return replace(result, num_free=result.num_free - self.num_spare)

    def capture(self) -> Captured:
        """Captures a CUDA graph that is missing."""
        return self._runner.capture()

    def check(self, edits: bytes, expected: ExpectedMemory) -> None:
        """Recounts the memory with the spare slots."""
        self._runner.check(edits, expected._replace(num_free=expected.num_free + self.num_spare))


class Decoding:
    """Sequences brought to a length on a runner, for each of `levels` once.

    A replay allocates slots that the ledger does not count, and that stay taken until the process ends. The
    ledger's capacity is smaller by that number. Raises NoReplay where no capacity is left.
    """

    def __init__(self, runner: ModelRunner, info: RunnerInfo, levels: Sequence[Level]) -> None:
        self._runner = runner
        self._limits = info.limits
        num_spare = NUM_REPLAYS * sum(level.batch for level in levels)
        if info.capacity <= num_spare:
            raise NoReplay(
                f"the replays take {num_spare} tokens, of {info.capacity}; give more --max-total-tokens"
            )
        ledger = TokenLedger(info.capacity - num_spare, info.limits.max_num_seqs, info.limits.max_model_len)
        self._ledger = ledger
        self._scheduler = Scheduler(ledger, info.limits)
        self._executor = _SparingExecutor(runner, num_spare)
        self._engine = LocalEngine(self._scheduler, self._executor)
        self._engine.capture_all()

    def bring(self, level: Level) -> float:
        """Computes prompts and decodes until the next replays will have the level's mean length. Returns the
        mean length then. Raises NoReplay."""
        batch, context = level
        target = context - (NUM_REPLAYS + 1) / 2  # a step has one token more than was computed before it
        chunk = self._limits.prefill_chunk or ceil(batch * target)
        prefill_steps = ceil(batch * target / chunk)  # the first to be computed decode meanwhile
        prompt = int(target) - prefill_steps // 2 - SPARE_STEPS // 2
        if prompt < 1:
            raise NoReplay(
                f"{batch} sequences cannot be brought to {context:.0f} tokens; take longer prompts"
            )
        max_tokens = prefill_steps + NUM_REPLAYS + SPARE_STEPS
        rng = random.Random(batch)
        for i in range(batch):
            ids = array("i", [rng.randrange(self._limits.vocab_size) for _ in range(prompt)]).tobytes()
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            self._engine.add(Request(f"{batch}-{i}", ids, params, seed=i))
        while self._scheduler.num_waiting or self._scheduler.num_prefilling or self._mean_length() < target:
            for event in self._engine.step():
                if event.error is not None:
                    raise NoReplay(event.error)
            if not self._engine.has_work:
                break
        if self._scheduler.num_running != batch:
            raise NoReplay(
                f"only {self._scheduler.num_running} of {batch} sequences of {context:.0f} tokens were there "
                "at once; give more --max-total-tokens or --max-num-seqs"
            )
        reached = self._mean_length()
        plan = self._executor.last_plan
        if plan is None or plan.num_prefills or len(plan.rows) != batch or reached > target + 1:
            raise NoReplay(
                f"{batch} sequences came to {reached:.0f} tokens with their prompts, not {target:.0f}"
            )
        return reached

    def replay_ms(self, batch: int) -> float:
        """Replays the graph of the open sequences."""
        milliseconds = replay_ms(self._runner, batch, REPLAYS)
        self._executor.num_spare -= NUM_REPLAYS * batch
        return milliseconds

    def end(self, batch: int) -> None:
        """Ends the sequences, and evicts what is cached of them."""
        for i in range(batch):
            self._engine.abort(f"{batch}-{i}")
        self._ledger.evict(self._ledger.num_cached)

    def _mean_length(self) -> float:
        lengths = [sequence.length for sequence in self._ledger.sequences]
        return sum(lengths) / max(len(lengths), 1)


def _answer(request: dict[str, Any]) -> Iterator[float]:
    runner, info = build_runner(EngineConfig(**request["config"]), lambda line: None)
    if not info.cuda_graphs:
        raise NoReplay("decode steps are no CUDA graphs here; it takes a GPU, and no --no-cuda-graphs")
    levels = [Level(*own) for own in request["levels"]]
    decoding = Decoding(runner, info, levels)
    for level in levels:
        decoding.bring(level)
        yield decoding.replay_ms(level.batch)
        decoding.end(level.batch)


if __name__ == "__main__":
    serve(_answer)
