"""The worker: overlapping steps and their errors, the wire and what it refuses."""

import dataclasses
import io
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import rpyc
import torch
from rpyc.core import consts

from lightkv.router import EngineConfig
from lightkv.router.engine.step import Captured, StepPlan, StepResult
from lightkv.router.model.build import build_runner
from lightkv.router.model.runner import ModelRunner
from lightkv.router.sampling_params import SamplerKind
from lightkv.router.service.messages import Done, WorkerError, WorkerStart
from lightkv.router.service.worker import RPYC_CONFIG, StepPipeline, Worker, connect
from tests.support.recorded_steps import Recording, assert_same, with_unknown_token
from tests.support.run_step import run_step

# The model runner: launched ahead


def test_the_recording_has_every_kind_of_step(recording: Recording) -> None:
    assert {SamplerKind.RANDOM, SamplerKind.EDITED} <= {plan.kind for plan in recording.plans}
    assert any(plan.num_prefills for plan in recording.plans)
    assert any(not plan.num_prefills for plan in recording.plans)
    assert any(plan.logprobs for plan in recording.plans)


def overlapped(runner: ModelRunner, plans: list[StepPlan]) -> list[StepResult | None]:
    results: list[StepResult | None] = []
    runner.launch(plans[0])
    for plan in plans[1:]:
        runner.launch(plan)
        results.append(runner.collect())
    return [*results, runner.collect()]


def test_steps_launched_ahead_give_the_same_results(config: EngineConfig, recording: Recording) -> None:
    runner, _ = build_runner(config, lambda line: None)
    assert_same(overlapped(runner, recording.plans), recording.results)
    runner.check(recording.edits, recording.holding)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_steps_launched_ahead_give_the_same_results_on_a_gpu(config: EngineConfig, graphs: bool) -> None:
    gpu_config = dataclasses.replace(config, device="cuda", cuda_graphs=graphs)
    expected = Recording(gpu_config)
    runner, _ = build_runner(gpu_config, lambda line: None)
    assert_same(overlapped(runner, expected.plans), expected.results)
    runner.check(expected.edits, expected.holding)


