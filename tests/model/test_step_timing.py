"""The steps that are measured at start: the fit, the memory before and after, and small pools."""

import random
from collections import deque

import msgspec
import pytest
import torch

from lightkv.edits import Alloc, Edit, FreeRange, decode
from lightkv.holdings import Holdings
from lightkv.router import EngineConfig, SamplingParams
from lightkv.router.engine.loop import LocalEngine, make_scheduler
from lightkv.router.engine.request import Request
from lightkv.router.engine.step import ExpectedMemory, Limits, RunnerInfo, StepPlan, StepResult
from lightkv.router.engine.step_time import LEAST_STEPS, PARAMETERS, StepTime
from lightkv.router.model.build import assemble
from lightkv.router.model.runner import ModelRunner
from lightkv.router.model.step_timing import MOST_STEPS, StepTimer, shapes
from tests.support.model_worker import assert_idle, run
from tests.support.tiny_models import tiny_llama

MODEL = StepTime(6e-3, 2e-5, 4e-8, 0.0, 2.4e-5, 1e-9)
LIMITS = Limits(max_num_seqs=24, max_model_len=3000, prefill_chunk=700, vocab_size=90)


def info_of(limits: Limits = LIMITS, capacity: int = 30_000) -> RunnerInfo:
    return RunnerInfo("", "a device", "", "", True, capacity, 1, 1, "", limits)


class TimedRows:
    """An executor that counts the tokens of each row, and moves a clock by what a model says of each step."""

    fatal = False

    def __init__(self, model: StepTime, info: RunnerInfo) -> None:
        self.now = 0.0
        self.steps: list[int] = []
        self.prepared: list[int] = []
        self._lengths = dict.fromkeys(range(1, info.limits.max_num_seqs + 1), 0)  # row → its tokens
        self._capacity = info.capacity
        self._model = model
        self._in_flight: deque[StepPlan] = deque()

    def prepare(self, plan: StepPlan) -> None:
        assert not self._in_flight
        self.prepared.append(plan.step)

    def launch(self, plan: StepPlan) -> None:
        assert len(self._in_flight) < 2
        self.steps.append(plan.step)
        self._apply(plan.all_edits())
        ends = [start + count for start, count in zip(plan.starts, plan.counts, strict=True)]
        assert ends == [self._lengths[row] for row in plan.rows]
        assert len(plan.token_ids) == 4 * sum(plan.counts[: plan.num_prefills])
        self._in_flight.append(plan)

    def collect(self) -> StepResult:
        plan = self._in_flight.popleft()
        self.now += self._model.seconds(plan.work)
        return StepResult(plan.step, [0] * len(plan.sample), 0, 0)

    def check(self, edits: bytes, expected: ExpectedMemory) -> None:
        assert not self._in_flight
        self._apply(decode(edits))
        assert not any(self._lengths.values())
        assert expected == ExpectedMemory(self._capacity, Holdings([], {}))

    def _apply(self, edits: list[Edit]) -> None:
        for edit in edits:
            if isinstance(edit, Alloc):
                for row, start, count in zip(*edit, strict=True):
                    assert self._lengths[row] == start
                    self._lengths[row] += count
            else:
                assert isinstance(edit, FreeRange)
                assert self._lengths[edit.row] == edit.end
                self._lengths[edit.row] = edit.start
            assert sum(self._lengths.values()) <= self._capacity


def test_the_fit_is_the_model_of_the_device() -> None:
    lines: list[str] = []
    device = TimedRows(MODEL, info_of())
    found = StepTimer(device, info_of(), device.prepare, lambda: device.now).measure(lines.append)
    assert found is not None
    for name in PARAMETERS:
        assert getattr(found, name) == pytest.approx(getattr(MODEL, name), rel=0.01)
    assert found.source["device"] == "a device"
    assert len(lines) == 1
    assert "the fit is off by 0.0%" in lines[0]
    assert device.now < 4.0


def test_no_step_of_one_shape_follows_a_step_of_another() -> None:
    """A graph that finds its rows loaded by the step before would take their lengths for the same, too."""
    device = TimedRows(MODEL, info_of())
    StepTimer(device, info_of(), device.prepare, lambda: device.now).measure(lambda line: None)
    num_gaps = sum(after != before + 1 for before, after in zip(device.steps, device.steps[1:], strict=False))
    assert num_gaps == len(shapes(info_of())) == len(device.prepared)
    assert set(device.prepared) <= set(device.steps)
    assert max(device.steps) < -1  # an engine's first step is 0


