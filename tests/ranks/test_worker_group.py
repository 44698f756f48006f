"""Workers of several ranks behave as one worker: the same results, and one end for all."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from lightkv.errors import CheckFailed
from lightkv.router import EngineConfig
from lightkv.router.engine.grammars.grammar_desk import Compile
from lightkv.router.engine.step import StepResult
from lightkv.router.sampling_params import Grammar
from lightkv.router.service.messages import WorkerError
from lightkv.router.service.ranks import worker_group
from lightkv.router.service.ranks.worker_group import WorkerGroup, _same
from lightkv.router.service.worker_client import WorkerDied, WorkerFailed
from tests.support.recorded_steps import Recording, assert_same, replaying, saved


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return saved(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def recording(config: EngineConfig) -> Recording:
    return Recording(config)


@pytest.fixture(autouse=True)
def runner() -> Iterator[asyncio.Runner]:
    """The event loop of the tests that are coroutines."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        yield runner


def pids(group: WorkerGroup) -> list[int]:
    """Returns the process ids, by rank."""
    return [worker.pid for worker in group._workers]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_two_ranks_answer_as_one_worker_and_end_together(
    config: EngineConfig, recording: Recording, tmp_path: Path
) -> None:
    store = tmp_path / "ranks"
    store.write_text("what a killed router has left")
    group = WorkerGroup(2, store, program=replaying(recording))
    assert not store.exists()
    assert await group.start(config, lambda line: None) == recording.info
    results = [await group.step(plan) for plan in recording.plans]
    results += [await group.flush(), await group.flush()]
    assert results[0] is results[-1] is None
    assert_same(results[1:-1], recording.results)
    assert await group.check(recording.edits, recording.holding) == b"of the tables"
    os.kill(pids(group)[1], signal.SIGKILL)
    died = await group.wait_dead()
    assert died.returncode == -signal.SIGKILL
    with pytest.raises(WorkerDied):
        await group.flush()
    assert not any(map(is_running, pids(group)))


@pytest.mark.slow  # tests/ranks/test_ranks.py has models on two ranks, and the test above has processes
async def test_two_ranks_have_the_results_of_one_and_end_together(
    config: EngineConfig, recording: Recording, tmp_path: Path
) -> None:
    """Also: the tables of both are the same bytes, and a rank that is killed takes the other one with it."""
    store = tmp_path / "ranks"
    store.write_text("what a killed router has left")
    group = WorkerGroup(2, store)
    lines: list[str] = []
    info = await group.start(config, lines.append)
    assert info.num_ranks == 2
    assert info.capacity == recording.info.capacity
    assert 2 * info.bytes_per_token == recording.info.bytes_per_token
    assert lines
    results = [await group.step(plan) for plan in recording.plans]
    results += [await group.flush(), await group.flush()]
    assert_same(results[1:-1], recording.results)
    assert len(await group.check(recording.edits, recording.holding)) == 16
    for number in (1, 2):
        group.send_grammar(Compile(number, Grammar("regex", "[0-9]+")))
        answer = await group.take_grammar()
        assert (answer.grammar_id, "not with this model" in answer.error) == (number, True)

    flushing = asyncio.ensure_future(group.flush())
    await asyncio.sleep(0)
    os.kill(pids(group)[1], signal.SIGKILL)
    with suppress(WorkerDied):
        await flushing  # it may have been answered before
    with pytest.raises(WorkerDied):
        await group.flush()
    died = await group.wait_dead()
    assert died.returncode == -signal.SIGKILL
    assert not any(map(is_running, pids(group)))
    assert not store.exists()


@pytest.mark.slow
async def test_a_rank_that_hangs_ends_the_group(
    config: EngineConfig, recording: Recording, tmp_path: Path
) -> None:
    group = WorkerGroup(2, tmp_path / "ranks", step_timeout=1.0)
    await group.start(config, lambda line: None)
    os.kill(pids(group)[1], signal.SIGSTOP)
    with pytest.raises(WorkerDied, match=r"took more than 1 s"):
        await group.step(recording.plans[0])
    await group.wait_dead()
    assert not any(map(is_running, pids(group)))


