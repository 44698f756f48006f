"""The workers of the ranks that run one model, which the router uses as one worker.

Every rank gets the same bytes, allocates for itself, and answers for itself; after each step their free
counts and flags are compared, and in a recount the bytes of their tables. Ranks wait for each other in every
layer, so a group that loses one is lost: the others are killed at once, and the router starts another group.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lightkv.errors import CheckFailed
from lightkv.holdings import Holdings
from lightkv.router.config import EngineConfig
from lightkv.router.engine.grammars.grammar_desk import Compile, Compiled, Forget
from lightkv.router.engine.step import Captured, ExpectedMemory, PoolMap, RunnerInfo, StepPlan, StepResult
from lightkv.router.service.messages import Rank
from lightkv.router.service.worker_client import WorkerClient, WorkerDied, WorkerFailed

Result = TypeVar("Result")
Report = Callable[[str], None]

FAIL_SECONDS = 2.0  # for the other ranks to answer, once one has answered an error


class WorkerGroup:
    """`size` workers, of which each runs one rank, on this host. It answers as a `WorkerClient` does.

    `store`: the path of a file by which the ranks find each other. It is made anew, and removed when the
    group has ended. `step_timeout` and `program`: as in `WorkerClient`.
    """

    def __init__(
        self, size: int, store: Path, step_timeout: float | None = None, program: Sequence[str] | None = None
    ) -> None:
        store.unlink(missing_ok=True)  # of a group whose router was killed
        self._store = store
        self._workers: list[WorkerClient] = []
        try:
            for _ in range(size):
                self._workers.append(WorkerClient(step_timeout, program))
        except BaseException:
            self.kill()
            raise
        self._end = asyncio.get_running_loop().create_task(self._wait_for_end())

    async def start(self, config: EngineConfig, report: Report) -> RunnerInfo:
        """Loads the model on all ranks. `report` gets the progress of rank 0. Kills the group on failure."""
        size = len(self._workers)

        def load(worker: WorkerClient, number: int) -> Coroutine[Any, Any, RunnerInfo]:
            rank = Rank(number, size, str(self._store))
            return worker.start(config, report if number == 0 else lambda line: None, rank)

        try:
            infos = await self._all(load)
            if len(capacities := {info.capacity for info in infos}) > 1:
                raise CheckFailed(f"the ranks' pools have {sorted(capacities)} tokens; report this")
            return infos[0]
        except BaseException:
            self.kill()
            raise

    async def step(self, plan: StepPlan) -> StepResult | None:
        """Launches a plan on all ranks. Returns the result of the plan before it, as `WorkerClient.step`
        does."""
        return _same(await self._all(lambda worker, _: worker.step(plan)))

    async def flush(self) -> StepResult | None:
        """Returns the result of the last plan, or None if that was returned already."""
        return _same(await self._all(lambda worker, _: worker.flush()))

    async def capture(self) -> Captured:
        """Captures the same CUDA graph on all ranks. Returns the longest time, and what rank 0 still lacks."""
        captured = await self._all(lambda worker, _: worker.capture())
        return Captured(max(one.seconds for one in captured), captured[0].num_missing)

    async def check(self, edits: bytes, expected: ExpectedMemory) -> bytes:
        """Applies the edits and recounts the memory of all ranks, whose tables have to be the same bytes."""
        digests = await self._all(lambda worker, _: worker.check(edits, expected))
        if different := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise CheckFailed(f"the tables of ranks {different} differ from those of rank 0; report this")
        return digests[0]

    async def map(self, edits: bytes, holdings: Holdings) -> PoolMap:
        """Applies the edits on all ranks, and returns what every slot of rank 0 is used for."""
        return (await self._all(lambda worker, _: worker.map(edits, holdings)))[0]

    def send_grammar(self, order: Compile | Forget) -> None:
        """Has all ranks compile or forget a grammar, since each masks what it draws."""
        for worker in self._workers:
            worker.send_grammar(order)

    async def take_grammar(self) -> Compiled:
        """Returns the answer to a Compile that all ranks have given; an error, if one has given an error. One
        grammar is compiled at a time. A call that is cancelled loses the answers of some ranks."""
        given = await asyncio.gather(*(worker.take_grammar() for worker in self._workers))
        return next((one for one in given if one.error), given[0])

    def kill(self, reason: str = "") -> None:
        """Kills all ranks, which have nothing to save."""
        for worker in self._workers:
            worker.kill(reason)

    async def wait_dead(self) -> WorkerDied:
        """Waits until all ranks have exited. Returns how the first of them ended."""
        return await asyncio.shield(self._end)

    async def _wait_for_end(self) -> WorkerDied:
        ends = [asyncio.ensure_future(worker.wait_dead()) for worker in self._workers]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            rank = ends.index(done.pop())
            died = ends[rank].result()
            self.kill(f"rank {rank} of its group has ended")
            await asyncio.wait(ends)
            return died
        finally:
            self.kill()
            self._store.unlink(missing_ok=True)

    async def _all(self, call: Callable[[WorkerClient, int], Coroutine[Any, Any, Result]]) -> list[Result]:
        """Calls every rank at once and returns their answers, by rank.

        Raises WorkerDied if one has ended, even if others have noticed that first and have failed, and
        WorkerFailed if all have failed. If some have failed, the others may wait for them for ever: then the
        group is killed, and the WorkerFailed is fatal.
        """
        tasks = [asyncio.ensure_future(call(worker, rank)) for rank, worker in enumerate(self._workers)]
        errors: list[BaseException] = []  # in the order in which they came
        reason: BaseException | None = None  # why the group was killed
        waiting = set(tasks)
        try:
            while waiting:
                timeout = FAIL_SECONDS if errors else None
                done, waiting = await asyncio.wait(
                    waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
                )
                errors += [error for task in done if (error := task.exception()) is not None]
                ends = [error for error in errors if not isinstance(error, WorkerFailed)]
                if reason is None and (ends or not done):
                    reason = ends[0] if ends else errors[0]
                    self.kill("another rank of its group has failed")
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()  # which kills its worker
            raise
        if not errors:
            return [task.result() for task in tasks]
        failed = [error for error in errors if isinstance(error, WorkerFailed)]
        reason = reason or next((error for error in failed if error.fatal), failed[0])
        if isinstance(reason, WorkerFailed) and len(failed) < len(tasks):
            self.kill("another rank of its group has failed")
            reason.fatal = True
        raise reason


Worker = WorkerClient | WorkerGroup


def _same(results: Sequence[StepResult | None]) -> StepResult | None:
    """Returns the result of rank 0. Raises CheckFailed unless all ranks have the same counts and tokens."""
    first = results[0]
    for rank, result in enumerate(results):
        if _counts(result) != _counts(first):
            raise CheckFailed(
                f"rank {rank} has step, tokens, free slots and flags {_counts(result)}, and rank 0 has "
                f"{_counts(first)}; report this"
            )
    return first


def _counts(result: StepResult | None) -> tuple[Any, ...] | None:
    return None if result is None else (result.step, result.tokens, result.num_free, result.flags)