@pytest.mark.parametrize("seed", range(30))
def test_every_shape_fits_the_pool_and_the_limits(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        limits = Limits(
            rng.choice((1, 2, 33, 256)), rng.choice((2, 40, 300, 9000)), rng.choice((0, 1, 64, 2048)), 90
        )
        capacity = rng.choice((1, 7, 50, 400, 5000, 300_000))
        for decodes, context, start, chunk in shapes(info_of(limits, capacity)):
            assert decodes + bool(chunk) <= limits.max_num_seqs
            assert chunk <= limits.prefill_budget
            assert 0 <= start <= limits.max_model_len - chunk
            assert decodes or chunk
            held = start + chunk
            if decodes:
                assert 1 <= context <= limits.max_model_len - MOST_STEPS
                held += decodes * (context + MOST_STEPS)
            assert held <= capacity


def test_one_kind_of_step_fewer_than_a_fit_needs_is_not_measured() -> None:
    info = info_of(msgspec.structs.replace(LIMITS, max_num_seqs=2), capacity=30)
    assert len(shapes(info)) == LEAST_STEPS - 1
    lines: list[str] = []
    device = TimedRows(MODEL, info)
    assert StepTimer(device, info, device.prepare, lambda: device.now).measure(lines.append) is None
    assert "not measured" in lines[0]


@pytest.mark.parametrize("capacity", [1, 200, 900, 3000])
def test_a_small_pool_is_measured_with_smaller_steps_or_not_at_all(capacity: int) -> None:
    lines: list[str] = []
    info = info_of(capacity=capacity)
    device = TimedRows(MODEL, info)
    found = StepTimer(device, info, device.prepare, lambda: device.now).measure(lines.append)
    assert (found is None) == (len(shapes(info)) < LEAST_STEPS) == (capacity <= 200)
    assert "not measured" in lines[0] if found is None else "measured in" in lines[0]


# --------------------------------------------------------------------------------
# A runner


def build(device: str, target: float | None) -> tuple[ModelRunner, RunnerInfo, list[str]]:
    config = EngineConfig(
        device=device, max_num_seqs=6, max_total_tokens=1200, prefill_chunk=64, itl_target=target
    )
    lines: list[str] = []
    model = tiny_llama(torch.device(device), vocabulary=300)
    runner, info = assemble(model, config, lines.append)
    return runner, info, [line for line in lines if line.startswith("step times:")]


def answers(runner: ModelRunner, info: RunnerInfo) -> list[list[int]]:
    """Returns greedy answers in float32; the first steps have the rows of the last steps measured."""
    engine = LocalEngine(make_scheduler(info), runner)
    rng = random.Random(0)
    requests = []
    for number in range(9):
        ids = torch.tensor([rng.randrange(300) for _ in range(1 + 17 * number)], dtype=torch.int32)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        requests.append(Request(str(number), ids.numpy().tobytes(), params, seed=number))
        engine.add(requests[-1])
    assert not [event.error for event in run(engine) if event.error]
    assert_idle(engine)
    return [list(request.output) for request in requests]


def check_runner(device: str) -> None:
    runner, info, lines = build(device, 30.0)
    assert len(lines) == 1
    assert info.step_time is not None
    assert info.step_time.source["median_relative_error"] < 1.0
    runner.check(b"", ExpectedMemory(info.capacity, Holdings([], {})))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=RunnerInfo) == info
    plain, without, none = build(device, 0.0)
    assert (without.step_time, none) == (None, [])
    assert answers(runner, info) == answers(plain, without)


def test_a_measured_runner_is_as_it_was() -> None:
    check_runner("cpu")


def test_a_cpu_is_measured_only_for_a_target() -> None:
    _, info, lines = build("cpu", None)
    assert (info.step_time, lines) == (None, [])


@pytest.mark.gpu
def test_a_measured_runner_on_a_gpu_is_as_it_was() -> None:
    check_runner("cuda")
    _, info, lines = build("cuda", None)
    assert info.step_time is not None
    assert len(lines) == 1