# A worker of which rank 1 raises where {place} is called, once its model is loaded.
FAILING = """
from lightkv.router.service.worker import Worker, main

class Failing(Worker):
    def _start(self, start):
        done = super()._start(start)
        if start.rank.number == 1:
            self._runner.{place} = lambda *given: 1 / 0
        return done

main(Failing)
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["_logits", "_parts.memory.apply_step", "_take_tokens"])
async def test_a_rank_that_raises_in_a_step_ends_the_group_at_once(
    place: str, config: EngineConfig, recording: Recording, tmp_path: Path
) -> None:
    """Rank 0 waits for it in the step, and would do so until the time of a step is over."""
    program = [sys.executable, "-c", FAILING.format(place=place)]
    group = WorkerGroup(2, tmp_path / "ranks", step_timeout=60.0, program=program)
    await group.start(config, lambda line: None)
    if place == "_take_tokens":
        assert await group.step(recording.plans[0]) is None
    call = group.flush() if place == "_take_tokens" else group.step(recording.plans[0])
    with pytest.raises(WorkerFailed, match="step 0: ZeroDivisionError") as failed:
        await call
    assert failed.value.fatal
    await group.wait_dead()
    assert not any(map(is_running, pids(group)))


class LostRank:
    """A rank whose call ends in an error, once `may_end` is set. It notes why it was killed."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.may_end = asyncio.Event()
        self.reasons: list[str] = []

    def kill(self, reason: str = "") -> None:
        self.reasons.append(reason)
        self.may_end.set()

    async def call(self) -> None:
        await self.may_end.wait()
        raise self.error


async def test_a_rank_that_has_died_is_the_reason_even_if_another_has_noticed_it_first() -> None:
    """A model whose loading fails is not loaded again, and one whose rank was killed meanwhile is."""
    noticed = LostRank(WorkerFailed(WorkerError("RuntimeError", "closed by peer", False)))
    killed = LostRank(WorkerDied(-signal.SIGKILL))
    group = object.__new__(WorkerGroup)
    group._workers = [noticed, killed]  # type: ignore[list-item]
    calls = asyncio.ensure_future(group._all(lambda worker, _: worker.call()))  # type: ignore[attr-defined]
    noticed.may_end.set()
    for _ in range(10):
        await asyncio.sleep(0)
    killed.may_end.set()
    with pytest.raises(WorkerDied, match="SIGKILL"):
        await calls
    assert noticed.reasons == ["another rank of its group has failed"]


async def test_a_rank_that_has_failed_ends_another_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is the reason, and the other's end is not. If all fail in the same way, none is killed."""
    monkeypatch.setattr(worker_group, "FAIL_SECONDS", 0.01)
    failed, waiting = (
        LostRank(WorkerFailed(WorkerError("ZeroDivisionError", "by zero", False, 0))),
        LostRank(WorkerDied(-signal.SIGKILL)),  # once it is killed
    )
    group = object.__new__(WorkerGroup)
    group._workers = [waiting, failed]  # type: ignore[list-item]
    failed.may_end.set()
    with pytest.raises(WorkerFailed, match="step 0: ZeroDivisionError") as raised:
        await asyncio.wait_for(group._all(lambda worker, _: worker.call()), 20)  # type: ignore[attr-defined]
    assert raised.value.fatal
    assert "another rank of its group has failed" in waiting.reasons

    alike = [LostRank(WorkerFailed(WorkerError("ModelNotFound", "no model", False))) for _ in range(2)]
    group._workers = alike  # type: ignore[assignment]
    for rank in alike:
        rank.may_end.set()
    with pytest.raises(WorkerFailed, match="no model") as raised:
        await group._all(lambda worker, _: worker.call())  # type: ignore[attr-defined]
    assert not raised.value.fatal
    assert not any(rank.reasons for rank in alike)


@pytest.mark.parametrize("change", [{"tokens": [5, 7]}, {"num_free": 8}, {"flags": 1}, {"step": 4}])
def test_results_that_differ_are_an_error(change: dict[str, Any]) -> None:
    same: dict[str, Any] = {"step": 3, "tokens": [5, 6], "num_free": 9, "flags": 0}
    results = [StepResult(**same), StepResult(**same)]
    assert _same(results) is results[0]
    with pytest.raises(CheckFailed, match=r"rank 1 has .* and rank 0 has"):
        _same([results[0], StepResult(**{**same, **change})])
    with pytest.raises(CheckFailed):
        _same([results[0], None])