@pytest.mark.gpu
def test_a_launch_does_not_wait(config: EngineConfig) -> None:
    gpu_config = dataclasses.replace(config, device="cuda", cuda_graphs=False)
    plans = Recording(gpu_config).plans
    runner, _ = build_runner(gpu_config, lambda line: None)
    for plan in plans[:-6]:
        run_step(runner, plan)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for plan in plans[-6:]:
            runner.launch(plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [runner.collect().step for _ in range(6)] == [plan.step for plan in plans[-6:]]


def test_a_failed_launch_leaves_the_step_before_to_be_collected(
    config: EngineConfig, recording: Recording
) -> None:
    runner, _ = build_runner(config, lambda line: None)
    first, second = recording.plans[:2]
    runner.launch(first)
    with pytest.raises(IndexError):
        runner.launch(with_unknown_token(second))
    assert not runner.fatal
    assert_same([runner.collect()], recording.results[:1])
    for plan in recording.plans[2:]:
        runner.skip(plan)  # the edits are applied, so the counts agree with the ledger's
    runner.check(recording.edits, recording.holding)


# The pipeline, where each call returns the result of the step before


class ScriptedRunner:
    """Notes its calls, and fails at the given ones."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fatal = False
        self.launch_error: Exception | None = None
        self.collect_error: Exception | None = None
        self.newest_error: Exception | None = None
        self._steps: list[int] = []

    def launch(self, plan: StepPlan) -> None:
        self.log.append(f"launch {plan.step}")
        if self.launch_error is not None:
            error, self.launch_error = self.launch_error, None
            raise error
        self._steps.append(plan.step)

    def collect(self) -> StepResult:
        step = self._steps.pop(0)
        self.log.append(f"collect {step}")
        if self.collect_error is not None:
            error, self.collect_error = self.collect_error, None
            raise error
        return StepResult(step, [], 0, 0)

    def skip(self, plan: StepPlan) -> None:
        self.log.append(f"skip {plan.step}")


def sent(plan: StepPlan) -> bytes:
    return msgspec.msgpack.encode(plan)


def bare_plan(step: int) -> StepPlan:
    return StepPlan(step, b"", [], [], [], 0, b"", [], SamplerKind.GREEDY, {}, [], 0)


def outcome(answer: Done[StepResult | None] | WorkerError) -> Any:
    """Returns the step of a result, or the step and the kind of an error, and whether it is fatal."""
    if isinstance(answer, WorkerError):
        return answer.step, answer.kind, answer.fatal
    return None if answer.result is None else answer.result.step


@pytest.fixture
def scripted() -> ScriptedRunner:
    return ScriptedRunner()


@pytest.fixture
def pipeline(scripted: ScriptedRunner) -> StepPipeline:
    return StepPipeline(scripted)  # type: ignore[arg-type]


def test_a_step_is_launched_before_the_pipeline_waits_for_the_one_before(
    pipeline: StepPipeline, scripted: ScriptedRunner
) -> None:
    answers = [pipeline.step(bare_plan(step)) for step in range(3)]
    answers += [pipeline.flush(), pipeline.flush()]
    assert [outcome(answer) for answer in answers] == [None, 0, 1, 2, None]
    assert scripted.log == ["launch 0", "launch 1", "collect 0", "launch 2", "collect 1", "collect 2"]


def test_a_failed_launch_is_reported_in_its_turn_and_fails_the_next_step(
    pipeline: StepPipeline, scripted: ScriptedRunner
) -> None:
    answers = [pipeline.step(bare_plan(0))]
    scripted.launch_error = RuntimeError("out of luck")
    answers += [pipeline.step(bare_plan(step)) for step in (1, 2)]
    answers.append(pipeline.flush())
    assert [outcome(answer) for answer in answers] == [
        None,
        0,
        (1, "RuntimeError", False),
        (2, "StepSkipped", False),
    ]
    assert scripted.log == ["launch 0", "launch 1", "collect 0", "skip 2"]
    assert [outcome(pipeline.step(bare_plan(3))), outcome(pipeline.flush())] == [None, 3]


def test_a_failure_while_the_result_is_read_names_its_own_step(
    pipeline: StepPipeline, scripted: ScriptedRunner
) -> None:
    pipeline.step(bare_plan(0))
    scripted.collect_error = RuntimeError("late")
    answers = [pipeline.step(bare_plan(1)), pipeline.flush()]
    assert [outcome(answer) for answer in answers] == [(0, "RuntimeError", False), 1]


def test_nothing_is_launched_after_a_fatal_failure(pipeline: StepPipeline, scripted: ScriptedRunner) -> None:
    pipeline.step(bare_plan(0))
    scripted.launch_error = RuntimeError("lost")
    answers = [pipeline.step(bare_plan(1))]
    scripted.fatal = True
    answers += [pipeline.step(bare_plan(2)), pipeline.step(bare_plan(3)), pipeline.flush()]
    assert [outcome(answer)[0] for answer in answers[1:]] == [1, 2, 3]
    assert [outcome(answer)[2] for answer in answers[2:]] == [True, True]
    assert scripted.log == ["launch 0", "launch 1", "collect 0"]


@pytest.mark.parametrize("place", ["launch_error", "newest_error", "collect_error"])
def test_a_rank_says_at_once_that_a_step_has_failed_which_is_fatal(
    place: str, scripted: ScriptedRunner
) -> None:
    """Where its sampling has failed, too. The step before it is lost with the group."""
    pipeline = StepPipeline(scripted, is_rank=True)  # type: ignore[arg-type]
    assert outcome(pipeline.step(bare_plan(0))) is None
    setattr(scripted, place, RuntimeError("out of luck"))
    failed = 0 if place == "collect_error" else 1
    assert outcome(pipeline.step(bare_plan(1))) == (failed, "RuntimeError", True)


# The wire


@pytest.fixture
def worker() -> Worker:
    return Worker(io.StringIO())


NO_PLANS: dict[str, Any] = {
    "empty": b"",
    "no msgpack": b"\xc1\xff",
    "cut off": sent(bare_plan(0))[:-1],
    "trailing": sent(bare_plan(0)) + b"\x00",
    "other type": msgspec.msgpack.encode([1, 2]),
    "a field's type": msgspec.msgpack.encode(
        {"plan": {**msgspec.structs.asdict(bare_plan(0)), "step": "one"}}
    ),
    "pickle": b"\x80\x04N.",
    "maps in maps": b"\x81\xa1x" * 100_000 + b"\x80",
    "lists in lists": b"\x91" * 100_000 + b"\x90",
    "str": "text",
    "bytearray": bytearray(b"\x80"),
    "subclass": type("Bytes", (bytes,), {})(b"\x80"),
    "none": None,
    "list": [],
}


@pytest.mark.parametrize("request_bytes", NO_PLANS.values(), ids=NO_PLANS)
@pytest.mark.parametrize("verb", ["start", "step", "check", "map"])
def test_invalid_messages_are_refused(worker: Worker, verb: str, request_bytes: Any) -> None:
    answer = getattr(worker, f"exposed_{verb}")(request_bytes)
    error = msgspec.msgpack.decode(answer, type=WorkerError)
    assert (error.kind, error.fatal, error.step) == ("BadRequest", False, None)


def test_a_step_before_the_model_is_loaded_is_refused(worker: Worker) -> None:
    for answer in (worker.exposed_step(sent(bare_plan(0))), worker.exposed_flush()):
        error = msgspec.msgpack.decode(answer, type=WorkerError)
        assert (error.kind, error.message) == ("BadRequest", "the model is not loaded; call start first")


def test_slow_work_is_announced_in_lines_and_its_end_by_an_empty_line(
    config: EngineConfig, recording: Recording
) -> None:
    told = io.StringIO()
    worker = Worker(told)
    worker.exposed_start(msgspec.msgpack.encode(WorkerStart(config)))
    *lines, end, rest = told.getvalue().split("\n")
    assert "K/V pool: 300 tokens" in "\n".join(lines)
    assert all(lines)
    assert (end, rest) == ("", "")
    before = told.getvalue()
    worker.exposed_step(sent(recording.plans[0]))
    worker.exposed_flush()
    assert told.getvalue() == before  # no work was slow


@pytest.mark.gpu
def test_compiling_is_announced_and_graphs_are_captured_between_steps(config: EngineConfig) -> None:
    """Otherwise the router would count the time to compile as the time of the step."""
    gpu_config = dataclasses.replace(config, device="cuda")
    plans = Recording(gpu_config).plans
    told = io.StringIO()
    worker = Worker(told)
    worker.exposed_start(msgspec.msgpack.encode(WorkerStart(gpu_config)))
    loaded = len(told.getvalue())
    for plan in plans:
        worker.exposed_step(sent(plan))
        worker.exposed_capture()
    worker.exposed_flush()
    *announced, rest = told.getvalue()[loaded:].split("\n\n")
    assert all(part.startswith("compiling ") for part in announced)
    assert rest == ""
    left = -1
    while left:
        left = msgspec.msgpack.decode(worker.exposed_capture(), type=Done[Captured]).result.num_missing
    worker.exposed_step(sent(bare_plan(len(plans))))
    result = msgspec.msgpack.decode(worker.exposed_flush(), type=Done[StepResult]).result
    assert result.num_missing_graphs == 0


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("mem_fraction", 2.0, "<= 1.0 - at `$.config.mem_fraction`"),
        ("prefill_chunk", -1, ">= 0 - at `$.config.prefill_chunk`"),
        ("admission", "by-luck", "--admission is 'by-luck'"),
        ("model", 7, "`$.config.model`"),
    ],
    ids=["share", "least", "choice", "type"],
)
def test_an_impossible_setting_is_refused(
    worker: Worker, config: EngineConfig, field: str, value: Any, words: str
) -> None:
    request = {"config": msgspec.to_builtins(config) | {field: value}}
    answer = worker.exposed_start(msgspec.msgpack.encode(request))
    assert words in msgspec.msgpack.decode(answer, type=WorkerError).message


def test_a_model_that_is_unknown_or_does_not_fit_is_an_error_of_that_kind(
    worker: Worker, config: EngineConfig
) -> None:
    unknown = dataclasses.replace(config, model="./nowhere")
    answer = worker.exposed_start(msgspec.msgpack.encode(WorkerStart(unknown)))
    error = msgspec.msgpack.decode(answer, type=WorkerError)
    assert (error.kind, error.fatal) == ("ModelNotFound", False)
    assert "./nowhere" in error.message
    large = dataclasses.replace(config, max_total_tokens=10**14)
    answer = worker.exposed_start(msgspec.msgpack.encode(WorkerStart(large)))
    assert (
        "a K/V pool of 100000000000000 tokens takes"
        in msgspec.msgpack.decode(answer, type=WorkerError).message
    )


def test_rpyc_allows_calls_of_exposed_methods_and_nothing_else() -> None:
    allowed = {name for name, value in RPYC_CONFIG.items() if name.startswith("allow_") and value}
    assert allowed == {"allow_getattr", "allow_exposed_attrs"}
    known = {
        name for name in rpyc.core.protocol.DEFAULT_CONFIG if name.startswith(("allow_", "instantiate_"))
    }
    assert known <= RPYC_CONFIG.keys()
    on = [
        name for name, value in RPYC_CONFIG.items() if name.startswith(("import_", "instantiate_")) and value
    ]
    assert not on
    assert not RPYC_CONFIG["safe_attrs"]


@pytest.fixture
def hostile(worker: Worker) -> Iterator[rpyc.Connection]:
    """A client that is allowed everything, connected to a worker with its usual configuration."""
    theirs, ours = socket.socketpair()
    served = connect(worker, rpyc.SocketStream(theirs), RPYC_CONFIG)
    thread = threading.Thread(target=served.serve_all)
    thread.start()
    everything = {name: True for name in RPYC_CONFIG if name.startswith("allow_")}
    config = {**everything, "sync_request_timeout": 10}
    connection = connect(rpyc.VoidService(), rpyc.SocketStream(ours), config)
    yield connection
    connection.close()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_a_hostile_client_reaches_only_the_exposed_methods(hostile: rpyc.Connection) -> None:
    root = hostile.root
    names = {*dir(Worker), *dir(rpyc.Service), "_runner", "_pipeline", "_slow_work", "__globals__"}
    reached = set()
    for name in names:
        try:
            hostile.sync_request(consts.HANDLE_GETATTR, root, name)
        except AttributeError:
            continue
        reached.add(name.removeprefix("exposed_"))
    ours = {"start", "step", "flush", "capture", "check", "map"}
    assert reached == ours | {"get_service_name", "get_service_aliases"}  # rpyc's own, which return names
    for name in dir(Worker.exposed_step):
        with pytest.raises(AttributeError):
            hostile.sync_request(consts.HANDLE_GETATTR, root.step, name)


def test_a_hostile_client_can_neither_write_nor_pickle(hostile: rpyc.Connection, worker: Worker) -> None:
    root = hostile.root
    before = dict(vars(worker))
    for handler, arguments in (
        (consts.HANDLE_SETATTR, ("exposed_step", 1)),
        (consts.HANDLE_SETATTR, ("_runner", 1)),
        (consts.HANDLE_DELATTR, ("_runner",)),
        (consts.HANDLE_PICKLE, (2,)),
        (consts.HANDLE_CALL, ((),)),
        (consts.HANDLE_CTXEXIT, (None,)),
        (consts.HANDLE_CMP, (1, "__init__")),
        (consts.HANDLE_BUFFITER, (1,)),
        (consts.HANDLE_OLDSLICING, ("__getitem__", "__getslice__", 0, 1, ())),
    ):
        with pytest.raises((AttributeError, TypeError, ValueError)):
            hostile.sync_request(handler, root, *arguments)
    assert vars(worker) == before


def test_live_objects_are_refused(hostile: rpyc.Connection) -> None:
    for live in ([1], {"a": 1}, bytearray(b"x"), open, object()):
        error = msgspec.msgpack.decode(hostile.root.step(live), type=WorkerError)
        assert error.kind == "BadRequest"
